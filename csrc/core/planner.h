#pragma once

#include <optional>

#include "residency/core/action.h"
#include "residency/core/backend.h"
#include "residency/core/verdict.h"
#include "world.h"

namespace residency {

/// Whether the device makes such a copy, and not a thread.
[[nodiscard]] inline bool goes_on_stream(const Backend& backend, Location from, Location to) {
  return backend.reuses_in_device_order(from) && backend.reuses_in_device_order(to);
}

/// Turns an action and a state into transitions with their charges, or into the reason why not.
///
/// The one place where that is decided: `explain` and preflight run it over a simulated world,
/// `execute` and direct calls over the state itself. It changes nothing and calls only the pure
/// queries of the backend. `Verdict::waits` says that the host must wait for fences first, after
/// which the caller plans again.
[[nodiscard]] Verdict plan_action(World& world, const ResidencyAction& action);

/// The page-locked buffers that an action's copy goes through.
struct StagingUse {
  Location device;
  Bytes nbytes;
};
[[nodiscard]] std::optional<StagingUse> staging_use(const Backend& backend, const Verdict& verdict);

/// Whether `nbytes` can be reserved: kReleased (it fits), kOverBudget, kLocationUnavailable.
/// `waits` as above.
[[nodiscard]] Verdict plan_reservation(World& world, Location location, Bytes nbytes);

/// The good materialization that a reader takes by the link order, never `except`; null when there
/// is none. Whether an arrival has completed plays no part: explain and execute must choose alike
/// although time passes between them. Whoever reads an arrival that can still fail waits for it.
[[nodiscard]] const Residence* cheapest_source(const World& world, const ValueView& value,
                                               std::optional<Location> except);
/// The same among those that are on no disk.
[[nodiscard]] const Residence* cheapest_in_memory(const World& world, const ValueView& value);

}  // namespace residency
