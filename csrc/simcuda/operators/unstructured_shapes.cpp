#include "csrc/simcuda/operators/unstructured_shapes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/TensorIterator.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/mean_meta_dispatch.h>
#include <ATen/ops/result_type.h>

namespace residency::simcuda {
namespace {

using at::IntArrayRef;
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor empty(IntArrayRef sizes, c10::ScalarType dtype) {
  return at::detail::empty_meta(sizes, dtype);
}

// As empty_like, which is a Python function for tensors without bytes (and imports sympy).
Tensor like(const Tensor& tensor, c10::ScalarType dtype,
            c10::MemoryFormat format = c10::MemoryFormat::Preserve) {
  if (format != c10::MemoryFormat::Preserve) {
    return at::detail::empty_meta(tensor.sizes(), dtype, format);
  }
  if (tensor.is_non_overlapping_and_dense()) {
    return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), dtype);
  }
  const auto strides = at::infer_dense_strides(tensor.sizes(), tensor.strides());
  return at::detail::empty_strided_meta(tensor.sizes(), strides, dtype);
}

Tensor like(const Tensor& tensor, c10::MemoryFormat format = c10::MemoryFormat::Preserve) {
  return like(tensor, tensor.scalar_type(), format);
}

Tensor like(const OptionalTensor& tensor, bool wanted) {
  return wanted && tensor && tensor->defined() ? like(*tensor, c10::MemoryFormat::Contiguous)
                                               : Tensor();
}

// Statistics of half-precision tensors are kept in single precision on CUDA.
c10::ScalarType statistics_type(const Tensor& tensor) {
  const c10::ScalarType dtype = tensor.scalar_type();
  return dtype == c10::kHalf || dtype == c10::kBFloat16 ? c10::kFloat : dtype;
}

Tensor unary_shape(const Tensor& self) {
  return like(self);
}

Tensor where_shape(const Tensor& condition, const Tensor& self, const Tensor& other) {
  const auto iterator =
      at::TensorIteratorConfig()
          .check_all_same_dtype(false)
          .check_all_same_device(false)
          .declare_static_dtype_and_device(at::result_type(self, other), c10::Device(c10::kMeta))
          .add_owned_output(Tensor())
          .add_const_input(condition)
          .add_const_input(self)
          .add_const_input(other)
          .build();
  return iterator.output();
}

Tensor roll_shape(const Tensor& self, IntArrayRef /*shifts*/, IntArrayRef /*dims*/) {
  return like(self, c10::MemoryFormat::Contiguous);
}

Tensor variance_shape(const Tensor& self, at::OptionalIntArrayRef dim,
                      const std::optional<at::Scalar>& /*correction*/, bool keepdim) {
  TORCH_CHECK(at::isFloatingType(self.scalar_type()));
  return at::meta::mean(self, dim, keepdim);
}

std::tuple<Tensor, Tensor> dropout_shape(const Tensor& input, double /*p*/,
                                         std::optional<bool> /*train*/) {
  return {like(input), like(input, c10::kBool)};
}

Tensor dropout_backward(const Tensor& grad_output, const Tensor& mask, double /*scale*/) {
  TORCH_CHECK(grad_output.sizes().equals(mask.sizes()));
  return like(grad_output);
}

Tensor absolute_shape(const Tensor& self) {
  return like(self, c10::toRealValueType(self.scalar_type()));
}

Tensor& take_shape(Tensor& out, const Tensor& of) {
  out.unsafeGetTensorImpl()->set_sizes_and_strides(of.sizes(), of.strides());
  return out;
}

Tensor& absolute_out(const Tensor& self, Tensor& out) {
  return take_shape(out, absolute_shape(self));
}

Tensor& where_out(const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out) {
  return take_shape(out, where_shape(condition, self, other));
}

// The CPU's backward pass reads the buffer, which a GPU leaves empty.
std::tuple<Tensor, Tensor> log_sigmoid_shape(const Tensor& self) {
  return {like(self), like(self)};
}

Tensor safe_softmax_shape(const Tensor& self, int64_t dim, std::optional<c10::ScalarType> dtype) {
  TORCH_CHECK(dim >= -self.dim() && dim < self.dim());
  return like(self, dtype.value_or(self.scalar_type()));
}

Tensor flip_shape(const Tensor& self, IntArrayRef /*dims*/) {
  return like(self);
}

template <class Value>
Tensor& masked_fill_shape(Tensor& self, const Tensor& mask, const Value& /*value*/) {
  TORCH_CHECK(at::infer_size(self.sizes(), mask.sizes()) == self.sizes().vec());
  return self;
}

// ---- Sequences.

Tensor& take_size(Tensor& out, IntArrayRef sizes) {
  out.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return out;
}

Tensor& eye_m_shape(int64_t n, int64_t m, Tensor& out) {
  return take_size(out, {n, m});
}

Tensor& eye_shape(int64_t n, Tensor& out) {
  return take_size(out, {n, n});
}

Tensor& arange_shape(const at::Scalar& start, const at::Scalar& end, const at::Scalar& step,
                     Tensor& out) {
  if (start.isIntegral(true) && end.isIntegral(true) && step.isIntegral(true)) {
    const auto distance = static_cast<__int128>(end.toLong()) - start.toLong();
    const int64_t stride = step.toLong();
    TORCH_CHECK(stride != 0 && (distance == 0 || (distance > 0) == (stride > 0)));
    const __int128 size = (distance + stride - (stride > 0 ? 1 : -1)) / stride;
    TORCH_CHECK(size < INT64_C(1'000'000'000'000'000));
    return take_size(out, {static_cast<int64_t>(size)});
  }
  const double size = std::ceil((end.toDouble() - start.toDouble()) / step.toDouble());
  TORCH_CHECK(size >= 0 && size < 1e15);
  return take_size(out, {static_cast<int64_t>(size)});
}

Tensor& linspace_shape(const at::Scalar& /*start*/, const at::Scalar& /*end*/, int64_t steps,
                       Tensor& out) {
  return take_size(out, {steps});
}

Tensor& randperm_shape(int64_t n, std::optional<at::Generator> /*generator*/, Tensor& out) {
  return take_size(out, {n});
}

// ---- Convolutions.

c10::MemoryFormat convolution_format(const Tensor& input, const Tensor& weight) {
  const auto format = input.suggest_memory_format();
  return format != c10::MemoryFormat::Contiguous ? format : weight.suggest_memory_format();
}

// What PyTorch checks in many words has to hold; else its own error follows.
Tensor convolution_shape(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                         IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                         bool transposed, IntArrayRef output_padding, int64_t groups) {
  const size_t rank = stride.size();
  TORCH_CHECK(input.sizes().size() == rank + 2 && weight.sizes().size() == rank + 2 && groups > 0 &&
              padding.size() == rank && dilation.size() == rank && output_padding.size() == rank &&
              input.scalar_type() == weight.scalar_type());
  TORCH_CHECK(input.size(1) == (transposed ? weight.size(0) : weight.size(1) * groups));
  const int64_t channels = transposed ? weight.size(1) * groups : weight.size(0);
  TORCH_CHECK(channels % groups == 0 && (!bias || !bias->defined() || bias->numel() == channels));
  std::vector<int64_t> sizes{input.size(0), channels};
  for (size_t i = 0; i < rank; ++i) {
    const int64_t in = input.sizes()[i + 2];
    const int64_t reach = dilation[i] * (weight.sizes()[i + 2] - 1);
    TORCH_CHECK(stride[i] > 0 && (transposed || in + 2 * padding[i] - reach >= 1));
    sizes.push_back(transposed
                        ? (in - 1) * stride[i] - 2 * padding[i] + reach + output_padding[i] + 1
                        : (in + 2 * padding[i] - reach - 1) / stride[i] + 1);
    TORCH_CHECK(sizes.back() > 0);
  }
  return at::detail::empty_meta(sizes, input.scalar_type(), convolution_format(input, weight));
}

Three convolution_backward_shape(const Tensor& grad_output, const Tensor& input,
                                 const Tensor& weight, at::OptionalIntArrayRef /*bias_sizes*/,
                                 IntArrayRef /*stride*/, IntArrayRef /*padding*/,
                                 IntArrayRef /*dilation*/, bool /*transposed*/,
                                 IntArrayRef /*output_padding*/, int64_t /*groups*/,
                                 std::array<bool, 3> mask) {
  const auto format = convolution_format(input, weight);
  return {mask[0] ? like(input, format) : Tensor(), mask[1] ? like(weight, format) : Tensor(),
          mask[2] ? empty({grad_output.size(1)}, grad_output.scalar_type()) : Tensor()};
}

// ---- Normalizations. Their backward passes are told by the tensors they are gradients of.

Three layer_norm_shape(const Tensor& input, IntArrayRef normalized_shape,
                       const OptionalTensor& weight, const OptionalTensor& bias, double /*eps*/) {
  TORCH_CHECK(!normalized_shape.empty() && input.dim() >= std::ssize(normalized_shape));
  const size_t outer = input.sizes().size() - normalized_shape.size();
  TORCH_CHECK(input.sizes().slice(outer).equals(normalized_shape));
  for (const OptionalTensor& parameter : {weight, bias}) {
    TORCH_CHECK(!parameter || !parameter->defined() || parameter->sizes().equals(normalized_shape));
  }
  std::vector<int64_t> sizes = input.sizes().vec();
  std::fill(sizes.begin() + static_cast<ptrdiff_t>(outer), sizes.end(), 1);
  const c10::ScalarType dtype = statistics_type(input);
  return {like(input, c10::MemoryFormat::Contiguous), empty(sizes, dtype), empty(sizes, dtype)};
}

std::tuple<Tensor, Tensor> rms_norm_shape(const Tensor& input, IntArrayRef normalized_shape,
                                          const OptionalTensor& weight,
                                          std::optional<double> /*eps*/) {
  auto [output, statistics, same] = layer_norm_shape(input, normalized_shape, weight, {}, 0);
  return {output, statistics};
}

Three layer_norm_backward(const Tensor& /*grad_out*/, const Tensor& input, IntArrayRef /*shape*/,
                          const Tensor& /*mean*/, const Tensor& /*rstd*/,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          std::array<bool, 3> mask) {
  return {like(input, mask[0]), like(weight, mask[1]), like(bias, mask[2])};
}

Three group_norm_shape(const Tensor& input, const OptionalTensor& /*weight*/,
                       const OptionalTensor& /*bias*/, int64_t n, int64_t channels,
                       int64_t positions, int64_t groups, double /*eps*/) {
  TORCH_CHECK(groups > 0 && channels % groups == 0 && input.numel() == n * channels * positions);
  const c10::ScalarType dtype = input.scalar_type();
  return {like(input, input.suggest_memory_format()), empty({n, groups}, dtype),
          empty({n, groups}, dtype)};
}

Three batch_norm_shape(const Tensor& input, const OptionalTensor& weight,
                       const OptionalTensor& bias, const OptionalTensor& running_mean,
                       const OptionalTensor& running_var, bool training, double /*momentum*/,
                       double /*eps*/) {
  TORCH_CHECK(input.dim() >= 2 && (training || (running_mean && running_var)));
  const int64_t channels = input.size(1);
  for (const OptionalTensor& parameter : {weight, bias, running_mean, running_var}) {
    TORCH_CHECK(!parameter || !parameter->defined() || parameter->numel() == channels);
  }
  // A GPU keeps nothing in evaluation.
  const c10::ScalarType dtype = statistics_type(input);
  const int64_t saved = training ? channels : 0;
  return {like(input, input.suggest_memory_format()), empty({saved}, dtype), empty({saved}, dtype)};
}

Three batch_norm_backward(const Tensor& /*grad_out*/, const Tensor& input,
                          const OptionalTensor& weight, const OptionalTensor& /*running_mean*/,
                          const OptionalTensor& /*running_var*/,
                          const OptionalTensor& /*save_mean*/,
                          const OptionalTensor& /*save_invstd*/, bool /*train*/, double /*eps*/,
                          std::array<bool, 3> mask) {
  const Tensor grad_input = mask[0] ? like(input, input.suggest_memory_format()) : Tensor();
  const bool affine = weight && weight->defined();
  const auto parameter = [&](bool wanted) {
    return wanted ? empty({input.size(1)}, affine ? weight->scalar_type() : statistics_type(input))
                  : Tensor();
  };
  return {grad_input, parameter(mask[1]), parameter(mask[2])};
}

template <class Function>
c10::KernelFunction boxed(Function* function) {
  return c10::KernelFunction::makeFromUnboxedRuntimeFunction(function);
}

}  // namespace

void add_unstructured_shapes(ShapeTable& table) {
  for (const char* name : {"relu", "hardswish", "hardsigmoid", "mish"}) {
    table.try_emplace(name, boxed(&unary_shape));
  }
  table.try_emplace("abs", boxed(&absolute_shape));
  table.try_emplace("abs.out", boxed(&absolute_out));
  table.try_emplace("where.self_out", boxed(&where_out));
  table.try_emplace("flip", boxed(&flip_shape));
  table.try_emplace("masked_fill_.Scalar", boxed(&masked_fill_shape<at::Scalar>));
  table.try_emplace("masked_fill_.Tensor", boxed(&masked_fill_shape<Tensor>));
  table.try_emplace("arange.start_out", boxed(&arange_shape));
  table.try_emplace("linspace.out", boxed(&linspace_shape));
  table.try_emplace("randperm.generator_out", boxed(&randperm_shape));
  table.try_emplace("convolution", boxed(&convolution_shape));
  table.try_emplace("convolution_backward", boxed(&convolution_backward_shape));
  table.try_emplace("eye.out", boxed(&eye_shape));
  table.try_emplace("eye.m_out", boxed(&eye_m_shape));
  table.try_emplace("log_sigmoid_forward", boxed(&log_sigmoid_shape));
  table.try_emplace("_safe_softmax", boxed(&safe_softmax_shape));
  table.try_emplace("native_dropout_backward", boxed(&dropout_backward));
  table.try_emplace("_fused_rms_norm", boxed(&rms_norm_shape));
  table.try_emplace("where.self", boxed(&where_shape));
  table.try_emplace("roll", boxed(&roll_shape));
  table.try_emplace("std.correction", boxed(&variance_shape));
  table.try_emplace("var.correction", boxed(&variance_shape));
  table.try_emplace("native_dropout", boxed(&dropout_shape));
  table.try_emplace("native_layer_norm", boxed(&layer_norm_shape));
  table.try_emplace("native_layer_norm_backward", boxed(&layer_norm_backward));
  table.try_emplace("native_group_norm", boxed(&group_norm_shape));
  table.try_emplace("native_batch_norm", boxed(&batch_norm_shape));
  table.try_emplace("native_batch_norm_backward", boxed(&batch_norm_backward));
}

}  // namespace residency::simcuda
