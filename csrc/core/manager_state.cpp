#include "manager_state.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <fmt/format.h>

#include "planner.h"
#include "registry.h"
#include "warning.h"

namespace residency {

std::int64_t now_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

namespace {

/// What `fence` keeps waiting for, if anything.
void add_incomplete(const FencePtr& fence, std::vector<FencePtr>& incomplete) {
  if (fence && fence->poll() == FenceStatus::kPending) {
    incomplete.push_back(fence);
  }
}

}  // namespace

ManagerState::ManagerState(ManagerId id, ManagerOptions options, std::shared_ptr<Backend> backend)
    : id_(id),
      options_(std::move(options)),
      backend_(std::move(backend)),
      fork_generation_(residency::fork_generation()),
      values_(id),
      present_(values_, ledger_, *backend_, options_),
      trace_(options_.trace_capacity) {
  const auto add = [this](Location location, std::optional<Bytes> budget) {
    if (const Account* known = ledger_.find(location); known != nullptr) {
      throw std::invalid_argument("ManagerOptions: " + to_string(location) + " is given twice");
    }
    ledger_.account(location).budget = budget;
    ledger_.list(location);
  };
  for (const LocationBudget& each : options_.budgets) {
    add(each.location, each.budget);
  }
  for (const DiskTier& each : options_.disks) {
    const Location location = Location::disk(each.name);
    if (std::ranges::count(options_.disks, each.name, &DiskTier::name) != 1) {
      throw std::invalid_argument("ManagerOptions: " + to_string(location) + " is given twice");
    }
    if (each.budget) {
      add(location, each.budget);
    }
  }
  backend_->open(id_, options_);
  for (const Location location : ledger_.listed()) {
    if (const std::string why = backend_->why_unavailable(location); !why.empty()) {
      backend_->close(false);
      throw UnavailableError(
          fmt::format("ManagerOptions: a budget is given for {}, which is not available: {}",
                      to_string(location), why));
    }
  }
}

ManagerState::~ManagerState() {
  // The manager went while calls were under way on other threads; now those have ended too.
  if (Lock lock(mutex_); !torn_down_) {
    tear_down(lock, false);
  }
  unregister_manager(id_);
}

// --- Checks

void ManagerState::check_open() const {
  if (closed()) {
    throw ClosedError(fmt::format("manager {} is closed", static_cast<std::uint32_t>(id_)));
  }
}

void ManagerState::check_available(Location location) const {
  if (const std::string why = backend_->why_unavailable(location); !why.empty()) {
    throw UnavailableError(fmt::format("{} is not available: {}", to_string(location), why));
  }
}

ValueRecord& ManagerState::resolve(const Handle& handle) const {
  const ValueTable::Found found = values_.find(handle);
  if (found.record == nullptr) {
    throw HandleError(handle, found.why_not, id_);
  }
  return *found.record;
}

void ManagerState::throw_failure_of(ValueRecord& record, const Handle& handle) {
  if (!record.has_failure) {
    return;
  }
  const auto found = failures_.find(handle.id());
  const Failure failure = std::move(found->second.front());
  found->second.pop_front();
  if (found->second.empty()) {
    failures_.erase(found);
    record.has_failure = false;
  }
  throw TransferError(handle, failure.path, failure.fence->error(), failure.message);
}

void ManagerState::throw_refusal(const Verdict& verdict, const Handle& handle,
                                 const std::string& action) {
  const std::string message = fmt::format("cannot {}: {}", action, describe(verdict));
  switch (verdict.reason) {
    case Reason::kForeignHandle:
    case Reason::kUnknownHandle:
    case Reason::kDiscardedHandle: throw HandleError(handle, verdict.reason, id_);
    case Reason::kLocationUnavailable:
      check_available(verdict.destination.value());
      [[fallthrough]];
    case Reason::kNothingToCopy:
    case Reason::kFromLocationAbsent:
    case Reason::kWouldBlock: throw UnavailableError(message);
    case Reason::kExclusiveElsewhere:
    case Reason::kLastMaterialization: throw OwnershipError(message);
    case Reason::kProtected:
    case Reason::kShared: throw InUseError(verdict.protection, message);
    case Reason::kOverBudget: throw BudgetError(verdict.shortfall, message);
    case Reason::kTransferFailed: throw_failure_of(resolve(handle), handle); [[fallthrough]];
    case Reason::kCopied:
    case Reason::kLoaded:
    case Reason::kRefreshed:
    case Reason::kReleased:
    case Reason::kDiscarded:
    case Reason::kTaken:
    case Reason::kAlreadyResident:
    case Reason::kAlreadyAbsent:
    case Reason::kSameLocation: break;
  }
  throw std::logic_error("a verdict that is feasible was refused: " + message);
}

// --- Turns and waiting

ValueRecord* ManagerState::take_turn(Lock& lock, const Handle& handle) {
  ValueRecord* record = values_.find(handle).record;
  if (record == nullptr) {
    return nullptr;
  }
  if (!record->busy) {
    record->busy = true;
    return record;
  }
  if (is_forked()) {
    throw ForkError(fmt::format(
        "{} was being changed by a thread of the parent process when this process was forked",
        to_string(handle)));
  }
  Waiter waiter;
  waiters_[record].push_back(&waiter);
  record->has_waiters = true;
  waiter.granted_changed.wait(lock, [&] { return waiter.granted; });
  // The turn is ours now, but the value, or the manager, may have ended meanwhile.
  if (closed() || values_.find(handle).record == nullptr) {
    end_turn(*record);
    check_open();
    return nullptr;
  }
  return record;
}

void ManagerState::end_turn(ValueRecord& record) noexcept {
  if (!record.has_waiters) {
    record.busy = false;
    return;
  }
  const auto queue = waiters_.find(&record);
  Waiter* next = queue->second.front();
  queue->second.pop_front();
  if (queue->second.empty()) {
    waiters_.erase(queue);
    record.has_waiters = false;
  }
  next->granted = true;  // busy stays set: the turn is handed over
  next->granted_changed.notify_one();
}

void ManagerState::wait_on(Lock& lock, const std::vector<FencePtr>& fences) {
  if (is_forked()) {
    for (const FencePtr& fence : fences) {
      if (fence->poll() == FenceStatus::kPending) {
        throw ForkError("a transfer of the parent process cannot be waited for in its child");
      }
    }
  }
  const Unlocked unlocked(*this, lock);
  for (const FencePtr& fence : fences) {
    fence->wait();
  }
}

std::vector<FencePtr> ManagerState::fences_to_wait_for(const ValueRecord* record,
                                                       const Verdict& verdict) const {
  std::vector<FencePtr> fences;
  if (record != nullptr) {
    for (const Materialization* each = record->first.get(); each != nullptr;
         each = each->next.get()) {
      if (each->is_uncertain()) {
        add_incomplete(each->ready(), fences);
      }
      if (verdict.reason == Reason::kRefreshed && each->location == verdict.destination) {
        each->for_each_pending([&](const FencePtr& fence) { fences.push_back(fence); });
      }
    }
  }
  const auto add_retiring = [&](Location location, Bytes nbytes) {
    const Account* account = ledger_.find(location);
    if (account == nullptr || account->lacking(nbytes) == Bytes()) {
      return;
    }
    for (const Retiring& each : retiring_) {
      if (each.location == location) {
        for (const FencePtr& fence : each.until) {
          add_incomplete(fence, fences);
        }
      }
    }
    for (const Arrival& each : arrivals_) {
      if (each.departing && each.from == location) {
        add_incomplete(each.fence, fences);
      }
    }
  };
  for (std::size_t i = 0; i < verdict.num_transitions; ++i) {
    const Transition& each = verdict.transitions[i];
    if (each.kind == TransitionKind::kReconstruct || each.kind == TransitionKind::kCopy) {
      add_retiring(each.to, each.charge);
    }
  }
  return fences;
}

void ManagerState::admit(Lock& lock, Trash& trash, Location location, Bytes nbytes,
                         bool may_block) {
  while (true) {
    check_open();
    settle(trash);
    Verdict verdict = plan_reservation(present_, location, nbytes);
    if (!verdict.feasible()) {
      if (verdict.reason == Reason::kOverBudget) {
        throw BudgetError(verdict.shortfall);
      }
      check_available(location);
    }
    if (!verdict.waits) {
      return;
    }
    if (!may_block) {
      throw BudgetError(ledger_.account(location).shortfall(nbytes));
    }
    verdict.transitions[0] = {
        .kind = TransitionKind::kCopy, .from = location, .to = location, .charge = nbytes};
    verdict.num_transitions = 1;
    wait_on(lock, fences_to_wait_for(nullptr, verdict));
  }
}

void ManagerState::wait_for(const Handle& handle, const FencePtr& fence) {
  check_not_loading();
  Trash trash;
  Lock lock(mutex_);
  wait_on(lock, {fence});
  if (closed() || fence->poll() == FenceStatus::kDone) {
    return;  // when everything has ended nobody is owed the failure any more
  }
  ValueRecord* record = take_turn(lock, handle);  // a busy record cannot be settled
  const Turn turn(*this, record);
  settle(trash, record);
  const auto failures = failures_.find(handle.id());
  if (record == nullptr || failures == failures_.end()) {
    return;  // somebody was told
  }
  const auto own = std::ranges::find(failures->second, fence, &Failure::fence);
  if (own != failures->second.end()) {
    std::rotate(failures->second.begin(), own, own + 1);
    throw_failure_of(*record, handle);
  }
}

void ManagerState::synchronize() {
  check_not_loading();
  Trash trash;
  Lock lock(mutex_);
  check_open();
  while (true) {
    all_locked_.wait(lock, [&] { return num_unlocked_ == 0 || is_forked(); });
    settle(trash);
    std::vector<FencePtr> fences;
    for (const Arrival& each : arrivals_) {
      add_incomplete(each.fence, fences);
    }
    for (const Retiring& each : retiring_) {
      for (const FencePtr& fence : each.until) {
        add_incomplete(fence, fences);
      }
    }
    values_.for_each([&](const ValueRecord& record) {
      for (const Materialization* each = record.first.get(); each != nullptr;
           each = each->next.get()) {
        each->for_each_pending([&](const FencePtr& fence) { fences.push_back(fence); });
      }
    });
    if (fences.empty()) {
      return;
    }
    wait_on(lock, fences);
  }
}

// --- Settling: what fences that have completed mean for the ledger

/// A record whose turn somebody else has is left alone: that call looks at it with the mutex open.
/// `own` is the record whose turn the caller has.
void ManagerState::settle(Trash& trash, const ValueRecord* own) {
  std::erase_if(arrivals_, [&](Arrival& each) { return settle_arrival(each, trash, own); });
  std::erase_if(retiring_, [&](Retiring& each) { return settle_retiring(each, trash); });
  std::erase_if(escaped_, [&](Escaped& each) {
    if (each.until->poll() == FenceStatus::kPending) {
      return false;
    }
    Account& account = ledger_.account(each.location);
    account.used -= each.bytes;
    account.escaped -= each.bytes;
    trash.objects.push_back(std::move(each.until));
    return true;
  });
}

/// As `settle`, but only as far as things completed in order: what a hot call can afford however
/// much is in flight.
void ManagerState::settle_oldest(Trash& trash) {
  while (!arrivals_.empty() && settle_arrival(arrivals_.front(), trash, nullptr)) {
    arrivals_.pop_front();
  }
  while (!retiring_.empty() && settle_retiring(retiring_.front(), trash)) {
    retiring_.pop_front();
  }
}

bool ManagerState::settle_retiring(Retiring& retiring, Trash& trash) {
  for (const FencePtr& fence : retiring.until) {
    if (fence->poll() == FenceStatus::kPending) {
      return false;
    }
  }
  ledger_.account(retiring.location).retiring -= retiring.bytes;
  for (FencePtr& fence : retiring.until) {
    trash.objects.push_back(std::move(fence));
  }
  trash.objects.push_back(std::move(retiring.block));
  return true;
}

/// What the end of an arrival means for the ledger; once.
void ManagerState::account_for_end(Arrival& arrival, Trash& trash) {
  arrival.accounted = true;
  const bool failed = arrival.fence->poll() == FenceStatus::kFailed;
  if (arrival.departing && !arrival.escape_watch) {
    ledger_.account(arrival.from).retiring -= arrival.departing->charge;
  }
  if (!failed) {
    if (arrival.departing) {
      std::vector<FencePtr> others;
      arrival.departing->for_each_pending([&](const FencePtr& fence) { others.push_back(fence); });
      if (arrival.departing->block && !others.empty()) {
        const Bytes bytes = arrival.escape_watch ? Bytes() : arrival.departing->charge;
        ledger_.account(arrival.from).retiring += bytes;
        retiring_.push_back(
            {arrival.from, bytes, std::move(others), std::move(arrival.departing->block)});
      }
      unregister_ranges(*arrival.departing);
      trash.materializations.push_back(std::move(arrival.departing));
    }
    return;
  }
  const ValueRecord* record = values_.find(arrival.handle).record;
  if (record == nullptr) {
    return;
  }
  if (!arrival.overwrites) {
    ledger_.account(arrival.at).used -= record->find(arrival.at)->charge;
  }
  if (arrival.departing) {
    Account& account = ledger_.account(arrival.from);
    std::erase_if(escaped_, [&](const Escaped& each) {
      if (!arrival.escape_watch || each.until != arrival.escape_watch) {
        return false;
      }
      account.used -= each.bytes;
      account.escaped -= each.bytes;
      return true;
    });
    account.charge(arrival.departing->charge);  // retiring until now, which no peak counts
  }
}

/// True when the arrival has ended and is done with.
bool ManagerState::settle_arrival(Arrival& arrival, Trash& trash, const ValueRecord* own) {
  const FenceStatus status = arrival.fence->poll();
  if (status == FenceStatus::kPending) {
    return false;
  }
  if (!arrival.accounted) {
    account_for_end(arrival, trash);
  }
  ValueRecord* record = values_.find(arrival.handle).record;
  if (record != nullptr && record->busy && record != own) {
    return false;
  }
  if (record == nullptr) {  // the value has ended
    trash.objects.push_back(arrival.fence->take_retained());
    if (arrival.departing) {
      unregister_ranges(*arrival.departing);
      trash.materializations.push_back(std::move(arrival.departing));
    }
    return true;
  }
  // An uncertain materialization is given up only after it was settled, so it is still there. Its
  // fence may be another's by now: whoever wrote to it has waited for the arrival.
  Materialization& arrived = *record->find(arrival.at);
  if (arrived.ready() == arrival.fence) {
    trash.objects.push_back(arrived.ready());
    arrived.set_ready(nullptr);
  }
  arrived.fails_later = false;
  arrived.replaces = false;
  if (status == FenceStatus::kDone) {
    return true;
  }
  ++version_;
  if (arrival.overwrites) {
    arrived.stale = true;
  } else {
    trash.materializations.push_back(detach(*record, arrival.at));
  }
  if (arrival.departing) {
    arrival.departing->block = arrival.fence->take_retained();
    unregister_ranges(*arrival.departing);  // attaching registers them
    attach(*record, std::move(arrival.departing));
  }
  record->has_failure = true;
  failures_[arrival.handle.id()].push_back(
      {arrival.path, arrival.fence,
       fmt::format(
           "the transfer of {} from {} to {} (path {}) failed after it was enqueued: {}; the "
           "value is at {} as before",
           to_string(arrival.handle), to_string(arrival.from), to_string(arrival.at),
           to_string(arrival.path), describe(arrival.fence->error()),
           record->first ? to_string(record->first->location) : "its source")});
  return true;
}

// --- Materializations

/// Returns where it stands until it is detached.
Materialization* ManagerState::attach(ValueRecord& record, MaterializationPtr materialization) {
  register_ranges(*materialization);
  if (Materialization& slot = record.slot_for_first; !slot.in_slot) {
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

MaterializationPtr ManagerState::detach(ValueRecord& record, Location location) {
  MaterializationPtr* place = &record.first;
  while (*place != nullptr && (*place)->location != location) {
    place = &(*place)->next;
  }
  MaterializationPtr detached = std::move(*place);
  if (!detached) {
    return detached;
  }
  *place = std::move(detached->next);
  if (detached->in_slot) {  // the slot is the record's: what is detached outlives that
    MaterializationPtr moved(new Materialization(std::move(*detached)));
    moved->in_slot = false;
    detached = std::move(moved);
  }
  unregister_ranges(*detached);
  return detached;
}

void ManagerState::register_ranges(const Materialization& materialization) {
  if (materialization.ranges) {
    for (const AddressRange& range : *materialization.ranges) {
      managed_ranges_.emplace(range.begin, range.end);
    }
  }
}

void ManagerState::unregister_ranges(const Materialization& materialization) {
  if (materialization.ranges) {
    for (const AddressRange& range : *materialization.ranges) {
      const auto [first, last] = managed_ranges_.equal_range(range.begin);
      const auto found =
          std::find_if(first, last, [&](const auto& each) { return each.second == range.end; });
      managed_ranges_.erase(found);
    }
  }
}

void ManagerState::give_up(const Handle& handle, MaterializationPtr given_up, FencePtr escape_watch,
                           std::vector<Release>& releases) {
  std::vector<FencePtr> after;
  given_up->for_each_pending([&](const FencePtr& fence) { after.push_back(fence); });
  Account& account = ledger_.account(given_up->location);
  if (escape_watch) {
    account.escaped += given_up->charge;
    escaped_.push_back({handle, given_up->location, given_up->charge, std::move(escape_watch),
                        given_up->ranges ? *given_up->ranges : std::vector<AddressRange>()});
  } else {
    account.used -= given_up->charge;
    if (!after.empty()) {
      // Memory that is reused in device order is free already, but something is still in flight,
      // which `synchronize` waits for.
      const bool reused = backend_->reuses_in_device_order(given_up->location);
      const Bytes bytes = reused ? Bytes() : given_up->charge;
      account.retiring += bytes;
      retiring_.push_back({given_up->location, bytes, after});
    }
  }
  releases.push_back({std::move(given_up->block), std::move(after)});
}

/// The escaped memory that is exactly this, if any.
std::vector<ManagerState::Escaped>::iterator ManagerState::find_escaped(
    Location at, const std::vector<AddressRange>& ranges) {
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

void ManagerState::end_value(ValueRecord& record, Trash& trash) {
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

// --- Budgets, reading

void ManagerState::set_budget(Location location, std::optional<Bytes> budget) {
  check_not_loading();
  Trash trash;
  const Lock lock(mutex_);
  check_open();
  check_available(location);
  settle(trash);
  Account& account = ledger_.account(location);
  if (budget && account.used.saturating_add(account.reserved) > *budget) {
    Shortfall shortfall = account.shortfall(Bytes());
    shortfall.budget = *budget;
    throw BudgetError(shortfall,
                      fmt::format("cannot lower the budget of {} to {} B: {} B are used and {} B "
                                  "reserved; make room first",
                                  to_string(location), budget->count(), account.used.count(),
                                  account.reserved.count()));
  }
  if (account.budget != budget || !account.listed) {
    account.budget = budget;
    ledger_.list(location);
    ++version_;
  }
}

void ManagerState::reset_peaks() {
  check_not_loading();
  Trash trash;
  const Lock lock(mutex_);
  check_open();
  settle(trash);
  for (Account& account : ledger_.accounts()) {
    account.peak_used = account.peak_charged = Bytes();
    account.note_peaks();
  }
}

std::vector<Location> ManagerState::locations() {
  check_not_loading();
  const Lock lock(mutex_);
  check_open();
  return ledger_.listed();
}

std::vector<TransitionRecord> ManagerState::trace(std::optional<std::size_t> limit) {
  const Lock lock(mutex_);  // readable after close
  return trace_.read(limit);
}

std::uint64_t ManagerState::state_version() {
  check_not_loading();
  Trash trash;
  const Lock lock(mutex_);
  check_open();
  settle(trash);  // what has failed since has changed the state
  return version_;
}

Snapshot ManagerState::snapshot() {
  check_not_loading();
  Trash trash;
  const Lock lock(mutex_);
  check_open();
  settle(trash);
  Snapshot snapshot;
  snapshot.manager = id_;
  snapshot.state_version = version_;
  snapshot.time_ns = now_ns();
  snapshot.num_leases = num_leases_;
  snapshot.num_holds = num_holds_;
  snapshot.num_scopes = num_scopes_;
  for (const Location location : ledger_.listed()) {
    const Account& account = *ledger_.find(location);
    snapshot.locations.push_back({.location = location,
                                  .budget = account.budget,
                                  .used = account.used,
                                  .reserved = account.reserved,
                                  .retiring = account.retiring,
                                  .arriving = Bytes(),
                                  .escaped = account.escaped,
                                  .peak_used = account.peak_used,
                                  .peak_charged = account.peak_charged});
  }
  const auto note_arriving = [&](Location location, Bytes bytes) {
    for (LocationSnapshot& each : snapshot.locations) {
      if (each.location == location) {
        each.arriving += bytes;
      }
    }
  };
  snapshot.values.reserve(values_.size());
  values_.for_each_by_registration([&](const ValueRecord& record) {
    ValueSnapshot& value = snapshot.values.emplace_back();
    value.handle = values_.handle_of(record);
    value.spec = record.spec;
    value.discarded = record.discarded;
    value.write_leased = record.write_leased;
    value.has_source = record.source != nullptr;
    if (value.has_source) {
      value.source_location = record.source_location;
    }
    for (const Materialization* each = record.first.get(); each != nullptr;
         each = each->next.get()) {
      const FencePtr ready = each->ready();
      const bool arriving = ready && ready->poll() == FenceStatus::kPending;
      if (arriving) {
        note_arriving(each->location, each->charge);
      }
      value.materializations.push_back(
          {.location = each->location,
           .state = arriving ? MaterializationState::kArriving : MaterializationState::kReady,
           .stale = each->stale,
           .charged_bytes = each->charge,
           .num_leases = each->num_leases,
           .num_holds = each->num_holds,
           .num_pending = each->num_pending_last_uses()});
    }
  });
  for (const Escaped& each : escaped_) {
    snapshot.escaped.push_back({each.handle, each.location, each.bytes});
  }
  for (const auto& [number, open] : reservations_) {
    snapshot.reservations.push_back({open.fields, open.headroom != nullptr});
  }
  return snapshot;
}

// --- Closing

void ManagerState::close(const CloseOptions& options) {
  check_not_loading();
  Trash trash;
  Lock lock(mutex_);
  if (closed()) {
    if (options.wait && !is_forked()) {  // another thread may be at it
      all_locked_.wait(lock, [&] { return torn_down_ && num_unlocked_ == 0; });
    }
    return;
  }
  settle(trash);
  if (!options.force) {
    std::uint32_t num_only_on_disk = 0;
    values_.for_each([&](const ValueRecord& record) {
      bool on_disk = false;
      bool elsewhere = record.can_be_made_again() || record.discarded;
      for (const Materialization* each = record.first.get(); each != nullptr;
           each = each->next.get()) {
        (each->location.is_disk() ? on_disk : elsewhere) |= !each->stale;
      }
      num_only_on_disk += on_disk && !elsewhere ? 1U : 0U;
    });
    const auto num_reservations = static_cast<std::uint32_t>(reservations_.size());
    if (num_leases_ + num_holds_ + num_scopes_ + num_reservations + num_only_on_disk != 0) {
      InUseError error(
          {.num_leases = num_leases_, .num_holds = num_holds_, .num_pending = 0},
          fmt::format("manager {} cannot close: {} lease(s), {} hold(s), {} reservation(s), {} "
                      "scope(s) are open and {} value(s) that nothing can make again are only on "
                      "disk; end them, take the values, or force",
                      static_cast<std::uint32_t>(id_), num_leases_, num_holds_, num_reservations,
                      num_scopes_, num_only_on_disk));
      error.num_reservations = num_reservations;
      error.num_scopes = num_scopes_;
      error.num_only_on_disk = num_only_on_disk;
      throw error;
    }
  }
  const std::vector<CutShort> leases = leases_cut_short();
  closed_.store(true, std::memory_order_release);
  if (!is_forked()) {
    all_locked_.wait(lock, [&] { return num_unlocked_ == 0; });
    record_last_uses(lock, leases);
  }
  if (options.wait && !is_forked()) {
    std::vector<FencePtr> fences;
    for (const Arrival& each : arrivals_) {
      add_incomplete(each.fence, fences);
    }
    for (const Retiring& each : retiring_) {
      for (const FencePtr& fence : each.until) {
        add_incomplete(fence, fences);
      }
    }
    values_.for_each([&](const ValueRecord& record) {
      for (const Materialization* each = record.first.get(); each != nullptr;
           each = each->next.get()) {
        each->for_each_pending([&](const FencePtr& fence) { fences.push_back(fence); });
      }
    });
    {
      const Unlocked unlocked(*this, lock);
      for (const FencePtr& fence : fences) {
        fence->wait();
      }
    }
    settle(trash);
  }
  tear_down(lock, options.wait);
}

/// What is under way on other threads, through leases and scopes that outlive the manager, ends
/// first; the last of them takes the state down with it, in its destructor.
void ManagerState::close_without_waiting() noexcept {
  Lock lock(mutex_);
  if (closed()) {
    return;
  }
  const std::vector<CutShort> leases = leases_cut_short();
  closed_.store(true, std::memory_order_release);
  if (!is_forked()) {
    record_last_uses(lock, leases);
  }
  if (num_unlocked_ == 0) {
    tear_down(lock, false);
  }
}

/// Before the manager counts as closed: from then on a lease may be destroyed at any time.
std::vector<ManagerState::CutShort> ManagerState::leases_cut_short() const {
  std::vector<CutShort> found;
  for (const LeaseState* lease : leases_) {
    CutShort& each = found.emplace_back();
    each.streams = lease->streams;
    for (const LeasedValue& value : lease->values) {
      each.materializations.push_back(value.materialization);
    }
  }
  return found;
}

void ManagerState::record_last_uses(Lock& lock, const std::vector<CutShort>& leases) noexcept {
  std::vector<std::pair<Stream, FencePtr>> uses;
  {
    const Unlocked unlocked(*this, lock);
    for (const CutShort& lease : leases) {
      for (const Stream& stream : lease.streams) {
        if (std::ranges::find(uses, stream, &std::pair<Stream, FencePtr>::first) != uses.end()) {
          continue;
        }
        try {
          uses.emplace_back(stream, backend_->record_use(stream));
        } catch (...) {
          warn("closing: a last use could not be recorded: " + describe(std::current_exception()));
        }
      }
    }
  }
  for (const CutShort& lease : leases) {
    for (const auto& [stream, fence] : uses) {
      if (std::ranges::find(lease.streams, stream) != lease.streams.end()) {
        for (Materialization* each : lease.materializations) {
          each->add_last_use(fence);
        }
      }
    }
  }
  leases_.clear();
}

void ManagerState::tear_down(Lock& lock, bool wait) noexcept {
  // Records stay until the state dies: threads that waited for a turn still look at them.
  torn_down_ = true;
  Trash trash;
  std::vector<Release> releases;
  values_.for_each([&](ValueRecord& record) {
    while (record.first) {
      give_up(values_.handle_of(record), detach(record, record.first->location), nullptr, releases);
    }
    if (!record.discarded) {
      end_value(record, trash);
    }
  });
  for (Arrival& each : arrivals_) {
    BlockPtr retained = each.fence->take_retained();  // fences live on in reports
    std::vector<FencePtr> after = {each.fence};
    if (each.departing) {
      each.departing->for_each_pending([&](const FencePtr& fence) { after.push_back(fence); });
      if (each.departing->block) {
        trash.objects.push_back(std::exchange(retained, std::move(each.departing->block)));
      }
    }
    if (retained) {
      releases.push_back({std::move(retained), std::move(after)});
    }
  }
  for (Retiring& each : retiring_) {
    if (each.block) {
      releases.push_back({std::move(each.block), std::move(each.until)});
    }
  }
  auto arrivals = std::exchange(arrivals_, {});
  auto reservations = std::exchange(reservations_, {});
  auto retiring = std::exchange(retiring_, {});
  auto escaped = std::exchange(escaped_, {});
  auto failures = std::exchange(failures_, {});
  auto orphans = std::exchange(orphans_, {});
  const Unlocked unlocked(*this, lock);
  orphans.clear();  // and their views, before the blocks
  for (Release& each : releases) {
    backend_->release(std::move(each.block), std::move(each.after));
  }
  arrivals.clear();
  retiring.clear();
  reservations.clear();
  trash.objects.clear();
  trash.materializations.clear();
  backend_->close(wait);
}

// --- Audit

void ManagerState::audit() {
  Trash trash;
  const Lock lock(mutex_);
  check_open();
  settle(trash);
  std::map<Location, Account> recount;
  std::string differences;
  std::size_t num_ranges = 0;
  std::uint64_t num_leases = 0;
  values_.for_each([&](const ValueRecord& record) {
    std::uint32_t leases = 0;
    std::uint32_t good = 0;
    std::uint32_t materializations = 0;
    for (const Materialization* each = record.first.get(); each != nullptr;
         each = each->next.get()) {
      recount[each->location].used += each->charge;
      leases += each->num_leases;
      good += each->stale ? 0U : 1U;
      ++materializations;
      num_ranges += each->ranges ? each->ranges->size() : 0;
      if (each->charge != backend_->occupied_bytes(record.spec, each->location)) {
        differences += fmt::format("{}: charge at {} is not what it occupies\n",
                                   to_string(values_.handle_of(record)), to_string(each->location));
      }
      if (each->next && !(each->location < each->next->location)) {
        differences += "materializations are out of order\n";
      }
    }
    num_leases += leases;
    if (leases != record.num_leases) {
      differences += fmt::format("{}: {} leases on materializations, {} counted\n",
                                 to_string(values_.handle_of(record)), leases, record.num_leases);
    }
    if (record.discarded ? materializations != 0
                         : good == 0 && (materializations != 0 || !record.can_be_made_again())) {
      differences += fmt::format("{}: {} materializations, {} of them good\n",
                                 to_string(values_.handle_of(record)), materializations, good);
    }
    if (record.spec.mode == ReplicaMode::kExclusive && materializations > 1) {
      differences += fmt::format("{}: exclusive, but at {} locations\n",
                                 to_string(values_.handle_of(record)), materializations);
    }
  });
  for (const Escaped& each : escaped_) {
    recount[each.location].used += each.bytes;
    recount[each.location].escaped += each.bytes;
  }
  for (const Retiring& each : retiring_) {
    recount[each.location].retiring += each.bytes;
  }
  for (const Arrival& each : arrivals_) {
    if (each.departing) {
      num_ranges += each.departing->ranges ? each.departing->ranges->size() : 0;
      if (!each.escape_watch) {
        recount[each.from].retiring += each.departing->charge;
      }
    }
  }
  for (const auto& [number, open] : reservations_) {
    recount[open.fields.location].reserved += open.fields.nbytes;
  }
  for (const Account& account : ledger_.accounts()) {
    const Account& counted = recount[account.location];
    const auto compare = [&](std::string_view what, Bytes ledger, Bytes recounted) {
      if (ledger != recounted) {
        differences += fmt::format("{}: {} is {} B, recounted {} B\n", to_string(account.location),
                                   what, ledger.count(), recounted.count());
      }
    };
    compare("used", account.used, counted.used);
    compare("reserved", account.reserved, counted.reserved);
    compare("retiring", account.retiring, counted.retiring);
    compare("escaped", account.escaped, counted.escaped);
    if (account.peak_used < account.used ||
        account.peak_charged < account.used + account.reserved) {
      differences += fmt::format("{}: a peak is below the present\n", to_string(account.location));
    }
    recount.erase(account.location);
  }
  for (const auto& [location, account] : recount) {
    differences += fmt::format("{} has no account\n", to_string(location));
  }
  if (num_ranges != managed_ranges_.size()) {
    differences += fmt::format("{} address ranges registered, {} counted\n", managed_ranges_.size(),
                               num_ranges);
  }
  if (!differences.empty()) {
    throw std::logic_error("the ledger does not match the values:\n" + differences);
  }
}

}  // namespace residency
