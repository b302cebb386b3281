#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "residency/core/action.h"
#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/location.h"

namespace residency {

/// Headroom at a location, held for a scope. It allocates nothing and places nothing.
struct MemoryReservation {
  Location location;
  Bytes nbytes;       ///< zero is allowed
  std::string label;  ///< not empty
  friend bool operator==(const MemoryReservation&, const MemoryReservation&) = default;
};

using ActionList = std::vector<ResidencyAction>;

/// What a plan is made of, in the order in which it is carried out.
struct PlanParts {
  std::string name;  ///< not empty
  ActionList reclaim = {};
  std::vector<MemoryReservation> reservations = {};
  ActionList enter = {};
  ActionList exit = {};
};

/// An immutable value that says what a scope does:
/// reclaim -> reservations -> enter -> body -> exit -> reservations released.
///
/// Nothing of it can be changed after construction; copies are cheap to compare and hash. Equality
/// is by content. It can be written as text and as JSON and read back; JSON with an unknown field,
/// action or version is refused.
class RESIDENCY_API ResidencyPlan {
 public:
  /// Throws `std::invalid_argument` when the name, or the label of a reservation, is empty.
  explicit ResidencyPlan(PlanParts parts);

  [[nodiscard]] const std::string& name() const noexcept { return name_; }
  [[nodiscard]] const ActionList& reclaim() const noexcept { return reclaim_; }
  [[nodiscard]] const std::vector<MemoryReservation>& reservations() const noexcept {
    return reservations_;
  }
  [[nodiscard]] const ActionList& enter() const noexcept { return enter_; }
  [[nodiscard]] const ActionList& exit() const noexcept { return exit_; }

  friend bool operator==(const ResidencyPlan&, const ResidencyPlan&) = default;
  [[nodiscard]] std::size_t hash_code() const noexcept;

  /// Compact JSON (`{"version":1,"name":...}`). Handle ids are only meaningful in their process.
  [[nodiscard]] std::string to_json() const;
  /// Throws `std::invalid_argument` naming the place and what was expected there.
  [[nodiscard]] static ResidencyPlan from_json(std::string_view text);

 private:
  std::string name_;
  ActionList reclaim_;
  std::vector<MemoryReservation> reservations_;
  ActionList enter_;
  ActionList exit_;
};

/// Several lines in order of execution, for people.
[[nodiscard]] RESIDENCY_API std::string to_string(const ResidencyPlan& plan);

}  // namespace residency

template <>
struct std::hash<residency::ResidencyPlan> {
  std::size_t operator()(const residency::ResidencyPlan& plan) const noexcept {
    return plan.hash_code();
  }
};
