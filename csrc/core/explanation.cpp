#include "residency/core/explanation.h"

#include <algorithm>

#include <fmt/format.h>

#include "table.h"

namespace residency {

Bytes Explanation::moved_bytes() const {
  Bytes sum;
  for (const ExplainedAction& action : actions) {
    sum += action.verdict.feasible() ? action.verdict.bytes : Bytes();
  }
  return sum;
}

const PredictedLocation* Explanation::find(Location location) const noexcept {
  const auto found = std::ranges::find(locations, location, &PredictedLocation::location);
  return found == locations.end() ? nullptr : &*found;
}

std::string to_string(const Explanation& explanation) {
  std::string text = fmt::format(
      "plan '{}' at state version {}: {}\n", explanation.plan, explanation.state_version,
      explanation.feasible ? "feasible" : "infeasible: " + explanation.infeasible_because);
  if (!explanation.actions.empty()) {
    Table actions({"phase", "#", "action", "bytes", "waits", "verdict"});
    for (const ExplainedAction& entry : explanation.actions) {
      const Verdict& verdict = entry.verdict;
      actions.add({std::string(to_string(entry.phase)), std::to_string(entry.index),
                   to_string(entry.action), std::to_string(verdict.bytes.count()),
                   verdict.waits ? "yes" : "-",
                   fmt::format("{}: {}",
                               verdict.feasible() ? (verdict.no_op() ? "no-op" : "ok") : "refused",
                               describe(verdict))});
    }
    text += actions.text();
  }
  if (!explanation.reservations.empty()) {
    Table reservations({"reservation", "location", "bytes", "verdict"});
    for (const ExplainedReservation& entry : explanation.reservations) {
      reservations.add({entry.reservation.label, to_string(entry.reservation.location),
                        std::to_string(entry.reservation.nbytes.count()),
                        entry.feasible ? "ok" : std::string(to_string(entry.reason))});
    }
    text += reservations.text();
  }
  if (!explanation.locations.empty()) {
    Table locations({"location", "budget B", "used before B", "used after B", "peak used B",
                     "peak charged B", "peak segments B"});
    for (const PredictedLocation& location : explanation.locations) {
      locations.add({to_string(location.location),
                     location.budget ? std::to_string(location.budget->count()) : "none",
                     std::to_string(location.used_before.count()),
                     std::to_string(location.used_after.count()),
                     std::to_string(location.peak_used.count()),
                     std::to_string(location.peak_charged.count()),
                     location.segments ? std::to_string(location.segments->peak.count()) : "-"});
    }
    text += locations.text();
  }
  return text;
}

}  // namespace residency
