#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "residency/core/action.h"
#include "residency/core/backend.h"
#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/location.h"
#include "residency/core/plan.h"
#include "residency/core/report.h"
#include "residency/core/verdict.h"

namespace residency {

/// The verdict on one action of a plan, given that all actions before it were carried out.
struct ExplainedAction {
  Phase phase = Phase::kExecute;
  std::uint32_t index = 0;  ///< in its phase
  ResidencyAction action;
  Verdict verdict;
};

/// The verdict on one reservation of a plan, or on the one named `staging` that the manager makes
/// of itself (and keeps): the page-locked buffers of the first staged copy of a device.
struct ExplainedReservation {
  MemoryReservation reservation;
  bool feasible = true;
  Reason reason = Reason::kReleased;  ///< meaningful when not feasible
  Shortfall shortfall;
};

/// What the plan will do to one location. Peaks exclude retiring bytes, whose end depends on time.
struct PredictedLocation {
  Location location;
  std::optional<Bytes> budget;
  Bytes used_before;
  Bytes used_after;
  Bytes escaped_after;  ///< part of used: memory that others keep alive
  Bytes peak_used;
  Bytes peak_charged;  ///< used + reserved
  /// Where memory is taken in segments (a device's arena, page-locked slabs with the buffers of
  /// staged copies): what PyTorch's caching allocator counts as allocated for the library, and what
  /// is page-locked. Exact where nothing else changes it meanwhile and no source makes its value
  /// there; what a worker's transfer of this plan reads counts to the end of the plan.
  std::optional<SegmentBytes> segments;
};

/// The dry run of a plan or of a list of actions: an immutable value without tensors.
struct Explanation {
  std::string plan;
  std::uint64_t state_version = 0;
  bool feasible = true;
  std::vector<ExplainedAction> actions;  ///< ends with the first that is infeasible
  std::vector<ExplainedReservation> reservations;
  std::vector<PredictedLocation> locations;
  /// Empty when feasible; otherwise the first reason, in one sentence.
  std::string infeasible_because;

  /// Bytes that would travel.
  [[nodiscard]] RESIDENCY_API Bytes moved_bytes() const;
  /// The predicted location, or null when the plan does not touch it.
  [[nodiscard]] RESIDENCY_API const PredictedLocation* find(Location location) const noexcept;
};

/// Two tables for people: actions, then locations.
[[nodiscard]] RESIDENCY_API std::string to_string(const Explanation& explanation);

}  // namespace residency
