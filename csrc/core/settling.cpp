#include <iterator>
#include <list>
#include <utility>

#include <fmt/format.h>

#include "manager_state.h"

namespace residency {
namespace {

/// Where one throws, those before it are settled, and it and those after it as they were.
template <class Each, class Settle>
void erase_settled(std::list<Each>& list, const Settle& settle) {
  for (auto each = list.begin(); each != list.end();) {
    each = settle(*each) ? list.erase(each) : std::next(each);
  }
}

}  // namespace

/// A record whose turn somebody else has is left alone: that call looks at it with the mutex open.
/// `own` is the record whose turn the caller has.
void ManagerState::settle(Trash& trash, const ValueRecord* own) {
  erase_settled(arrivals_, [&](Arrival& each) { return settle_arrival(each, trash, own); });
  erase_settled(retiring_, [&](Retiring& each) { return settle_retiring(each, trash); });
  erase_settled(escaped_, [&](Escaped& each) {
    if (each.until->poll() == FenceStatus::kPending) {
      return false;
    }
    trash.make_room(1);
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
  trash.make_room(retiring.until.size() + 1);
  ledger_.account(retiring.location).retiring -= retiring.bytes;
  for (FencePtr& fence : retiring.until) {
    trash.objects.push_back(std::move(fence));
  }
  trash.objects.push_back(std::move(retiring.block));
  return true;
}

/// What it means for the ledger that an arrival is certain; once. What is pending still counts as
/// arrived from then on, whatever becomes of its device.
void ManagerState::account_for_end(Arrival& arrival, Trash& trash) {
  const bool failed = arrival.fence->poll() == FenceStatus::kFailed;
  std::list<Retiring> retiring;
  if (!failed && arrival.departing) {
    trash.make_room(0, 1);
    arrival.departing->for_each_pending([&](const FencePtr& fence) {
      if (retiring.empty()) {
        retiring.emplace_back();
      }
      retiring.front().until.push_back(fence);
    });
  }
  // From here on nothing allocates.
  arrival.failed = failed;
  if (arrival.departing && !arrival.escape_watch) {
    ledger_.account(arrival.from).retiring -= arrival.departing->charge;
  }
  if (!failed) {
    if (arrival.departing) {
      if (arrival.departing->block && !retiring.empty()) {
        const Bytes bytes = arrival.escape_watch ? Bytes() : arrival.departing->charge;
        ledger_.account(arrival.from).retiring += bytes;
        retiring.front().location = arrival.from;
        retiring.front().bytes = bytes;
        retiring.front().block = std::move(arrival.departing->block);
        retiring_.splice(retiring_.end(), retiring);
      }
      unregister_ranges(arrival.departing_ranges);
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
    escaped_.remove_if([&](const Escaped& each) {
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

/// True when it is known how the arrival ends and it is done with.
bool ManagerState::settle_arrival(Arrival& arrival, Trash& trash, const ValueRecord* own) {
  if (!arrival.fence->is_certain()) {
    return false;
  }
  if (!arrival.failed.has_value()) {
    account_for_end(arrival, trash);
  }
  ValueRecord* record = values_.find(arrival.handle).record;
  if (record != nullptr && record->busy && record != own) {
    return false;
  }
  trash.make_room(2, 2);
  if (record == nullptr) {  // the value has ended
    trash.objects.push_back(arrival.fence->take_retained());
    if (arrival.departing) {
      unregister_ranges(arrival.departing_ranges);
      trash.materializations.push_back(std::move(arrival.departing));
    }
    return true;
  }
  // An uncertain materialization is given up only after it was settled, so it is still there. Its
  // fence may be another's by now: whoever wrote to it has waited for the arrival.
  Materialization& arrived = *record->find(arrival.at);
  const bool failed = *arrival.failed;
  std::list<Failure> failure;
  Leave leave;
  if (failed) {
    failure.emplace_back();
    leave = leave_of(arrived, /*escapes=*/false);
    (void)failures_[arrival.handle.id()];
  }
  // From here on nothing allocates.
  const bool is_latest = arrived.ready() == arrival.fence;
  if (is_latest) {
    arrived.fails_later = false;
    arrived.replaces = false;
  }
  if (is_latest && (failed || arrival.fence->poll() == FenceStatus::kDone)) {
    trash.objects.push_back(arrived.ready());
    arrived.set_ready(nullptr);
  }
  if (!failed) {
    return true;
  }
  failure.front().path = arrival.path;
  failure.front().fence = arrival.fence;
  failure.front().from = arrival.from;
  failure.front().at = arrival.at;
  std::list<Failure>& failures = failures_.find(arrival.handle.id())->second;
  failures.splice(failures.end(), failure);
  record->has_failure = true;
  ++version_;
  if (arrival.overwrites) {
    arrived.stale = true;
  } else {
    trash.materializations.push_back(detach(*record, arrival.at, leave));
  }
  if (arrival.departing) {
    arrival.departing->block = arrival.fence->take_retained();
    link(*record, std::move(arrival.departing));  // its ranges have stayed registered
  }
  return true;
}

}  // namespace residency
