#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>

#include <cuda_runtime_api.h>

#include "csrc/cuda/copy_batch.h"
#include "csrc/cuda/event_fence.h"
#include "csrc/cuda/page_locked_segments.h"
#include "residency/core/bytes.h"
#include "residency/core/location.h"

namespace residency {

/// A ring of page-locked buffers through which pageable memory and a device exchange bytes: while
/// the device copies one, the host copies the next. Its users wait for each other.
class Staging {
 public:
  static constexpr std::size_t kNumSlots = 4;
  static constexpr std::size_t kSlotBytes = std::size_t{4} << 20;
  static constexpr auto kRingBytes = Bytes(std::int64_t{kNumSlots * kSlotBytes});

  Staging() = default;
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  struct Direction {
    Location device;
    bool to_device = true;
    cudaStream_t stream = nullptr;
    EventPool* events = nullptr;
    /// The gaps between the pieces on the device may be overwritten (with anything).
    bool may_fill_gaps = false;
    /// Begins only when nobody else wants the buffers who does not give way.
    bool gives_way = false;
  };
  /// Returns when all has arrived. The device is the current one. Throws with nothing of it in
  /// flight what `throw_cuda_error` throws, `PageLockError`, and `UnavailableError` when abandoned.
  void copy(std::span<const Piece> pieces, const Direction& direction,
            const std::atomic<bool>& abandon);
  /// Gives the buffers back, to be made again when needed.
  void trim() noexcept;

 private:
  std::atomic<int> num_needed_now_{0};  // copies that do not give way
  std::mutex mutex_;
  PageLockedSegments segments_;
  std::byte* ring_ = nullptr;
};

}  // namespace residency
