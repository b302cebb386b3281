#include "csrc/cuda/staging.h"

#include <algorithm>
#include <utility>

#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

/// What one buffer carries: bytes from here on at the device, with gaps.
struct Chunk {
  std::byte* device = nullptr;
  std::size_t nbytes = 0;
  struct Part {
    std::size_t offset = 0;
    std::size_t nbytes = 0;
  };
  std::vector<Part> parts;

  [[nodiscard]] std::vector<iovec> in(std::byte* buffer) const {
    std::vector<iovec> pieces;
    pieces.reserve(parts.size());
    for (const Part& part : parts) {
      pieces.push_back({buffer + part.offset, part.nbytes});
    }
    return pieces;
  }
};

/// Long runs are cut, short ones put together while their gaps may be filled.
std::vector<Chunk> chunks_of(const std::vector<iovec>& runs, bool may_fill_gaps) {
  std::vector<Chunk> chunks;
  for (const iovec& run : runs) {
    auto* device = static_cast<std::byte*>(run.iov_base);
    std::byte* const end = device + run.iov_len;
    while (device != end) {
      const bool joins = !chunks.empty() && may_fill_gaps &&
                         device >= chunks.back().device + chunks.back().nbytes &&
                         device < chunks.back().device + Staging::kSlotBytes;
      if (!joins) {
        chunks.push_back({device, 0, {}});
      }
      Chunk& chunk = chunks.back();
      const auto offset = static_cast<std::size_t>(device - chunk.device);
      const std::size_t part =
          std::min(static_cast<std::size_t>(end - device), Staging::kSlotBytes - offset);
      chunk.parts.push_back({offset, part});
      chunk.nbytes = offset + part;
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

/// One event for each buffer, given back at the end of the scope.
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

 private:
  EventPool& pool_;
  std::array<cudaEvent_t, Staging::kNumSlots> events_{};
};

}  // namespace

Staging::~Staging() {
  if (ring_ != nullptr && generation_ == device_generation()) {
    segments_.give_back(ring_, kRingBytes, {});
  }
}

bool Staging::copy(const std::vector<iovec>& runs, const HostEnd& host, const Direction& direction,
                   const std::atomic<bool>& abandon) {
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
        check_cuda(cudaMemcpyAsync(chunk.device, buffer, chunk.nbytes, cudaMemcpyHostToDevice,
                                   direction.stream),
                   direction.device, "cudaMemcpyAsync");
      } else {
        if (i >= kNumSlots) {
          deliver(i - kNumSlots);
        }
        check_cuda(cudaMemcpyAsync(buffer, chunk.device, chunk.nbytes, cudaMemcpyDeviceToHost,
                                   direction.stream),
                   direction.device, "cudaMemcpyAsync");
      }
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
  return true;
}

}  // namespace residency
