#include "residency/core/backend.h"

#include <stdexcept>

namespace residency {

Block::~Block() = default;
View::~View() = default;
Source::~Source() = default;
Backend::~Backend() = default;

void Backend::attach(std::weak_ptr<Reclaimer>) {}

std::exception_ptr Backend::copy_all(std::span<const CopyRequest> requests,
                                     std::vector<CopyResult>& results) {
  results.reserve(results.size() + requests.size());  // nothing may fail once one is enqueued
  for (const CopyRequest& request : requests) {
    try {
      results.push_back(copy(request));
    } catch (...) {
      return std::current_exception();
    }
  }
  return nullptr;
}

bool Backend::is_lost(Location) const {
  return false;
}

void Backend::check_answers(Location) {}

void Backend::check_may_wait() const {}

Bytes Backend::staging_bytes(Location, Location) const {
  return Bytes();
}

std::optional<SegmentBytes> Backend::predict_segments(Location, std::span<const MemoryStep>) const {
  return std::nullopt;
}

std::optional<SpareBytes> Backend::spare_bytes(Location, const Growth&) {
  return std::nullopt;
}

Stream Backend::current_stream(Location location) {
  throw std::invalid_argument("this backend has no streams at " + to_string(location));
}

FencePtr Backend::record_use(const Stream& stream) {
  throw std::invalid_argument("this backend has no streams at " + to_string(stream.device));
}

std::shared_ptr<void> Backend::make_headroom(Location, Bytes, std::string_view) {
  return nullptr;
}

std::string_view to_string(TransferPath path) {
  switch (path) {
    case TransferPath::kNone: return "none";
    case TransferPath::kDirect: return "direct";
    case TransferPath::kPeer: return "peer";
    case TransferPath::kStaged: return "staged";
    case TransferPath::kFile: return "file";
    case TransferPath::kSource: return "source";
  }
  return {};
}

std::string_view to_string(Access access) {
  return access == Access::kRead ? "read" : "write";
}

}  // namespace residency
