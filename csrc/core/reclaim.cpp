#include "residency/core/reclaim.h"

#include <algorithm>

#include "manager_state.h"
#include "planner.h"

namespace residency {

/// How a value could leave without waiting, if it can.
std::optional<ManagerState::Leaving> ManagerState::way_out(const ValueRecord& record,
                                                           Location from) {
  const Materialization* leaving = record.find(from);
  if (leaving == nullptr || record.busy || record.num_pins != 0 || leaving->is_protected() ||
      backend_->is_shared(*leaving->block)) {
    return std::nullopt;
  }
  const Handle handle = values_.handle_of(record);
  const auto can_be = [&](const ResidencyAction& action) {
    const Verdict verdict = plan_action(present_, action);
    return verdict.feasible() && !verdict.waits;
  };
  const ResidencyAction drop = DropResident{handle, from};
  if (can_be(drop)) {
    bool is_elsewhere = leaving->stale;
    for (const Materialization* each = record.first.get(); each != nullptr;
         each = each->next.get()) {
      is_elsewhere |= each != leaving && !each->stale;
    }
    if (is_elsewhere) {
      return Leaving{drop, Bytes()};
    }
    // Its source has to make it again.
    return options_.reclaim == ReclaimMode::kPolicy
               ? std::optional(Leaving{drop, record.spec.logical_bytes})
               : std::nullopt;
  }
  if (options_.reclaim != ReclaimMode::kPolicy) {
    return std::nullopt;
  }
  std::vector<Location> places = {Location::pinned_host(), Location::pageable_host()};
  for (const DiskTier& disk : options_.disks) {
    places.push_back(Location::disk(disk.name));
  }
  for (const Location place : places) {
    if (const ResidencyAction move = MoveResident{handle, place, from}; can_be(move)) {
      return Leaving{move, record.spec.logical_bytes};
    }
  }
  return std::nullopt;
}

std::vector<Evictable> ManagerState::evictable(Location from) {
  std::vector<Evictable> found;
  Trash trash;
  const Lock lock(mutex_);
  if (closed()) {
    return found;
  }
  settle(trash);
  values_.for_each_by_registration([&](const ValueRecord& record) {
    if (const std::optional<Leaving> leaving = way_out(record, from); leaving.has_value()) {
      found.push_back(
          {values_.handle_of(record), record.find(from)->block->address_ranges(), leaving->cost});
    }
  });
  return found;
}

bool ManagerState::evict(const Handle& handle, Location from, const std::string& why) noexcept {
  try {
    std::optional<Leaving> leaving;
    {
      const Lock lock(mutex_);
      if (const ValueRecord* record = closed() ? nullptr : values_.find(handle).record;
          record != nullptr) {
        leaving = way_out(*record, from);
      }
    }
    if (!leaving.has_value()) {
      return false;
    }
    const ActionReport report = perform(leaving->action, {.may_block = false}, Phase::kReclaim,
                                        std::make_shared<const std::string>(why));
    if (can_fail_later(report.record().path)) {  // its memory stays until it has arrived
      report.wait();
    }
    return true;
  } catch (...) {
    return false;  // the allocator's own error is what there is to tell
  }
}

}  // namespace residency
