#include "csrc/cuda/streams.h"

#include <array>
#include <atomic>
#include <mutex>

#include <c10/cuda/CUDAGuard.h>

#include "csrc/core/fork.h"
#include "csrc/cuda/runtime.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

constexpr std::size_t kMaxDevices = 128;  // the indices that a Location can have

struct Registry {
  std::mutex mutex;
  std::array<std::atomic<DeviceStreams*>, kMaxDevices> streams{};
  std::uint64_t generation = fork_generation();
};

// Never destroyed: static objects of others may still move values while the process ends.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

cudaStream_t make_stream(Location device) {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), device,
             "cudaStreamCreateWithFlags");
  return stream;
}

}  // namespace

DeviceStreams* find_streams(Location device) noexcept {
  Registry& shared = registry();
  return shared.streams[static_cast<std::size_t>(device.cuda_index())].load(
      std::memory_order_acquire);
}

void synchronize_device(Location device) noexcept {
  try {
    const RelaxedCapture relaxed;
    const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device.cuda_index()));
    if (cudaDeviceSynchronize() != cudaSuccess) {
      (void)cudaGetLastError();
    }
  } catch (...) {
    (void)cudaGetLastError();
  }
}

DeviceStreams& streams_of(Location device) {
  Registry& shared = registry();
  if (shared.generation != fork_generation()) {
    throw ForkError(
        "this process was forked after its parent had used a device; devices exist "
        "only in the parent (start processes with spawn)");
  }
  if (DeviceStreams* found = find_streams(device); found != nullptr) {
    return *found;
  }
  const std::lock_guard lock(shared.mutex);
  if (DeviceStreams* found = find_streams(device); found != nullptr) {
    return *found;
  }
  const RelaxedCapture relaxed;
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(device.cuda_index()));
  auto made = std::make_unique<DeviceStreams>();
  made->events = std::make_shared<EventPool>(device);
  // What a failure leaves is a stream or two, and the device is then hardly of use.
  made->in.stream = make_stream(device);
  made->out.stream = make_stream(device);
  made->arena = make_stream(device);
  shared.streams[static_cast<std::size_t>(device.cuda_index())].store(made.get(),
                                                                      std::memory_order_release);
  return *made.release();
}

}  // namespace residency
