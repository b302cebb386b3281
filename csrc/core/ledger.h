#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "make_room.h"
#include "residency/core/backend.h"
#include "residency/core/bytes.h"
#include "residency/core/location.h"
#include "residency/core/verdict.h"

namespace residency {

/// What a location can take from the system, as a simulation found it at its start. Memory that was
/// taken stays: what a value has given up serves values alone.
struct SystemLimit {
  Growth taken{};  ///< by values, with what is free among them, and by `staging`
  Bytes spare{};   ///< what can be taken more
};

/// The accounting of one location.
struct Account {
  Location location;
  std::optional<Bytes> budget{};
  std::optional<SystemLimit> limit{};  ///< only in a simulation
  Bytes used{};                        ///< materializations, temporary loads, escaped memory
  Bytes reserved{};                    ///< open reservations, and `staging`
  Bytes staging{};                     ///< buffers that staged copies go through
  Bytes retiring{};                    ///< given up, but something still reads it
  Bytes escaped{};                     ///< part of used: given up, but others keep the memory alive
  Bytes peak_used{};
  Bytes peak_charged{};  ///< of used + reserved
  Bytes peak_held{};     ///< of used + retiring: what memory was there for
  /// Of a device: staged copies that were admitted and have not failed at once. From the first on
  /// its buffers are among those at pinned-host.
  std::uint64_t num_staged = 0;
  bool listed = false;

  void note_peaks() {
    peak_used = std::max(peak_used, used);
    peak_charged = std::max(peak_charged, used.saturating_add(reserved));
    peak_held = std::max(peak_held, used.saturating_add(retiring));
  }
  void charge(Bytes bytes) {
    used += bytes;
    note_peaks();
  }
  void reserve(Bytes bytes) {
    reserved += bytes;
    note_peaks();
  }
  void reserve_staging(Bytes bytes) {
    staging += bytes;
    reserve(bytes);
  }
  void release_staging(Bytes bytes) {
    staging -= bytes;
    reserved -= bytes;
  }

  /// Bytes by which `requested` is beyond the budget. Without one the limit is what can be counted.
  [[nodiscard]] Bytes over_budget(Bytes requested) const noexcept {
    const Wide most = (budget.has_value() ? *budget : Bytes::max()).count();
    return bytes_above(most, held(reserved, requested));
  }
  /// The same for bytes that are going to be taken from the system, which may have a limit of its
  /// own. Reservations are not taken from it, but for `staging`.
  [[nodiscard]] Bytes lacking(const Growth& requested) const noexcept {
    return std::max(over_budget(requested.values + requested.staging), over_limit(requested));
  }
  /// The same once nothing is retiring any more.
  [[nodiscard]] Bytes lacking_for_good(const Growth& requested) const noexcept {
    Account settled = *this;
    settled.retiring = Bytes();
    return settled.lacking(requested);
  }
  [[nodiscard]] Shortfall shortfall(const Growth& growth) const noexcept {
    const Bytes requested = growth.values + growth.staging;
    const Bytes over = over_limit(growth);
    if (over <= over_budget(requested)) {
      return {location, budget.value_or(Bytes::max()), used, reserved, retiring, requested, false};
    }
    const Bytes most = bytes_above(over.count(), held(staging, requested));
    return {location, most, used, staging, retiring, requested, true};
  }

 private:
  using Wide = __int128;  // sums of bytes must not stop at 2^63-1 and then seem to fit

  [[nodiscard]] Wide held(Bytes besides, Bytes requested) const noexcept {
    return Wide(used.count()) + besides.count() + retiring.count() + requested.count();
  }
  [[nodiscard]] static Bytes bytes_above(Wide most, Wide sum) noexcept {
    const Wide over = std::clamp<Wide>(sum - most, 0, Bytes::max().count());
    return Bytes(static_cast<std::int64_t>(over));
  }
  [[nodiscard]] Bytes over_limit(const Growth& requested) const noexcept {
    if (!limit.has_value()) {
      return {};
    }
    const Wide values = std::max<Wide>(peak_held.count(), held(Bytes(), requested.values)) -
                        limit->taken.values.count();
    const Wide buffers =
        Wide(staging.count()) + requested.staging.count() - limit->taken.staging.count();
    return bytes_above(limit->spare.count(), std::max<Wide>(values, 0) + buffers);
  }
};

/// The accounts of a manager. Guarded by the manager's mutex.
class Ledger {
 public:
  [[nodiscard]] const Account* find(Location location) const noexcept {
    const auto found = std::ranges::find(accounts_, location, &Account::location);
    return found == accounts_.end() ? nullptr : &*found;
  }
  /// The account, made when it is not there yet. References stay valid.
  [[nodiscard]] Account& account(Location location) {
    for (Account& each : accounts_) {
      if (each.location == location) {
        return each;
      }
    }
    accounts_.push_back({.location = location});
    return accounts_.back();
  }
  /// So that adding so many does not allocate, where their accounts are there.
  void make_room_to_list(std::size_t count) { make_room_in(listed_, count); }
  /// Adds the location to the public list at its first successful use.
  void list(Location location) {
    Account& account = this->account(location);
    if (!account.listed) {
      account.listed = true;
      listed_.push_back(location);
    }
  }
  [[nodiscard]] const std::vector<Location>& listed() const noexcept { return listed_; }
  [[nodiscard]] std::deque<Account>& accounts() noexcept { return accounts_; }
  [[nodiscard]] const std::deque<Account>& accounts() const noexcept { return accounts_; }

 private:
  std::deque<Account> accounts_;  // few: searched linearly
  std::vector<Location> listed_;
};

}  // namespace residency
