#include "csrc/simcuda/operators/device_check.h"

#include <optional>

#include <ATen/core/List.h>
#include <ATen/core/op_registration/adaption.h>

namespace residency::simcuda {
namespace {

using c10::Device;
using c10::IValue;

// Calls visit(tensor) for each tensor of an argument, undefined ones included.
template <class Visit>
void for_each_tensor(ArgumentKind kind, const IValue& value, Visit visit) {
  switch (kind) {
    case ArgumentKind::kTensor:
      if (value.isTensor()) {
        visit(value.toTensor());
      }
      return;
    case ArgumentKind::kTensorList:
    case ArgumentKind::kOptionalTensorList:
      if (value.isList()) {
        for (const IValue& element : value.toListRef()) {
          for_each_tensor(ArgumentKind::kTensor, element, visit);
        }
      }
      return;
    default: return;
  }
}

// The generated wrappers look at the out= arguments first.
void check_same(const OperatorTraits& traits, const c10::FunctionSchema& schema,
                c10::ArrayRef<IValue> arguments) {
  std::optional<Device> common;
  for (const bool out : {true, false}) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (traits.arguments[i].is_out != out) {
        continue;
      }
      for_each_tensor(traits.arguments[i].kind, arguments[i], [&](const at::Tensor& tensor) {
        c10::impl::check_and_update_common_device(common, tensor, traits.wrapper_name.c_str(),
                                                  schema.arguments()[i].name().c_str());
      });
    }
  }
}

// As TensorIteratorBase::compute_types does.
void check_iterator(const OperatorTraits& traits, c10::ArrayRef<IValue> arguments) {
  std::optional<Device> common;
  for (size_t i = 0; i < arguments.size() && !common; ++i) {
    for_each_tensor(traits.arguments[i].kind, arguments[i], [&](const at::Tensor& tensor) {
      if (!common && tensor.defined() && !tensor.is_cpu()) {
        common = tensor.device();
      }
    });
  }
  int host_scalars = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    // Indices may be on the host: they are copied to the device.
    if (traits.arguments[i].kind == ArgumentKind::kOptionalTensorList) {
      continue;
    }
    for_each_tensor(traits.arguments[i].kind, arguments[i], [&](const at::Tensor& tensor) {
      if (!tensor.defined() || tensor.device() == common) {
        return;
      }
      const bool scalar = tensor.is_cpu() && tensor.dim() == 0 && !traits.arguments[i].is_out;
      TORCH_CHECK(scalar,
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  *common, " and ", tensor.device(), "!");
      ++host_scalars;
      TORCH_CHECK(host_scalars == 1 || traits.takes_host_scalars,
                  "Trying to pass too many CPU scalars to non-CPU kernel!");
    });
  }
}

}  // namespace

void check_devices(const OperatorTraits& traits, const c10::FunctionSchema& schema,
                   c10::ArrayRef<IValue> arguments) {
  if (traits.check == DeviceCheck::kSame) {
    check_same(traits, schema, arguments);
  } else {
    check_iterator(traits, arguments);
  }
}

bool on_several_devices(const OperatorTraits& traits, c10::ArrayRef<IValue> arguments) {
  std::optional<Device> common;
  bool several = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (traits.arguments[i].kind != ArgumentKind::kTensorList) {
      continue;
    }
    for_each_tensor(ArgumentKind::kTensorList, arguments[i], [&](const at::Tensor& tensor) {
      several = several || (common && *common != tensor.device());
      common = tensor.device();
    });
  }
  return several || (common && !common->is_cuda());
}

}  // namespace residency::simcuda
