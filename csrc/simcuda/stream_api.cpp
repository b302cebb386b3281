// The entry points of streams.
#include <algorithm>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/graph.h"
#include "csrc/simcuda/runtime.h"

using namespace simcuda;

namespace {

cudaError_t create_stream(cudaStream_t* handle, unsigned flags, int priority) {
  if (!handle || (flags & ~static_cast<unsigned>(cudaStreamNonBlocking)) != 0) {
    return cudaErrorInvalidValue;
  }
  Device& device = current_device();
  if (int broken = device.broken) return static_cast<cudaError_t>(broken);
  constexpr int kGreatestPriority = -5;
  StreamOptions options{.flags = flags, .priority = std::clamp(priority, kGreatestPriority, 0)};
  auto stream = std::make_shared<Stream>(device, runtime().next_id++, options);
  {
    Clock::Lock lock(runtime().clock.mutex);
    device.streams.push_back(stream);
  }
  *handle = static_cast<cudaStream_t>(runtime().streams.insert(std::move(stream)));
  return cudaSuccess;
}

cudaError_t add_host_function(cudaStream_t handle, Body body) {
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return error;
  OperationSpec spec{.kind = OperationKind::kHostFunction, .name = "host function"};
  spec.body = std::make_shared<Body>(std::move(body));
  return submit(stream, std::move(spec));
}

}  // namespace

SIMCUDA_EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t* handle, unsigned flags,
                                                        int priority) {
  SIMCUDA_ENTER(cudaStreamCreateWithPriority, kHostCall);
  return fail(create_stream(handle, flags, priority));
}

SIMCUDA_EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t* handle, unsigned flags) {
  SIMCUDA_ENTER(cudaStreamCreateWithFlags, kHostCall);
  return fail(create_stream(handle, flags, 0));
}

SIMCUDA_EXPORT cudaError_t cudaStreamCreate(cudaStream_t* handle) {
  SIMCUDA_ENTER(cudaStreamCreate, kHostCall);
  return fail(create_stream(handle, cudaStreamDefault, 0));
}

SIMCUDA_EXPORT cudaError_t cudaStreamDestroy(cudaStream_t handle) {
  SIMCUDA_ENTER(cudaStreamDestroy, kHostCall);
  StreamPtr stream = runtime().streams.take(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  Clock::Lock lock(runtime().clock.mutex);
  std::erase(stream->device.streams, stream);
  stream->close(lock);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaStreamQuery(cudaStream_t handle) {
  SIMCUDA_ENTER(cudaStreamQuery, kHostCall);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  if (cudaError_t error = refuse_on_captured(*stream)) return fail(error);
  OperationPtr last;
  {
    Clock::Lock lock(runtime().clock.mutex);
    last = stream->last;
    if (!runtime().clock.is_done(lock, last)) return cudaErrorNotReady;
  }
  if (last && !last->wait_until_run_or_blocked()) return cudaErrorNotReady;
  return fail(static_cast<cudaError_t>(stream->device.broken.load()));
}

SIMCUDA_EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  SIMCUDA_ENTER(cudaStreamSynchronize, kHostCall);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  if (cudaError_t error = refuse_on_captured(*stream)) return fail(error);
  OperationPtr last;
  {
    Clock::Lock lock(runtime().clock.mutex);
    last = stream->last;
  }
  synchronize(stream->device, {last});
  return fail(static_cast<cudaError_t>(stream->device.broken.load()));
}

SIMCUDA_EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  SIMCUDA_ENTER(cudaStreamGetPriority, kNothing);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  *priority = stream->priority;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned* flags) {
  SIMCUDA_ENTER(cudaStreamGetFlags, kNothing);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  *flags = stream->flags;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaStreamGetDevice(cudaStream_t handle, int* device) {
  SIMCUDA_ENTER(cudaStreamGetDevice, kNothing);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  *device = stream->device.ordinal;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  SIMCUDA_ENTER(cudaStreamGetId, kNothing);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  *id = stream->id;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function,
                                              void* data) {
  SIMCUDA_ENTER(cudaLaunchHostFunc, kHostCall);
  if (!function) return fail(cudaErrorInvalidValue);
  return fail(add_host_function(handle, [function, data] {
    function(data);
    return cudaSuccess;
  }));
}

SIMCUDA_EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback,
                                                 void* data, unsigned flags) {
  SIMCUDA_ENTER(cudaStreamAddCallback, kHostCall);
  if (!callback || flags != 0) return fail(cudaErrorInvalidValue);
  StreamPtr stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  Device& device = stream->device;
  return fail(add_host_function(handle, [handle, callback, data, &device] {
    callback(handle, static_cast<cudaError_t>(device.broken.load()), data);
    return cudaSuccess;
  }));
}
