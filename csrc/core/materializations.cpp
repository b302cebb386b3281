#include <algorithm>
#include <utility>

#include "manager_state.h"

namespace residency {

/// Returns where it stands until it is detached. Its ranges are registered.
Materialization* ManagerState::link(ValueRecord& record,
                                    MaterializationPtr materialization) noexcept {
  if (Materialization& slot = record.slot_for_first; !slot.in_slot) {  // there is room by now
    slot = std::move(*materialization);
    slot.in_slot = true;
    materialization.reset(&slot);
  }
  // In the order of locations, so that equal states look equal.
  MaterializationPtr* place = &record.first;
  while (*place != nullptr && (*place)->location < materialization->location) {
    place = &(*place)->next;
  }
  materialization->next = std::move(*place);
  *place = std::move(materialization);
  return place->get();
}

ManagerState::Leave ManagerState::leave_of(const Materialization& materialization, bool escapes) {
  Leave leave;
  leave.ranges = materialization.block->address_ranges();
  if (materialization.in_slot) {
    leave.outside.reset(new Materialization);
  }
  if (escapes) {
    leave.escaped.emplace_back().ranges = leave.ranges;
  }
  if (const auto& fences = materialization.fences; fences) {
    // What is there, the arrival, and the copy that is about to read it.
    const std::size_t most = 2 + fences->last_uses.size() + fences->readers.size();
    leave.after.reserve(most);
    leave.retiring.emplace_back().until.reserve(most);
  }
  return leave;
}

MaterializationPtr ManagerState::detach(ValueRecord& record, Location location,
                                        Leave& leave) noexcept {
  MaterializationPtr* place = &record.first;
  while (*place != nullptr && (*place)->location != location) {
    place = &(*place)->next;
  }
  if (*place == nullptr) {
    return nullptr;
  }
  MaterializationPtr detached = std::move(*place);
  *place = std::move(detached->next);
  if (detached->in_slot) {  // which is the record's, and what is detached outlives that
    *leave.outside = std::move(*detached);
    leave.outside->in_slot = false;
    detached = std::move(leave.outside);
  }
  unregister_ranges(leave.ranges);
  return detached;
}

/// All of them or none.
void ManagerState::register_ranges(const AddressRanges& ranges) {
  range_nodes_.make_room(ranges.size());
  for (const AddressRange& range : ranges) {
    const bool is_before_next =
        last_range_begin_ <= range.begin &&
        (next_range_ == managed_ranges_.end() || range.begin <= next_range_->first);
    const auto registered = managed_ranges_.emplace_hint(next_range_, range.begin, range.end);
    // What was made one after the other mostly lies so: then this costs no search.
    if (!is_before_next) {
      next_range_ = std::next(registered);
    }
    last_range_begin_ = range.begin;
  }
}

void ManagerState::unregister_ranges(const AddressRanges& ranges) noexcept {
  for (const AddressRange& range : ranges) {
    const auto [first, last] = managed_ranges_.equal_range(range.begin);
    const auto found =
        std::find_if(first, last, [&](const auto& each) { return each.second == range.end; });
    const bool was_next = found == next_range_;
    const auto after = managed_ranges_.erase(found);
    if (was_next) {
      next_range_ = after;
    }
  }
}

/// Whether memory that is given up behind the fences can be had at once: not what a thread is at.
bool ManagerState::is_reused_at_once(Location location, std::span<const FencePtr> after) const {
  return std::ranges::all_of(after, [](const FencePtr& each) { return each->on_stream(); }) &&
         (after.empty() || backend_->reuses_in_device_order(location));
}

/// There is room for the release.
void ManagerState::give_up(ValueRecord& record, MaterializationPtr given_up, Leave& leave,
                           FencePtr escape_watch, std::vector<Release>& releases) noexcept {
  std::vector<FencePtr>& after = leave.after;
  given_up->for_each_pending([&](const FencePtr& fence) { after.push_back(fence); });
  if (escape_watch) {
    note_escaped(values_.handle_of(record), *given_up, std::move(escape_watch), leave);
  } else {
    ledger_.account(given_up->location).used -= given_up->charge;
    if (!after.empty()) {
      // Memory that is reused in device order is free already, but something is still in flight,
      // which `synchronize` waits for.
      const Bytes bytes = is_reused_at_once(given_up->location, after) ? Bytes() : given_up->charge;
      note_retiring(given_up->location, bytes, after, leave);
    }
  }
  releases.push_back({std::move(given_up->block), std::move(after)});
  // The next that is made often stands in the record, and has fences too.
  if (Materialization& slot = record.slot_for_first; !slot.in_slot && given_up->fences) {
    slot.fences = std::move(given_up->fences);
    slot.fences->clear();
  }
}

/// Its bytes stay in use until nobody shares them. There is room in `leave`.
void ManagerState::note_escaped(const Handle& handle, const Materialization& given_up,
                                FencePtr until, Leave& leave) noexcept {
  ledger_.account(given_up.location).escaped += given_up.charge;
  Escaped& escaped = leave.escaped.front();
  escaped.handle = handle;
  escaped.location = given_up.location;
  escaped.bytes = given_up.charge;
  escaped.until = std::move(until);
  escaped_.splice(escaped_.end(), leave.escaped);
}

void ManagerState::note_retiring(Location location, Bytes bytes, const std::vector<FencePtr>& until,
                                 Leave& leave) noexcept {
  ledger_.account(location).retiring += bytes;
  Retiring& retiring = leave.retiring.front();
  retiring.location = location;
  retiring.bytes = bytes;
  retiring.until = until;  // there is room
  retiring_.splice(retiring_.end(), leave.retiring);
}

/// The escaped memory that is exactly this, if any.
std::list<ManagerState::Escaped>::iterator ManagerState::find_escaped(Location at,
                                                                      const AddressRanges& ranges) {
  return ranges.empty() ? escaped_.end() : std::ranges::find_if(escaped_, [&](const Escaped& each) {
    return each.location == at && each.ranges == ranges;
  });
}

/// One entry for each materialization, in their order; null where nobody shares it.
std::vector<FencePtr> ManagerState::watch_escapes(Lock& lock, const ValueRecord& record) {
  std::vector<FencePtr> watches;
  const Unlocked unlocked(*this, lock);
  for (const Materialization* each = record.first.get(); each != nullptr; each = each->next.get()) {
    watches.push_back(backend_->watch_escape(*each->block));
  }
  return watches;
}

/// All that giving up every materialization and ending the value needs memory for: one entry for
/// each, in their order.
std::vector<ManagerState::Leave> ManagerState::prepare_end(const ValueRecord& record,
                                                           std::span<const FencePtr> watches,
                                                           Trash& trash,
                                                           std::vector<Release>& releases) {
  std::vector<Leave> leaves;
  leaves.reserve(watches.size());
  for (const Materialization* each = record.first.get(); each != nullptr; each = each->next.get()) {
    leaves.push_back(leave_of(*each, watches[leaves.size()] != nullptr));
  }
  make_room_in(releases, watches.size());
  trash.make_room(2, watches.size());
  trace_.make_room();
  return leaves;
}

void ManagerState::end_value(ValueRecord& record, Trash& trash) noexcept {
  record.discarded = true;
  trash.objects.push_back(std::move(record.source));
  trash.objects.push_back(std::move(record.spec.layout));
  record.source = nullptr;
  record.spec.layout = nullptr;
}

void ManagerState::mark_others_stale(ValueRecord& record, const Materialization* good) {
  ++record.content_epoch;
  record.dirty = record.source != nullptr;
  for (Materialization* each = record.first.get(); each != nullptr; each = each->next.get()) {
    each->stale = each != good;
  }
}

void ManagerState::run_releases(Lock& lock, std::vector<Release>& releases) {
  if (releases.empty()) {
    return;
  }
  const Unlocked unlocked(*this, lock);
  for (Release& each : releases) {
    backend_->release(std::move(each.block), std::move(each.after));
  }
  releases.clear();
}

}  // namespace residency
