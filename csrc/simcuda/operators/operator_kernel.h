#ifndef RESIDENCY_SIMCUDA_OPERATORS_OPERATOR_KERNEL_H
#define RESIDENCY_SIMCUDA_OPERATORS_OPERATOR_KERNEL_H

#include <memory>
#include <mutex>

#include <ATen/core/boxing/OperatorKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "csrc/simcuda/operators/operator_traits.h"
#include "csrc/simcuda/operators/signature_cache.h"

namespace residency::simcuda {

/// The CUDA kernel of one operator on the simulated device: PyTorch's checks, outputs from the
/// caching allocator, and the CPU kernel as a task of the current stream. Thread-safe. Lives as
/// long as the process, as tasks and timelines refer to it.
class SimulatedOperator : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack);

 private:
  const OperatorTraits& traits_of(const c10::OperatorHandle& op);
  torch::jit::Stack run(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments);

  std::once_flag once_;
  std::unique_ptr<const OperatorTraits> traits_;
  SignatureCache cache_;
};

}  // namespace residency::simcuda

#endif
