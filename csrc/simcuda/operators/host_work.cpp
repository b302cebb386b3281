#include "csrc/simcuda/operators/host_work.h"

#include <memory>
#include <string_view>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

#include "csrc/simcuda/operators/cost.h"
#include "residency/simcuda/control.h"

namespace torch::autograd {
// In libtorch_cpu; its header includes all of autograd.
TORCH_API int get_current_graph_task_id();
}  // namespace torch::autograd

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
  const c10::StorageImpl* storage = nullptr;  // of the first one; to compare with, not to follow
  size_t num_first = 0;                       // of inputs, from the first argument
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
    if (&value == function.inputs().begin()) {
      host_operator->num_first = host_operator->inputs.size();
    }
  }
  if (host_operator->on_host && !function.inputs().empty()) {
    if (const at::TensorImpl* self = first_tensor(function.inputs()[0])) {
      host_operator->storage = self->unsafe_storage().unsafeGetStorageImpl();
    }
  }
  return host_operator;
}

bool is_in_place(std::string_view name) {
  return name.ends_with('_');
}

// A view, an argument that is handed back, or an output that has not been written.
bool touches_nothing(std::string_view name, const HostOperator& host_operator,
                     const std::vector<IValue>& outputs) {
  if (name.starts_with("aten::empty") || name.starts_with("aten::resize")) {
    return true;
  }
  if (is_in_place(name)) {
    return false;
  }
  const at::TensorImpl* output = outputs.empty() ? nullptr : first_tensor(outputs[0]);
  return output != nullptr &&
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
  if (outputs.empty() && is_in_place(name)) {  // _foreach_add_ and the like return nothing
    outputs.assign(
        host_operator->inputs.begin(),
        host_operator->inputs.begin() + static_cast<ptrdiff_t>(host_operator->num_first));
  }
  const Cost cost = price(find_cost_formula(name.substr(6)), host_operator->inputs, outputs, {});
  simcuda_work work{function.name(), cost.flops, cost.bytes, cost.precision};
  simcuda_host_work(&work);
}

}  // namespace

void price_host_operators() {
  simcuda_in_backward([] { return torch::autograd::get_current_graph_task_id() == -1 ? 0 : 1; });
  at::addGlobalCallback(at::RecordFunctionCallback(&start, &finish)
                            .needsInputs(true)
                            .needsOutputs(true)
                            .scopes({at::RecordScope::FUNCTION}));
}

}  // namespace residency::simcuda
