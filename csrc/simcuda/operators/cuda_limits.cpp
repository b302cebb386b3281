#include "csrc/simcuda/operators/cuda_limits.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

namespace residency::simcuda {
namespace {

// cuBLAS has none in integers. Their types are dispatched in aten/src/ATen/native/cuda/Blas.cpp, by
// AT_DISPATCH_FLOATING_AND_COMPLEX_TYPES_AND2.
constexpr std::array<std::string_view, 9> kFloatProducts{
    "mm", "bmm", "mv", "dot", "addmm", "addmv", "addbmm", "baddbmm", "_addmm_activation"};

// aten/src/ATen/native/cuda/layer_norm_kernel.cu reads the parameters as the input's type.
constexpr std::string_view kLayerNorm = "native_layer_norm";

}  // namespace

void check_cuda_limits(const OperatorTraits& traits, c10::ArrayRef<c10::IValue> arguments) {
  std::string_view plain = std::string_view(traits.name).substr(std::string_view("aten::").size());
  plain = plain.substr(0, plain.find('.'));
  if (plain.ends_with('_')) {
    plain.remove_suffix(1);
  }
  const auto dtype_of = [&](size_t i) {
    const bool given = arguments[i].isTensor() && arguments[i].toTensor().defined();
    return given ? arguments[i].toTensor().scalar_type() : c10::ScalarType::Undefined;
  };
  if (std::ranges::find(kFloatProducts, plain) != kFloatProducts.end()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!c10::isIntegralType(dtype_of(0), /*includeBool=*/true), '"', plain,
                                "_cuda\" not implemented for '", c10::toString(dtype_of(0)), "'");
  } else if (plain == kLayerNorm) {
    for (const size_t parameter : {size_t{2}, size_t{3}}) {
      const c10::ScalarType dtype = dtype_of(parameter);
      TORCH_CHECK(dtype == c10::ScalarType::Undefined || dtype == dtype_of(0),
                  "expected scalar type ", c10::toString(dtype_of(0)), " but found ",
                  c10::toString(dtype));
    }
  }
}

}  // namespace residency::simcuda
