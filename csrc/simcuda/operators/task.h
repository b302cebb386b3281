#ifndef RESIDENCY_SIMCUDA_OPERATORS_TASK_H
#define RESIDENCY_SIMCUDA_OPERATORS_TASK_H

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/cuda/PhiloxCudaState.h>
#include <c10/util/SmallVector.h>

#include "csrc/simcuda/operators/operator_traits.h"
#include "csrc/simcuda/operators/signature_cache.h"
#include "csrc/simcuda/operators/trial.h"

namespace residency::simcuda {

/// Results that the host waits for.
struct AwaitedResults {
  torch::jit::Stack results;  ///< on the host
  std::exception_ptr error;
};

/// One call, ready to be run by a stream: it has addresses where a call has device tensors. A
/// captured graph runs it many times.
struct Task {
  Task(const OperatorTraits& traits, const c10::OperatorHandle& op,
       std::shared_ptr<const Plan> plan, c10::ArrayRef<c10::IValue> arguments);

  void add_output(const at::Tensor& tensor) { addresses.push_back(tensor.const_data_ptr()); }
  /// Runs the CPU kernel. Throws what it throws.
  void run() const;

  const OperatorTraits* traits;
  c10::OperatorHandle op;
  std::shared_ptr<const Plan> plan;
  /// The arguments with nothing in place of device tensors, and of lists of tensors.
  c10::SmallVector<c10::IValue, 8> values;
  /// Elements of the lists; undefined in place of device tensors.
  std::vector<at::Tensor> host_elements;
  c10::SmallVector<uint32_t, 2> list_sizes;
  /// Of plan->inputs and then of the defined ones of plan->outputs.
  c10::SmallVector<const void*, 8> addresses;
  /// Which tensors of `values` and `host_elements` in order are device tensors.
  c10::SmallVector<bool, 8> on_device;
  std::optional<at::PhiloxCudaState> random;
  std::shared_ptr<AwaitedResults> awaited;
  std::shared_ptr<Trial> trial;
};

/// Enqueues the task on the current stream. Throws when an earlier task of the operator layer
/// failed, with its error, as the device is broken then.
void launch(std::unique_ptr<Task> task);

}  // namespace residency::simcuda

#endif
