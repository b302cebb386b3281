#ifndef RESIDENCY_SIMCUDA_OPERATORS_OPERATOR_FACTS_H
#define RESIDENCY_SIMCUDA_OPERATORS_OPERATOR_FACTS_H

#include <string_view>

namespace residency::simcuda {

/// How PyTorch's CUDA operators make sure that their arguments are on one device.
enum class DeviceCheck {
  kSame,      ///< the generated wrapper compares all tensors
  kIterator,  ///< TensorIterator does, and takes scalars from the host
  kNone,      ///< `device_check: NoCheck` without that reason
};

/// What native_functions.yaml of the torch this was built for says about an operator.
struct OperatorFacts {
  std::string_view name;  ///< "addmm", "add.Tensor"
  DeviceCheck check = DeviceCheck::kSame;
  bool structured = false;
};

/// Finds them by name and overload, without "aten::". The defaults for an unknown operator.
[[nodiscard]] OperatorFacts find_operator_facts(std::string_view name);

}  // namespace residency::simcuda

#endif
