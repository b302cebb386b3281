#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include "residency/core/fence.h"
#include "residency/core/location.h"

namespace residency {

/// Events of one device, kept for reuse: making one costs more than recording it. Thread-safe.
class EventPool : public std::enable_shared_from_this<EventPool> {
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

/// A point in a stream's work. Thread-safe. After its device was lost it is failed, with
/// `DeviceLostError`; in a forked child with `ForkError`.
class EventFence final : public Fence {
 public:
  /// Behind all that the stream was given so far. The stream's device must be the current one. With
  /// `begin`, an event recorded earlier in that stream which the fence owns from now on, it knows
  /// how long the device was busy in between. Throws what `throw_cuda_error` throws.
  [[nodiscard]] static std::shared_ptr<EventFence> record(std::shared_ptr<EventPool> pool,
                                                          cudaStream_t stream,
                                                          cudaEvent_t begin = nullptr);

  ~EventFence() override;
  [[nodiscard]] FenceStatus poll() const noexcept override;
  void wait() override;
  [[nodiscard]] std::optional<std::int64_t> elapsed_ns() const override;
  [[nodiscard]] std::exception_ptr error() const override;

  [[nodiscard]] cudaEvent_t event() const noexcept { return end_; }
  /// For comparison only: the stream may have gone.
  [[nodiscard]] cudaStream_t stream() const noexcept { return stream_; }

 private:
  EventFence(std::shared_ptr<EventPool> pool, cudaStream_t stream, cudaEvent_t begin,
             cudaEvent_t end);
  FenceStatus settle(cudaError_t answer) const noexcept;
  [[nodiscard]] bool is_orphan() const noexcept;

  const std::shared_ptr<EventPool> pool_;
  const cudaStream_t stream_;
  const cudaEvent_t begin_;
  const cudaEvent_t end_;
  const std::uint64_t generation_;
  mutable std::atomic<FenceStatus> status_{FenceStatus::kPending};
  mutable std::atomic<cudaError_t> error_{cudaSuccess};
};

/// Makes the stream go on only after the fence, without waiting on the host where the fence is an
/// event. Returns whether the host waited. Throws what `throw_cuda_error` throws, and why the fence
/// failed.
bool wait_on_stream(cudaStream_t stream, const FencePtr& fence, Location device);

}  // namespace residency
