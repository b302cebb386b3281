#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>

#include "residency/core/fence.h"
#include "residency/core/location.h"

namespace residency {

/// Events of one device, kept for reuse: making one costs more than recording it. Thread-safe.
class EventPool {
 public:
  explicit EventPool(Location device);
  ~EventPool();
  EventPool(const EventPool&) = delete;
  EventPool& operator=(const EventPool&) = delete;

  [[nodiscard]] Location device() const noexcept { return device_; }
  /// The device must be the calling thread's current one. Throws what `throw_cuda_error` throws.
  [[nodiscard]] cudaEvent_t take();
  void give_back(cudaEvent_t event) noexcept;

 private:
  const Location device_;
  const std::uint64_t generation_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> idle_;
};

/// A fence in a stream, which other streams can wait for. Thread-safe.
class StreamFence : public Fence {
 public:
  [[nodiscard]] bool on_stream() const noexcept final { return true; }
  /// Behind the work that the fence stands for. Throws what `throw_cuda_error` throws.
  [[nodiscard]] virtual cudaEvent_t event() = 0;
  /// For comparison only: the stream may have gone.
  [[nodiscard]] virtual cudaStream_t stream() const noexcept = 0;
};

/// A point in a stream's work. After its device was lost it is failed, with `DeviceLostError`; in a
/// forked child with `ForkError`.
class EventFence final : public StreamFence {
 public:
  /// Behind all that the stream was given so far. The stream's device must be the current one. With
  /// `begin`, an event recorded earlier in that stream which the fence owns from now on, it knows
  /// how long the device was busy in between. Throws what `throw_cuda_error` throws.
  [[nodiscard]] static std::shared_ptr<EventFence> record(std::shared_ptr<EventPool> pool,
                                                          cudaStream_t stream,
                                                          cudaEvent_t begin = nullptr);
  /// All that is needed for that, but for the point itself.
  [[nodiscard]] static std::shared_ptr<EventFence> prepare(std::shared_ptr<EventPool> pool,
                                                           cudaStream_t stream,
                                                           cudaEvent_t begin = nullptr);
  /// Sets the point, once, before anything else is asked. Allocates nothing. When the device is
  /// lost the fence is failed.
  [[nodiscard]] cudaError_t record() noexcept { return record_on(stream_); }
  /// The same in another stream of the device than it was prepared for.
  [[nodiscard]] cudaError_t record_on(cudaStream_t stream) noexcept;
  /// Instead of `record`, once, when what it is to stand behind could not be enqueued.
  void fail(std::exception_ptr why) noexcept;

  ~EventFence() override;
  [[nodiscard]] FenceStatus poll() const noexcept override;
  [[nodiscard]] bool has_failed() const noexcept override {
    return status_.load(std::memory_order_acquire) == FenceStatus::kFailed;
  }
  void wait() override;
  [[nodiscard]] std::optional<std::int64_t> elapsed_ns() const override;
  [[nodiscard]] std::exception_ptr error() const override;

  [[nodiscard]] cudaEvent_t event() override { return end_; }
  [[nodiscard]] cudaStream_t stream() const noexcept override { return stream_; }
  [[nodiscard]] Location device() const noexcept { return pool_->device(); }
  /// Pending, in a forked child of the process that made it.
  [[nodiscard]] bool is_orphan() const noexcept;

 private:
  EventFence(std::shared_ptr<EventPool> pool, cudaStream_t stream, cudaEvent_t begin,
             cudaEvent_t end);
  FenceStatus settle(cudaError_t answer) const noexcept;
  void fail_as_lost(cudaError_t answer) const noexcept;

  const std::shared_ptr<EventPool> pool_;
  cudaStream_t stream_;
  const cudaEvent_t begin_;
  const cudaEvent_t end_;
  const std::uint64_t generation_;
  mutable std::atomic<FenceStatus> status_{FenceStatus::kPending};
  mutable std::atomic<cudaError_t> error_{cudaSuccess};  // with which the device was lost
  std::exception_ptr why_;                               // it was not recorded
};

/// Fences of several copies that lie before one point. Each has its share of the time, by bytes.
class FenceParts : public std::enable_shared_from_this<FenceParts> {
 public:
  explicit FenceParts(std::size_t count);
  ~FenceParts();
  FenceParts(const FenceParts&) = delete;
  FenceParts& operator=(const FenceParts&) = delete;
  /// Once, before anything else.
  void set_whole(std::shared_ptr<EventFence> whole) noexcept { whole_ = std::move(whole); }
  /// The fence of one of them. All are made before one is asked for its time.
  [[nodiscard]] FencePtr part(std::size_t index, std::size_t num_bytes) noexcept;

 private:
  class Part;
  std::shared_ptr<EventFence> whole_;
  const std::unique_ptr<Part[]> parts_;  // NOLINT(modernize-avoid-c-arrays): they cannot be moved
  std::size_t num_bytes_ = 0;
};

/// Makes the stream go on only after the fence, without waiting on the host where the fence is an
/// event. Returns whether the host waited. Throws what `throw_cuda_error` throws, and why the fence
/// failed.
bool wait_on_stream(cudaStream_t stream, const FencePtr& fence, Location device);
/// The same where it matters only that the work is over, and not how it ended.
bool come_after(cudaStream_t stream, const FencePtr& fence, Location device);

}  // namespace residency
