#ifndef RESIDENCY_SIMCUDA_OPERATORS_DEVICE_CHECK_H
#define RESIDENCY_SIMCUDA_OPERATORS_DEVICE_CHECK_H

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include "csrc/simcuda/operators/operator_traits.h"

namespace residency::simcuda {

/// Throws PyTorch's error when the arguments are on devices that the operator does not take
/// together.
void check_devices(const OperatorTraits& traits, const c10::FunctionSchema& schema,
                   c10::ArrayRef<c10::IValue> arguments);

/// Whether the tensors of a _foreach operator are on more than one device, so that it runs tensor
/// by tensor.
[[nodiscard]] bool on_several_devices(const OperatorTraits& traits,
                                      c10::ArrayRef<c10::IValue> arguments);

}  // namespace residency::simcuda

#endif
