#include "csrc/cuda/paced_copy.h"

#include <algorithm>

#include <c10/cuda/CUDAGuard.h>

#include "csrc/cuda/nvtx_range.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"
#include "residency/core/errors.h"

namespace residency {

PacedCopy::PacedCopy(std::shared_ptr<EventPool> pool, cudaStream_t stream, const Piece& piece,
                     std::vector<FencePtr> after, std::optional<Peers> peers)
    : pool_(std::move(pool)), peers_(peers), rest_(piece), after_(std::move(after)) {
  begin_ = pool_->take();
  fence_ = EventFence::prepare(pool_, stream, begin_);
}

void PacedCopy::enqueue_begin() {
  for (const FencePtr& fence : after_) {
    (void)wait_on_stream(stream(), fence, pool_->device());
  }
  check_cuda(cudaEventRecord(begin_, stream()), pool_->device(), "cudaEventRecord");
  after_.clear();
  begin_ = nullptr;
}

void PacedCopy::enqueue_chunk() {
  if (begin_ != nullptr) {
    enqueue_begin();
  }
  const std::size_t nbytes = std::min(rest_.nbytes, kChunkBytes);
  const NvtxRange range("residency::prefetch");
  const cudaError_t error = enqueue_copy({rest_.to, rest_.from, nbytes}, peers_, stream());
  check_cuda(error, pool_->device(), "cudaMemcpyAsync");
  rest_ = {rest_.to + nbytes, rest_.from + nbytes, rest_.nbytes - nbytes};
}

void PacedCopy::enqueue_rest() {
  while (rest_.nbytes != 0) {
    enqueue_chunk();
  }
  if (!is_recorded_) {
    check_cuda(fence_->record(), pool_->device(), "cudaEventRecord");
    is_recorded_ = true;
  }
}

void PacedCopy::note_failure() noexcept {
  try {
    throw;
  } catch (const DeviceLostError&) {
    fence_->fail(cudaErrorDevicesUnavailable);
    is_recorded_ = true;
  } catch (...) {
    // Whoever waits tries again.
  }
}

bool PacedCopy::enqueue_next(std::vector<FencePtr>& outstanding) noexcept {
  try {
    const RelaxedCapture relaxed;
    const c10::cuda::CUDAGuard guard(index_of(pool_->device()));
    const std::lock_guard lock(mutex_);
    if (is_recorded_) {
      return false;
    }
    try {
      outstanding.reserve(outstanding.size() + 1);
      enqueue_chunk();
      outstanding.push_back(EventFence::record(pool_, stream()));
      if (rest_.nbytes == 0) {
        enqueue_rest();
      }
      return !is_recorded_;
    } catch (...) {
      note_failure();
    }
  } catch (...) {
    // No device to turn to.
  }
  return false;
}

FenceStatus PacedCopy::poll() const noexcept {
  return is_recorded_ || fence_->is_orphan() ? fence_->poll() : FenceStatus::kPending;
}

cudaEvent_t PacedCopy::event() {
  const RelaxedCapture relaxed;
  const c10::cuda::CUDAGuard guard(index_of(pool_->device()));
  const std::lock_guard lock(mutex_);
  enqueue_rest();
  return fence_->event();
}

void PacedCopy::wait() {
  if (fence_->is_orphan()) {
    return;
  }
  const auto attempt = [this] {
    try {
      (void)event();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      note_failure();
    }
    return is_recorded_.load();
  };
  if (!try_for_a_second(attempt)) {
    const std::lock_guard lock(mutex_);
    if (!is_recorded_) {
      fence_->fail(cudaErrorUnknown);
      is_recorded_ = true;
    }
  }
  fence_->wait();
}

std::optional<std::int64_t> PacedCopy::elapsed_ns() const {
  return is_recorded_ ? fence_->elapsed_ns() : std::nullopt;
}

}  // namespace residency
