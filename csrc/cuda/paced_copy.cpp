#include "csrc/cuda/paced_copy.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include <c10/cuda/CUDAGuard.h>

#include "csrc/cuda/nvtx_range.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"
#include "residency/core/errors.h"

namespace residency {

PacedCopy::PacedCopy(std::shared_ptr<EventPool> pool, cudaStream_t stream, const Piece& piece,
                     std::vector<FencePtr> after, std::optional<std::pair<int, int>> peers)
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
  const cudaError_t error =
      peers_.has_value()
          ? cudaMemcpyPeerAsync(rest_.to, peers_->second, rest_.from, peers_->first, nbytes,
                                stream())
          : cudaMemcpyAsync(rest_.to, rest_.from, nbytes, cudaMemcpyDefault, stream());
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
  constexpr int kMostTries = 1000;  // a call that fails may have another chance, not for ever
  for (int i = 0; !is_recorded_; ++i) {
    try {
      (void)event();
    } catch (...) {
      const std::lock_guard lock(mutex_);
      note_failure();
      if (i >= kMostTries && !is_recorded_) {
        fence_->fail(cudaErrorUnknown);
        is_recorded_ = true;
      }
    }
    if (!is_recorded_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  fence_->wait();
}

std::optional<std::int64_t> PacedCopy::elapsed_ns() const {
  return is_recorded_ ? fence_->elapsed_ns() : std::nullopt;
}

}  // namespace residency
