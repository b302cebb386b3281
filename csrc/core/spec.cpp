#include "residency/core/spec.h"

namespace residency {

Layout::~Layout() = default;

std::string_view to_string(ReplicaMode mode) {
  return mode == ReplicaMode::kExclusive ? "exclusive" : "replicable";
}

std::string_view to_string(Recoverability recoverability) {
  return recoverability == Recoverability::kMustPreserve ? "must_preserve" : "reconstructible";
}

std::string_view to_string(Mutability mutability) {
  return mutability == Mutability::kImmutable ? "immutable" : "mutable";
}

}  // namespace residency
