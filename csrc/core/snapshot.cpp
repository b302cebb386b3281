#include "residency/core/snapshot.h"

#include <algorithm>

#include <fmt/format.h>

#include "table.h"

namespace residency {

std::string_view to_string(MaterializationState state) {
  return state == MaterializationState::kArriving ? "arriving" : "ready";
}

const ValueSnapshot* Snapshot::find(const Handle& handle) const noexcept {
  const auto found = std::ranges::find(values, handle, &ValueSnapshot::handle);
  return found == values.end() ? nullptr : &*found;
}

const LocationSnapshot* Snapshot::find(Location location) const noexcept {
  const auto found = std::ranges::find(locations, location, &LocationSnapshot::location);
  return found == locations.end() ? nullptr : &*found;
}

std::string to_string(const Snapshot& snapshot) {
  std::string text = fmt::format(
      "manager {} at state version {}: {} value(s), {} lease(s), {} hold(s), {} scope(s)\n",
      static_cast<std::uint32_t>(snapshot.manager), snapshot.state_version, snapshot.values.size(),
      snapshot.num_leases, snapshot.num_holds, snapshot.num_scopes);
  Table locations({"location", "budget B", "used B", "reserved B", "retiring B", "arriving B",
                   "escaped B", "peak used B", "peak charged B"});
  for (const LocationSnapshot& location : snapshot.locations) {
    locations.add(
        {to_string(location.location),
         location.budget ? std::to_string(location.budget->count()) : "none",
         std::to_string(location.used.count()), std::to_string(location.reserved.count()),
         std::to_string(location.retiring.count()), std::to_string(location.arriving.count()),
         std::to_string(location.escaped.count()), std::to_string(location.peak_used.count()),
         std::to_string(location.peak_charged.count())});
  }
  text += locations.text();
  Table values({"value", "storage B", "mode", "where"});
  for (const ValueSnapshot& value : snapshot.values) {
    std::string where = value.discarded ? "discarded" : "";
    for (const MaterializationSnapshot& each : value.materializations) {
      where += fmt::format("{}{} ({}{}{})", where.empty() ? "" : ", ", to_string(each.location),
                           to_string(each.state), each.stale ? ", stale" : "",
                           each.num_leases + each.num_holds > 0 ? ", protected" : "");
    }
    values.add({to_string(value.handle), std::to_string(value.spec.storage_bytes.count()),
                std::string(to_string(value.spec.mode)), where.empty() ? "not loaded" : where});
  }
  return text + values.text();
}

}  // namespace residency
