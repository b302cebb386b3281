#include "csrc/simcuda/operators/operator_facts.h"

#include <algorithm>
#include <iterator>

namespace residency::simcuda {
namespace {

// Sorted by name; written at build time by generate_facts.py.
constexpr OperatorFacts kFacts[] = {
#include "operator_facts.inc"
};

}  // namespace

OperatorFacts find_operator_facts(std::string_view name) {
  const auto* found = std::lower_bound(
      std::begin(kFacts), std::end(kFacts), name,
      [](const OperatorFacts& facts, std::string_view wanted) { return facts.name < wanted; });
  if (found != std::end(kFacts) && found->name == name) {
    return *found;
  }
  return {};
}

}  // namespace residency::simcuda
