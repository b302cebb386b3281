#include "csrc/cuda/staging.h"

#include <algorithm>
#include <utility>

#include "csrc/cuda/copy_batch.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

/// What one buffer carries.
struct Chunk {
  /// One copy: bytes at the device, with gaps.
  struct Run {
    std::byte* device = nullptr;
    std::size_t offset = 0;  // in the buffer
    std::size_t nbytes = 0;
  };
  struct Part {
    std::size_t offset = 0;
    std::size_t nbytes = 0;
  };
  std::vector<Run> runs;
  std::vector<Part> parts;  // what the host has of them
  std::size_t nbytes = 0;

  [[nodiscard]] std::vector<iovec> in(std::byte* buffer) const {
    std::vector<iovec> pieces;
    pieces.reserve(parts.size());
    for (const Part& part : parts) {
      pieces.push_back({buffer + part.offset, part.nbytes});
    }
    return pieces;
  }
  [[nodiscard]] Pieces pieces(std::byte* buffer, bool to_device) const {
    Pieces pieces;
    for (const Run& run : runs) {
      std::byte* const here = buffer + run.offset;
      pieces.push_back(to_device ? Piece{run.device, here, run.nbytes}
                                 : Piece{here, run.device, run.nbytes});
    }
    return pieces;
  }
};

/// Long runs are cut, short ones put together: in one copy while the gaps between them may be
/// filled.
std::vector<Chunk> chunks_of(const std::vector<iovec>& runs, bool may_fill_gaps) {
  constexpr std::size_t kAlignment = 256;
  std::vector<Chunk> chunks;
  for (const iovec& run : runs) {
    auto* device = static_cast<std::byte*>(run.iov_base);
    std::byte* const end = device + run.iov_len;
    while (device != end) {
      if (chunks.empty()) {
        chunks.emplace_back();
      }
      const auto joins = [&](const Chunk& chunk) {
        return may_fill_gaps && !chunk.runs.empty() &&
               device >= chunk.runs.back().device + chunk.runs.back().nbytes &&
               device < chunk.runs.back().device + Staging::kSlotBytes - chunk.runs.back().offset;
      };
      if (!joins(chunks.back())) {
        const std::size_t used = (chunks.back().nbytes + kAlignment - 1) / kAlignment * kAlignment;
        if (used >= Staging::kSlotBytes) {
          chunks.emplace_back();
        }
        Chunk& chunk = chunks.back();
        chunk.runs.push_back({device, chunk.runs.empty() ? 0 : used, 0});
      }
      Chunk& chunk = chunks.back();
      Chunk::Run& last = chunk.runs.back();
      const std::size_t offset = last.offset + static_cast<std::size_t>(device - last.device);
      const std::size_t part =
          std::min(static_cast<std::size_t>(end - device), Staging::kSlotBytes - offset);
      chunk.parts.push_back({offset, part});
      chunk.nbytes = offset + part;
      last.nbytes = chunk.nbytes - last.offset;
      device += part;
    }
  }
  return chunks;
}

/// Adds to a count for the time of a scope.
class Counted {
 public:
  Counted(std::atomic<int>& count, int added) noexcept : count_(count), added_(added) {
    count_ += added_;
  }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() { count_ -= added_; }

 private:
  std::atomic<int>& count_;
  const int added_;
};

/// One event for each buffer and one for the beginning, given back at the end of the scope.
class SlotEvents {
 public:
  explicit SlotEvents(EventPool& pool) : pool_(pool) {}
  SlotEvents(const SlotEvents&) = delete;
  SlotEvents& operator=(const SlotEvents&) = delete;
  ~SlotEvents() {
    for (const cudaEvent_t event : events_) {
      pool_.give_back(event);
    }
  }
  void take() {
    for (cudaEvent_t& event : events_) {
      event = pool_.take();
    }
  }
  [[nodiscard]] cudaEvent_t operator[](std::size_t slot) const { return events_.at(slot); }
  [[nodiscard]] cudaEvent_t begin() const { return events_.back(); }

 private:
  EventPool& pool_;
  std::array<cudaEvent_t, Staging::kNumSlots + 1> events_{};
};

}  // namespace

Staging::~Staging() {
  if (ring_ != nullptr && generation_ == device_generation()) {
    segments_.give_back(ring_, kRingBytes, {});
  }
}

std::shared_ptr<void> Staging::announce(std::shared_ptr<Staging> staging) {
  struct Announced {
    explicit Announced(std::shared_ptr<Staging> at)
        : staging(std::move(at)), counted(staging->num_needed_now_, 1) {}
    std::shared_ptr<Staging> staging;
    Counted counted;
  };
  return std::make_shared<Announced>(std::move(staging));
}

bool Staging::copy(const std::vector<iovec>& runs,
                   const std::function<void(const std::vector<iovec>&)>& host,
                   const Direction& direction, const std::atomic<bool>& abandon,
                   std::optional<std::int64_t>& device_ns) {
  const auto end_if_abandoned = [&] {
    if (abandon.load(std::memory_order_relaxed)) {
      throw UnavailableError("the transfer was abandoned: its manager has closed");
    }
  };
  end_if_abandoned();
  const Counted needed_now(num_needed_now_, direction.gives_way ? 0 : 1);
  std::unique_lock lock(mutex_, std::defer_lock);
  if (!direction.gives_way) {
    lock.lock();
  } else if (num_needed_now_ != 0 || !lock.try_lock()) {
    return false;
  }
  const RelaxedCapture relaxed;
  if (ring_ == nullptr) {
    ring_ = static_cast<std::byte*>(segments_.make(kRingBytes).data);
  }
  const std::vector<Chunk> chunks = chunks_of(runs, direction.may_fill_gaps);
  SlotEvents done(*direction.events);
  const auto wait_for_slot = [&](std::size_t slot) {
    check_cuda(cudaEventSynchronize(done[slot]), direction.device, "cudaEventSynchronize");
  };
  // Takes the bytes of a chunk that has come from the device to where they belong.
  const auto deliver = [&](std::size_t i) {
    const std::size_t slot = i % kNumSlots;
    wait_for_slot(slot);
    host(chunks[i].in(ring_ + slot * kSlotBytes));
  };
  try {
    done.take();
    for (std::size_t i = 0; i < chunks.size(); ++i) {
      end_if_abandoned();
      const Chunk& chunk = chunks[i];
      const std::size_t slot = i % kNumSlots;
      std::byte* buffer = ring_ + slot * kSlotBytes;
      if (direction.to_device) {
        if (i >= kNumSlots) {
          wait_for_slot(slot);
        }
        host(chunk.in(buffer));
      } else if (i >= kNumSlots) {
        deliver(i - kNumSlots);
      }
      if (i == 0) {
        check_cuda(cudaEventRecord(done.begin(), direction.stream), direction.device,
                   "cudaEventRecord");
      }
      check_cuda(
          enqueue_copies(chunk.pieces(buffer, direction.to_device), std::nullopt, direction.stream),
          direction.device, "cudaMemcpyAsync");
      check_cuda(cudaEventRecord(done[slot], direction.stream), direction.device,
                 "cudaEventRecord");
    }
    const std::size_t first_left = chunks.size() - std::min(chunks.size(), kNumSlots);
    for (std::size_t i = first_left; i < chunks.size(); ++i) {
      if (direction.to_device) {
        wait_for_slot(i % kNumSlots);
      } else {
        deliver(i);
      }
    }
  } catch (...) {
    drain(direction.stream, direction.device);
    throw;
  }
  float milliseconds = 0;
  if (!chunks.empty() &&
      cudaEventElapsedTime(&milliseconds, done.begin(), done[(chunks.size() - 1) % kNumSlots]) ==
          cudaSuccess) {
    device_ns = static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6);
  } else {
    (void)cudaGetLastError();
  }
  return true;
}

}  // namespace residency
