#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>

#include <cuda_runtime_api.h>

#include "csrc/cuda/event_fence.h"

namespace residency {

class CopyGroup;

/// A stream for copies, and the group that the next small one may join.
struct Lane {
  cudaStream_t stream = nullptr;
  std::mutex mutex;  // held while something is enqueued, and while a group's event is recorded
  std::shared_ptr<CopyGroup> open;
};

/// Small copies that one stream carries out one after the other, with one event behind them all:
/// recording one costs as much as enqueuing a small copy does. The event is recorded when somebody
/// asks for one of the copies, or when the next cannot join. Until then later copies of the group
/// delay the earlier ones' fences, so that a group is small: kMostBytes take 20 us at 50 GB/s.
class CopyGroup : public std::enable_shared_from_this<CopyGroup> {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{1} << 20;

  /// With the lane's mutex held. `begin` was recorded before the group's first copy. Throws what
  /// `throw_cuda_error` throws, and has given `begin` back then.
  CopyGroup(std::shared_ptr<EventPool> pool, Lane& lane, cudaEvent_t begin);

  [[nodiscard]] bool has_room(std::size_t nbytes) const noexcept {
    return nbytes <= kMostBytes - num_bytes_;
  }
  /// The fence of a copy that was just enqueued. With the lane's mutex held.
  [[nodiscard]] FencePtr join(std::size_t nbytes);
  /// Records the event, unless it is. With the lane's mutex held.
  cudaError_t close() noexcept;

 private:
  class Member;
  /// The event's fence; null when it could not be recorded, or (`may_wait` false) not yet.
  EventFence* recorded(bool may_wait) noexcept;

  Lane& lane_;
  const std::shared_ptr<EventFence> fence_;
  std::atomic<bool> is_recorded_{false};
  std::atomic<std::size_t> num_bytes_{0};
};

}  // namespace residency
