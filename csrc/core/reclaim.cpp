#include "residency/core/reclaim.h"

#include <algorithm>
#include <functional>

#include "manager_state.h"
#include "planner.h"

namespace residency {

Reclaimer::~Reclaimer() = default;

/// How a value that is there could leave without waiting, or why it cannot.
ManagerState::Leaving ManagerState::way_out(const ValueRecord& record,
                                            const Materialization& leaving) {
  if (options_.reclaim == ReclaimMode::kOff) {
    return {.why_not = "ManagerOptions::reclaim is off"};
  }
  if (leaving.num_leases != 0) {
    return {.why_not = "leased"};
  }
  if (leaving.num_holds != 0) {
    return {.why_not = "held"};
  }
  if (record.busy || record.num_pins != 0) {
    return {.why_not = "another call is at it"};
  }
  if (backend_->is_shared(*leaving.block)) {
    return {.why_not = "somebody else keeps its memory"};
  }
  const Handle handle = values_.handle_of(record);
  const auto can_be = [&](const ResidencyAction& action) {
    const Verdict verdict = plan_action(present_, action);
    return verdict.feasible() && !verdict.waits;
  };
  const bool may_cost = options_.reclaim == ReclaimMode::kPolicy;
  if (const ResidencyAction drop = DropResident{handle, leaving.location}; can_be(drop)) {
    bool is_elsewhere = leaving.stale;
    for (const Materialization* each = record.first.get(); each != nullptr;
         each = each->next.get()) {
      is_elsewhere |= each != &leaving && is_good(*each);
    }
    if (is_elsewhere) {
      return {.action = drop};
    }
    if (may_cost) {  // its source makes it again
      return {.action = drop, .cost = record.spec.logical_bytes};
    }
  }
  if (!may_cost) {
    return {.why_not = "the only copy"};
  }
  std::vector<Location> places = {Location::pinned_host(), Location::pageable_host()};
  for (const DiskTier& disk : options_.disks) {
    places.push_back(Location::disk(disk.name));
  }
  for (const Location place : places) {
    if (const ResidencyAction move = MoveResident{handle, place, leaving.location}; can_be(move)) {
      return {.action = move, .cost = record.spec.logical_bytes};
    }
  }
  return {.why_not = "no room for it elsewhere, or it would have to wait"};
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
    if (const Materialization* there = record.find(from); there != nullptr) {
      if (const Leaving leaving = way_out(record, *there); leaving.action.has_value()) {
        found.push_back({values_.handle_of(record), there->block->address_ranges(), leaving.cost});
      }
    }
  });
  return found;
}

std::vector<Holder> ManagerState::holders(Location at) {
  std::vector<Holder> found;
  const Lock lock(mutex_);
  if (closed()) {
    return found;
  }
  values_.for_each_by_registration([&](const ValueRecord& record) {
    if (const Materialization* there = record.find(at); there != nullptr) {
      found.push_back(
          {values_.handle_of(record), there->charge, std::string(way_out(record, *there).why_not)});
    }
  });
  std::ranges::stable_sort(found, std::ranges::greater(), &Holder::charge);
  return found;
}

bool ManagerState::evict(const Handle& handle, Location from, const std::string& why) noexcept {
  try {
    std::optional<ResidencyAction> action;
    {
      Trash trash;
      const Lock lock(mutex_);
      settle(trash);
      const ValueRecord* record = closed() ? nullptr : values_.find(handle).record;
      const Materialization* there = record != nullptr ? record->find(from) : nullptr;
      if (there != nullptr) {
        action = way_out(*record, *there).action;
      }
    }
    if (!action.has_value()) {
      return false;
    }
    const ActionReport report = perform(*action, {.may_block = false}, Phase::kReclaim,
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
