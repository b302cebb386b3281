#include "csrc/simcuda/activity.h"

#include <algorithm>
#include <atomic>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/runtime.h"

namespace simcuda {
namespace {

// Written with the clock's mutex held, so that what holds it sees one observer.
std::atomic<const simcuda_observer*> g_observer{nullptr};

int kind_of(const Operation& operation) {
  switch (operation.spec.kind) {
    case OperationKind::kKernel: return SIMCUDA_ACTIVITY_KERNEL;
    case OperationKind::kCopy: return SIMCUDA_ACTIVITY_COPY;
    case OperationKind::kMemset: return SIMCUDA_ACTIVITY_MEMSET;
    case OperationKind::kHostFunction:
    case OperationKind::kEventRecord:
    case OperationKind::kEventWait:
    case OperationKind::kEmpty: return SIMCUDA_ACTIVITY_NONE;
  }
  return SIMCUDA_ACTIVITY_NONE;
}

bool all_idle(Clock::Lock& lock) {
  const auto& devices = runtime().devices;
  return std::none_of(devices.begin(), devices.end(),
                      [&](const auto& device) { return is_busy(lock, *device); });
}

}  // namespace

void observe_enqueue(Clock::Lock& lock, Operation& operation) {
  const simcuda_observer* observer = g_observer.load(std::memory_order_acquire);
  if (!observer) return;
  operation.tag =
      observer->enqueued(kind_of(operation), runtime().clock.now(), all_idle(lock) ? 1 : 0);
}

void observe_settled(const Operation& operation) {
  if (operation.tag.id == 0) return;
  const simcuda_observer* observer = g_observer.load(std::memory_order_acquire);
  if (!observer) return;
  const OperationSpec& spec = operation.spec;
  simcuda_activity activity{.kind = kind_of(operation),
                            .direction = spec.direction,
                            .pageable = spec.pageable ? 1 : 0,
                            .device = operation.stream->device.ordinal,
                            .stream = operation.stream->id,
                            .name = spec.name,
                            .num_bytes = spec.num_bytes,
                            .start_ns = operation.model.start_ns,
                            .end_ns = operation.model.end_ns,
                            .tag = operation.tag};
  observer->settled(&activity);
}

void observe_wait() {
  const simcuda_observer* observer = g_observer.load(std::memory_order_acquire);
  if (observer) observer->waited(runtime().clock.now());
}

}  // namespace simcuda

using namespace simcuda;

SIMCUDA_EXPORT void simcuda_observe(const simcuda_observer* observer) {
  Hidden hidden;
  Clock::Lock lock(runtime().clock.mutex);
  g_observer.store(observer, std::memory_order_release);
}

SIMCUDA_EXPORT void simcuda_settle_activities(void) {
  Hidden hidden;
  Clock& clock = runtime().clock;
  Clock::Lock lock(clock.mutex);
  clock.advance(lock);
}

SIMCUDA_EXPORT void simcuda_complain(const char* line) {
  complain(line);
}
