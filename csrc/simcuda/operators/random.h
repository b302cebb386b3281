#ifndef RESIDENCY_SIMCUDA_OPERATORS_RANDOM_H
#define RESIDENCY_SIMCUDA_OPERATORS_RANDOM_H

#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/cuda/PhiloxCudaState.h>

namespace residency::simcuda {

/// Takes the numbers of one kernel from a CUDA generator (the current device's default one when
/// there is none) and advances its offset. Under a capture, the state refers to the graph's seed
/// and offset in device memory, as with PyTorch's own kernels.
[[nodiscard]] at::PhiloxCudaState draw(const std::optional<at::Generator>& generator);

/// The CPU generator that stands for that state; called when the kernel runs. Depends on seed and
/// offset alone, not on the CPU's generators.
[[nodiscard]] at::Generator cpu_generator(const at::PhiloxCudaState& state);

}  // namespace residency::simcuda

#endif
