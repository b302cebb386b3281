#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "keep_for_ever.h"
#include "manager_state.h"
#include "warning.h"

namespace residency {
namespace {

/// Null when it cannot be had.
FencePtr record_use_somehow(Backend& backend, const Stream& stream) noexcept {
  constexpr int kMostTries = 100;
  for (int i = 1;; ++i) {
    try {
      return backend.record_use(stream);
    } catch (...) {
      if (i == kMostTries) {
        warn("closing: a last use could not be recorded; what it uses is not freed any more: " +
             describe(std::current_exception()));
        return nullptr;
      }
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

void ManagerState::close(const CloseOptions& options) {
  check_not_loading();
  Trash trash;
  Lock lock(mutex_);
  end_orphans(lock);
  if (closed()) {
    if (options.wait && !is_forked()) {  // another thread may be at it
      all_locked_.wait(lock, [&] { return torn_down_ && num_unlocked_ == 0; });
    }
    return;
  }
  settle(trash);
  if (options.wait && !is_forked()) {
    backend_->check_may_wait();
  }
  if (!options.force) {
    std::uint32_t num_only_on_disk = 0;
    values_.for_each([&](const ValueRecord& record) {
      bool on_disk = false;
      bool elsewhere = record.can_be_made_again() || record.discarded;
      for (const Materialization* each = record.first.get(); each != nullptr;
           each = each->next.get()) {
        (each->location.is_disk() ? on_disk : elsewhere) |= is_good(*each);
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
  CutShort leases = leases_cut_short();
  closed_.store(true, std::memory_order_release);
  if (!is_forked()) {
    all_locked_.wait(lock, [&] { return num_unlocked_ == 0; });
    record_last_uses(lock, leases);
  }
  if (options.wait && !is_forked()) {
    const std::vector<FencePtr> fences = pending_work();
    {
      const Unlocked unlocked(*this, lock);
      wait_all(fences);
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
  CutShort leases;
  try {
    leases = leases_cut_short();
  } catch (...) {
    warn("closing: no memory to record what leases still use; nothing is given back any more");
    static std::atomic<ManagerState*> last{nullptr};  // so that leak checkers reach all of them
    itself_ = shared_from_this();
    kept_before_ = last.exchange(this);
  }
  closed_.store(true, std::memory_order_release);
  if (itself_ != nullptr) {
    return;
  }
  if (!is_forked()) {
    record_last_uses(lock, leases);
  }
  if (num_unlocked_ == 0) {
    tear_down(lock, false);
  }
}

/// Before the manager counts as closed: from then on a lease may be destroyed at any time. All that
/// `record_last_uses` needs memory for.
ManagerState::CutShort ManagerState::leases_cut_short() {
  CutShort found;
  for (const LeaseState* lease : leases_) {
    for (const Stream& stream : lease->streams) {
      auto use = std::ranges::find(found.uses, stream, &CutShort::Use::stream);
      if (use == found.uses.end()) {
        use = found.uses.insert(use, {stream, nullptr});
      }
      for (const LeasedValue& value : lease->values) {
        found.used.emplace_back(value.materialization,
                                static_cast<std::size_t>(use - found.uses.begin()));
      }
    }
  }
  std::ranges::sort(found.used);
  const auto repeated = std::ranges::unique(found.used);
  found.used.erase(repeated.begin(), repeated.end());
  for (const auto& [materialization, use] : found.used) {
    materialization->make_room_for_last_uses(found.uses.size());
  }
  return found;
}

void ManagerState::record_last_uses(Lock& lock, CutShort& leases) noexcept {
  {
    const Unlocked unlocked(*this, lock);
    for (CutShort::Use& use : leases.uses) {
      use.fence = record_use_somehow(*backend_, use.stream);
    }
  }
  for (const auto& [materialization, use] : leases.used) {
    if (const FencePtr& fence = leases.uses[use].fence; fence != nullptr) {
      materialization->add_last_use(fence);
    } else {
      keep_for_ever(materialization->block);  // nobody knows when its use is over
    }
  }
  leases_.clear();
}

void ManagerState::tear_down(Lock& lock, bool wait) noexcept {
  // Records stay until the state dies: threads that waited for a turn still look at them.
  torn_down_ = true;
  // Whoever has waited and settles now finds nothing; none of this allocates.
  auto arrivals = std::exchange(arrivals_, {});
  auto retiring = std::exchange(retiring_, {});
  auto escaped = std::exchange(escaped_, {});
  auto failures = std::exchange(failures_, {});
  auto reservations = std::exchange(reservations_, {});
  auto orphans = std::move(orphans_);
  // Every call finds the manager closed, so that nobody looks at the values' blocks any more.
  const Unlocked unlocked(*this, lock);
  while (orphans != nullptr) {  // and their views, before the blocks
    orphans = std::move(orphans->next);
  }
  values_.for_each([&](ValueRecord& record) {
    while (record.first) {
      give_back_at_close(*record.first);
      const MaterializationPtr ended = std::move(record.first);
      record.first = std::move(ended->next);
    }
    record.source = nullptr;
    record.spec.layout = nullptr;
  });
  for (Arrival& each : arrivals) {
    BlockPtr retained = each.fence->take_retained();  // fences live on in reports
    if (each.departing != nullptr) {                  // the fence is among its readers
      if (each.departing->block == nullptr) {
        each.departing->block = std::move(retained);
      }
      give_back_at_close(*each.departing);
    }
  }
  for (Retiring& each : retiring) {
    if (each.block) {
      backend_->release(std::move(each.block), std::move(each.until));
    }
  }
  arrivals.clear();
  retiring.clear();
  escaped.clear();
  failures.clear();
  reservations.clear();
  backend_->close(wait);
}

/// Gives its block back behind what is still pending.
void ManagerState::give_back_at_close(Materialization& materialization) noexcept {
  std::vector<FencePtr> after;
  try {
    materialization.for_each_pending([&](const FencePtr& fence) { after.push_back(fence); });
  } catch (...) {  // no memory: then it is waited for
    materialization.for_each_pending([](const FencePtr& fence) { fence->wait(); });
    after.clear();
  }
  backend_->release(std::move(materialization.block), std::move(after));
}

}  // namespace residency
