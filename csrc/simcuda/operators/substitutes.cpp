#include "csrc/simcuda/operators/substitutes.h"

#include <array>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/native_batch_norm.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/stack.h>

namespace residency::simcuda {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::KernelFunction;
using OptionalTensor = std::optional<Tensor>;

thread_local at::Generator t_generator;

std::optional<at::Generator> current_generator() {
  return t_generator.defined() ? std::optional(t_generator) : std::nullopt;
}

// ---- Dropout: the CPU's kernels take no generator.

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p,
                                          std::optional<bool> train) {
  if (input.numel() == 0 || (train.has_value() && !*train)) {
    return {input.clone(), at::empty_like(input, input.options().dtype(c10::kBool)).fill_(true)};
  }
  const double scale = p == 1 ? 0.0 : 1.0 / (1.0 - p);
  Tensor mask = at::empty_like(input, input.options().dtype(c10::kBool));
  mask.bernoulli_(1 - p, current_generator());
  return {input.mul(mask).mul_(scale), mask};
}

std::tuple<Tensor, Tensor> fused_dropout(const Tensor& input, double keep,
                                         std::optional<at::Generator> /*generator*/) {
  Tensor mask = at::empty_like(input, input.options().dtype(c10::kByte));
  mask.bernoulli_(keep, current_generator());
  return {input.mul(mask).mul_(1.0 / keep), mask};
}

Tensor masked_scale(const Tensor& self, const Tensor& mask, double scale) {
  return self.mul(mask).mul_(scale);
}

// ---- Convolutions by cuDNN, for programs that turn it on again.

Tensor cudnn_convolution(const Tensor& self, const Tensor& weight, IntArrayRef padding,
                         IntArrayRef stride, IntArrayRef dilation, int64_t groups,
                         bool /*benchmark*/, bool /*deterministic*/, bool /*allow_tf32*/) {
  const std::vector<int64_t> no_output_padding(padding.size(), 0);
  return at::convolution(self, weight, {}, stride, padding, dilation, false, no_output_padding,
                         groups);
}

Tensor cudnn_convolution_transpose(const Tensor& self, const Tensor& weight, IntArrayRef padding,
                                   IntArrayRef output_padding, IntArrayRef stride,
                                   IntArrayRef dilation, int64_t groups, bool /*benchmark*/,
                                   bool /*deterministic*/, bool /*allow_tf32*/) {
  return at::convolution(self, weight, {}, stride, padding, dilation, true, output_padding, groups);
}

Tensor cudnn_convolution_relu(const Tensor& self, const Tensor& weight, const OptionalTensor& bias,
                              IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
                              int64_t groups) {
  const std::vector<int64_t> no_output_padding(padding.size(), 0);
  return at::convolution(self, weight, bias, stride, padding, dilation, false, no_output_padding,
                         groups)
      .relu_();
}

std::tuple<Tensor, Tensor, Tensor, Tensor> cudnn_batch_norm(
    const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
    const OptionalTensor& running_mean, const OptionalTensor& running_var, bool training,
    double momentum, double epsilon) {
  auto [output, mean, inverse] = at::native_batch_norm(input, weight, bias, running_mean,
                                                       running_var, training, momentum, epsilon);
  return {output, mean, inverse, at::empty({0}, input.options().dtype(c10::kByte))};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_batch_norm_backward(
    const Tensor& input, const Tensor& grad_output, const Tensor& weight,
    const OptionalTensor& running_mean, const OptionalTensor& running_var,
    const OptionalTensor& save_mean, const OptionalTensor& save_var, double epsilon,
    const Tensor& /*reserve*/) {
  return at::native_batch_norm_backward(grad_output, input, weight, running_mean, running_var,
                                        save_mean, save_var, true, epsilon, {true, true, true});
}

// ---- Recurrent cells, fused on CUDA only. Gates are [batch, n * hidden].

Tensor complement(const Tensor& tensor) {
  return tensor.neg().add(1);
}

Tensor add_gates(const Tensor& input_gates, const Tensor& hidden_gates,
                 const OptionalTensor& input_bias, const OptionalTensor& hidden_bias) {
  Tensor gates = input_gates.add(hidden_gates);
  if (input_bias && input_bias->defined()) {
    gates = gates.add(*input_bias).add(*hidden_bias);
  }
  return gates;
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                             const Tensor& cx, const OptionalTensor& input_bias,
                                             const OptionalTensor& hidden_bias) {
  const Tensor gates = add_gates(input_gates, hidden_gates, input_bias, hidden_bias);
  const std::vector<Tensor> parts = gates.chunk(4, 1);
  const Tensor in = parts[0].sigmoid();
  const Tensor forget = parts[1].sigmoid();
  const Tensor cell = parts[2].tanh();
  const Tensor out = parts[3].sigmoid();
  const Tensor cy = forget.mul(cx).add(in.mul(cell));
  const Tensor hy = out.mul(cy.tanh());
  return {hy, cy, at::stack({in, forget, cell, out}, 1).flatten(1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const OptionalTensor& grad_hy,
                                                      const OptionalTensor& grad_cy,
                                                      const Tensor& cx, const Tensor& cy,
                                                      const Tensor& workspace, bool has_bias) {
  const bool has_hy = grad_hy && grad_hy->defined();
  const bool has_cy = grad_cy && grad_cy->defined();
  if (!has_hy && !has_cy) {
    return {};
  }
  const std::vector<Tensor> parts = workspace.chunk(4, 1);
  const Tensor &in = parts[0], &forget = parts[1], &cell = parts[2], &out = parts[3];
  const Tensor tanh_cy = cy.tanh();
  Tensor grad_out;
  Tensor grad_cell_state;
  if (has_hy) {
    grad_out = grad_hy->mul(tanh_cy);
    grad_cell_state = grad_hy->mul(out).mul(complement(tanh_cy.mul(tanh_cy)));
  } else {
    grad_out = cy.mul(0);
    grad_cell_state = cy.mul(0);
  }
  if (has_cy) {
    grad_cell_state = grad_cell_state.add(*grad_cy);
  }
  const Tensor grad_in = grad_cell_state.mul(cell).mul(in).mul(complement(in));
  const Tensor grad_forget = grad_cell_state.mul(cx).mul(forget).mul(complement(forget));
  const Tensor grad_cell = grad_cell_state.mul(in).mul(complement(cell.mul(cell)));
  grad_out = grad_out.mul(out).mul(complement(out));
  const Tensor grad_gates = at::stack({grad_in, grad_forget, grad_cell, grad_out}, 1).flatten(1);
  return {grad_gates, grad_cell_state.mul(forget), has_bias ? grad_gates.sum(0) : Tensor()};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates,
                                    const Tensor& hx, const OptionalTensor& input_bias,
                                    const OptionalTensor& hidden_bias) {
  const bool has_bias = input_bias && input_bias->defined();
  const std::vector<Tensor> input =
      (has_bias ? input_gates.add(*input_bias) : input_gates).chunk(3, 1);
  const std::vector<Tensor> hidden =
      (has_bias ? hidden_gates.add(*hidden_bias) : hidden_gates).chunk(3, 1);
  const Tensor reset = input[0].add(hidden[0]).sigmoid();
  const Tensor update = input[1].add(hidden[1]).sigmoid();
  const Tensor fresh = input[2].add(reset.mul(hidden[2])).tanh();
  const Tensor hy = fresh.add(update.mul(hx.sub(fresh)));
  return {hy, at::stack({reset, update, fresh, hx, hidden[2]}, 1).flatten(1)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hy,
                                                                     const Tensor& workspace,
                                                                     bool has_bias) {
  const std::vector<Tensor> parts = workspace.chunk(5, 1);
  const Tensor &reset = parts[0], &update = parts[1], &fresh = parts[2], &hx = parts[3];
  const Tensor& hidden = parts[4];
  const Tensor grad_update = grad_hy.mul(hx.sub(fresh)).mul(update).mul(complement(update));
  const Tensor grad_fresh = grad_hy.mul(complement(update)).mul(complement(fresh.mul(fresh)));
  const Tensor grad_reset = grad_fresh.mul(hidden).mul(reset).mul(complement(reset));
  const Tensor grad_input = at::stack({grad_reset, grad_update, grad_fresh}, 1).flatten(1);
  const Tensor grad_hidden =
      at::stack({grad_reset, grad_update, grad_fresh.mul(reset)}, 1).flatten(1);
  return {grad_input, grad_hidden, grad_hy.mul(update), has_bias ? grad_input.sum(0) : Tensor(),
          has_bias ? grad_hidden.sum(0) : Tensor()};
}

// ---- Softmax of half precision with a result in float32, which CUDA has as one kernel.

template <Tensor (*Softmax)(const Tensor&, int64_t, bool)>
Tensor softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  return Softmax(half_to_float ? self.to(c10::kFloat) : self, dim, false);
}

template <Tensor (*Backward)(const Tensor&, const Tensor&, int64_t, c10::ScalarType)>
Tensor softmax_backward(const Tensor& grad_output, const Tensor& output, int64_t dim,
                        c10::ScalarType input_dtype) {
  return Backward(grad_output, output, dim, grad_output.scalar_type()).to(input_dtype);
}

// ---- Products with a wider result.

Tensor mm_dtype(const Tensor& self, const Tensor& other, c10::ScalarType dtype) {
  return at::mm(self.to(dtype), other.to(dtype));
}

Tensor bmm_dtype(const Tensor& self, const Tensor& other, c10::ScalarType dtype) {
  return at::bmm(self.to(dtype), other.to(dtype));
}

Tensor addmm_dtype(const Tensor& self, const Tensor& mat1, const Tensor& mat2,
                   c10::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::addmm(self.to(dtype), mat1.to(dtype), mat2.to(dtype), beta, alpha);
}

Tensor baddbmm_dtype(const Tensor& self, const Tensor& batch1, const Tensor& batch2,
                     c10::ScalarType dtype, const at::Scalar& beta, const at::Scalar& alpha) {
  return at::baddbmm(self.to(dtype), batch1.to(dtype), batch2.to(dtype), beta, alpha);
}

template <class Function>
KernelFunction boxed(Function* function) {
  return KernelFunction::makeFromUnboxedRuntimeFunction(function);
}

const std::unordered_map<std::string, KernelFunction>& substitutes() {
  static const auto* table = new std::unordered_map<std::string, KernelFunction>{
      {"aten::native_dropout", boxed(&native_dropout)},
      {"aten::_fused_dropout", boxed(&fused_dropout)},
      {"aten::_masked_scale", boxed(&masked_scale)},
      {"aten::cudnn_convolution", boxed(&cudnn_convolution)},
      {"aten::cudnn_convolution_transpose", boxed(&cudnn_convolution_transpose)},
      {"aten::cudnn_convolution_relu", boxed(&cudnn_convolution_relu)},
      {"aten::cudnn_batch_norm", boxed(&cudnn_batch_norm)},
      {"aten::cudnn_batch_norm_backward", boxed(&cudnn_batch_norm_backward)},
      {"aten::_thnn_fused_lstm_cell", boxed(&lstm_cell)},
      {"aten::_thnn_fused_lstm_cell_backward_impl", boxed(&lstm_cell_backward)},
      {"aten::_thnn_fused_gru_cell", boxed(&gru_cell)},
      {"aten::_thnn_fused_gru_cell_backward", boxed(&gru_cell_backward)},
      {"aten::_softmax", boxed(&softmax<&at::_softmax>)},
      {"aten::_log_softmax", boxed(&softmax<&at::_log_softmax>)},
      {"aten::_softmax_backward_data", boxed(&softmax_backward<&at::_softmax_backward_data>)},
      {"aten::_log_softmax_backward_data",
       boxed(&softmax_backward<&at::_log_softmax_backward_data>)},
      {"aten::mm.dtype", boxed(&mm_dtype)},
      {"aten::bmm.dtype", boxed(&bmm_dtype)},
      {"aten::addmm.dtype", boxed(&addmm_dtype)},
      {"aten::baddbmm.dtype", boxed(&baddbmm_dtype)},
  };
  return *table;
}

}  // namespace

const KernelFunction* find_substitute(const std::string& name) {
  const auto found = substitutes().find(name);
  return found == substitutes().end() ? nullptr : &found->second;
}

bool substitute_draws_random(const std::string& name) {
  return name == "aten::native_dropout";
}

c10::ArrayRef<const char*> fused_operators() {
  static constexpr std::array kNames{"convolution", "_convolution", "convolution_backward"};
  return kNames;
}

CurrentGenerator::CurrentGenerator(at::Generator generator) {
  t_generator = std::move(generator);
}

CurrentGenerator::~CurrentGenerator() {
  t_generator = at::Generator();
}

}  // namespace residency::simcuda
