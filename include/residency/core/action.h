#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <variant>

#include "residency/core/export.h"
#include "residency/core/handle.h"
#include "residency/core/location.h"

namespace residency {

/// Puts a materialization at the location and keeps the others. (To copy is the same word.)
struct EnsureResident {
  Handle handle;
  Location location;
  friend bool operator==(const EnsureResident&, const EnsureResident&) = default;
};

/// Materializes at `to`, then gives up exactly one source: `from_location` when given, otherwise
/// the one with the cheapest path.
struct MoveResident {
  Handle handle;
  Location to;
  std::optional<Location> from_location = std::nullopt;
  friend bool operator==(const MoveResident&, const MoveResident&) = default;
};

/// Gives up the materialization at the location.
struct DropResident {
  Handle handle;
  Location location;
  friend bool operator==(const DropResident&, const DropResident&) = default;
};

/// Ends the value everywhere. Its handle is refused from then on.
struct DiscardValue {
  Handle handle;
  friend bool operator==(const DiscardValue&, const DiscardValue&) = default;
};

/// The closed union of the actions. Visit it with `Overloaded`, without a generic branch, so that
/// a new alternative breaks the build instead of the behaviour.
using ResidencyAction = std::variant<EnsureResident, MoveResident, DropResident, DiscardValue>;

template <class... Visitors>
struct Overloaded : Visitors... {
  using Visitors::operator()...;
};
// Clang deduces this by itself from version 17 on only.
template <class... Visitors>
Overloaded(Visitors...) -> Overloaded<Visitors...>;

/// What was done to a value: the actions, in the order of the union, and `take`.
enum class ActionKind : std::uint8_t { kEnsure, kMove, kDrop, kDiscard, kTake };
[[nodiscard]] RESIDENCY_API std::string_view to_string(ActionKind kind);
[[nodiscard]] inline ActionKind kind_of(const ResidencyAction& action) noexcept {
  static_assert(std::variant_size_v<ResidencyAction> == 4, "ActionKind lists the alternatives");
  return static_cast<ActionKind>(action.index());
}
[[nodiscard]] inline const Handle& handle_of(const ResidencyAction& action) noexcept {
  return std::visit([](const auto& alternative) -> const Handle& { return alternative.handle; },
                    action);
}

/// `move tensors#1:42 to cuda:0 from pinned-host`.
[[nodiscard]] RESIDENCY_API std::string to_string(const ResidencyAction& action);

}  // namespace residency

template <>
struct std::hash<residency::ResidencyAction> {
  RESIDENCY_API std::size_t operator()(const residency::ResidencyAction& action) const noexcept;
};
