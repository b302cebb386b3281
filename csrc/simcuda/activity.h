// Tells the simulated CUPTI of operations, while a profiler records.
#ifndef RESIDENCY_CSRC_SIMCUDA_ACTIVITY_H
#define RESIDENCY_CSRC_SIMCUDA_ACTIVITY_H

#include "csrc/simcuda/activity_link.h"
#include "csrc/simcuda/clock.h"
#include "csrc/simcuda/operation.h"

namespace simcuda {

// Before the operation is on the clock. Without an observer it costs a load, as the others do.
void observe_enqueue(Clock::Lock& lock, Operation& operation);
// When its start and end are decided. The clock's mutex is held.
void observe_settled(const Operation& operation);
// After the calling thread waited for the device. The clock's mutex is not held.
void observe_wait();

}  // namespace simcuda

#endif
