#include "csrc/cuda/paced_copy.h"

#include <algorithm>

#include <c10/cuda/CUDAGuard.h>

#include "csrc/cuda/nvtx_range.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"
#include "residency/core/errors.h"

namespace residency {

bool AheadLane::has_room() noexcept {
  while (!outstanding.empty() && !is_pending(outstanding.front().done)) {
    outstanding.pop_front();
  }
  std::size_t cost = 0;
  for (const Chunk& chunk : outstanding) {
    cost += chunk.cost;
  }
  return cost <= PacedCopy::kChunkBytes;
}

PacedCopy::PacedCopy(std::shared_ptr<EventPool> pool, AheadLane& lane, Pieces pieces,
                     std::vector<FencePtr> after, std::optional<Peers> peers)
    : pool_(std::move(pool)),
      lane_(lane),
      peers_(peers),
      pieces_(std::move(pieces)),
      after_(std::move(after)) {
  begin_ = pool_->take();
  fence_ = EventFence::prepare(pool_, lane.stream, begin_);
}

void PacedCopy::enqueue_begin() {
  for (const FencePtr& fence : after_) {
    (void)wait_on_stream(stream(), fence, pool_->device());
  }
  check_cuda(cudaEventRecord(begin_, stream()), pool_->device(), "cudaEventRecord");
  after_.clear();
  begin_ = nullptr;
}

std::size_t PacedCopy::enqueue_chunk() {
  if (begin_ != nullptr) {
    enqueue_begin();
  }
  Pieces chunk;
  std::size_t cost = 0;
  for (std::size_t i = next_; i != pieces_.size() && cost < kChunkBytes; ++i) {
    const std::size_t nbytes = std::min(pieces_[i].nbytes, kChunkBytes - cost);
    chunk.push_back({pieces_[i].to, pieces_[i].from, nbytes});
    cost += std::max(nbytes, kLeastCost);
  }
  const NvtxRange range("residency::prefetch");
  check_cuda(enqueue_copies(chunk, peers_, stream()), pool_->device(), "cudaMemcpyAsync");
  next_ += chunk.size() - 1;
  Piece& last = pieces_[next_];
  const std::size_t done = chunk.back().nbytes;
  last = {last.to + done, last.from + done, last.nbytes - done};
  if (last.nbytes == 0) {
    ++next_;
  }
  return cost;
}

void PacedCopy::enqueue_rest() {
  while (next_ != pieces_.size()) {
    (void)enqueue_chunk();
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

bool PacedCopy::enqueue_next() noexcept {
  try {
    const RelaxedCapture relaxed;
    const c10::cuda::CUDAGuard guard(index_of(pool_->device()));
    const std::lock_guard lock(mutex_);
    if (is_recorded_) {
      return true;  // by whoever waits for it
    }
    try {
      AheadLane::Chunk& chunk = lane_.outstanding.emplace_back();  // first, as it can fail
      if (next_ != pieces_.size()) {
        chunk.cost = enqueue_chunk();
      }
      if (next_ == pieces_.size()) {
        enqueue_rest();
        chunk.done = fence_;
      } else {
        chunk.done = EventFence::record(pool_, stream());
      }
      return true;
    } catch (...) {
      note_failure();
    }
  } catch (...) {
    // No device to turn to.
  }
  return false;
}

bool PacedCopy::pace(bool at_once) noexcept {
  constexpr int kMostFailures = 100;  // where there is no more time for it
  const std::lock_guard lock(lane_.mutex);
  if (!is_queued_) {
    try {
      lane_.queue.push_back(this);
    } catch (...) {
      return true;
    }
    is_queued_ = true;
  }
  while (!is_recorded_ && !(at_once && num_failed_ >= kMostFailures)) {
    if (!at_once && (lane_.queue.front() != this || !lane_.has_room())) {
      return false;
    }
    if (!enqueue_next()) {
      ++num_failed_;
      return false;
    }
  }
  std::erase(lane_.queue, this);
  return true;
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
      // Nothing orders what comes after it behind the chunks that were enqueued, nor behind what
      // they came after.
      wait_all(after_);
      (void)cudaStreamSynchronize(stream());
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
