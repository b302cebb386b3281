#include "csrc/cuda/paced_copy.h"

#include <algorithm>
#include <utility>

#include "csrc/cuda/nvtx_range.h"
#include "csrc/cuda/on_device.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"
#include "residency/core/errors.h"

namespace residency {

bool AheadLane::has_room(std::size_t chunk_bytes) noexcept {
  while (!outstanding.empty() && !is_pending(outstanding.front().done)) {
    outstanding.pop_front();
  }
  std::size_t cost = 0;
  for (const Chunk& chunk : outstanding) {
    cost += chunk.cost;
  }
  return cost <= chunk_bytes;
}

PacedCopy::PacedCopy(std::shared_ptr<EventPool> pool, AheadLane& ahead, cudaStream_t needed_now,
                     Pieces pieces, FencePtr source_ready, std::vector<FencePtr> after,
                     std::optional<Peers> peers, std::size_t chunk_bytes)
    : pool_(std::move(pool)),
      ahead_(ahead),
      needed_now_(needed_now),
      peers_(peers),
      chunk_bytes_(chunk_bytes),
      pieces_(std::move(pieces)),
      after_(std::move(after)) {
  after_.insert(after_.begin(), std::move(source_ready));
  begin_ = pool_->take();
  fence_ = EventFence::prepare(pool_, ahead.stream, begin_);
}

PacedCopy::~PacedCopy() {
  // One by one: a long chain of them, each in the destructor of the next, would overflow the stack.
  std::vector<FencePtr> fences = std::move(after_);
  while (!fences.empty()) {
    const FencePtr fence = std::move(fences.back());
    fences.pop_back();
    auto* copy = fence.use_count() == 1 ? dynamic_cast<PacedCopy*>(fence.get()) : nullptr;
    if (copy == nullptr) {
      continue;
    }
    try {
      // Nobody else has it. In a forked child the mutex may be held for ever.
      if (const std::unique_lock lock(copy->mutex_, std::try_to_lock); lock.owns_lock()) {
        fences.insert(fences.end(), copy->after_.begin(), copy->after_.end());
        copy->after_.clear();
      }
    } catch (...) {
      // No memory: then in its destructor.
    }
  }
}

std::vector<std::shared_ptr<PacedCopy>> PacedCopy::copies_before() {
  std::vector<std::shared_ptr<PacedCopy>> before;
  const std::lock_guard lock(mutex_);
  for (const FencePtr& fence : after_) {
    if (auto copy = std::dynamic_pointer_cast<PacedCopy>(fence);
        copy != nullptr && !copy->is_recorded_) {
      before.push_back(std::move(copy));
    }
  }
  return before;
}

template <class Visit>
void PacedCopy::visit_in_order(const Visit& visit) {
  struct Step {
    std::shared_ptr<PacedCopy> copy;
    std::vector<std::shared_ptr<PacedCopy>> before;  // to be visited first
  };
  std::vector<Step> steps;
  steps.push_back({std::shared_ptr<PacedCopy>(std::shared_ptr<void>(), this), copies_before()});
  while (!steps.empty()) {
    Step& step = steps.back();
    if (step.before.empty()) {
      visit(*step.copy);
      steps.pop_back();
      continue;
    }
    std::shared_ptr<PacedCopy> next = std::move(step.before.back());
    step.before.pop_back();
    if (!next->is_recorded_) {
      std::vector<std::shared_ptr<PacedCopy>> before = next->copies_before();
      steps.push_back({std::move(next), std::move(before)});
    }
  }
}

void PacedCopy::promote() {
  visit_in_order([](PacedCopy& each) { each.enqueue_in_needed_now(); });
}

void PacedCopy::enqueue_in_needed_now() {
  const RelaxedCapture relaxed;
  const OnDevice current(pool_->device());
  std::vector<FencePtr> over;  // dies without the mutex
  const std::lock_guard lock(mutex_);
  if (is_recorded_) {
    return;
  }
  is_needed_now_ = true;
  wait_in(needed_now_);
  after_.swap(over);
  num_over_ = 0;
  if (is_ahead_) {
    (void)wait_on_stream(needed_now_, EventFence::record(pool_, ahead_.stream), pool_->device());
    is_ahead_ = false;
  }
  record_begin(needed_now_);
  while (next_ != pieces_.size()) {
    (void)enqueue_chunk(needed_now_);
  }
  record_end(needed_now_);
}

void PacedCopy::wait_in(cudaStream_t stream) {
  for (std::size_t i = 0; i < after_.size(); ++i) {
    (void)(i == 0 ? wait_on_stream : come_after)(stream, after_[i], pool_->device());
  }
}

void PacedCopy::record_begin(cudaStream_t stream) {
  if (begin_ != nullptr) {
    check_cuda(cudaEventRecord(begin_, stream), pool_->device(), "cudaEventRecord");
    begin_ = nullptr;
  }
}

std::size_t PacedCopy::enqueue_chunk(cudaStream_t stream) {
  Pieces chunk;
  std::size_t cost = 0;
  for (std::size_t i = next_; i != pieces_.size() && cost < chunk_bytes_; ++i) {
    const std::size_t nbytes = std::min(pieces_[i].nbytes, chunk_bytes_ - cost);
    chunk.push_back({pieces_[i].to, pieces_[i].from, nbytes});
    cost += std::max(nbytes, kLeastCost);
  }
  const NvtxRange range("residency::prefetch");
  check_cuda(enqueue_copies(chunk, peers_, stream), pool_->device(), "cudaMemcpyAsync");
  next_ += chunk.size() - 1;
  Piece& last = pieces_[next_];
  const std::size_t done = chunk.back().nbytes;
  last = {last.to + done, last.from + done, last.nbytes - done};
  if (last.nbytes == 0) {
    ++next_;
  }
  return cost;
}

void PacedCopy::record_end(cudaStream_t stream) {
  check_cuda(fence_->record_on(stream), pool_->device(), "cudaEventRecord");
  failure_ = nullptr;
  is_recorded_ = true;
}

bool PacedCopy::is_turn() noexcept {
  if (is_needed_now_) {
    return true;  // it was tried, and is in no lane's order any more
  }
  if (ahead_.queue.front() != this || !ahead_.has_room(chunk_bytes_)) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  while (num_over_ != after_.size() && !is_pending(after_[num_over_])) {
    ++num_over_;
  }
  return num_over_ == after_.size();
}

void PacedCopy::enqueue_ahead() {
  const RelaxedCapture relaxed;
  const OnDevice current(pool_->device());
  std::vector<FencePtr> over;  // dies without the copy's mutex
  const std::lock_guard lock(mutex_);
  if (is_needed_now_) {
    return;  // since
  }
  wait_in(ahead_.stream);  // it is over, or has failed
  after_.swap(over);
  num_over_ = 0;
  AheadLane::Chunk& chunk = ahead_.outstanding.emplace_back();  // first, as it can fail
  is_ahead_ = true;
  record_begin(ahead_.stream);
  if (next_ != pieces_.size()) {
    chunk.cost = enqueue_chunk(ahead_.stream);
  }
  if (next_ == pieces_.size()) {
    record_end(ahead_.stream);
    chunk.done = fence_;
  } else {
    chunk.done = EventFence::record(pool_, ahead_.stream);
  }
}

bool PacedCopy::enqueue_next(bool at_once) noexcept {
  try {
    if (at_once || is_needed_now_) {
      promote();
    } else {
      enqueue_ahead();
    }
    return true;
  } catch (...) {
    note_failure();
  }
  return false;
}

void PacedCopy::note_failure() noexcept {
  const std::exception_ptr failure = std::current_exception();
  const std::lock_guard lock(mutex_);
  if (is_recorded_) {
    return;
  }
  failure_ = failure;
  try {
    throw;
  } catch (const DeviceLostError&) {  // or that of a source at another
    fence_->fail(failure);
    is_recorded_ = true;
  } catch (...) {
    // Whoever waits tries again.
  }
}

bool PacedCopy::pace(bool at_once) noexcept {
  constexpr int kMostFailuresAtOnce = 100;  // where there is no time for more
  const std::lock_guard lock(ahead_.mutex);
  ahead_.queue.splice(ahead_.queue.end(), node_);
  while (!is_recorded_ && !(at_once && num_failed_ >= kMostFailuresAtOnce)) {
    if (!at_once && !is_turn()) {
      return false;
    }
    if (enqueue_next(at_once)) {
      num_failed_ = 0;
      continue;
    }
    const auto now = std::chrono::steady_clock::now();
    if (num_failed_++ == 0) {
      failing_since_ = now;
    }
    if (now - failing_since_ < kLongEnough) {
      return false;
    }
    give_up(why_not_yet());
  }
  node_.splice(node_.end(), ahead_.queue, place_);
  return true;
}

FenceStatus PacedCopy::poll() const noexcept {
  return is_recorded_ || fence_->is_orphan() ? fence_->poll() : FenceStatus::kPending;
}

cudaEvent_t PacedCopy::event() {
  if (!is_recorded_) {
    promote();
  }
  return fence_->event();
}

void PacedCopy::make_certain() {
  if (is_certain()) {
    return;
  }
  const auto attempt = [this] {
    try {
      (void)event();
    } catch (...) {
      note_failure();
    }
    return is_recorded_.load();
  };
  if (!try_for_a_second(attempt)) {
    const std::exception_ptr why = why_not_yet();
    try {
      visit_in_order([&](PacedCopy& each) { each.give_up(why); });
    } catch (...) {
      give_up(why);  // no memory to remember the order in
    }
  }
}

void PacedCopy::wait() {
  make_certain();
  fence_->wait();
}

std::exception_ptr PacedCopy::error() const {
  return poll() == FenceStatus::kFailed ? fence_->error() : nullptr;
}

std::exception_ptr PacedCopy::why_not_yet() const noexcept {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void PacedCopy::give_up(const std::exception_ptr& why) noexcept {
  std::vector<FencePtr> over;  // dies without the mutex
  const std::lock_guard lock(mutex_);
  if (is_recorded_) {
    return;
  }
  // Nothing orders what comes after it behind the chunks that were enqueued, nor behind what they
  // came after.
  wait_all(after_);
  after_.swap(over);
  num_over_ = 0;
  drain(ahead_.stream, pool_->device());
  drain(needed_now_, pool_->device());
  fence_->fail(why);
  is_recorded_ = true;
}

std::optional<std::int64_t> PacedCopy::elapsed_ns() const {
  return is_recorded_ ? fence_->elapsed_ns() : std::nullopt;
}

}  // namespace residency
