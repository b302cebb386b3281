#ifndef RESIDENCY_SIMCUDA_OPERATORS_OPERATOR_TRAITS_H
#define RESIDENCY_SIMCUDA_OPERATORS_OPERATOR_TRAITS_H

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include "csrc/simcuda/operators/cost.h"
#include "csrc/simcuda/operators/operator_facts.h"

namespace residency::simcuda {

enum class ArgumentKind { kTensor, kTensorList, kOptionalTensorList, kGenerator, kNumber, kOther };

struct ArgumentTraits {
  ArgumentKind kind = ArgumentKind::kOther;
  bool is_out = false;
};

struct ReturnTraits {
  bool is_list = false;
  std::optional<size_t> argument;  ///< the argument that is returned, for in-place and out=
};

/// What is known of an operator before it is called.
struct OperatorTraits {
  explicit OperatorTraits(const c10::OperatorHandle& op);

  std::string name;  ///< "aten::add.Tensor"
  std::vector<ArgumentTraits> arguments;
  std::vector<ReturnTraits> returns;
  DeviceCheck check = DeviceCheck::kSame;
  std::string wrapper_name;  ///< of PyTorch's generated wrapper, for its message

  /// In-place on its only tensor, or without results (_foreach_add_): there is no shape to infer.
  bool keeps_shape = false;
  bool is_foreach = false;
  bool draws_random = false;
  bool takes_host_scalars = false;  ///< any number of them, where one is the rule
  /// The sizes of the results depend on the value of numbers, as those of arange do.
  bool shaped_by_numbers = false;
  /// Results of unknown size, or a result on the host: the host has to wait for the device.
  bool synchronous = false;

  /// The out= form of a functional operator, where the CPU has a kernel of its own for it.
  std::optional<c10::OperatorHandle> out_variant;
  /// What runs in place of a CPU kernel that does not exist, or refuses what CUDA's does; made of
  /// CPU operators. The out= variant, where there is one, is tried first.
  const c10::KernelFunction* substitute = nullptr;
  /// Infers the results' shapes in place of the dispatcher's meta kernel.
  const c10::KernelFunction* shape_inference = nullptr;
  CostFormula cost;
};

}  // namespace residency::simcuda

#endif
