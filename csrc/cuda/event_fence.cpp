#include "csrc/cuda/event_fence.h"

#include <utility>

#include <fmt/format.h>

#include "csrc/core/fork.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"
#include "residency/core/errors.h"

namespace residency {

EventPool::EventPool(Location device) : device_(device), generation_(device_generation()) {}

EventPool::~EventPool() {
  if (generation_ != device_generation()) {
    return;
  }
  const RelaxedCapture relaxed;
  for (const cudaEvent_t event : idle_) {
    (void)cudaEventDestroy(event);
  }
}

cudaEvent_t EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      const cudaEvent_t event = idle_.back();
      idle_.pop_back();
      return event;
    }
  }
  cudaEvent_t event = nullptr;
  check_cuda(cudaEventCreateWithFlags(&event, cudaEventDefault), device_, "cudaEventCreate");
  return event;
}

void EventPool::give_back(cudaEvent_t event) noexcept {
  if (event == nullptr || generation_ != device_generation()) {
    return;
  }
  try {
    const std::lock_guard lock(mutex_);
    idle_.push_back(event);
  } catch (...) {
    const RelaxedCapture relaxed;
    (void)cudaEventDestroy(event);
  }
}

EventFence::EventFence(std::shared_ptr<EventPool> pool, cudaStream_t stream, cudaEvent_t begin,
                       cudaEvent_t end)
    : pool_(std::move(pool)),
      stream_(stream),
      begin_(begin),
      end_(end),
      generation_(device_generation()) {}

std::shared_ptr<EventFence> EventFence::prepare(std::shared_ptr<EventPool> pool,
                                                cudaStream_t stream, cudaEvent_t begin) {
  cudaEvent_t end = nullptr;
  std::shared_ptr<EventFence> fence;
  try {
    end = pool->take();
    fence.reset(new EventFence(pool, stream, begin, end));
  } catch (...) {
    pool->give_back(end);
    pool->give_back(begin);
    throw;
  }
  return fence;
}

std::shared_ptr<EventFence> EventFence::record(std::shared_ptr<EventPool> pool, cudaStream_t stream,
                                               cudaEvent_t begin) {
  const Location device = pool->device();
  auto fence = prepare(std::move(pool), stream, begin);
  check_cuda(fence->record(), device, "cudaEventRecord");
  return fence;
}

cudaError_t EventFence::record_on(cudaStream_t stream) noexcept {
  stream_ = stream;
  const RelaxedCapture relaxed;
  const cudaError_t error = cudaEventRecord(end_, stream_);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    if (is_lost(error)) {
      fail_as_lost(error);
    }
  }
  return error;
}

void EventFence::fail_as_lost(cudaError_t answer) const noexcept {
  note_lost(pool_->device());
  error_.store(answer, std::memory_order_relaxed);
  status_.store(FenceStatus::kFailed, std::memory_order_release);
}

void EventFence::fail(std::exception_ptr why) noexcept {
  why_ = std::move(why);
  status_.store(FenceStatus::kFailed, std::memory_order_release);
}

EventFence::~EventFence() {
  // An event that is recorded again counts from then on for whoever has yet to wait for it, and for
  // nobody who already does.
  pool_->give_back(begin_);
  pool_->give_back(end_);
}

bool EventFence::is_orphan() const noexcept {
  return generation_ != device_generation() &&
         status_.load(std::memory_order_relaxed) == FenceStatus::kPending;
}

FenceStatus EventFence::settle(cudaError_t answer) const noexcept {
  if (answer == cudaSuccess) {
    status_.store(FenceStatus::kDone, std::memory_order_release);
  } else if (is_lost(answer)) {
    fail_as_lost(answer);
  }
  // Otherwise it is not ready, or a call failed, which says nothing of it.
  return status_.load(std::memory_order_relaxed);
}

FenceStatus EventFence::poll() const noexcept {
  const FenceStatus known = status_.load(std::memory_order_acquire);
  if (known != FenceStatus::kPending) {
    return known;
  }
  if (is_orphan()) {
    return FenceStatus::kFailed;
  }
  const RelaxedCapture relaxed;
  const cudaError_t answer = cudaEventQuery(end_);
  if (answer != cudaSuccess) {
    (void)cudaGetLastError();  // "not ready" too would be found by whoever asks next
  }
  return settle(answer);
}

void EventFence::wait() {
  if (is_orphan() || status_.load(std::memory_order_acquire) != FenceStatus::kPending) {
    return;
  }
  const RelaxedCapture relaxed;
  cudaError_t answer = cudaSuccess;
  const auto attempt = [&] {
    answer = cudaEventSynchronize(end_);
    if (answer != cudaSuccess) {
      (void)cudaGetLastError();
    }
    return settle(answer) != FenceStatus::kPending;
  };
  if (!try_for_a_second(attempt)) {
    fail_as_lost(answer);  // what it has in flight can never be known to be over
  }
}

std::optional<std::int64_t> EventFence::elapsed_ns() const {
  if (begin_ == nullptr || poll() != FenceStatus::kDone) {
    return std::nullopt;
  }
  float milliseconds = 0;
  const RelaxedCapture relaxed;
  if (cudaEventElapsedTime(&milliseconds, begin_, end_) != cudaSuccess) {
    (void)cudaGetLastError();
    return std::nullopt;
  }
  return static_cast<std::int64_t>(static_cast<double>(milliseconds) * 1e6);
}

std::exception_ptr EventFence::error() const {
  if (is_orphan()) {
    return std::make_exception_ptr(
        ForkError("this process was forked while the device was at work; devices exist only in the "
                  "parent"));
  }
  if (poll() != FenceStatus::kFailed) {
    return nullptr;
  }
  if (why_ != nullptr) {
    return why_;
  }
  const cudaError_t error = error_.load(std::memory_order_relaxed);
  return std::make_exception_ptr(DeviceLostError(
      pool_->device(),
      fmt::format("{} was lost with work in flight: {} ({})", to_string(pool_->device()),
                  cudaGetErrorString(error), cudaGetErrorName(error))));
}

class FenceParts::Part final : public StreamFence {
 public:
  [[nodiscard]] FenceStatus poll() const noexcept override { return of_->whole_->poll(); }
  [[nodiscard]] bool has_failed() const noexcept override { return of_->whole_->has_failed(); }
  void wait() override { of_->whole_->wait(); }
  [[nodiscard]] std::optional<std::int64_t> elapsed_ns() const override {
    const std::optional<std::int64_t> whole = of_->whole_->elapsed_ns();
    if (!whole.has_value() || of_->num_bytes_ == 0) {
      return whole;
    }
    return static_cast<std::int64_t>(static_cast<double>(*whole) * static_cast<double>(num_bytes_) /
                                     static_cast<double>(of_->num_bytes_));
  }
  [[nodiscard]] std::exception_ptr error() const override { return of_->whole_->error(); }
  [[nodiscard]] cudaEvent_t event() override { return of_->whole_->event(); }
  [[nodiscard]] cudaStream_t stream() const noexcept override { return of_->whole_->stream(); }

 private:
  friend class FenceParts;
  const FenceParts* of_ = nullptr;
  std::size_t num_bytes_ = 0;
};

FenceParts::FenceParts(std::size_t count) : parts_(new Part[count]) {}

FenceParts::~FenceParts() = default;

FencePtr FenceParts::part(std::size_t index, std::size_t num_bytes) noexcept {
  Part& part = parts_[index];
  part.of_ = this;
  part.num_bytes_ = num_bytes;
  num_bytes_ += num_bytes;
  return {shared_from_this(), &part};
}

bool wait_on_stream(cudaStream_t stream, const FencePtr& fence, Location device) {
  if (!is_pending(fence)) {
    if (fence != nullptr && fence->poll() == FenceStatus::kFailed) {
      std::rethrow_exception(fence->error());
    }
    return false;
  }
  auto* event = dynamic_cast<StreamFence*>(fence.get());
  if (event == nullptr) {
    fence->wait();
    return true;
  }
  // Asked for even in the same stream: what the fence stands for may not be enqueued there yet.
  const cudaEvent_t point = event->event();
  // Another's stream may have been destroyed since, and a new one made at the same address; the
  // default stream of each thread has the same number too.
  const DeviceStreams* ours = find_streams(device);
  if (event->stream() != stream || ours == nullptr || !ours->has(stream)) {
    check_cuda(cudaStreamWaitEvent(stream, point, 0), device, "cudaStreamWaitEvent");
  }
  return false;
}

bool come_after(cudaStream_t stream, const FencePtr& fence, Location device) {
  return is_pending(fence) && wait_on_stream(stream, fence, device);
}

}  // namespace residency
