#ifndef RESIDENCY_SIMCUDA_OPERATORS_ON_WORKER_H
#define RESIDENCY_SIMCUDA_OPERATORS_ON_WORKER_H

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

namespace residency::simcuda {

/// What a stream's worker runs CPU kernels under: without autograd, and unseen by profilers and by
/// the pricing of host operators, as it is the device that computes.
struct OnWorker {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::DisableRecordFunctionGuard unrecorded;
};

}  // namespace residency::simcuda

#endif
