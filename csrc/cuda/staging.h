#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>
#include <sys/uio.h>

#include "csrc/core/fork.h"
#include "csrc/cuda/event_fence.h"
#include "csrc/cuda/page_locked_segments.h"
#include "residency/core/bytes.h"
#include "residency/core/location.h"

namespace residency {

/// Serves in the order of the calls: whoever takes it again and again keeps nobody out.
class FairMutex {
 public:
  void lock() {
    std::unique_lock lock(mutex_);
    const std::uint64_t mine = next_++;
    served_.wait(lock, [&] { return serving_ == mine; });
  }
  [[nodiscard]] bool try_lock() {
    const std::lock_guard lock(mutex_);
    if (next_ != serving_) {
      return false;
    }
    ++next_;
    return true;
  }
  void unlock() {
    const std::lock_guard lock(mutex_);
    ++serving_;
    served_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable served_;
  std::uint64_t next_ = 0;
  std::uint64_t serving_ = 0;
};

/// A ring of page-locked buffers through which one device exchanges bytes with pageable memory and
/// files: while the device copies one, the host fills the next. Its users wait for each other. Made
/// by the first copy.
class Staging {
 public:
  static constexpr std::size_t kNumSlots = 4;
  static constexpr std::size_t kSlotBytes = std::size_t{4} << 20;
  static constexpr auto kRingBytes = Bytes(std::int64_t{kNumSlots * kSlotBytes});

  Staging() = default;
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// As long as what it returns lives, copies that give way do.
  [[nodiscard]] static std::shared_ptr<void> announce(std::shared_ptr<Staging> staging);

  struct Direction {
    Location device;
    bool to_device = true;
    cudaStream_t stream = nullptr;
    EventPool* events = nullptr;
    /// The gaps between the runs on the device may be overwritten (with anything).
    bool may_fill_gaps = false;
    /// To whoever else uses the buffers, or waits for them.
    bool gives_way = false;
  };
  /// `host` fills buffers with the next bytes for the device, or takes them out.
  /// Returns when all has arrived; false, at once and with nothing done, when it gives way. `runs`
  /// are addresses of the device, which is the current one; small ones share buffers. `device_ns`
  /// is the time from the first copy to the last, where the device can say it. Throws with nothing
  /// of it in flight what `throw_cuda_error` and the host's end throw, `PageLockError`, and
  /// `UnavailableError` when abandoned.
  [[nodiscard]] bool copy(const std::vector<iovec>& runs,
                          const std::function<void(const std::vector<iovec>&)>& host,
                          const Direction& direction, const std::atomic<bool>& abandon,
                          std::optional<std::int64_t>& device_ns);

 private:
  std::atomic<int> num_needed_now_{0};  // copies that do not give way
  FairMutex mutex_;
  PageLockedSegments segments_;
  const std::uint64_t generation_ = device_generation();
  std::byte* ring_ = nullptr;
};

}  // namespace residency
