#ifndef RESIDENCY_SIMCUDA_OPERATORS_UNSTRUCTURED_SHAPES_H
#define RESIDENCY_SIMCUDA_OPERATORS_UNSTRUCTURED_SHAPES_H

#include <string_view>
#include <unordered_map>

#include <ATen/core/boxing/KernelFunction.h>

namespace residency::simcuda {

using ShapeTable = std::unordered_map<std::string_view, c10::KernelFunction>;

/// Adds the shapes of frequent operators that are not structured.
void add_unstructured_shapes(ShapeTable& table);

}  // namespace residency::simcuda

#endif
