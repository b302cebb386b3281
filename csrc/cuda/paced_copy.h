#pragma once

#include <atomic>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include "csrc/cuda/copy_batch.h"
#include "csrc/cuda/event_fence.h"

namespace residency {

class PacedCopy;

/// A stream for copies ahead of need in one direction of a device, and what of them is outstanding.
struct AheadLane {
  cudaStream_t stream = nullptr;
  std::mutex mutex;  // guards the rest; before that of a copy
  /// Not wholly enqueued yet, in the order in which they are to be.
  std::deque<PacedCopy*> queue;
  struct Chunk {
    FencePtr done;
    std::size_t cost = 0;
  };
  std::deque<Chunk> outstanding;

  /// For one more chunk: not more than two are outstanding, in bytes. The mutex is held.
  [[nodiscard]] bool has_room() noexcept;
};

/// A copy ahead of need. A worker enqueues it chunk by chunk, and never so much at once that a copy
/// which is needed now would come long after it; whoever waits for it has the rest enqueued at
/// once.
class PacedCopy final : public StreamFence {
 public:
  static constexpr std::size_t kChunkBytes = std::size_t{16} << 20;
  /// What a piece counts for at least: a tiny copy takes the time of so many bytes (1 us or so),
  /// and a stream takes a thousand or so without making the host wait.
  static constexpr std::size_t kLeastCost = std::size_t{64} << 10;

  /// `after`: what it comes behind. There is a piece. The lane's device must be the current one.
  /// Throws what `throw_cuda_error` throws.
  PacedCopy(std::shared_ptr<EventPool> pool, AheadLane& lane, Pieces pieces,
            std::vector<FencePtr> after, std::optional<Peers> peers);

  /// Enqueues what there is room for, once those before it in the lane are enqueued; or the rest
  /// `at_once`. True when there is no more to do here: if it could not be enqueued, whoever waits
  /// tries again. From the first call on it must live, and be called, until then.
  [[nodiscard]] bool pace(bool at_once) noexcept;

  [[nodiscard]] FenceStatus poll() const noexcept override;
  void wait() override;
  [[nodiscard]] std::optional<std::int64_t> elapsed_ns() const override;
  [[nodiscard]] std::exception_ptr error() const override {
    return poll() == FenceStatus::kFailed ? fence_->error() : nullptr;
  }
  /// Enqueues the rest.
  [[nodiscard]] cudaEvent_t event() override;
  [[nodiscard]] cudaStream_t stream() const noexcept override { return fence_->stream(); }

 private:
  /// With the lane's mutex held. Whether it went well.
  [[nodiscard]] bool enqueue_next() noexcept;
  void enqueue_begin();
  /// Returns what it counts for.
  std::size_t enqueue_chunk();
  void enqueue_rest();
  /// Of the exception that is being handled.
  void note_failure() noexcept;

  const std::shared_ptr<EventPool> pool_;
  AheadLane& lane_;
  const std::optional<Peers> peers_;
  std::shared_ptr<EventFence> fence_;
  bool is_queued_ = false;  // these two are guarded by the lane's mutex
  int num_failed_ = 0;

  std::mutex mutex_;             // guards the rest
  cudaEvent_t begin_ = nullptr;  // the fence's; null once it is recorded
  Pieces pieces_;
  std::size_t next_ = 0;  // of the pieces, the first that is not wholly enqueued: its rest
  std::vector<FencePtr> after_;
  std::atomic<bool> is_recorded_{false};  // all is enqueued
};

}  // namespace residency
