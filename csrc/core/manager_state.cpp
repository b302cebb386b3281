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
  for (const LocationKind kind : options_.link_order) {
    if (std::ranges::count(options_.link_order, kind) != 1) {
      throw std::invalid_argument("ManagerOptions: link_order names a kind of location twice");
    }
  }
  for (const DiskTier& each : options_.disks) {
    if (each.directory.empty()) {
      throw std::invalid_argument("ManagerOptions: the directory of " +
                                  to_string(Location::disk(each.name)) + " is empty");
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
  if (backend_->is_lost(location)) {
    throw DeviceLostError(location, fmt::format("{} was lost; nothing can be done there any more",
                                                to_string(location)));
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
  throw TransferError(
      handle, failure.path, failure.fence->error(),
      fmt::format(
          "the transfer of {} from {} to {} (path {}) failed after it was enqueued: {}; the "
          "value is {}",
          to_string(handle), to_string(failure.from), to_string(failure.at),
          to_string(failure.path), describe(failure.fence->error()),
          record.first ? "at " + to_string(record.first->location) + " as before"
                       : "still to be loaded from its source"));
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
      if (verdict.source.has_value() && backend_->is_lost(*verdict.source)) {
        throw DeviceLostError(*verdict.source, message + "; " + to_string(*verdict.source) +
                                                   ", where it lies, was lost");
      }
      [[fallthrough]];
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
    Shortfall shortfall = account.shortfall({});
    shortfall.budget = *budget;
    throw BudgetError(
        shortfall,
        fmt::format(
            "cannot lower the budget of {} to {} B: {} B are used and {} B reserved{}; make "
            "room first",
            to_string(location), budget->count(), account.used.count(), account.reserved.count(),
            account.staging != Bytes()
                ? fmt::format(", of which {} B for staging until the manager closes",
                              account.staging.count())
                : ""));
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
      const bool arriving = is_pending(each->ready());
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
  if (const Account* pinned = ledger_.find(Location::pinned_host());
      pinned != nullptr && pinned->staging != Bytes()) {
    snapshot.reservations.push_back({staging_reservation(pinned->staging), true});
  }
  for (const auto& [number, open] : reservations_) {
    snapshot.reservations.push_back({open.fields, open.headroom != nullptr});
  }
  return snapshot;
}

}  // namespace residency
