#include "csrc/simcuda/operators/operator_traits.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <unordered_map>
#include <utility>

#include <ATen/core/enum_tag.h>

#include "csrc/simcuda/operators/shape_inference.h"
#include "csrc/simcuda/operators/substitutes.h"

namespace residency::simcuda {
namespace {

bool is_tensor(const c10::Type& type) {
  return type.kind() == c10::TypeKind::TensorType;
}

bool is_optional_tensor(const c10::Type& type) {
  return type.kind() == c10::TypeKind::OptionalType &&
         is_tensor(*type.castRaw<c10::OptionalType>()->getElementType());
}

ArgumentKind kind_of(const c10::Type& type) {
  if (is_tensor(type) || is_optional_tensor(type)) {
    return ArgumentKind::kTensor;
  }
  const c10::Type* inner = &type;
  if (const auto* optional = type.castRaw<c10::OptionalType>()) {
    inner = optional->getElementType().get();
  }
  if (const auto* list = inner->castRaw<c10::ListType>()) {
    const c10::Type& element = *list->getElementType();
    if (is_tensor(element)) {
      return ArgumentKind::kTensorList;
    }
    return is_optional_tensor(element) ? ArgumentKind::kOptionalTensorList : ArgumentKind::kOther;
  }
  switch (inner->kind()) {
    case c10::TypeKind::GeneratorType: return ArgumentKind::kGenerator;
    case c10::TypeKind::NumberType:
    case c10::TypeKind::FloatType: return ArgumentKind::kNumber;
    default: return ArgumentKind::kOther;
  }
}

// All overloads by base name; asked of the dispatcher once, as it only lists all of them.
const std::vector<c10::OperatorName>& overloads_of(const std::string& base_name) {
  static const auto* by_name = [] {
    auto* map = new std::unordered_map<std::string, std::vector<c10::OperatorName>>;
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
      (*map)[name.name].push_back(name);
    }
    return map;
  }();
  return by_name->at(base_name);
}

// Whether `candidate` takes what `schema` takes and then one out= tensor for each result.
bool is_out_form(const c10::FunctionSchema& candidate, const c10::FunctionSchema& schema) {
  const size_t count = schema.arguments().size();
  if (candidate.arguments().size() != count + schema.returns().size()) {
    return false;
  }
  for (size_t i = 0; i < count; ++i) {
    const c10::Argument& ours = schema.arguments()[i];
    const c10::Argument& theirs = candidate.arguments()[i];
    if (ours.name() != theirs.name() || *ours.type() != *theirs.type()) {
      return false;
    }
  }
  for (size_t i = count; i < candidate.arguments().size(); ++i) {
    const c10::Argument& argument = candidate.arguments()[i];
    if (!argument.is_out() || !is_tensor(*argument.type())) {
      return false;
    }
  }
  return true;
}

std::optional<c10::OperatorHandle> find_out_variant(const c10::FunctionSchema& schema) {
  // Those of the whole tensor's extremes take an empty one without a word.
  if (schema.name() == "aten::max" || schema.name() == "aten::min") {
    return std::nullopt;
  }
  // The losses' out= forms resize the output on their way to its mean or sum.
  for (const c10::Argument& argument : schema.arguments()) {
    if (argument.name() == "reduction") {
      return std::nullopt;
    }
  }
  for (const auto& name : overloads_of(schema.name())) {
    const auto candidate = c10::Dispatcher::singleton().findSchema(name);
    // Without a CPU kernel of its own, the out= form is the functional one and a copy.
    if (candidate && candidate->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        is_out_form(candidate->schema(), schema)) {
      return candidate;
    }
  }
  return std::nullopt;
}

// The names that torchgen gives the wrappers of structured kernels and of others differ.
std::string wrapper_name_of(const c10::FunctionSchema& schema, bool structured) {
  const std::string base = schema.name().substr(std::string_view("aten::").size());
  const std::string& overload = schema.overload_name();
  const bool is_out = !schema.arguments().empty() && schema.arguments().back().is_out();
  const std::string function = base + (is_out ? "_out" : "");
  if (structured) {
    return "wrapper_CUDA_" + function + (overload.empty() ? "" : "_" + overload);
  }
  return "wrapper_CUDA_" + overload + "_" + function;
}

bool contains_any(std::string_view text, std::initializer_list<std::string_view> words) {
  for (std::string_view word : words) {
    if (text.find(word) != std::string_view::npos) {
      return true;
    }
  }
  return false;
}

}  // namespace

OperatorTraits::OperatorTraits(const c10::OperatorHandle& op)
    : name(c10::toString(op.operator_name())) {
  const c10::FunctionSchema& schema = op.schema();
  const std::string_view plain = std::string_view(name).substr(std::string_view("aten::").size());
  const OperatorFacts facts = find_operator_facts(plain);
  check = facts.check;
  wrapper_name = wrapper_name_of(schema, facts.structured);
  substitute = find_substitute(name);
  shape_inference = find_shape_inference(plain);
  cost = find_cost_formula(plain);
  is_foreach = plain.starts_with("_foreach_");
  takes_host_scalars = plain.starts_with("where") || plain.starts_with("_fused_");
  shaped_by_numbers = contains_any(plain, {"range", "linspace", "logspace"});
  draws_random = substitute_draws_random(name);

  for (const c10::Argument& argument : schema.arguments()) {
    const ArgumentKind kind = kind_of(*argument.type());
    arguments.push_back({kind, argument.is_out()});
    draws_random = draws_random || kind == ArgumentKind::kGenerator;
  }

  synchronous = op.hasTag(at::Tag::data_dependent_output) ||
                (op.hasTag(at::Tag::dynamic_output_shape) && !plain.starts_with("index.") &&
                 !plain.starts_with("_ctc_loss"));
  bool functional = !schema.returns().empty();
  for (const c10::Argument& result : schema.returns()) {
    ReturnTraits traits;
    const ArgumentKind kind = kind_of(*result.type());
    traits.is_list = kind == ArgumentKind::kTensorList;
    if (kind != ArgumentKind::kTensor && kind != ArgumentKind::kTensorList) {
      synchronous = true;
    }
    if (const c10::AliasInfo* alias = result.alias_info()) {
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const c10::AliasInfo* other = schema.arguments()[i].alias_info();
        if (other != nullptr && *other == *alias) {
          traits.argument = i;
        }
      }
    }
    functional = functional && !traits.is_list && !traits.argument;
    returns.push_back(traits);
  }
  const auto num_tensors =
      std::count_if(arguments.begin(), arguments.end(), [](const ArgumentTraits& argument) {
        return argument.kind != ArgumentKind::kOther && argument.kind != ArgumentKind::kNumber &&
               argument.kind != ArgumentKind::kGenerator;
      });
  keeps_shape = returns.empty() ||
                (num_tensors == 1 && returns.size() == 1 && returns[0].argument == size_t{0} &&
                 arguments[0].kind == ArgumentKind::kTensor && !arguments[0].is_out);
  if (functional) {
    out_variant = find_out_variant(schema);
  }
}

}  // namespace residency::simcuda
