#include <stdexcept>

#include <fmt/format.h>

#include "manager_state.h"
#include "planner.h"

namespace residency {

Handle ManagerState::register_source(std::shared_ptr<Source> source, const ValueSpec& spec,
                                     Location at, ValueType type) {
  check_not_loading();
  if (!source) {
    throw std::invalid_argument("register_source: the source is null");
  }
  if (spec.recoverability != Recoverability::kReconstructible) {
    throw std::invalid_argument(
        "register_source: a value with a source is reconstructible, the spec says must_preserve");
  }
  const Lock lock(mutex_);
  check_open();
  check_available(at);
  ledger_.make_room_to_list(1);
  (void)ledger_.account(at);
  ValueRecord& record = values_.add(type);
  record.spec = spec;
  record.source = std::move(source);
  record.source_location = at;
  ledger_.list(at);
  ++version_;
  return values_.handle_of(record);
}

void ManagerState::check_not_managed(const AddressRanges& ranges) const {
  for (const AddressRange& range : ranges) {
    // The only managed range that can reach into this one from below is the last that begins
    // before its end.
    const auto after = managed_ranges_.lower_bound(range.end);
    if (after != managed_ranges_.begin() && std::prev(after)->second > range.begin) {
      throw OwnershipError(fmt::format(
          "adopt: its storage at [{:#x}, {:#x}) overlaps memory that manager {} already manages at "
          "[{:#x}, {:#x}); adopt a clone, or put both into one value",
          range.begin, range.end, static_cast<std::uint32_t>(id_), std::prev(after)->first,
          std::prev(after)->second));
    }
  }
}

/// Says what the block is and where it lies. Throws where that is not what the spec says.
MaterializationPtr ManagerState::adoptable(const BlockPtr& block, const ValueSpec& spec,
                                           FencePtr ready) {
  if (!block) {
    throw std::invalid_argument("adopt: the block is null");
  }
  if (block->logical_bytes() != spec.logical_bytes) {
    throw MaterializationError(
        fmt::format("adopt: the block has {} logical bytes, the spec says {}",
                    block->logical_bytes().count(), spec.logical_bytes.count()));
  }
  MaterializationPtr materialization(new Materialization);
  materialization->location = block->location();
  materialization->set_ready(std::move(ready));
  materialization->block = block;
  return materialization;
}

/// Its charge is on the ledger, or will be before the mutex is open.
Handle ManagerState::add_adopted(MaterializationPtr& materialization, const ValueSpec& spec,
                                 ValueType type) {
  ledger_.make_room_to_list(1);
  (void)ledger_.account(materialization->location);
  const AddressRanges ranges = materialization->block->address_ranges();
  register_ranges(ranges);
  try {
    ValueRecord& record = values_.add(type);
    record.spec = spec;
    record.spec.recoverability = Recoverability::kMustPreserve;
    ledger_.list(materialization->location);
    link(record, std::move(materialization));
    ++version_;
    return values_.handle_of(record);
  } catch (...) {
    unregister_ranges(ranges);
    throw;
  }
}

Handle ManagerState::adopt(BlockPtr block, const ValueSpec& spec, ValueType type, FencePtr ready) {
  check_not_loading();
  MaterializationPtr materialization = adoptable(block, spec, std::move(ready));
  const Location at = materialization->location;
  const AddressRanges ranges = block->address_ranges();
  Trash trash;
  Lock lock(mutex_);
  check_open();
  check_available(at);
  materialization->charge = backend_->occupied_bytes(spec, at);
  // Memory that was given up and comes back is in `used` already.
  const auto charged_already = [&] {
    const auto escaped = find_escaped(at, ranges);
    return escaped != escaped_.end() ? escaped->bytes : Bytes();
  };
  settle(trash);
  check_not_managed(ranges);  // before room is waited for, and again after that
  for (Bytes known = charged_already();;) {
    admit(lock, trash, at, materialization->charge.saturating_sub(known), true);
    if (const Bytes now = charged_already(); now != known) {  // it waited, with the mutex open
      known = now;
      continue;
    }
    break;
  }
  check_not_managed(ranges);
  const Bytes charge = materialization->charge;
  trash.make_room(1);
  const Handle handle = add_adopted(materialization, spec, type);  // it can fail
  Account& account = ledger_.account(at);
  if (const auto escaped = find_escaped(at, ranges); escaped != escaped_.end()) {
    account.used -= escaped->bytes;
    account.escaped -= escaped->bytes;
    trash.objects.push_back(std::move(escaped->until));
    escaped_.erase(escaped);
  }
  account.charge(charge);
  return handle;
}

Handle ManagerState::adopt(const std::function<CopyResult()>& make, Location at,
                           const ValueSpec& spec, ValueType type) {
  check_not_loading();
  MaterializationPtr materialization;
  Trash trash;
  Lock lock(mutex_);
  check_open();
  check_available(at);
  const Bytes charge = backend_->occupied_bytes(spec, at);
  admit(lock, trash, at, charge, true);
  ledger_.account(at).charge(charge);
  try {
    {
      const Unlocked unlocked(*this, lock);
      CopyResult made = make();
      try {
        materialization = adoptable(made.block, spec, made.ready);
        if (materialization->location != at) {
          throw MaterializationError(
              fmt::format("adopt: the block was to be made at {}, it is at {}", to_string(at),
                          to_string(materialization->location)));
        }
        check_open();  // or nobody is left to give it to
      } catch (...) {
        materialization.reset();
        if (made.block != nullptr) {
          backend_->release(std::move(made.block), {std::move(made.ready)});
        }
        throw;
      }
    }
    materialization->charge = charge;
    return add_adopted(materialization, spec, type);
  } catch (...) {
    ledger_.account(at).used -= charge;
    if (materialization != nullptr) {
      const FencePtr ready = materialization->ready();
      BlockPtr block = std::move(materialization->block);
      const Unlocked unlocked(*this, lock);
      if (ready) {
        ready->wait();
      }
      backend_->release(std::move(block), {});
    }
    throw;
  }
}

BlockPtr ManagerState::take(const Handle& handle, std::optional<Location> at) {
  check_not_loading();
  Trash trash;
  BlockPtr taken;
  std::vector<Release> releases;
  Lock lock(mutex_);
  start_call(lock);
  ValueRecord* record = take_turn(lock, handle);
  if (record == nullptr) {
    (void)resolve(handle);  // throws
  }
  const Turn turn(*this, record);
  if (at) {
    check_available(*at);
    if (at->is_disk()) {
      throw std::invalid_argument(
          fmt::format("take: what lies at {} is a file of the manager's; name a location in memory",
                      to_string(*at)));
    }
  }
  while (true) {
    check_open();
    settle(trash, record);
    throw_failure_of(*record, handle);
    const ValueView& value = present_.value(handle);
    const Residence* chosen = at ? value.find(*at) : cheapest_in_memory(present_, value);
    if (chosen == nullptr && !at && cheapest_source(present_, value, std::nullopt) != nullptr) {
      // Only on disk: brought to memory in this turn, lest somebody takes it back before.
      Step step;
      step.handle = step.entry.handle = handle;
      step.record = record;
      step.entry.action = ActionKind::kMove;
      step.entry.host_start_ns = now_ns();
      (void)perform_in_turn(lock, trash, MoveResident{handle, Location::pageable_host()}, {}, step,
                            nullptr, false);
      continue;
    }
    if (chosen == nullptr || !chosen->is_good()) {
      throw UnavailableError(fmt::format("take: {} has no good materialization{}; ensure one first",
                                         to_string(handle), at ? " at " + to_string(*at) : ""));
    }
    for (const Residence& each : value.residences) {
      if (each.is_protected()) {
        const Protection protection{each.num_leases, each.num_holds, each.num_pending};
        throw InUseError(protection,
                         fmt::format("take: the materialization of {} at {} is protected: {} "
                                     "lease(s), {} hold(s); release them first",
                                     to_string(handle), to_string(each.location), each.num_leases,
                                     each.num_holds));
      }
    }
    // Whoever gets the tensors shall find them complete, and in nobody's use.
    const Location location = chosen->location;
    std::vector<FencePtr> fences;
    const auto add = [&](const FencePtr& fence) { fences.push_back(fence); };
    for (const Materialization* each = record->first.get(); each != nullptr;
         each = each->next.get()) {
      if (each->location == location) {
        each->for_each_pending(add);
      }
      if (each->is_uncertain()) {  // though it may have ended meanwhile: it is to be settled
        add(each->ready());
      }
    }
    if (!fences.empty()) {
      wait_on(lock, fences);
      continue;
    }
    TransitionRecord entry;
    entry.action = ActionKind::kTake;
    entry.reason = Reason::kTaken;
    entry.handle = handle;
    entry.source = location;
    entry.host_start_ns = now_ns();
    std::vector<FencePtr> watches;
    std::vector<Leave> leaves;
    try {
      watches = watch_escapes(lock, *record);
      leaves = prepare_end(*record, watches, trash, releases);
    } catch (...) {
      append_failed(entry, nullptr);
      throw;
    }
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      MaterializationPtr each = detach(*record, record->first->location, leaves[i]);
      if (each->location == location) {
        ledger_.account(location).used -= each->charge;
        taken = each->block;
        trash.materializations.push_back(std::move(each));
      } else {
        give_up(*record, std::move(each), leaves[i], std::move(watches[i]), releases);
      }
    }
    end_value(*record, trash);
    ++version_;
    entry.host_end_ns = now_ns();
    trace_.append(entry, nullptr, nullptr);
    break;
  }
  run_releases(lock, releases);
  return taken;
}

std::size_t ManagerState::forget_discarded() {
  check_not_loading();
  const Lock lock(mutex_);
  check_open();
  std::vector<ValueRecord*> discarded;
  values_.for_each([&](ValueRecord& record) {
    if (record.discarded && !record.busy) {
      discarded.push_back(&record);
    }
  });
  for (ValueRecord* record : discarded) {
    failures_.erase(values_.handle_of(*record).id());
    values_.remove(*record);
  }
  if (!discarded.empty()) {
    ++version_;
  }
  return discarded.size();
}

ValueSpec ManagerState::spec(const Handle& handle) {
  check_not_loading();
  const Lock lock(mutex_);
  check_open();
  return resolve(handle).spec;
}

}  // namespace residency
