#include "csrc/cuda/streams.h"

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <stdexcept>

#include <ATen/Context.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "csrc/aten/transfer_worker.h"
#include "csrc/core/fork.h"
#include "csrc/cuda/nvtx_range.h"
#include "csrc/cuda/on_device.h"
#include "csrc/cuda/runtime.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

struct Registry {
  std::mutex mutex;
  std::array<std::atomic<DeviceStreams*>, kMaxDevices> streams{};
  std::uint64_t generation = device_generation();
};

// Never destroyed: static objects of others may still move values while the process ends.
Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

/// ATen sets PyTorch's CUDA code up when it first makes a tensor there, and ours may come before
/// that.
void set_up_torch(Location device) {
  try {
    at::globalContext().lazyInitDevice(at::kCUDA);
  } catch (const c10::Error& error) {
    throw UnavailableError(fmt::format("PyTorch cannot use {}: {}", to_string(device),
                                       error.what_without_backtrace()));
  }
}

cudaStream_t make_stream(Location device) {
  cudaStream_t stream = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), device,
             "cudaStreamCreateWithFlags");
  return stream;
}

cudaError_t ask_whether_capturing(cudaStream_t stream, bool& captures) noexcept {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  captures = error == cudaSuccess && status != cudaStreamCaptureStatusNone;
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
  }
  // The legacy stream answers so while another stream captures in global mode: it does not itself.
  return error == cudaErrorStreamCaptureImplicit ? cudaSuccess : error;
}

}  // namespace

DeviceStreams* find_streams(Location device) noexcept {
  Registry& shared = registry();
  if (shared.generation != device_generation()) {
    return nullptr;
  }
  return shared.streams[static_cast<std::size_t>(device.cuda_index())].load(
      std::memory_order_acquire);
}

bool synchronize_device(Location device) noexcept {
  try {
    const RelaxedCapture relaxed;
    const OnDevice current(device);
    const cudaError_t error = cudaDeviceSynchronize();
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
    }
    return error == cudaSuccess || is_lost(error);
  } catch (const DeviceLostError&) {
    return true;
  } catch (...) {
    (void)cudaGetLastError();
    return false;
  }
}

void throw_error_of_switching(cudaError_t error, Location device) {
  (void)cudaGetLastError();
  if (!is_lost(error)) {
    throw_cuda_error(error, device, "cudaSetDevice");
  }
  const RelaxedCapture relaxed;
  const DeviceStreams* streams = find_streams(device);
  const cudaError_t own = streams != nullptr ? cudaStreamQuery(streams->arena) : cudaSuccess;
  if (is_lost(own)) {
    throw_cuda_error(own, device, "cudaStreamQuery");
  }
  (void)cudaGetLastError();
  throw UnavailableError(fmt::format(
      "{} cannot be made the current device: {} ({}), of another one or of earlier work",
      to_string(device), cudaGetErrorString(error), cudaGetErrorName(error)));
}

void drain(cudaStream_t stream, Location device) noexcept {
  const RelaxedCapture relaxed;
  const bool is_over = try_for_a_second([&] {
    if (bool captures = false; ask_whether_capturing(stream, captures) == cudaSuccess && captures) {
      return synchronize_device(device);  // to wait for the stream itself would end the capture
    }
    const cudaError_t error = cudaStreamSynchronize(stream);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
    }
    if (error == cudaErrorInvalidResourceHandle) {  // one of the caller's, who has destroyed it
      return synchronize_device(device);
    }
    if (is_lost(error)) {
      note_lost(device);
    }
    return error == cudaSuccess || is_lost(error);
  });
  if (!is_over) {
    note_lost(device);
  }
}

bool is_capturing(cudaStream_t stream, Location device) {
  bool captures = false;
  check_cuda(ask_whether_capturing(stream, captures), device, "cudaStreamIsCapturing");
  return captures;
}

cudaStream_t handle_of(const Stream& stream) {
  try {
    return c10::cuda::CUDAStream::unpack3(stream.id, index_of(stream.device), c10::DeviceType::CUDA)
        .stream();
  } catch (const c10::Error& error) {
    throw std::invalid_argument(fmt::format("{} has no stream {}: {}", to_string(stream.device),
                                            stream.id, error.what_without_backtrace()));
  }
}

Stream current_stream_of(Location device) {
  return {device, c10::cuda::getCurrentCUDAStream(index_of(device)).id()};
}

FencePtr record_stream(const Stream& stream) {
  const Location device = stream.device;
  const DeviceStreams& streams = streams_of(device);
  const OnDevice current(device);
  const cudaStream_t handle = handle_of(stream);
  bool captures = false;
  cudaError_t error = ask_whether_capturing(handle, captures);
  if (error != cudaErrorInvalidResourceHandle) {
    check_cuda(error, device, "cudaStreamIsCapturing");
    if (captures) {
      return nullptr;
    }
    const RelaxedCapture relaxed;
    auto fence = EventFence::prepare(streams.events, handle);
    error = fence->record();
    if (error != cudaErrorInvalidResourceHandle) {
      check_cuda(error, device, "cudaEventRecord");
      return fence;
    }
  }
  // The stream was destroyed, or never was: what was done on it is over when all is.
  (void)cudaGetLastError();
  if (!synchronize_device(device)) {
    throw UnavailableError(fmt::format(
        "{} has no such stream any more, and the device cannot be waited for", to_string(device)));
  }
  return Fence::done();
}

DeviceStreams& streams_of(Location device) {
  Registry& shared = registry();
  if (shared.generation != device_generation()) {
    throw ForkError(
        "this process was forked after its parent had used a device, or exits; devices exist only "
        "in the parent (start processes with spawn)");
  }
  if (DeviceStreams* found = find_streams(device); found != nullptr) {
    return *found;
  }
  set_up_torch(device);
  const std::lock_guard lock(shared.mutex);
  if (DeviceStreams* found = find_streams(device); found != nullptr) {
    return *found;
  }
  const RelaxedCapture relaxed;
  const OnDevice current(device);
  { const NvtxRange first("residency::set up"); }  // which has NVTX set itself up, on one thread
  auto made = std::make_unique<DeviceStreams>();
  made->events = std::make_shared<EventPool>(device);
  // What a failure leaves is a stream or two, and the device is then hardly of use.
  made->in.label = "residency::copy to device";
  made->in.stream = make_stream(device);
  made->out.label = "residency::copy from device";
  made->out.stream = make_stream(device);
  made->ahead_in.stream = make_stream(device);
  made->ahead_out.stream = make_stream(device);
  made->staged_in = make_stream(device);
  made->staged_out = make_stream(device);
  made->arena = make_stream(device);
  TransferWorker::end_with_process();  // before what c10 has made by now is destroyed
  shared.streams[static_cast<std::size_t>(device.cuda_index())].store(made.get(),
                                                                      std::memory_order_release);
  return *made.release();
}

}  // namespace residency
