// libcupti.so.13: what PyTorch's profiler asks of CUPTI, on top of the simulated runtime.
//
// Kernels, copies and fills become records, with what of the external correlation ids attributes
// them to operators. There are none of the host's calls: those would have to lie on the real clock
// and their kernels after them, which they do not (see Note [Placement]).
#include <array>
#include <atomic>
#include <bitset>
#include <chrono>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <cupti.h>
#include <dlfcn.h>

#include "csrc/simcuda/activity_link.h"
#include "csrc/simcuda/cupti_buffer.h"
#include "csrc/simcuda/cupti_placement.h"
#include "csrc/simcuda/cupti_record.h"
#include "csrc/simcuda/thread_object.h"

#define SIMCUDA_CUPTI extern "C" __attribute__((visibility("default"))) CUptiResult CUPTIAPI

namespace {

using namespace simcuda;

// The clock's mutex may be held when the mutex is taken, and never the other way round.
struct Profiler {
  std::mutex mutex;
  std::bitset<CUPTI_ACTIVITY_KIND_COUNT> enabled;
  RecordBuffer buffer;
  Placement placement;
  uint64_t next_id = 1;
  bool correlated = false;  // since something was enabled
};

Profiler& profiler() {
  // Never destroyed: threads may call until the very end of the process.
  static auto* profiler = new Profiler;
  return *profiler;
}

using ExternalIds = std::array<std::vector<uint64_t>, CUPTI_EXTERNAL_CORRELATION_KIND_SIZE>;

// The operators that the calling thread is in.
ExternalIds& external_ids() {
  return thread_object<ExternalIds>();
}

void append_external_ids(Profiler& state, uint64_t correlation_id) {
  ExternalIds& ids = external_ids();
  for (size_t kind = 0; kind < ids.size(); ++kind) {
    if (ids[kind].empty()) continue;
    uint8_t* room = state.buffer.append(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION);
    if (!room) return;
    write_external_correlation(static_cast<CUpti_ExternalCorrelationKind>(kind), ids[kind].back(),
                               correlation_id, room);
  }
}

// ---- What the runtime tells

simcuda_activity_tag enqueued(int kind, uint64_t now_ns, int idle) {
  Profiler& state = profiler();
  std::lock_guard lock(state.mutex);
  int64_t offset = state.placement.offset_at(now_ns, idle != 0);
  if (kind == SIMCUDA_ACTIVITY_NONE || !state.enabled[record_kind_of(kind)]) return {};
  uint64_t id = state.next_id++;
  if (state.enabled[CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION]) append_external_ids(state, id);
  return {id, offset};
}

void settled(const simcuda_activity* activity) {
  Profiler& state = profiler();
  std::lock_guard lock(state.mutex);
  if (uint8_t* room = state.buffer.append(record_kind_of(activity->kind))) {
    write_record(*activity, room);
  }
}

void waited(uint64_t now_ns) {
  int64_t left_ns = 0;
  {
    Profiler& state = profiler();
    std::lock_guard lock(state.mutex);
    left_ns = state.placement.host_time(now_ns) - host_now_ns();
  }
  if (left_ns <= 0) return;
  constexpr int64_t kLongNs = 10'000'000'000;
  if (left_ns > kLongNs) {
    std::string line = "a profiler records: waiting " + std::to_string(left_ns / 1'000'000'000) +
                       " s, as the modelled card would";
    simcuda_complain(line.c_str());
  }
  std::this_thread::sleep_for(std::chrono::nanoseconds(left_ns));
}

constexpr simcuda_observer kObserver{enqueued, settled, waited};

CUptiResult set_enabled(CUpti_ActivityKind kind, bool on) {
  if (kind <= CUPTI_ACTIVITY_KIND_INVALID || kind >= CUPTI_ACTIVITY_KIND_COUNT) {
    return CUPTI_ERROR_INVALID_KIND;
  }
  Profiler& state = profiler();
  bool any = false;
  {
    std::lock_guard lock(state.mutex);
    // A kernel is recorded once, whichever way it was asked for.
    if (kind == CUPTI_ACTIVITY_KIND_KERNEL) kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    if (state.enabled.none()) {
      state.correlated = false;
      state.placement.restart();
    }
    state.enabled[kind] = on;
    any = state.enabled.any();
  }
  simcuda_observe(any ? &kObserver : nullptr);
  return CUPTI_SUCCESS;
}

bool is_external_kind(CUpti_ExternalCorrelationKind kind) {
  return kind > CUPTI_EXTERNAL_CORRELATION_KIND_INVALID &&
         kind < CUPTI_EXTERNAL_CORRELATION_KIND_SIZE;
}

// Makes torch's profiler take timestamps as they are, in nanoseconds. It would have them in ticks
// of the processor's counter and multiply them by a measured period, which rounds durations.
bool count_in_nanoseconds() {
  using Setting = bool& (*)();
  void* torch = dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!torch) return false;
  // libkineto::use_cupti_tsc(), in torch 2.11 to 2.15.
  void* setting = dlsym(torch, "_ZN9libkineto13use_cupti_tscEv");
  if (setting) reinterpret_cast<Setting>(setting)() = false;
  dlclose(torch);
  return setting != nullptr;
}

}  // namespace

// ---- Activities

SIMCUDA_CUPTI cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc request,
                                             CUpti_BuffersCallbackCompleteFunc complete) {
  if (!request || !complete) return CUPTI_ERROR_INVALID_PARAMETER;
  Profiler& state = profiler();
  std::lock_guard lock(state.mutex);
  state.buffer.set_callbacks(request, complete);
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiActivityEnable(CUpti_ActivityKind kind) {
  return set_enabled(kind, true);
}

SIMCUDA_CUPTI cuptiActivityDisable(CUpti_ActivityKind kind) {
  return set_enabled(kind, false);
}

SIMCUDA_CUPTI cuptiActivityFlushAll(uint32_t) {
  simcuda_settle_activities();
  Profiler& state = profiler();
  std::lock_guard lock(state.mutex);
  state.buffer.complete();
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiActivityGetNextRecord(uint8_t* buffer, size_t num_bytes,
                                         CUpti_Activity** record) {
  if (!buffer || !record) return CUPTI_ERROR_INVALID_PARAMETER;
  CUpti_Activity* next = next_record(buffer, num_bytes, *record);
  if (!next) return CUPTI_ERROR_MAX_LIMIT_REACHED;
  *record = next;
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t* num_dropped) {
  if (!num_dropped) return CUPTI_ERROR_INVALID_PARAMETER;
  // Not locked: a profiler asks in its callback, when the lock is held.
  *num_dropped = profiler().buffer.take_num_dropped();
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiActivityPushExternalCorrelationId(CUpti_ExternalCorrelationKind kind,
                                                     uint64_t id) {
  if (!is_external_kind(kind)) return CUPTI_ERROR_INVALID_PARAMETER;
  external_ids()[kind].push_back(id);
  Profiler& state = profiler();
  std::lock_guard lock(state.mutex);
  // PyTorch enables activities when it begins to warm up, and pushes its first id when the part
  // begins that it shows; what is still running then must not draw the rest to before that.
  if (!state.correlated) state.placement.restart();
  state.correlated = true;
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiActivityPopExternalCorrelationId(CUpti_ExternalCorrelationKind kind,
                                                    uint64_t* last) {
  if (!is_external_kind(kind)) return CUPTI_ERROR_INVALID_PARAMETER;
  std::vector<uint64_t>& ids = external_ids()[kind];
  if (ids.empty()) return CUPTI_ERROR_QUEUE_EMPTY;
  if (last) *last = ids.back();
  ids.pop_back();
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc) {
  if (count_in_nanoseconds()) return CUPTI_SUCCESS;
  static std::once_flag told;
  std::call_once(told, [] {
    simcuda_complain(
        "this profiler wants times by a clock of its own, and the simulated card's are "
        "nanoseconds: what it shows of the device is not to be trusted");
  });
  return CUPTI_ERROR_NOT_SUPPORTED;
}

// Buffers of a device, a hardware clock and filters of records that are never written: nothing to
// set.
SIMCUDA_CUPTI cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t*, void*) {
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiActivityEnableCudaEventDeviceTimestamps(uint8_t) {
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiActivityEnableRuntimeApi(CUpti_CallbackId, uint8_t) {
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiActivityEnableDriverApi(CUpti_CallbackId, uint8_t) {
  return CUPTI_SUCCESS;
}

// ---- Callbacks: a profiler subscribes before it does anything, and nothing is called back

SIMCUDA_CUPTI cuptiSubscribe(CUpti_SubscriberHandle* subscriber, CUpti_CallbackFunc, void*) {
  if (!subscriber) return CUPTI_ERROR_INVALID_PARAMETER;
  *subscriber = reinterpret_cast<CUpti_SubscriberHandle>(&profiler());
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiUnsubscribe(CUpti_SubscriberHandle) {
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiEnableCallback(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain domain,
                                  CUpti_CallbackId) {
  // PyTorch asks for the creation of contexts, to begin earlier than it would.
  return domain == CUPTI_CB_DOMAIN_RESOURCE ? CUPTI_SUCCESS : CUPTI_ERROR_NOT_SUPPORTED;
}

SIMCUDA_CUPTI cuptiEnableDomain(uint32_t enable, CUpti_SubscriberHandle, CUpti_CallbackDomain) {
  return enable ? CUPTI_ERROR_NOT_SUPPORTED : CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiGetCallbackName(CUpti_CallbackDomain, uint32_t, const char** name) {
  if (!name) return CUPTI_ERROR_INVALID_PARAMETER;
  *name = "simulated call";
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiFinalize(void) {
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiGetVersion(uint32_t* version) {
  if (!version) return CUPTI_ERROR_INVALID_PARAMETER;
  *version = CUPTI_API_VERSION;
  return CUPTI_SUCCESS;
}

SIMCUDA_CUPTI cuptiGetResultString(CUptiResult result, const char** text) {
  if (!text) return CUPTI_ERROR_INVALID_PARAMETER;
  switch (result) {
    case CUPTI_SUCCESS: *text = "CUPTI_SUCCESS"; break;
    case CUPTI_ERROR_INVALID_PARAMETER: *text = "CUPTI_ERROR_INVALID_PARAMETER"; break;
    case CUPTI_ERROR_INVALID_KIND: *text = "CUPTI_ERROR_INVALID_KIND"; break;
    case CUPTI_ERROR_MAX_LIMIT_REACHED: *text = "CUPTI_ERROR_MAX_LIMIT_REACHED"; break;
    case CUPTI_ERROR_QUEUE_EMPTY: *text = "CUPTI_ERROR_QUEUE_EMPTY"; break;
    case CUPTI_ERROR_NOT_SUPPORTED: *text = "CUPTI_ERROR_NOT_SUPPORTED"; break;
    default: *text = "an error that the simulated CUPTI does not give"; break;
  }
  return CUPTI_SUCCESS;
}
