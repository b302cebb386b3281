#include "world.h"

#include <algorithm>
#include <bit>

#include "planner.h"

namespace residency {
namespace {

std::size_t spread(std::int64_t id) noexcept {
  return static_cast<std::size_t>(static_cast<std::uint64_t>(id) * 0x9e3779b97f4a7c15ULL >> 20);
}

}  // namespace

void World::read(const Handle& handle, ValueView& view) const {
  const ValueTable::Found found = values_.find(handle);
  view.record = found.record;
  view.why_not = found.why_not;
  view.ended = false;
  view.residences.clear();
  if (found.record == nullptr) {
    return;
  }
  for (const Materialization* each = found.record->first.get(); each != nullptr;
       each = each->next.get()) {
    view.residences.push_back({});
    Residence& residence = *(view.residences.end() - 1);  // in place: it is copied nowhere again
    residence.location = each->location;
    residence.stale = each->stale;
    residence.lost = backend_.is_lost(each->location);
    residence.num_leases = each->num_leases;
    residence.num_holds = each->num_holds + found.record->num_pins;
    if (each->fences) {
      residence.lost |= each->has_failed();
      residence.put_off = each->is_put_off();
      residence.uncertain = each->is_uncertain() && !residence.put_off;
      residence.replaces = each->replaces;
      residence.arrives_by_worker = each->arrives_by_worker();
      residence.read_by_copy = each->is_read_by_worker();
      residence.used_by_worker = each->is_used_by_worker();
      residence.num_pending = each->num_pending_last_uses();
    }
    residence.charge = each->charge;
    residence.block = each->block.get();
  }
}

std::uint32_t* World::find_slot(std::int64_t id) {
  if (index_.empty()) {
    return nullptr;
  }
  const std::size_t mask = index_.size() - 1;
  for (std::size_t i = spread(id) & mask;; i = (i + 1) & mask) {
    if (index_[i] == 0 || ids_[index_[i] - 1] == id) {
      return &index_[i];
    }
  }
}

void World::grow() {
  if (index_.empty()) {
    const std::size_t expected = std::min<std::size_t>(num_actions_, 1U << 16);
    views_.reserve(expected);
    ids_.reserve(expected);
    index_.assign(std::bit_ceil(std::max<std::size_t>(16, 2 * expected)), 0);
  } else {
    index_.assign(index_.size() * 2, 0);
  }
  for (std::size_t i = 0; i < ids_.size(); ++i) {
    *find_slot(ids_[i]) = static_cast<std::uint32_t>(i + 1);
  }
}

const ValueView& World::value(const Handle& handle) {
  if (const std::uint32_t* slot = find_slot(handle.id()); slot != nullptr && *slot != 0) {
    ValueView& view = views_[*slot - 1];
    if (view.record->type == handle.type()) {
      if (!view.ended) {
        return view;
      }
      scratch_ = ValueView();
      scratch_id_ = 0;
      scratch_.why_not = Reason::kDiscardedHandle;
      return scratch_;
    }
  }
  read(handle, scratch_);
  scratch_id_ = handle.id();
  return scratch_;
}

ValueView& World::overlaid(const Handle& handle) {
  if ((views_.size() + 1) * 2 > index_.size()) {
    grow();
  }
  std::uint32_t* slot = find_slot(handle.id());
  if (*slot == 0) {
    if (scratch_id_ == handle.id()) {  // just planned, and nothing has changed it since
      views_.push_back(scratch_);
    } else {
      read(handle, views_.emplace_back());
    }
    ids_.push_back(handle.id());
    *slot = static_cast<std::uint32_t>(views_.size());
  }
  return views_[*slot - 1];
}

const Account& World::account(Location location) {
  if (!limits_.empty()) {
    return overlaid(location);
  }
  for (const Account& each : accounts_) {
    if (each.location == location) {
      return each;
    }
  }
  if (const Account* account = ledger_.find(location)) {
    return *account;
  }
  unlisted_ = Account{.location = location};
  return unlisted_;
}

Account& World::overlaid(Location location) {
  for (Account& each : accounts_) {
    if (each.location == location) {
      return each;
    }
  }
  const Account* base = ledger_.find(location);
  accounts_.push_back(base != nullptr ? *base : Account{.location = location});
  // A prediction starts from the present: earlier peaks are not the plan's.
  accounts_.back().peak_used = accounts_.back().peak_charged = Bytes();
  accounts_.back().peak_held = Bytes();
  accounts_.back().note_peaks();
  for (const auto& [limited, limit] : limits_) {
    if (limited == location) {
      accounts_.back().limit = limit;
    }
  }
  return accounts_.back();
}

std::span<const MemoryStep> World::steps_at(Location location) const noexcept {
  for (const auto& [each, steps] : steps_) {
    if (each == location) {
      return steps;
    }
  }
  return {};
}

std::vector<MemoryStep>& World::steps_of(Location location) {
  for (auto& [each, steps] : steps_) {
    if (each == location) {
      return steps;
    }
  }
  return steps_.emplace_back(location, std::vector<MemoryStep>()).second;
}

std::uint32_t World::note_taken(Location location, Bytes nbytes) {
  if (!notes_steps_ || nbytes == Bytes() || !backend_.reuses_in_device_order(location)) {
    return Residence::kNoStep;
  }
  std::vector<MemoryStep>& steps = steps_of(location);
  steps.push_back({.takes = true, .nbytes = nbytes});
  return static_cast<std::uint32_t>(steps.size() - 1);
}

void World::note_given_back(const Residence& residence) {
  if (!notes_steps_ || residence.charge == Bytes() ||
      !backend_.reuses_in_device_order(residence.location)) {
    return;
  }
  if (residence.block != nullptr || residence.taken_by != Residence::kNoStep) {
    steps_of(residence.location)
        .push_back(
            {.nbytes = residence.charge, .block = residence.block, .taken_by = residence.taken_by});
  }
}

void World::reserve(Location location, Bytes nbytes) {
  Account& account = overlaid(location);
  account.retiring = account.retiring.saturating_sub(account.over_budget(nbytes));
  account.reserve(nbytes);
}

void World::apply(const Handle& handle, const Verdict& verdict) {
  if (verdict.no_op()) {
    // Untouched state, but its locations belong to the prediction all the same.
    for (const auto& location : {verdict.source, verdict.destination}) {
      if (location) {
        (void)overlaid(*location);
      }
    }
    return;
  }
  ValueView& view = overlaid(handle);
  if (verdict.waits) {
    for (Residence& each : view.residences) {
      each.uncertain = each.put_off = false;
      each.arrives_by_worker = false;
      each.read_by_copy = false;
      each.used_by_worker = false;
    }
  }
  const auto give_up = [&](const Residence& residence, bool escapes, bool retires) {
    Account& account = overlaid(residence.location);
    if (escapes) {
      account.escaped += residence.charge;  // stays in used
      return;
    }
    account.used -= residence.charge;
    if (retires) {
      account.retiring += residence.charge;
    } else {  // or when it goes depends on a worker
      note_given_back(residence);
    }
  };
  if (verdict.reason == Reason::kDiscarded) {
    for (const Residence& each : view.residences) {
      give_up(each, each.block != nullptr && backend_.is_shared(*each.block), each.used_by_worker);
    }
    view.residences.clear();
    view.ended = true;
    return;
  }
  // Everything is charged before anything is given back, as in the execution.
  std::uint32_t taken_by = Residence::kNoStep;
  for (std::size_t i = 0; i < verdict.num_transitions; ++i) {
    const Transition& each = verdict.transitions[i];
    if (each.kind == TransitionKind::kReconstruct || each.kind == TransitionKind::kCopy) {
      Account& account = overlaid(each.to);
      account.retiring = account.retiring.saturating_sub(account.lacking({.values = each.charge}));
      account.charge(each.charge);
    }
    if (each.kind == TransitionKind::kCopy) {
      taken_by = note_taken(each.to, each.charge);
    }
  }
  if (verdict.staging != Bytes()) {
    overlaid(Location::pinned_host()).reserve_staging(verdict.staging);
    ++overlaid(staging_use(backend_, verdict)->device).num_staged;
  }
  bool in_flight = false;  // the copy of this action completes on a worker
  bool by_worker = false;  // a thread copies, not the device
  std::optional<Location> read_from;
  for (std::size_t i = 0; i < verdict.num_transitions; ++i) {
    const Transition& each = verdict.transitions[i];
    switch (each.kind) {
      case TransitionKind::kReconstruct:
        if (!each.temporary) {
          view.residences.push_back({.location = each.to, .charge = each.charge});
        }
        break;
      case TransitionKind::kCopy:
      case TransitionKind::kRefresh: {
        in_flight = can_fail_later(backend_.path(each.from, each.to));
        read_from = each.from;
        by_worker = !goes_on_stream(backend_, each.from, each.to);
        if (Residence* source = view.find(each.from); source != nullptr) {
          source->read_by_copy |= by_worker;
          source->used_by_worker |= by_worker;
        }
        if (each.kind == TransitionKind::kCopy) {
          view.residences.push_back({.location = each.to,
                                     .uncertain = in_flight,
                                     .arrives_by_worker = by_worker,
                                     .used_by_worker = by_worker,
                                     .charge = each.charge,
                                     .taken_by = taken_by});
        } else {
          Residence* target = view.find(each.to);
          target->stale = false;
          target->uncertain = in_flight;
          target->arrives_by_worker = by_worker;
          target->used_by_worker |= by_worker;
        }
        break;
      }
      case TransitionKind::kRelease:
        if (each.temporary) {
          Account& account = overlaid(each.from);
          account.used -= each.charge;
          if (by_worker) {
            account.retiring += each.charge;
          }
        } else {
          Residence* given_up = view.find(each.from);
          // The source of a transfer that can still fail is kept whole until it has succeeded.
          const bool departs = in_flight && read_from == each.from;
          if (departs) {
            view.find(*verdict.destination)->replaces = true;
          }
          give_up(*given_up, each.escapes, departs || given_up->used_by_worker);
          view.residences.erase(given_up);
        }
        break;
    }
  }
}

}  // namespace residency
