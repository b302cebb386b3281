#ifndef RESIDENCY_SIMCUDA_OPERATORS_SUBSTITUTES_H
#define RESIDENCY_SIMCUDA_OPERATORS_SUBSTITUTES_H

#include <string>

#include <ATen/core/Generator.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <c10/util/ArrayRef.h>

namespace residency::simcuda {

/// A function that computes a CUDA operator which has no CPU kernel (or none that takes a
/// generator) out of operators that run on the CPU and infer shapes. Null when there is none.
[[nodiscard]] const c10::KernelFunction* find_substitute(const std::string& name);

/// Whether it takes random numbers without a Generator argument: from current_generator().
[[nodiscard]] bool substitute_draws_random(const std::string& name);

/// Operators that PyTorch composes of others on CUDA, and that run as one kernel here, as they do
/// where cuDNN is: convolutions.
[[nodiscard]] c10::ArrayRef<const char*> fused_operators();

/// Sets the generator of the calling thread's substitutes while it lives.
class CurrentGenerator {
 public:
  explicit CurrentGenerator(at::Generator generator);
  CurrentGenerator(const CurrentGenerator&) = delete;
  CurrentGenerator& operator=(const CurrentGenerator&) = delete;
  ~CurrentGenerator();
};

}  // namespace residency::simcuda

#endif
