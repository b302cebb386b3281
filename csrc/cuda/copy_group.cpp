#include "csrc/cuda/copy_group.h"

#include <utility>

#include "csrc/cuda/nvtx_range.h"
#include "csrc/cuda/runtime.h"

namespace residency {

/// One copy of a group.
class CopyGroup::Member final : public StreamFence {
 public:
  Member(std::shared_ptr<CopyGroup> group, std::size_t nbytes)
      : group_(std::move(group)), nbytes_(nbytes) {}

  [[nodiscard]] FenceStatus poll() const noexcept override {
    EventFence* fence = group_->recorded(/*may_wait=*/false);
    return fence != nullptr ? fence->poll() : FenceStatus::kPending;
  }
  void wait() override { group_->wait_until_recorded().wait(); }
  /// The group's time, shared out by bytes.
  [[nodiscard]] std::optional<std::int64_t> elapsed_ns() const override {
    if (poll() != FenceStatus::kDone) {
      return std::nullopt;
    }
    const std::optional<std::int64_t> whole = group_->fence_->elapsed_ns();
    const auto num_bytes = static_cast<double>(group_->num_bytes_.load());
    if (!whole.has_value() || num_bytes == 0) {
      return whole;
    }
    return static_cast<std::int64_t>(static_cast<double>(*whole) * static_cast<double>(nbytes_) /
                                     num_bytes);
  }
  [[nodiscard]] std::exception_ptr error() const override {
    return poll() == FenceStatus::kFailed ? group_->fence_->error() : nullptr;
  }
  [[nodiscard]] cudaEvent_t event() override {
    const std::lock_guard lock(group_->lane_.mutex);
    check_cuda(group_->close(), group_->fence_->device(), "cudaEventRecord");
    return group_->fence_->event();
  }
  [[nodiscard]] cudaStream_t stream() const noexcept override { return group_->fence_->stream(); }

 private:
  const std::shared_ptr<CopyGroup> group_;
  const std::size_t nbytes_;
};

CopyGroup::CopyGroup(std::shared_ptr<EventPool> pool, Lane& lane, cudaEvent_t begin)
    : lane_(lane), fence_(EventFence::prepare(std::move(pool), lane.stream, begin)) {}

FencePtr CopyGroup::join(std::size_t nbytes) {
  auto member = std::make_shared<Member>(shared_from_this(), nbytes);
  num_bytes_ += nbytes;
  return member;
}

FencePtr CopyGroup::put_off(const Piece& piece) {
  FencePtr member = join(piece.nbytes);
  batch_.add(piece);
  is_put_off_ = true;
  return member;
}

cudaError_t CopyGroup::start() noexcept {
  if (!is_put_off_) {
    return cudaSuccess;
  }
  const NvtxRange range(lane_.label);
  const cudaError_t error = batch_.enqueue_on(lane_.stream);
  if (error == cudaSuccess) {
    is_put_off_ = false;
  }
  start_failed_ = error != cudaSuccess;
  return error;
}

cudaError_t CopyGroup::close() noexcept {
  if (is_recorded_) {
    return cudaSuccess;
  }
  cudaError_t error = start();
  if (error == cudaSuccess) {
    error = fence_->record();
  } else if (is_lost(error)) {
    fence_->fail(error);
  }
  if (error == cudaSuccess || is_lost(error)) {
    end();
  }
  return error;
}

void CopyGroup::end() noexcept {
  is_put_off_ = false;
  is_recorded_ = true;
  if (lane_.open.get() == this) {
    lane_.open = nullptr;
  }
}

EventFence* CopyGroup::recorded(bool may_wait) noexcept {
  if (!is_recorded_) {
    if (fence_->is_orphan()) {
      return fence_.get();  // a forked child: the mutex may be held for ever
    }
    if (!may_wait && is_put_off_ && !start_failed_) {
      return nullptr;
    }
    std::unique_lock lock(lane_.mutex, std::defer_lock);
    if (may_wait) {
      lock.lock();
    } else if (!lock.try_lock()) {
      return nullptr;
    }
    (void)close();
  }
  return is_recorded_ ? fence_.get() : nullptr;
}

EventFence& CopyGroup::wait_until_recorded() noexcept {
  if (!try_for_a_second([this] { return recorded(/*may_wait=*/true) != nullptr; })) {
    const std::lock_guard lock(lane_.mutex);
    if (const cudaError_t error = close(); !is_recorded_) {
      fence_->fail(error);
      end();
    }
  }
  return *fence_;
}

}  // namespace residency
