#include "csrc/simcuda/operators/operator_kernel.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "csrc/simcuda/operators/cuda_limits.h"
#include "csrc/simcuda/operators/device_check.h"
#include "csrc/simcuda/operators/on_worker.h"
#include "csrc/simcuda/operators/random.h"
#include "csrc/simcuda/operators/simulation_mode.h"
#include "csrc/simcuda/operators/task.h"
#include "csrc/simcuda/operators/trial.h"

namespace residency::simcuda {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// The device of the first CUDA tensor, which is the device a generated wrapper switches to.
std::optional<c10::Device> device_of(const OperatorTraits& traits,
                                     c10::ArrayRef<IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& value = arguments[i];
    if (value.isTensor()) {
      if (value.toTensor().defined() && value.toTensor().is_cuda()) {
        return value.toTensor().device();
      }
    } else if (traits.arguments[i].kind == ArgumentKind::kTensorList && value.isList()) {
      for (const IValue& element : value.toListRef()) {
        if (element.toTensor().defined() && element.toTensor().is_cuda()) {
          return element.toTensor().device();
        }
      }
    } else if (value.isDevice() && value.toDevice().is_cuda() && value.toDevice().has_index()) {
      return value.toDevice();
    }
  }
  return std::nullopt;
}

// index and index_put take indices on the host, and copy them.
void move_indices(const OperatorTraits& traits, c10::ArrayRef<IValue> arguments, Stack& stack,
                  size_t first) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (traits.arguments[i].kind != ArgumentKind::kOptionalTensorList || !arguments[i].isList()) {
      continue;
    }
    bool on_host = false;
    c10::List<std::optional<Tensor>> moved;
    for (const IValue& element : arguments[i].toListRef()) {
      std::optional<Tensor> index = element.toOptional<Tensor>();
      if (index && index->defined() && !index->is_cuda()) {
        on_host = true;
        index = index->to(c10::Device(c10::kCUDA, c10::cuda::current_device()));
      }
      moved.push_back(std::move(index));
    }
    if (on_host) {
      stack[first + i] = std::move(moved);
    }
  }
}

Tensor to_meta(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? meta_tensor(TensorSpec::of(tensor)) : tensor;
}

IValue to_meta(ArgumentKind kind, const IValue& value) {
  switch (kind) {
    case ArgumentKind::kTensor: return value.isTensor() ? IValue(to_meta(value.toTensor())) : value;
    case ArgumentKind::kTensorList: {
      if (!value.isList()) {
        return value;
      }
      c10::List<Tensor> list;
      for (const IValue& element : value.toListRef()) {
        list.push_back(to_meta(element.toTensor()));
      }
      return list;
    }
    case ArgumentKind::kOptionalTensorList: {
      c10::List<std::optional<Tensor>> list;
      for (const IValue& element : value.toListRef()) {
        list.push_back(element.isNone() ? std::optional<Tensor>() : to_meta(element.toTensor()));
      }
      return list;
    }
    case ArgumentKind::kGenerator: return {};
    default: return value.isDevice() ? IValue(c10::Device(c10::kMeta)) : value;
  }
}

void add_inputs(ArgumentKind kind, const IValue& value, const TensorSpec* resized, Plan& plan) {
  switch (kind) {
    case ArgumentKind::kTensor:
      if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
        plan.inputs.push_back(resized != nullptr ? *resized : TensorSpec::of(value.toTensor()));
      }
      return;
    case ArgumentKind::kTensorList:
    case ArgumentKind::kOptionalTensorList:
      if (value.isList()) {
        for (const IValue& element : value.toListRef()) {
          add_inputs(ArgumentKind::kTensor, element, nullptr, plan);
        }
      }
      return;
    default: return;
  }
}

// Throws what the meta kernel throws.
void infer_results(const OperatorTraits& traits, const c10::OperatorHandle& op,
                   c10::ArrayRef<IValue> arguments, Plan& plan) {
  Stack stack;
  for (size_t i = 0; i < arguments.size(); ++i) {
    stack.push_back(to_meta(traits.arguments[i].kind, arguments[i]));
    if (traits.arguments[i].is_out && arguments[i].isTensor()) {
      // Empty, so that it takes its size without a warning; the real one gives that.
      stack.back() = at::detail::empty_meta({0}, arguments[i].toTensor().scalar_type());
    }
  }
  constexpr c10::DispatchKeySet kMetaKey(c10::DispatchKey::Meta);
  if (traits.keeps_shape) {
    torch::jit::drop(stack, arguments.size() - traits.returns.size());
  } else if (traits.shape_inference != nullptr) {
    traits.shape_inference->callBoxed(op, kMetaKey, &stack);
  } else if (traits.substitute != nullptr) {
    traits.substitute->callBoxed(op, kMetaKey, &stack);
  } else {
    op.redispatchBoxed(kMetaKey, &stack);
  }
  bool all_defined = true;
  for (size_t i = 0; i < traits.returns.size(); ++i) {
    const ReturnTraits& result = traits.returns[i];
    plan.num_outputs.push_back(0);
    plan.resized.emplace_back();
    if (result.argument) {
      const IValue& argument = arguments[*result.argument];
      if (traits.arguments[*result.argument].is_out && argument.isTensor() &&
          !argument.toTensor().sizes().equals(stack[i].toTensor().sizes())) {
        plan.resized.back() = TensorSpec::of(stack[i].toTensor());
        plan.resized.back().dtype = argument.toTensor().scalar_type();
      }
      continue;
    }
    const auto add_output = [&](const Tensor& tensor) {
      TORCH_CHECK(!tensor.defined() || tensor.layout() == c10::kStrided, traits.name,
                  " cannot run on the simulated device: its result is sparse, and only strided "
                  "tensors are simulated");
      plan.outputs.push_back(TensorSpec::of(tensor));
      all_defined = all_defined && tensor.defined();
      ++plan.num_outputs.back();
    };
    if (result.is_list) {
      for (const IValue& element : stack[i].toListRef()) {
        add_output(element.toTensor());
      }
    } else {
      add_output(stack[i].toTensor());
    }
  }
  plan.writes_outputs = traits.out_variant && all_defined;
}

void add_cost(const OperatorTraits& traits, c10::ArrayRef<IValue> arguments, Plan& plan) {
  std::vector<TensorSpec> written = plan.outputs;
  for (const ReturnTraits& result : traits.returns) {
    if (result.argument && arguments[*result.argument].isTensor()) {
      written.push_back(TensorSpec::of(arguments[*result.argument].toTensor()));
    } else if (result.argument) {
      for (const IValue& element : arguments[*result.argument].toListRef()) {
        written.push_back(TensorSpec::of(element.toTensor()));
      }
    }
  }
  plan.cost = price(traits.cost, plan.inputs, written, arguments);
}

// Boolean indices select as many elements as they hold: PyTorch counts them on the device and
// waits, but for the assignment of one value, which is a masked fill.
bool indexes_by_mask(const OperatorTraits& traits, c10::ArrayRef<IValue> arguments) {
  bool mask = false;
  bool one_value = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (traits.arguments[i].kind == ArgumentKind::kOptionalTensorList) {
      for (const IValue& element : arguments[i].toListRef()) {
        const auto dtype = element.isTensor() && element.toTensor().defined()
                               ? element.toTensor().scalar_type()
                               : c10::ScalarType::Undefined;
        mask = mask || dtype == c10::kBool || dtype == c10::kByte;
      }
    } else if (i == 2 && arguments[i].isTensor()) {
      one_value = arguments[i].toTensor().numel() == 1;
    }
  }
  return mask && !one_value;
}

std::shared_ptr<const Plan> make_plan(const OperatorTraits& traits, const c10::OperatorHandle& op,
                                      c10::ArrayRef<IValue> arguments) {
  check_cuda_limits(traits, arguments);
  auto plan = std::make_shared<Plan>();
  if (traits.synchronous || indexes_by_mask(traits, arguments)) {
    plan->synchronous = true;
    plan->why_synchronous = "its result depends on values";
  } else {
    try {
      infer_results(traits, op, arguments, *plan);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::exception& error) {
      // Either the operator has no shape inference or the arguments are wrong; in the second case
      // the CPU kernel gives the error that a user knows.
      plan = std::make_shared<Plan>();
      plan->synchronous = true;
      plan->widens = false;
      const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
      plan->why_synchronous = torch_error ? torch_error->what_without_backtrace() : error.what();
    }
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    const TensorSpec* resized = nullptr;
    for (size_t k = 0; k < plan->resized.size(); ++k) {
      if (traits.returns[k].argument == i && plan->resized[k].defined()) {
        resized = &plan->resized[k];
      }
    }
    add_inputs(traits.arguments[i].kind, arguments[i], resized, *plan);
  }
  add_cost(traits, arguments, *plan);
  return plan;
}

// Tensors on the host are parameters of a kernel when they are scalars; anything else would be read
// by the task after the call, and by no GPU.
void require_device_tensors(const OperatorTraits& traits, c10::ArrayRef<IValue> arguments) {
  const auto require = [&](const Tensor& tensor) {
    TORCH_CHECK(
        !tensor.defined() || tensor.is_cuda() || tensor.dim() == 0,
        "Expected all tensors to be on the same device, but found at least two devices, cuda and ",
        tensor.device(), "! (in ", traits.name, ")");
    TORCH_CHECK(!tensor.defined() || tensor.layout() == c10::kStrided, traits.name,
                " cannot run on the simulated device: only strided tensors are simulated, and got ",
                tensor.layout());
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].isTensor()) {
      require(arguments[i].toTensor());
    } else if (traits.arguments[i].kind != ArgumentKind::kOther && arguments[i].isList()) {
      for (const IValue& element : arguments[i].toListRef()) {
        if (element.isTensor()) {
          require(element.toTensor());
        }
      }
    }
  }
}

Tensor allocate(const TensorSpec& spec) {
  if (!spec.defined()) {
    return {};
  }
  return at::detail::empty_strided_cuda(spec.sizes, spec.strides, spec.dtype,
                                        c10::Device(c10::kCUDA));
}

std::unique_ptr<Task> make_task(const OperatorTraits& traits, const c10::OperatorHandle& op,
                                std::shared_ptr<const Plan> plan, c10::ArrayRef<IValue> arguments) {
  auto task = std::make_unique<Task>(traits, op, std::move(plan), arguments);
  if (traits.draws_random) {
    std::optional<at::Generator> generator;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (traits.arguments[i].kind == ArgumentKind::kGenerator) {
        generator = arguments[i].toOptional<at::Generator>();
      }
    }
    task->random = draw(generator);
  }
  return task;
}

Stack run_asynchronously(const OperatorTraits& traits, const c10::OperatorHandle& op,
                         const std::shared_ptr<const Plan>& plan, c10::ArrayRef<IValue> arguments,
                         const std::shared_ptr<Trial>& trial) {
  for (size_t i = 0; i < plan->resized.size(); ++i) {
    const TensorSpec& spec = plan->resized[i];
    if (spec.defined()) {
      const Tensor& out = arguments[*traits.returns[i].argument].toTensor();
      at::native::resize_output(out, spec.sizes);
      out.unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides);
    }
  }
  auto task = make_task(traits, op, plan, arguments);
  task->trial = trial;
  Stack results;
  size_t next = 0;
  const auto next_output = [&] {
    const TensorSpec& spec = plan->outputs[next++];
    Tensor tensor = allocate(spec);
    if (tensor.defined()) {
      task->add_output(tensor);
    }
    return tensor;
  };
  for (size_t i = 0; i < traits.returns.size(); ++i) {
    if (traits.returns[i].argument) {
      results.push_back(arguments[*traits.returns[i].argument]);
    } else if (traits.returns[i].is_list) {
      c10::List<Tensor> list;
      for (size_t k = 0; k < plan->num_outputs[i]; ++k) {
        list.push_back(next_output());
      }
      results.emplace_back(std::move(list));
    } else {
      results.emplace_back(next_output());
    }
  }
  launch(std::move(task));
  if (trial) {
    trial->wait(c10::cuda::getCurrentCUDAStream().stream());
  }
  return results;
}

// Puts a result that is on the host into device memory by a kernel, as it would be there on a GPU.
void upload(const Tensor& to, const Tensor& from) {
  if (from.numel() == 0) {
    return;
  }
  struct Upload {
    TensorSpec spec;
    const void* address;
    Tensor from;
  };
  auto* data = new Upload{TensorSpec::of(to), to.const_data_ptr(), from};
  const simcuda_work work{"result", 0, 0, SIMCUDA_FP32};
  const auto run = [](void* opaque) {
    const auto& task = *static_cast<Upload*>(opaque);
    const OnWorker on_worker;
    host_alias(task.spec, simcuda_host_address(task.address)).copy_(task.from);
    return 0;
  };
  C10_CUDA_CHECK(static_cast<cudaError_t>(simcuda_launch(
      c10::cuda::getCurrentCUDAStream().stream(), &work, run,
      [](void* opaque) { delete static_cast<Upload*>(opaque); }, data)));
}

Tensor upload_new(const OperatorTraits& traits, const Tensor& from) {
  if (!from.defined()) {
    return {};
  }
  TORCH_CHECK_NOT_IMPLEMENTED(
      from.layout() == c10::kStrided, traits.name,
      " cannot run on the simulated device: its result is sparse, and only strided tensors are "
      "simulated; run this part with device='cpu'");
  Tensor to = allocate(TensorSpec::of(from));
  upload(to, from);
  return to;
}

Stack run_synchronously(const OperatorTraits& traits, const c10::OperatorHandle& op,
                        const std::shared_ptr<const Plan>& plan, c10::ArrayRef<IValue> arguments) {
  TORCH_CHECK(!dry_mode(), traits.name,
              " cannot run in dry mode, where tensors have no values: ", plan->why_synchronous);
  auto awaited = std::make_shared<AwaitedResults>();
  auto task = make_task(traits, op, plan, arguments);
  task->awaited = awaited;
  launch(std::move(task));
  c10::cuda::stream_synchronize(c10::cuda::getCurrentCUDAStream().stream());
  if (awaited->error) {
    std::rethrow_exception(awaited->error);
  }
  Stack results;
  for (size_t i = 0; i < traits.returns.size(); ++i) {
    const IValue& value = awaited->results.at(i);
    if (traits.returns[i].argument) {
      const size_t index = *traits.returns[i].argument;
      const IValue& argument = arguments[index];
      if (traits.arguments[index].is_out) {
        at::native::resize_output(argument.toTensor(), value.toTensor().sizes());
        upload(argument.toTensor(), value.toTensor());
      }
      results.push_back(argument);
    } else if (traits.returns[i].is_list) {
      c10::List<Tensor> list;
      for (const IValue& element : value.toListRef()) {
        list.push_back(upload_new(traits, element.toTensor()));
      }
      results.emplace_back(std::move(list));
    } else {
      results.push_back(value.isTensor() ? IValue(upload_new(traits, value.toTensor())) : value);
    }
  }
  return results;
}

}  // namespace

const OperatorTraits& SimulatedOperator::traits_of(const c10::OperatorHandle& op) {
  std::call_once(once_, [&] { traits_ = std::make_unique<const OperatorTraits>(op); });
  return *traits_;
}

Stack SimulatedOperator::run(const c10::OperatorHandle& op, c10::ArrayRef<IValue> arguments) {
  const Signature signature(*traits_, arguments);
  std::shared_ptr<const Plan> plan = signature.cacheable() ? cache_.find(signature) : nullptr;
  const bool is_new = plan == nullptr;
  if (is_new) {
    // Not under the cache's lock: the meta kernel may take the GIL.
    plan = make_plan(*traits_, op, arguments);
  }
  Stack results = plan->synchronous ? run_synchronously(*traits_, op, plan, arguments)
                                    : run_asynchronously(*traits_, op, plan, arguments,
                                                         is_new ? Trial::begin() : nullptr);
  if (is_new && signature.cacheable()) {
    cache_.insert(signature, plan);  // not when it was refused: then the next call is tried too
  }
  return results;
}

void SimulatedOperator::operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/,
                                   Stack* stack) {
  const OperatorTraits& traits = traits_of(op);
  const size_t first = stack->size() - traits.arguments.size();
  const c10::ArrayRef<IValue> arguments(stack->data() + first, traits.arguments.size());
  if (traits.is_foreach && on_several_devices(traits, arguments)) {
    // The CPU's kernel is the composite one, which calls the operator of each tensor's own device.
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  if (!traits.is_foreach) {
    check_devices(traits, op.schema(), arguments);
  }

  c10::cuda::OptionalCUDAGuard guard;
  if (const auto device = device_of(traits, arguments);
      device && device->index() != c10::cuda::current_device()) {
    guard.set_device(*device);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  move_indices(traits, arguments, *stack, first);
  require_device_tensors(traits, arguments);
  Stack results = run(op, arguments);
  torch::jit::drop(*stack, traits.arguments.size());
  for (IValue& result : results) {
    stack->push_back(std::move(result));
  }
}

}  // namespace residency::simcuda
