#include <algorithm>
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
  const std::vector<CutShort> leases = leases_cut_short();
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
        uses.emplace_back(stream, record_use_somehow(*backend_, stream));
      }
    }
  }
  for (const CutShort& lease : leases) {
    for (const auto& [stream, fence] : uses) {
      if (std::ranges::find(lease.streams, stream) == lease.streams.end()) {
        continue;
      }
      for (Materialization* each : lease.materializations) {
        if (fence != nullptr) {
          each->add_last_use(fence);
        } else {
          keep_for_ever(each->block);  // it stays for ever: nobody knows when its use is over
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
  for (const Arrival& each : arrivals_) {
    // What has failed under a call that had the turn is off the ledger and still on the record.
    ValueRecord* record = values_.find(each.handle).record;
    if (each.accounted && !each.overwrites && record != nullptr &&
        each.fence->poll() == FenceStatus::kFailed) {
      record->find(each.at)->charge = Bytes();
    }
  }
  values_.for_each([&](ValueRecord& record) {
    while (record.first) {
      Leave leave = leave_of(*record.first, /*escapes=*/false);
      make_room_in(releases, 1);
      give_up(record, detach(record, record.first->location, leave), leave, nullptr, releases);
    }
    if (!record.discarded) {
      trash.make_room(2);
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
  auto orphans = std::move(orphans_);
  const Unlocked unlocked(*this, lock);
  while (orphans != nullptr) {  // and their views, before the blocks
    orphans = std::move(orphans->next);
  }
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

}  // namespace residency
