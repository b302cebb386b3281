#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include "csrc/cuda/copy_batch.h"
#include "csrc/cuda/event_fence.h"

namespace residency {

/// A copy ahead of need. A worker enqueues it chunk by chunk, and never so much at once that a copy
/// which is needed now would come long after it; whoever waits for it has the rest enqueued at
/// once.
class PacedCopy final : public StreamFence {
 public:
  static constexpr std::size_t kChunkBytes = std::size_t{16} << 20;

  /// `after`: what it comes behind. The stream's device must be the current one. Throws what
  /// `throw_cuda_error` throws.
  PacedCopy(std::shared_ptr<EventPool> pool, cudaStream_t stream, const Piece& piece,
            std::vector<FencePtr> after, std::optional<Peers> peers);

  /// Enqueues the next chunk and adds its fence. False when it was the last, and when it could not
  /// be enqueued: then whoever waits tries again.
  [[nodiscard]] bool enqueue_next(std::vector<FencePtr>& outstanding) noexcept;
  [[nodiscard]] bool is_enqueued() const noexcept { return is_recorded_; }

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
  void enqueue_begin();
  void enqueue_chunk();
  void enqueue_rest();
  /// Of the exception that is being handled.
  void note_failure() noexcept;

  const std::shared_ptr<EventPool> pool_;
  const std::optional<Peers> peers_;
  std::shared_ptr<EventFence> fence_;

  std::mutex mutex_;             // guards the rest
  cudaEvent_t begin_ = nullptr;  // the fence's; null once it is recorded
  Piece rest_;
  std::vector<FencePtr> after_;
  std::atomic<bool> is_recorded_{false};  // all is enqueued
};

}  // namespace residency
