#include "csrc/simcuda/operators/task.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "csrc/simcuda/operators/on_worker.h"
#include "csrc/simcuda/operators/random.h"
#include "csrc/simcuda/operators/substitutes.h"
#include "residency/simcuda/control.h"

namespace residency::simcuda {
namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

bool is_narrow_float(c10::ScalarType dtype) {
  return dtype == c10::kHalf || dtype == c10::kBFloat16;
}

struct IllegalAddress : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Hands out the task's tensors in the order in which they were taken from the arguments.
class Aliases {
 public:
  explicit Aliases(const Task& task) : task_(task) {}

  Tensor next_input() { return alias(task_.plan->inputs[input_++]); }
  Tensor next_output(const TensorSpec& spec) { return spec.defined() ? alias(spec) : Tensor(); }

 private:
  Tensor alias(const TensorSpec& spec) {
    const void* device = task_.addresses[address_++];
    void* host = device == nullptr ? nullptr : simcuda_host_address(device);
    if (host == nullptr && spec.extent_bytes != 0) {
      throw IllegalAddress("its memory was freed before it ran");
    }
    return host_alias(spec, host);
  }

  const Task& task_;
  size_t input_ = 0;
  size_t address_ = 0;
};

Stack build_arguments(const Task& task, Aliases& aliases,
                      const std::optional<at::Generator>& random) {
  Stack stack;
  stack.reserve(task.values.size() + 4);
  size_t list = 0;
  size_t element = 0;
  size_t tensor = 0;
  const auto next_element = [&]() -> Tensor {
    const Tensor& host = task.host_elements[element++];
    return task.on_device[tensor++] ? aliases.next_input() : host;
  };
  for (size_t i = 0; i < task.values.size(); ++i) {
    const IValue& value = task.values[i];
    switch (task.traits->arguments[i].kind) {
      case ArgumentKind::kTensor:
        stack.push_back(task.on_device[tensor++] ? IValue(aliases.next_input()) : value);
        break;
      case ArgumentKind::kTensorList: {
        if (!value.isBool()) {  // an absent optional list
          stack.push_back(value);
          break;
        }
        c10::List<Tensor> tensors;
        for (uint32_t n = task.list_sizes[list++]; n > 0; --n) {
          tensors.push_back(next_element());
        }
        stack.emplace_back(std::move(tensors));
        break;
      }
      case ArgumentKind::kOptionalTensorList: {
        c10::List<std::optional<Tensor>> tensors;
        for (uint32_t n = task.list_sizes[list++]; n > 0; --n) {
          Tensor next = next_element();
          tensors.push_back(next.defined() ? std::optional<Tensor>(std::move(next)) : std::nullopt);
        }
        stack.emplace_back(std::move(tensors));
        break;
      }
      case ArgumentKind::kGenerator: stack.emplace_back(random); break;
      default: stack.push_back(value);
    }
  }
  return stack;
}

void call(const Task& task, Stack& stack) {
  constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);
  if (task.traits->substitute != nullptr) {
    task.traits->substitute->callBoxed(task.op, kCpu, &stack);
  } else {
    task.op.redispatchBoxed(kCpu, &stack);
  }
}

Tensor widen(const Tensor& tensor) {
  return tensor.defined() && is_narrow_float(tensor.scalar_type()) ? tensor.to(c10::kFloat)
                                                                   : tensor;
}

IValue widen(const IValue& value) {
  if (value.isTensor()) {
    return widen(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& tensor : value.toTensorVector()) {
      list.push_back(widen(tensor));
    }
    return list;
  }
  return value;
}

void copy_back(const IValue& to, const IValue& from) {
  if (to.isTensor() && to.toTensor().defined()) {
    Tensor target = to.toTensor();
    if (!target.is_same(from.toTensor())) {
      target.copy_(from.toTensor());
    }
  } else if (to.isTensorList()) {
    const std::vector<Tensor> source = from.toTensorVector();
    size_t i = 0;
    for (const Tensor& target : to.toTensorVector()) {
      target.copy_(source[i++]);
    }
  }
}

// A GPU has half-precision kernels that the CPU lacks: those run in float32 and are rounded.
void call_widened(const Task& task, Stack& stack) {
  const Stack narrow = stack;
  bool any = false;
  for (IValue& value : stack) {
    IValue wide = widen(value);
    any = any || !wide.is(value);
    value = std::move(wide);
  }
  if (!any) {
    throw;  // NOLINT: called from a handler
  }
  const Stack wide = stack;
  call(task, stack);
  for (const ReturnTraits& result : task.traits->returns) {
    if (result.argument) {
      copy_back(narrow[*result.argument], wide[*result.argument]);
    }
  }
}

// Runs the out= variant. False when it cannot, where the functional form still may: some resize
// their output on the way, or lack an element type.
bool write_outputs(const Task& task, Stack stack, Aliases aliases) {
  for (const TensorSpec& spec : task.plan->outputs) {
    stack.emplace_back(aliases.next_output(spec));
  }
  try {
    task.traits->out_variant->redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    return true;
  } catch (const c10::Error&) {
    task.plan->writes_outputs = false;
    return false;
  }
}

void store(const Tensor& output, const Tensor& result, const std::string& name) {
  // CUDA kernels have auxiliary results that the CPU's leave empty (the saved mean of a batch norm
  // in evaluation), and the other way round.
  if (!output.defined() || output.numel() == 0) {
    return;
  }
  if (!result.defined() || result.numel() == 0) {
    output.zero_();
    return;
  }
  TORCH_CHECK(output.sizes().equals(result.sizes()), name, ": its shape inference gives ",
              output.sizes(), " and its CPU kernel ", result.sizes());
  output.copy_(result);
}

void store_results(const Task& task, Aliases& aliases, const Stack& results) {
  size_t next = 0;
  for (size_t i = 0; i < task.traits->returns.size(); ++i) {
    const size_t count = task.plan->num_outputs[i];
    for (size_t k = 0; k < count; ++k) {
      const Tensor output = aliases.next_output(task.plan->outputs[next++]);
      const bool is_list = task.traits->returns[i].is_list;
      store(output, is_list ? results[i].toListRef()[k].toTensor() : results[i].toTensor(),
            task.traits->name);
    }
  }
}

// ---- Failures of tasks: the device breaks, as after an assertion in a kernel.

std::mutex g_failure_mutex;
std::string g_failure;  // guarded by g_failure_mutex
std::atomic<bool> g_failed{false};

int fail(const Task& task, const char* reason, cudaError_t error) {
  const std::lock_guard<std::mutex> lock(g_failure_mutex);
  if (!g_failed) {
    g_failure = task.traits->name + " failed on the simulated device: " + reason;
    std::fprintf(stderr, "simcuda: %s\n", g_failure.c_str());
    g_failed = true;
  }
  return error;
}

int failed(const Task& task) {
  try {
    throw;
  } catch (const IllegalAddress& error) {
    return fail(task, error.what(), cudaErrorIllegalAddress);
  } catch (const c10::Error& error) {
    return fail(task, error.what_without_backtrace(), cudaErrorAssert);
  } catch (const std::exception& error) {
    return fail(task, error.what(), cudaErrorAssert);
  }
}

// A host scalar's value is taken at the call, as a kernel's parameters are. The copy also has no
// Python object: releasing one takes the GIL, which the host may hold while it waits for the
// stream.
Tensor copy_of_scalar(const Tensor& tensor) {
  const Tensor plain = tensor.resolve_conj().resolve_neg();
  Tensor copy = at::detail::empty_cpu({}, plain.options());
  std::memcpy(copy.mutable_data_ptr(), plain.const_data_ptr(), plain.itemsize());
  copy.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return copy;
}

int run_task(void* data) {
  const auto& task = *static_cast<const Task*>(data);
  int status = cudaSuccess;
  try {
    task.run();
  } catch (...) {
    if (task.awaited) {  // the host is waiting, and throws it
      task.awaited->error = std::current_exception();
    } else if (!task.trial || !task.trial->take_error(std::current_exception())) {
      status = failed(task);
    }
  }
  if (task.trial) {
    task.trial->finish();
  }
  return status;
}

void destroy_task(void* data) {
  delete static_cast<Task*>(data);
}

}  // namespace

Task::Task(const OperatorTraits& operator_traits, const c10::OperatorHandle& handle,
           std::shared_ptr<const Plan> plan_of_call, c10::ArrayRef<IValue> arguments)
    : traits(&operator_traits), op(handle), plan(std::move(plan_of_call)) {
  const auto take = [this](const Tensor& tensor) -> Tensor {
    const bool device = tensor.defined() && tensor.is_cuda();
    on_device.push_back(device);
    if (device) {
      addresses.push_back(tensor.const_data_ptr());
      return {};
    }
    return tensor.defined() ? copy_of_scalar(tensor) : tensor;
  };
  values.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& value = arguments[i];
    switch (traits->arguments[i].kind) {
      case ArgumentKind::kTensor: {
        Tensor host = take(value.isTensor() ? value.toTensor() : Tensor());
        values.push_back(value.isTensor() ? IValue(std::move(host)) : IValue());
        break;
      }
      case ArgumentKind::kTensorList:
      case ArgumentKind::kOptionalTensorList: {
        values.push_back(value.isList() ? IValue(true) : IValue());
        if (!value.isList()) {
          break;
        }
        list_sizes.push_back(static_cast<uint32_t>(value.toListRef().size()));
        for (const IValue& element : value.toListRef()) {
          host_elements.push_back(take(element.isTensor() ? element.toTensor() : Tensor()));
        }
        break;
      }
      case ArgumentKind::kGenerator: values.emplace_back(); break;
      default: values.push_back(value.isDevice() ? IValue(c10::Device(c10::kCPU)) : value);
    }
  }
}

void Task::run() const {
  const OnWorker on_worker;
  std::optional<at::Generator> generator;
  if (random) {
    generator = cpu_generator(*random);
  }
  const CurrentGenerator current(generator.value_or(at::Generator()));
  Aliases aliases(*this);
  Stack stack = build_arguments(*this, aliases, generator);
  if (plan->writes_outputs && write_outputs(*this, stack, aliases)) {
    return;
  }
  if (plan->synchronous) {
    // Outputs are of any size; PyTorch resizes them when the results are known.
    for (size_t i = 0; i < stack.size(); ++i) {
      if (traits->arguments[i].is_out && stack[i].isTensor()) {
        stack[i] = at::empty({0}, stack[i].toTensor().options());
      }
    }
  }
  const Stack arguments = stack;
  try {
    call(*this, stack);
  } catch (const c10::NotImplementedError&) {
    if (!plan->widens) {
      throw;
    }
    stack = arguments;
    call_widened(*this, stack);
  }
  if (awaited) {
    awaited->results = std::move(stack);
  } else {
    store_results(*this, aliases, stack);
  }
}

void launch(std::unique_ptr<Task> task) {
  if (g_failed) {
    const std::lock_guard<std::mutex> lock(g_failure_mutex);
    TORCH_CHECK(false, g_failure, " (asynchronously; the device cannot be used any more)");
  }
  const simcuda_work work = work_of(task->plan->cost, task->traits->name.c_str());
  const auto stream = c10::cuda::getCurrentCUDAStream();
  Task* const data = task.release();
  C10_CUDA_CHECK(static_cast<cudaError_t>(
      simcuda_launch(stream.stream(), &work, &run_task, &destroy_task, data)));
}

}  // namespace residency::simcuda
