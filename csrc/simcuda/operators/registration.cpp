// Takes over PyTorch's CUDA operators when the library is loaded into a process that runs on the
// simulated runtime. Elsewhere it does nothing.

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "csrc/simcuda/operators/copy.h"
#include "csrc/simcuda/operators/host_work.h"
#include "csrc/simcuda/operators/operator_kernel.h"
#include "csrc/simcuda/operators/simulation_mode.h"
#include "csrc/simcuda/operators/substitutes.h"
#include "residency/simcuda/control.h"

namespace residency::simcuda {
namespace {

using c10::DispatchKey;
using torch::CppFunction;
using torch::jit::Stack;

// These allocate, read back or answer from what the host knows, and launch no kernel: PyTorch's own
// code runs. So do views, which are told by their schema.
constexpr std::array<std::string_view, 14> kOwnCode{
    "aten::_efficientzerotensor",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::copy_",
    "aten::empty",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::record_stream",
    "aten::resize_",
    "aten::set_",
    "aten::_use_cudnn_ctc_loss",
    "aten::_use_miopen_ctc_loss",
    "aten::_fused_sdp_choice",
};

bool runs_own_code(const c10::OperatorHandle& op) {
  if (std::find(kOwnCode.begin(), kOwnCode.end(), op.operator_name().name) != kOwnCode.end()) {
    return true;
  }
  const auto& results = op.schema().returns();
  return std::any_of(results.begin(), results.end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

std::string advice_for(std::string_view name) {
  if (name.find("cudnn") != std::string_view::npos ||
      name.find("miopen") != std::string_view::npos) {
    return "set torch.backends.cudnn.enabled = False, so that PyTorch takes another path";
  }
  if (name.find("attention") != std::string_view::npos) {
    return "use torch.nn.attention.sdpa_kernel(SDPBackend.MATH)";
  }
  return "replace it, or run this part with device='cpu'";
}

void refuse_without_kernel(const c10::OperatorHandle& op, Stack* /*stack*/) {
  const std::string name = c10::toString(op.operator_name());
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, name, " cannot run on the simulated device: it has no CPU kernel; ", advice_for(name));
}

void refuse_layout(const c10::OperatorHandle& op, Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, c10::toString(op.operator_name()),
      " cannot run on the simulated device: sparse, nested and quantized CUDA tensors are not "
      "simulated; use dense tensors, or run this part with device='cpu'");
}

bool runs_on_cpu(const c10::OperatorHandle& op) {
  constexpr std::array kKeys{DispatchKey::CPU, DispatchKey::CompositeExplicitAutograd,
                             DispatchKey::CompositeExplicitAutogradNonFunctional,
                             DispatchKey::CompositeImplicitAutograd};
  return std::any_of(kKeys.begin(), kKeys.end(),
                     [&](DispatchKey key) { return op.hasKernelForDispatchKey(key); });
}

// PyTorch warns of each override of a kernel of its own; here that is what is meant.
class Silence : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

class Registration {
 public:
  void add_operators() {
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getRegistrationsForDispatchKey(DispatchKey::CUDA)) {
      if (!std::string_view(name.name).starts_with("aten::")) {
        continue;
      }
      const auto op = dispatcher.findSchema(name);
      if (!op || runs_own_code(*op)) {
        continue;
      }
      if (runs_on_cpu(*op) || find_substitute(c10::toString(name)) != nullptr) {
        simulate(name);
      } else {
        library(DispatchKey::CUDA)
            .impl(short_name(name).c_str(),
                  CppFunction::makeFromBoxedFunction<&refuse_without_kernel>());
      }
    }
    for (const char* name : fused_operators()) {
      simulate({std::string("aten::") + name, ""});
    }
    library(DispatchKey::CUDA).impl("copy_", &copy_);
    if (dry_mode()) {
      library(DispatchKey::CUDA).impl("_local_scalar_dense", &dry_item);
    }
  }

  void refuse_other_layouts() {
    for (const DispatchKey key : {DispatchKey::SparseCUDA, DispatchKey::SparseCsrCUDA,
                                  DispatchKey::QuantizedCUDA, DispatchKey::NestedTensorCUDA}) {
      for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(key)) {
        if (std::string_view(name.name).starts_with("aten::")) {
          library(key).impl(short_name(name).c_str(),
                            CppFunction::makeFromBoxedFunction<&refuse_layout>());
        }
      }
    }
  }

 private:
  static std::string short_name(const c10::OperatorName& name) {
    return c10::toString(name).substr(std::string_view("aten::").size());
  }

  void simulate(const c10::OperatorName& name) {
    library(DispatchKey::CUDA)
        .impl(short_name(name).c_str(),
              CppFunction::makeFromBoxedFunctor(std::make_unique<SimulatedOperator>()));
  }

  torch::Library& library(DispatchKey key) {
    auto& library = libraries_[key];
    if (library == nullptr) {
      library =
          std::make_unique<torch::Library>(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
    }
    return *library;
  }

  std::unordered_map<DispatchKey, std::unique_ptr<torch::Library>> libraries_;
};

// cuDNN and the fused attention kernels are compiled for the device alone. PyTorch then composes
// the same from operators that are simulated.
void choose_simulated_paths() {
  at::Context& context = at::globalContext();
  context.setUserEnabledCuDNN(false);
  context.setSDPUseFlash(false);
  context.setSDPUseMemEfficient(false);
  context.setSDPUseCuDNN(false);
}

[[maybe_unused]] const bool g_registered = [] {
  if (simcuda_present == nullptr) {
    return false;
  }
  static Silence silence;
  const c10::WarningUtils::WarningHandlerGuard guard(&silence);
  choose_simulated_paths();
  // Never taken back: streams may run tasks until the process ends.
  auto* registration = new Registration;
  registration->add_operators();
  registration->refuse_other_layouts();
  price_host_operators();
  return true;
}();

}  // namespace
}  // namespace residency::simcuda
