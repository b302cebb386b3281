#include "csrc/simcuda/operators/host_work.h"

#include <memory>
#include <string_view>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include "csrc/simcuda/operators/cost.h"
#include "residency/simcuda/control.h"

namespace residency::simcuda {
namespace {

using at::ObserverContext;
using at::RecordFunction;
using c10::IValue;

// Operators that operators call are part of them.
thread_local int t_depth = 0;

// Kept from the start of the operator: its inputs are gone at its end.
struct HostOperator : ObserverContext {
  std::vector<TensorSpec> inputs;
  const at::TensorImpl* self = nullptr;  // to compare with, not to follow
  const c10::StorageImpl* storage = nullptr;
  bool on_host = true;
};

// Appends the tensors' specs; false when one of them is not on the host.
bool add_specs(const IValue& value, std::vector<TensorSpec>& specs) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined()) {
      return true;
    }
    if (!tensor.is_cpu() || tensor.layout() != c10::kStrided) {
      return false;
    }
    specs.push_back(TensorSpec::of(tensor));
  } else if (value.isTensorList()) {
    for (const IValue& element : value.toListRef()) {
      if (!add_specs(element, specs)) {
        return false;
      }
    }
  }
  return true;
}

// The tensor, or the first of a list; null when there is none with bytes.
const at::TensorImpl* first_tensor(const IValue& value) {
  if (value.isTensorList()) {
    const auto elements = value.toListRef();
    return elements.empty() ? nullptr : first_tensor(elements[0]);
  }
  return value.isTensor() && value.toTensor().has_storage() ? value.toTensor().unsafeGetTensorImpl()
                                                            : nullptr;
}

std::unique_ptr<ObserverContext> start(const RecordFunction& function) {
  if (t_depth++ != 0) {
    return nullptr;
  }
  auto host_operator = std::make_unique<HostOperator>();
  for (const IValue& value : function.inputs()) {
    if (!add_specs(value, host_operator->inputs)) {
      host_operator->on_host = false;
      break;
    }
  }
  if (host_operator->on_host && !function.inputs().empty()) {
    host_operator->self = first_tensor(function.inputs()[0]);
    if (host_operator->self != nullptr) {
      host_operator->storage = host_operator->self->unsafe_storage().unsafeGetStorageImpl();
    }
  }
  return host_operator;
}

// A view, or an output that has not been written.
bool touches_nothing(std::string_view name, const HostOperator& host_operator,
                     const std::vector<IValue>& outputs) {
  if (name.starts_with("aten::empty") || name.starts_with("aten::resize") || outputs.empty()) {
    return true;
  }
  const at::TensorImpl* output = first_tensor(outputs[0]);
  if (output == nullptr) {
    return false;
  }
  return output != host_operator.self &&
         output->unsafe_storage().unsafeGetStorageImpl() == host_operator.storage;
}

void finish(const RecordFunction& function, ObserverContext* context) {
  --t_depth;
  auto* host_operator = static_cast<HostOperator*>(context);
  if (host_operator == nullptr || !host_operator->on_host) {
    return;
  }
  std::vector<TensorSpec> outputs;
  for (const IValue& value : function.outputs()) {
    if (!add_specs(value, outputs)) {
      return;
    }
  }
  const std::string_view name = function.name();
  if (!name.starts_with("aten::") || touches_nothing(name, *host_operator, function.outputs())) {
    return;
  }
  const Cost cost = price(find_cost_formula(name.substr(6)), host_operator->inputs, outputs, {});
  simcuda_work work{function.name(), cost.flops, cost.bytes, cost.precision};
  simcuda_host_work(&work);
}

}  // namespace

void price_host_operators() {
  at::addGlobalCallback(at::RecordFunctionCallback(&start, &finish)
                            .needsInputs(true)
                            .needsOutputs(true)
                            .scopes({at::RecordScope::FUNCTION}));
}

}  // namespace residency::simcuda
