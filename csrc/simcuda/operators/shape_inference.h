#ifndef RESIDENCY_SIMCUDA_OPERATORS_SHAPE_INFERENCE_H
#define RESIDENCY_SIMCUDA_OPERATORS_SHAPE_INFERENCE_H

#include <string_view>

#include <ATen/core/boxing/KernelFunction.h>

namespace residency::simcuda {

/// A C++ function that gives an operator's ("add.Tensor") results for tensors without bytes; null
/// where only the dispatcher has one. The dispatcher's own C++ functions are gone once torch is
/// imported: Python decompositions have their place, which are a hundred times slower and, on first
/// use, import torch._dynamo for seconds. A function that throws leaves the error to the CPU
/// kernel.
[[nodiscard]] const c10::KernelFunction* find_shape_inference(std::string_view name);

}  // namespace residency::simcuda

#endif
