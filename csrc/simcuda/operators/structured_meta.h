#ifndef RESIDENCY_SIMCUDA_OPERATORS_STRUCTURED_META_H
#define RESIDENCY_SIMCUDA_OPERATORS_STRUCTURED_META_H

#include <string_view>

#include <ATen/core/boxing/KernelFunction.h>

namespace residency::simcuda {

/// The C++ shape inference of a structured operator ("add.Tensor"), which its CUDA kernel uses too;
/// null for the others. The dispatcher has it no more once torch is imported: a Python
/// decomposition has its place, which is a hundred times slower and, on first use, imports
/// torch._dynamo.
[[nodiscard]] const c10::KernelFunction* find_structured_meta(std::string_view name);

}  // namespace residency::simcuda

#endif
