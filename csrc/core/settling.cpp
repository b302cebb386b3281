#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "manager_state.h"

namespace residency {

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

/// True when it is known how the arrival ends and it is done with.
bool ManagerState::settle_arrival(Arrival& arrival, Trash& trash, const ValueRecord* own) {
  if (!arrival.fence->is_certain()) {
    return false;
  }
  const FenceStatus status = arrival.fence->poll();
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
      unregister_ranges(arrival.departing_ranges);
      trash.materializations.push_back(std::move(arrival.departing));
    }
    return true;
  }
  // An uncertain materialization is given up only after it was settled, so it is still there. Its
  // fence may be another's by now: whoever wrote to it has waited for the arrival.
  Materialization& arrived = *record->find(arrival.at);
  if (arrived.ready() == arrival.fence && status != FenceStatus::kPending) {
    trash.objects.push_back(arrived.ready());
    arrived.set_ready(nullptr);
  }
  arrived.fails_later = false;
  arrived.replaces = false;
  if (status != FenceStatus::kFailed) {
    return true;
  }
  // First what can fail, for want of memory: nothing is half settled then.
  Failure& failure = failures_[arrival.handle.id()].emplace_back();
  record->has_failure = true;
  failure.path = arrival.path;
  failure.fence = arrival.fence;
  ++version_;
  if (arrival.overwrites) {
    arrived.stale = true;
  } else {
    trash.materializations.push_back(detach(*record, arrival.at));
  }
  if (arrival.departing) {
    arrival.departing->block = arrival.fence->take_retained();
    unregister_ranges(arrival.departing_ranges);  // attaching registers them
    attach(*record, std::move(arrival.departing));
  }
  failure.from = arrival.from;
  failure.at = arrival.at;
  return true;
}

}  // namespace residency
