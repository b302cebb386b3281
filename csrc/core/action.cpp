#include "residency/core/action.h"

#include <fmt/format.h>

#include "hash.h"

namespace residency {

std::string_view to_string(ActionKind kind) {
  switch (kind) {
    case ActionKind::kEnsure: return "ensure";
    case ActionKind::kMove: return "move";
    case ActionKind::kDrop: return "drop";
    case ActionKind::kDiscard: return "discard";
    case ActionKind::kTake: return "take";
  }
  return {};
}

std::string to_string(const ResidencyAction& action) {
  return std::visit(
      Overloaded{
          [](const EnsureResident& ensure) {
            return fmt::format("ensure {} at {}", to_string(ensure.handle),
                               to_string(ensure.location));
          },
          [](const MoveResident& move) {
            std::string text =
                fmt::format("move {} to {}", to_string(move.handle), to_string(move.to));
            if (move.from_location) {
              text += " from " + to_string(*move.from_location);
            }
            return text;
          },
          [](const DropResident& drop) {
            return fmt::format("drop {} at {}", to_string(drop.handle), to_string(drop.location));
          },
          [](const DiscardValue& discard) {
            return fmt::format("discard {}", to_string(discard.handle));
          },
      },
      action);
}

}  // namespace residency

std::size_t std::hash<residency::ResidencyAction>::operator()(
    const residency::ResidencyAction& action) const noexcept {
  using namespace residency;
  const std::size_t target =
      std::visit(Overloaded{
                     [](const EnsureResident& ensure) { return hash_all(ensure.location); },
                     [](const MoveResident& move) { return hash_all(move.to, move.from_location); },
                     [](const DropResident& drop) { return hash_all(drop.location); },
                     [](const DiscardValue&) { return std::size_t{0}; },
                 },
                 action);
  return hash_all(action.index(), handle_of(action), target);
}
