#include "csrc/simcuda/operators/cost.h"

#include <algorithm>
#include <array>
#include <utility>

#include <ATen/Context.h>

namespace residency::simcuda {
namespace {

using Specs = c10::ArrayRef<TensorSpec>;
using Values = c10::ArrayRef<c10::IValue>;

double count(const TensorSpec& spec) {
  double elements = 1;
  for (const int64_t size : spec.sizes) {
    elements *= static_cast<double>(size);
  }
  return elements;
}

double size(const TensorSpec& spec, int64_t dim) {
  const auto rank = static_cast<int64_t>(spec.sizes.size());
  const int64_t index = dim < 0 ? dim + rank : dim;
  return index >= 0 && index < rank ? static_cast<double>(spec.sizes[static_cast<size_t>(index)])
                                    : 1;
}

// [.., m, k] x [.., k, n]: both matrices are `Behind` the tensors that are only added.
template <size_t Behind>
double product_flops(Specs inputs, Specs /*written*/, Values /*arguments*/) {
  if (inputs.size() < Behind + 2) {
    return 0;
  }
  const TensorSpec& right = inputs[Behind + 1];
  return 2 * count(inputs[Behind]) * (right.sizes.size() < 2 ? 1 : size(right, -1));
}

// [.., in] x [out, in].
double linear_flops(Specs inputs, Specs /*written*/, Values /*arguments*/) {
  return inputs.size() < 2 ? 0 : 2 * count(inputs[0]) * size(inputs[1], 0);
}

// Input, weight, (bias,) ...: each output element is a product over a filter. With the channels of
// the transposed kind the same holds for each input element.
double convolution_flops_of(const TensorSpec& positions, const TensorSpec& weight) {
  return 2 * count(positions) * count(weight) / std::max(1.0, size(weight, 0));
}

bool is_transposed(Values arguments) {
  // The first plain bool of convolution, _convolution and convolution_backward.
  for (const c10::IValue& value : arguments) {
    if (value.isBool()) {
      return value.toBool();
    }
  }
  return false;
}

double convolution_flops(Specs inputs, Specs written, Values arguments) {
  if (inputs.size() < 2 || written.empty()) {
    return 0;
  }
  return convolution_flops_of(is_transposed(arguments) ? inputs[0] : written[0], inputs[1]);
}

double plain_convolution_flops(Specs inputs, Specs written, Values /*arguments*/) {
  return inputs.size() < 2 || written.empty() ? 0 : convolution_flops_of(written[0], inputs[1]);
}

double convolution_backward_flops(Specs inputs, Specs written, Values arguments) {
  if (inputs.size() < 3) {
    return 0;
  }
  const double one =
      convolution_flops_of(is_transposed(arguments) ? inputs[1] : inputs[0], inputs[2]);
  double products = 0;  // of the gradients of the input and of the weight
  for (size_t i = 0; i < std::min<size_t>(written.size(), 2); ++i) {
    products += written[i].defined() ? 1 : 0;
  }
  return products * one;
}

// query, key, value of [batch, heads, length, width].
double attention_flops_from(Specs inputs, size_t first, double products) {
  if (inputs.size() < first + 3) {
    return 0;
  }
  return products * 2 * count(inputs[first]) * size(inputs[first + 1], -2);
}

double attention_flops(Specs inputs, Specs /*written*/, Values /*arguments*/) {
  return attention_flops_from(inputs, 0, 2);
}

// grad_output comes first; five products, as the scores are computed again.
double attention_backward_flops(Specs inputs, Specs /*written*/, Values /*arguments*/) {
  return attention_flops_from(inputs, 1, 5);
}

// ---- Bytes, where a kernel does not touch all of its tensors, or touches them several times

double touched_bytes(Specs specs) {
  double bytes = 0;
  for (const TensorSpec& spec : specs) {
    bytes += spec.defined() ? spec.touched_bytes() : 0;
  }
  return bytes;
}

// Rows of a table (the first input) by indices: what is read of it is what is written.
double gathered_bytes(Specs inputs, Specs written, Values /*arguments*/) {
  return 2 * touched_bytes(written) +
         touched_bytes(inputs.slice(std::min<size_t>(1, inputs.size())));
}

// Indices and values into a tensor (the first input): each value is read, and its place read and
// written.
double scattered_bytes(Specs inputs, Specs /*written*/, Values /*arguments*/) {
  if (inputs.size() < 2) {
    return 0;
  }
  double bytes = 0;
  bool has_values = false;
  for (const TensorSpec& spec : inputs.slice(1)) {
    const bool is_value = spec.dtype == inputs[0].dtype;
    bytes += (is_value ? 3 : 1) * spec.touched_bytes();
    has_values = has_values || is_value;
  }
  if (!has_values) {  // one number to all places
    bytes += count(inputs[1]) * static_cast<double>(c10::elementSize(inputs[0].dtype));
  }
  return bytes;
}

// The same into a copy.
double scattered_copy_bytes(Specs inputs, Specs written, Values arguments) {
  return 2 * touched_bytes(written) + scattered_bytes(inputs, written, arguments);
}

// A radix sort passes over keys and indices for each byte of the key, reading and writing.
double sorted_bytes(Specs inputs, Specs written, Values /*arguments*/) {
  const double key_bytes =
      inputs.empty() ? 1 : static_cast<double>(c10::elementSize(inputs[0].dtype));
  return 2 * key_bytes * touched_bytes(written);
}

struct Entry {
  std::string_view name;  ///< without the overload
  CostFormula formula;
};

// linear, matmul, conv and scaled_dot_product_attention are composed on either device, and priced
// by themselves on the host, where the outermost operator is.
constexpr std::array kFormulas{
    Entry{"linear", {&linear_flops, true}},
    Entry{"matmul", {&product_flops<0>, true}},
    Entry{"conv1d", {&plain_convolution_flops, true}},
    Entry{"conv2d", {&plain_convolution_flops, true}},
    Entry{"conv3d", {&plain_convolution_flops, true}},
    Entry{"scaled_dot_product_attention", {&attention_flops, true}},
    Entry{"mm", {&product_flops<0>, true}},
    Entry{"bmm", {&product_flops<0>, true}},
    Entry{"mv", {&product_flops<0>, true}},
    Entry{"dot", {&product_flops<0>, true}},
    Entry{"_int_mm", {&product_flops<0>, true}},
    Entry{"_scaled_mm", {&product_flops<0>, true}},
    Entry{"addmm", {&product_flops<1>, true}},
    Entry{"addmm_", {&product_flops<1>, true}},
    Entry{"addmv", {&product_flops<1>, true}},
    Entry{"addmv_", {&product_flops<1>, true}},
    Entry{"addbmm", {&product_flops<1>, true}},
    Entry{"baddbmm", {&product_flops<1>, true}},
    Entry{"baddbmm_", {&product_flops<1>, true}},
    Entry{"_addmm_activation", {&product_flops<1>, true}},
    Entry{"convolution", {&convolution_flops, true}},
    Entry{"_convolution", {&convolution_flops, true}},
    Entry{"cudnn_convolution", {&plain_convolution_flops, true}},
    Entry{"cudnn_convolution_relu", {&plain_convolution_flops, true}},
    Entry{"cudnn_convolution_add_relu", {&plain_convolution_flops, true}},
    Entry{"convolution_backward", {&convolution_backward_flops, true}},
    Entry{"_scaled_dot_product_flash_attention", {&attention_flops, true}},
    Entry{"_scaled_dot_product_efficient_attention", {&attention_flops, true}},
    Entry{"_scaled_dot_product_cudnn_attention", {&attention_flops, true}},
    Entry{"_scaled_dot_product_flash_attention_backward", {&attention_backward_flops, true}},
    Entry{"_scaled_dot_product_efficient_attention_backward", {&attention_backward_flops, true}},
    Entry{"embedding", {.bytes = &gathered_bytes}},
    Entry{"gather", {.bytes = &gathered_bytes}},
    Entry{"index", {.bytes = &gathered_bytes}},
    Entry{"index_select", {.bytes = &gathered_bytes}},
    Entry{"take", {.bytes = &gathered_bytes}},
    Entry{"_index_put_impl_", {.bytes = &scattered_bytes}},
    Entry{"index_add_", {.bytes = &scattered_bytes}},
    Entry{"index_copy_", {.bytes = &scattered_bytes}},
    Entry{"index_fill_", {.bytes = &scattered_bytes}},
    Entry{"index_put_", {.bytes = &scattered_bytes}},
    Entry{"scatter_", {.bytes = &scattered_bytes}},
    Entry{"scatter_add_", {.bytes = &scattered_bytes}},
    Entry{"scatter_reduce_", {.bytes = &scattered_bytes}},
    Entry{"index_add", {.bytes = &scattered_copy_bytes}},
    Entry{"index_copy", {.bytes = &scattered_copy_bytes}},
    Entry{"index_fill", {.bytes = &scattered_copy_bytes}},
    Entry{"scatter", {.bytes = &scattered_copy_bytes}},
    Entry{"scatter_add", {.bytes = &scattered_copy_bytes}},
    Entry{"scatter_reduce", {.bytes = &scattered_copy_bytes}},
    Entry{"argsort", {.bytes = &sorted_bytes}},
    Entry{"sort", {.bytes = &sorted_bytes}},
};

}  // namespace

CostFormula find_cost_formula(std::string_view name) {
  const std::string_view base = name.substr(0, name.find('.'));
  const auto* found = std::find_if(kFormulas.begin(), kFormulas.end(),
                                   [&](const Entry& entry) { return entry.name == base; });
  return found == kFormulas.end() ? CostFormula{} : found->formula;
}

int precision_of(c10::ScalarType dtype) {
  switch (dtype) {
    case c10::kDouble:
    case c10::kComplexDouble: return SIMCUDA_FP64;
    case c10::kHalf:
    case c10::kBFloat16:
    case c10::ScalarType::ComplexHalf: return SIMCUDA_FP16;
    case c10::kFloat8_e4m3fn:
    case c10::kFloat8_e5m2:
    case c10::kFloat8_e4m3fnuz:
    case c10::kFloat8_e5m2fnuz: return SIMCUDA_FP8;
    default: return SIMCUDA_FP32;
  }
}

Cost price(const CostFormula& formula, Specs inputs, Specs written, Values arguments) {
  Cost cost;
  cost.matrix_product = formula.matrix_product;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  double elements = 0;  // of the largest tensor that is touched as a whole
  for (const Specs specs : {inputs, written}) {
    for (const TensorSpec& spec : specs) {
      if (!spec.defined()) {
        continue;
      }
      elements = std::max(elements, count(spec));
      if (dtype == c10::ScalarType::Undefined && c10::isFloatingType(spec.dtype)) {
        dtype = spec.dtype;
      }
    }
  }
  if (formula.bytes != nullptr) {
    cost.bytes = formula.bytes(inputs, written, arguments);
    elements = std::min(elements, cost.bytes);
  } else {
    cost.bytes = touched_bytes(inputs) + touched_bytes(written);
  }
  if (formula.flops != nullptr) {
    cost.flops = formula.flops(inputs, written, arguments);
  } else {
    cost.flops = elements;
    if (dtype == c10::kHalf || dtype == c10::kBFloat16) {
      dtype = c10::kFloat;  // tensor cores do matrix products only
    }
  }
  cost.precision = precision_of(dtype);
  return cost;
}

simcuda_work work_of(const Cost& cost, const char* name) {
  int precision = cost.precision;
  if (cost.matrix_product && precision == SIMCUDA_FP32 && at::globalContext().allowTF32CuBLAS()) {
    precision = SIMCUDA_TF32;
  }
  return {name, cost.flops, cost.bytes, precision};
}

}  // namespace residency::simcuda
