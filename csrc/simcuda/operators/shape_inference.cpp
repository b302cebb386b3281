#include "csrc/simcuda/operators/shape_inference.h"

#include <unordered_map>

#include <ATen/MetaFunctions.h>
#include <ATen/Operators.h>

#include "csrc/simcuda/operators/unstructured_shapes.h"

namespace residency::simcuda {
namespace {

template <class Schema>
c10::KernelFunction boxed(Schema* function) {
  return c10::KernelFunction::makeFromUnboxedRuntimeFunction(function);
}

ShapeTable* make_table() {
  auto* table = new ShapeTable;
// Structured operators: their CUDA kernels use these functions too. The cast picks the overload of
// the operator's own type.
#define RESIDENCY_META(operator_, function, name) \
  table->emplace(name, boxed(static_cast<at::_ops::operator_::schema*>(&at::meta::function)));
// Written at build time by generate_facts.py.
#include "structured_meta.inc"
#undef RESIDENCY_META
  add_unstructured_shapes(*table);
  return table;
}

}  // namespace

const c10::KernelFunction* find_shape_inference(std::string_view name) {
  static const ShapeTable* const table = make_table();
  const auto found = table->find(name);
  return found == table->end() ? nullptr : &found->second;
}

}  // namespace residency::simcuda
