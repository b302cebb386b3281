#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>

#include <cuda_runtime_api.h>

#include "csrc/cuda/copy_batch.h"
#include "csrc/cuda/event_fence.h"

namespace residency {

class CopyGroup;

/// A stream for copies, and the group that the next small one may join.
struct Lane {
  const char* label = "";  ///< of its copies in NVIDIA's tools
  cudaStream_t stream = nullptr;
  std::mutex mutex;  // held while something is enqueued, and while a group's event is recorded
  std::shared_ptr<CopyGroup> open;
};

/// Small copies that one stream carries out one after the other, with one event behind them all:
/// recording one costs as much as enqueuing a small copy does. The event is recorded when somebody
/// asks for one of the copies, or when the next cannot join. Until then later copies of the group
/// delay the earlier ones' fences, so that a group is small: kMostBytes take 20 us at 50 GB/s.
///
/// Copies of which more follow at once can be put off, to be enqueued together by `start`.
class CopyGroup : public std::enable_shared_from_this<CopyGroup> {
 public:
  static constexpr std::size_t kMostBytes = std::size_t{1} << 20;

  /// With the lane's mutex held, as all that follows. `begin` was recorded before the group's first
  /// copy. Throws what `throw_cuda_error` throws, and has given `begin` back then.
  CopyGroup(std::shared_ptr<EventPool> pool, Lane& lane, cudaEvent_t begin);

  [[nodiscard]] bool has_room(std::size_t nbytes) const noexcept {
    return nbytes <= kMostBytes - num_bytes_;
  }
  /// The fence of a copy that is enqueued next.
  [[nodiscard]] FencePtr join(std::size_t nbytes);
  /// The same for one that is enqueued by `start`. Its fence is pending until then; to wait for it
  /// starts it.
  [[nodiscard]] FencePtr put_off(const Piece& piece);
  /// Enqueues what was put off. What could not be stays put off.
  cudaError_t start() noexcept;
  /// Starts it and records the event, unless it is.
  cudaError_t close() noexcept;

 private:
  class Member;
  void end() noexcept;
  /// The event's fence; null when it could not be recorded, or (`may_wait` false) not yet.
  EventFence* recorded(bool may_wait) noexcept;
  EventFence& wait_until_recorded() noexcept;

  Lane& lane_;
  const std::shared_ptr<EventFence> fence_;
  CopyBatch batch_;
  std::atomic<bool> is_put_off_{false};    // some of it is in the batch
  std::atomic<bool> start_failed_{false};  // so that whoever asks tries again
  std::atomic<bool> is_recorded_{false};
  std::atomic<std::size_t> num_bytes_{0};
};

}  // namespace residency
