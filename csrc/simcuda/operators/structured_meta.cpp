#include "csrc/simcuda/operators/structured_meta.h"

#include <unordered_map>

#include <ATen/MetaFunctions.h>
#include <ATen/Operators.h>

namespace residency::simcuda {
namespace {

template <class Schema>
c10::KernelFunction boxed(Schema* function) {
  return c10::KernelFunction::makeFromUnboxedRuntimeFunction(function);
}

using Table = std::unordered_map<std::string_view, c10::KernelFunction>;

Table* make_table() {
  auto* table = new Table;
// The cast picks the overload of the operator's own type.
#define RESIDENCY_META(operator_, function, name) \
  table->emplace(name, boxed(static_cast<at::_ops::operator_::schema*>(&at::meta::function)));
// Written at build time by generate_facts.py.
#include "structured_meta.inc"
#undef RESIDENCY_META
  return table;
}

}  // namespace

const c10::KernelFunction* find_structured_meta(std::string_view name) {
  static const Table* const table = make_table();
  const auto found = table->find(name);
  return found == table->end() ? nullptr : &found->second;
}

}  // namespace residency::simcuda
