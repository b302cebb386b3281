#include "csrc/simcuda/event.h"

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/graph.h"
#include "csrc/simcuda/runtime.h"

using namespace simcuda;

namespace {

cudaError_t create_event(cudaEvent_t* handle, unsigned flags) {
  constexpr unsigned kKnownFlags =
      cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess;
  if (!handle || (flags & ~kKnownFlags) != 0) return cudaErrorInvalidValue;
  auto event = std::shared_ptr<Event>(new Event{.device = current_device(), .flags = flags});
  *handle = static_cast<cudaEvent_t>(runtime().events.insert(std::move(event)));
  return cudaSuccess;
}

cudaError_t record(cudaEvent_t event_handle, cudaStream_t stream_handle, unsigned flags) {
  if ((flags & ~static_cast<unsigned>(cudaEventRecordExternal)) != 0) return cudaErrorInvalidValue;
  StreamPtr stream;
  if (cudaError_t error = open_stream(stream_handle, stream)) return error;
  EventPtr event = runtime().events.find(event_handle);
  if (!event || &event->device != &stream->device) return cudaErrorInvalidResourceHandle;
  Clock::Lock lock(runtime().clock.mutex);
  bool external = (flags & cudaEventRecordExternal) != 0;
  if (stream->capture && !external) return record_captured(*stream, *event);
  OperationSpec spec{.kind = OperationKind::kEventRecord, .name = "event record"};
  if (stream->capture) spec.event = event;
  OperationPtr operation;
  if (cudaError_t error = submit(lock, *stream, std::move(spec), &operation)) return error;
  if (!operation) return cudaSuccess;  // a node, which records when its graph is launched
  event->record = operation;
  event->capture = nullptr;
  event->captured.clear();
  return cudaSuccess;
}

cudaError_t wait(cudaStream_t stream_handle, cudaEvent_t event_handle, unsigned flags,
                 EntryPoint& entry_point) {
  if ((flags & ~static_cast<unsigned>(cudaEventWaitExternal)) != 0) return cudaErrorInvalidValue;
  StreamPtr stream;
  if (cudaError_t error = open_stream(stream_handle, stream)) return error;
  EventPtr event = runtime().events.find(event_handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  Clock::Lock lock(runtime().clock.mutex);
  OperationSpec spec{.kind = OperationKind::kEventWait, .name = "event wait"};
  bool external = (flags & cudaEventWaitExternal) != 0;
  if (stream->capture && external) {
    spec.event = event;
    return submit(lock, *stream, std::move(spec));
  }
  if (event->capture) return wait_for_captured(*stream, *event);
  if (!event->record) return cudaSuccess;
  if (stream->capture) {
    stream->capture->invalidated = true;
    return cudaErrorStreamCaptureIsolation;
  }
  spec.secret_order = entry_point.keeps_order_secret();
  stream->enqueue(lock, std::move(spec), {event->record});
  return cudaSuccess;
}

// The event's record, or why a call that looks at it is refused. A null record is complete.
cudaError_t open_record(cudaEvent_t handle, EventPtr& event, OperationPtr& operation) {
  event = runtime().events.find(handle);
  if (!event) return cudaErrorInvalidResourceHandle;
  if (int broken = event->device.broken) return static_cast<cudaError_t>(broken);
  {
    Clock::Lock lock(runtime().clock.mutex);
    if (event->capture) {
      event->capture->invalidated = true;
      return cudaErrorCapturedEvent;
    }
    operation = event->record;
  }
  return refuse_during_capture();
}

}  // namespace

SIMCUDA_EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  SIMCUDA_ENTER(cudaEventCreateWithFlags, kHostCall);
  return fail(create_event(handle, flags));
}

SIMCUDA_EXPORT cudaError_t cudaEventCreate(cudaEvent_t* handle) {
  SIMCUDA_ENTER(cudaEventCreate, kHostCall);
  return fail(create_event(handle, cudaEventDefault));
}

SIMCUDA_EXPORT cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  SIMCUDA_ENTER(cudaEventDestroy, kHostCall);
  return runtime().events.take(handle) ? cudaSuccess : fail(cudaErrorInvalidResourceHandle);
}

SIMCUDA_EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream,
                                                    unsigned flags) {
  SIMCUDA_ENTER(cudaEventRecordWithFlags, kHostCall);
  return fail(record(event, stream, flags));
}

SIMCUDA_EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  SIMCUDA_ENTER(cudaEventRecord, kHostCall);
  return fail(record(event, stream, cudaEventRecordDefault));
}

SIMCUDA_EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event,
                                               unsigned flags) {
  SIMCUDA_ENTER(cudaStreamWaitEvent, kHostCall);
  return fail(wait(stream, event, flags, entry_point));
}

SIMCUDA_EXPORT cudaError_t cudaEventQuery(cudaEvent_t handle) {
  SIMCUDA_ENTER(cudaEventQuery, kHostCall);
  EventPtr event;
  OperationPtr operation;
  if (cudaError_t error = open_record(handle, event, operation)) return fail(error);
  {
    Clock::Lock lock(runtime().clock.mutex);
    if (!runtime().clock.is_done(lock, operation)) return cudaErrorNotReady;
  }
  SecretOrder secret(operation && entry_point.keeps_order_secret());
  if (operation && !operation->wait_until_run_or_blocked()) return cudaErrorNotReady;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  SIMCUDA_ENTER(cudaEventSynchronize, kHostCall);
  EventPtr event;
  OperationPtr operation;
  if (cudaError_t error = open_record(handle, event, operation)) return fail(error);
  SecretOrder secret(operation && entry_point.keeps_order_secret());
  synchronize(event->device, {operation});
  return fail(static_cast<cudaError_t>(event->device.broken.load()));
}

SIMCUDA_EXPORT cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start_handle,
                                                cudaEvent_t end_handle) {
  SIMCUDA_ENTER(cudaEventElapsedTime, kHostCall);
  EventPtr start = runtime().events.find(start_handle);
  EventPtr end = runtime().events.find(end_handle);
  if (!start || !end) return fail(cudaErrorInvalidResourceHandle);
  if ((start->flags | end->flags) & cudaEventDisableTiming) {
    return fail(cudaErrorInvalidResourceHandle);
  }
  Clock& clock = runtime().clock;
  Clock::Lock lock(clock.mutex);
  if (!start->record || !end->record) return fail(cudaErrorInvalidResourceHandle);
  if (!clock.is_done(lock, start->record) || !clock.is_done(lock, end->record)) {
    return cudaErrorNotReady;
  }
  double from = static_cast<double>(start->record->model.end_ns);
  double to = static_cast<double>(end->record->model.end_ns);
  *milliseconds = static_cast<float>((to - from) / 1e6);
  return cudaSuccess;
}
