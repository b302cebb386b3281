#include "csrc/simcuda/operators/unstructured_shapes.h"

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/TensorIterator.h>
#include <ATen/ops/empty_like.h>
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

Tensor like(const Tensor& tensor, std::optional<c10::MemoryFormat> format = std::nullopt) {
  return at::empty_like(tensor, tensor.options(), format);
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

Tensor unary(const Tensor& self) {
  return like(self);
}

Tensor where(const Tensor& condition, const Tensor& self, const Tensor& other) {
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

Tensor roll(const Tensor& self, IntArrayRef /*shifts*/, IntArrayRef /*dims*/) {
  return like(self, c10::MemoryFormat::Contiguous);
}

Tensor variance(const Tensor& self, at::OptionalIntArrayRef dim,
                const std::optional<at::Scalar>& /*correction*/, bool keepdim) {
  TORCH_CHECK(at::isFloatingType(self.scalar_type()));
  return at::meta::mean(self, dim, keepdim);
}

std::tuple<Tensor, Tensor> dropout(const Tensor& input, double /*p*/,
                                   std::optional<bool> /*train*/) {
  return {like(input), at::empty_like(input, input.options().dtype(c10::kBool))};
}

Tensor dropout_backward(const Tensor& grad_output, const Tensor& mask, double /*scale*/) {
  TORCH_CHECK(grad_output.sizes().equals(mask.sizes()));
  return like(grad_output);
}

Tensor absolute(const Tensor& self) {
  return at::empty_like(self, self.options().dtype(c10::toRealValueType(self.scalar_type())));
}

Tensor& take_shape(Tensor& out, const Tensor& of) {
  out.unsafeGetTensorImpl()->set_sizes_and_strides(of.sizes(), of.strides());
  return out;
}

Tensor& absolute_out(const Tensor& self, Tensor& out) {
  return take_shape(out, absolute(self));
}

Tensor& where_out(const Tensor& condition, const Tensor& self, const Tensor& other, Tensor& out) {
  return take_shape(out, where(condition, self, other));
}

// The CPU's backward pass reads the buffer, which a GPU leaves empty.
std::tuple<Tensor, Tensor> log_sigmoid(const Tensor& self) {
  return {like(self), like(self)};
}

Tensor safe_softmax(const Tensor& self, int64_t dim, std::optional<c10::ScalarType> dtype) {
  TORCH_CHECK(dim >= -self.dim() && dim < self.dim());
  return at::empty_like(self, self.options().dtype(dtype.value_or(self.scalar_type())));
}

Tensor& eye_m(int64_t n, int64_t m, Tensor& out) {
  out.resize_({n, m});
  return out;
}

Tensor& eye(int64_t n, Tensor& out) {
  return eye_m(n, n, out);
}

// ---- Normalizations. Their backward passes are told by the tensors they are gradients of.

Three layer_norm(const Tensor& input, IntArrayRef normalized_shape, const OptionalTensor& weight,
                 const OptionalTensor& bias, double /*eps*/) {
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

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, IntArrayRef normalized_shape,
                                    const OptionalTensor& weight, std::optional<double> /*eps*/) {
  auto [output, statistics, same] = layer_norm(input, normalized_shape, weight, {}, 0);
  return {output, statistics};
}

Three layer_norm_backward(const Tensor& /*grad_out*/, const Tensor& input, IntArrayRef /*shape*/,
                          const Tensor& /*mean*/, const Tensor& /*rstd*/,
                          const OptionalTensor& weight, const OptionalTensor& bias,
                          std::array<bool, 3> mask) {
  return {like(input, mask[0]), like(weight, mask[1]), like(bias, mask[2])};
}

Three group_norm(const Tensor& input, const OptionalTensor& /*weight*/,
                 const OptionalTensor& /*bias*/, int64_t n, int64_t channels, int64_t positions,
                 int64_t groups, double /*eps*/) {
  TORCH_CHECK(groups > 0 && channels % groups == 0 && input.numel() == n * channels * positions);
  const c10::ScalarType dtype = input.scalar_type();
  return {like(input, input.suggest_memory_format()), empty({n, groups}, dtype),
          empty({n, groups}, dtype)};
}

Three batch_norm(const Tensor& input, const OptionalTensor& weight, const OptionalTensor& bias,
                 const OptionalTensor& running_mean, const OptionalTensor& running_var,
                 bool training, double /*momentum*/, double /*eps*/) {
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
    table.try_emplace(name, boxed(&unary));
  }
  table.try_emplace("abs", boxed(&absolute));
  table.try_emplace("abs.out", boxed(&absolute_out));
  table.try_emplace("where.self_out", boxed(&where_out));
  table.try_emplace("eye.out", boxed(&eye));
  table.try_emplace("eye.m_out", boxed(&eye_m));
  table.try_emplace("log_sigmoid_forward", boxed(&log_sigmoid));
  table.try_emplace("_safe_softmax", boxed(&safe_softmax));
  table.try_emplace("native_dropout_backward", boxed(&dropout_backward));
  table.try_emplace("_fused_rms_norm", boxed(&rms_norm));
  table.try_emplace("where.self", boxed(&where));
  table.try_emplace("roll", boxed(&roll));
  table.try_emplace("std.correction", boxed(&variance));
  table.try_emplace("var.correction", boxed(&variance));
  table.try_emplace("native_dropout", boxed(&dropout));
  table.try_emplace("native_layer_norm", boxed(&layer_norm));
  table.try_emplace("native_layer_norm_backward", boxed(&layer_norm_backward));
  table.try_emplace("native_group_norm", boxed(&group_norm));
  table.try_emplace("native_batch_norm", boxed(&batch_norm));
  table.try_emplace("native_batch_norm_backward", boxed(&batch_norm_backward));
}

}  // namespace residency::simcuda
