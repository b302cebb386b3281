#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "manager_state.h"
#include "planner.h"

namespace residency {

namespace {

void add_if_pending(const FencePtr& fence, std::vector<FencePtr>& incomplete) {
  if (is_pending(fence)) {
    incomplete.push_back(fence);
  }
}

}  // namespace

ValueRecord* ManagerState::take_turn(Lock& lock, const Handle& handle, bool may_block) {
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
  if (!may_block) {
    throw UnavailableError(
        fmt::format("another call is changing {}, and this one may not wait (may_block = false)",
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

void ManagerState::refuse_pending_in_forked_child(const std::vector<FencePtr>& fences) const {
  if (is_forked() && any_pending(fences)) {
    throw ForkError("a transfer of the parent process cannot be waited for in its child");
  }
}

void ManagerState::wait_on(Lock& lock, const std::vector<FencePtr>& fences) {
  refuse_pending_in_forked_child(fences);
  if (any_pending(fences)) {
    backend_->check_may_wait();
  }
  const Unlocked unlocked(*this, lock);
  wait_all(fences);
}

/// Waits for arrivals until it is known whether they succeed.
void ManagerState::make_certain(Lock& lock, const std::vector<FencePtr>& arrivals) {
  refuse_pending_in_forked_child(arrivals);
  const Unlocked unlocked(*this, lock);
  for (const FencePtr& each : arrivals) {
    each->make_certain();
  }
}

/// Asks of every copy to the value whether it has failed, with a device that was lost: the planner
/// looks at what is known.
void ManagerState::poll_arrivals(const ValueRecord& record) {
  for (const Materialization* each = record.first.get(); each != nullptr; each = each->next.get()) {
    (void)is_pending(each->ready());
  }
}

/// Has the copies to the value that were put off given to their device, without waiting for them:
/// whoever acts on the value relies on them, or takes their source away. The caller has the turn.
void ManagerState::make_certain(Lock& lock, Trash& trash, ValueRecord& record) {
  std::vector<FencePtr> put_off;
  for (const Materialization* each = record.first.get(); each != nullptr; each = each->next.get()) {
    if (each->is_put_off()) {
      put_off.push_back(each->ready());
    }
  }
  if (!put_off.empty()) {
    make_certain(lock, put_off);
    settle(trash, &record);
  }
}

std::vector<FencePtr> ManagerState::fences_to_wait_for(const ValueRecord* record,
                                                       const Verdict& verdict) const {
  std::vector<FencePtr> fences;
  if (record != nullptr) {
    for (const Materialization* each = record->first.get(); each != nullptr;
         each = each->next.get()) {
      if (each->is_uncertain()) {
        add_if_pending(each->ready(), fences);
      }
      if (verdict.reason == Reason::kRefreshed && each->location == verdict.destination) {
        each->for_each_pending([&](const FencePtr& fence) { fences.push_back(fence); });
      }
    }
  }
  const auto add_retiring = [&](Location location, Bytes nbytes) {
    const Account* account = ledger_.find(location);
    if (account == nullptr || account->over_budget(nbytes) == Bytes()) {
      return;
    }
    for (const Retiring& each : retiring_) {
      if (each.location == location) {
        for (const FencePtr& fence : each.until) {
          add_if_pending(fence, fences);
        }
      }
    }
    for (const Arrival& each : arrivals_) {
      if (each.departing && each.from == location) {
        add_if_pending(each.fence, fences);
      }
    }
  };
  for (std::size_t i = 0; i < verdict.num_transitions; ++i) {
    const Transition& each = verdict.transitions[i];
    if (each.kind == TransitionKind::kReconstruct || each.kind == TransitionKind::kCopy) {
      add_retiring(each.to, each.charge);
    }
    const Materialization* source = record != nullptr ? record->find(each.from) : nullptr;
    if (source != nullptr && each.kind != TransitionKind::kRelease && source->arrives_by_worker() &&
        goes_on_stream(*backend_, each.from, each.to)) {
      fences.push_back(source->ready());
    }
  }
  if (verdict.staging != Bytes()) {
    add_retiring(Location::pinned_host(), verdict.staging);
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
      throw BudgetError(ledger_.account(location).shortfall({.values = nbytes}));
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
    failures->second.splice(failures->second.begin(), failures->second, own);
    throw_failure_of(*record, handle);
  }
}

/// All that is in flight.
std::vector<FencePtr> ManagerState::pending_work() const {
  std::vector<FencePtr> fences;
  for (const Arrival& each : arrivals_) {
    add_if_pending(each.fence, fences);
  }
  for (const Retiring& each : retiring_) {
    for (const FencePtr& fence : each.until) {
      add_if_pending(fence, fences);
    }
  }
  values_.for_each([&](const ValueRecord& record) {
    for (const Materialization* each = record.first.get(); each != nullptr;
         each = each->next.get()) {
      each->for_each_pending([&](const FencePtr& fence) { fences.push_back(fence); });
    }
  });
  return fences;
}

void ManagerState::synchronize() {
  check_not_loading();
  Trash trash;
  Lock lock(mutex_);
  start_call(lock);
  while (true) {
    all_locked_.wait(lock, [&] { return num_unlocked_ == 0 || is_forked(); });
    settle(trash);
    const std::vector<FencePtr> fences = pending_work();
    if (fences.empty()) {
      return;
    }
    wait_on(lock, fences);
  }
}

}  // namespace residency
