#ifndef RESIDENCY_SIMCUDA_OPERATORS_CUDA_LIMITS_H
#define RESIDENCY_SIMCUDA_OPERATORS_CUDA_LIMITS_H

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "csrc/simcuda/operators/operator_traits.h"

namespace residency::simcuda {

/// Throws for element types that PyTorch's CUDA kernels refuse and its CPU kernels compute: without
/// it a program would pass here and fail on a GPU. Covers matrix products and layer norms.
void check_cuda_limits(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments);

}  // namespace residency::simcuda

#endif
