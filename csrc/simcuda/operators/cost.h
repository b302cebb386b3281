#ifndef RESIDENCY_SIMCUDA_OPERATORS_COST_H
#define RESIDENCY_SIMCUDA_OPERATORS_COST_H

#include <string_view>

#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

#include "csrc/simcuda/operators/tensor_spec.h"
#include "residency/simcuda/control.h"

namespace residency::simcuda {

/// The price of one call on the modelled card, less its name.
struct Cost {
  double flops = 0;
  double bytes = 0;
  int precision = SIMCUDA_FP32;
  bool matrix_product = false;  ///< in float32 it may run in TF32, as PyTorch's switch says
};

/// Multiply-adds count as two. The specs are those of the defined device tensors, in the order of
/// the arguments; `arguments` are the boxed arguments themselves.
struct CostFormula {
  using Count = double (*)(c10::ArrayRef<TensorSpec> inputs, c10::ArrayRef<TensorSpec> outputs,
                           c10::ArrayRef<c10::IValue> arguments);
  Count flops = nullptr;  ///< one per element of the largest tensor when null
  bool matrix_product = false;
  Count bytes = nullptr;  ///< all inputs are read once and all outputs written once when null
};

[[nodiscard]] CostFormula find_cost_formula(std::string_view name);

/// Prices a call.
[[nodiscard]] Cost price(const CostFormula& formula, c10::ArrayRef<TensorSpec> inputs,
                         c10::ArrayRef<TensorSpec> written, c10::ArrayRef<c10::IValue> arguments);

/// For simcuda_launch. `name` has to outlive the process' last timeline.
[[nodiscard]] simcuda_work work_of(const Cost& cost, const char* name);

/// Which of the FLOP rates an element type is counted under.
[[nodiscard]] int precision_of(c10::ScalarType dtype);

}  // namespace residency::simcuda

#endif
