#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "residency/core/bytes.h"
#include "residency/core/location.h"
#include "residency/core/verdict.h"

namespace residency {

/// The accounting of one location.
struct Account {
  Location location;
  std::optional<Bytes> budget{};
  std::optional<Bytes> limit{};  ///< of the system; only in a simulation
  Bytes used{};                  ///< materializations, temporary loads, escaped memory
  Bytes reserved{};              ///< open reservations, and `staging`
  Bytes staging{};               ///< buffers that staged copies go through
  Bytes retiring{};              ///< given up, but something still reads it
  Bytes escaped{};               ///< part of used: given up, but others keep the memory alive
  Bytes peak_used{};
  Bytes peak_charged{};  ///< of used + reserved
  /// Of a device: staged copies that were admitted and have not failed at once. From the first on
  /// its buffers are among those at pinned-host.
  std::uint64_t num_staged = 0;
  bool listed = false;

  void note_peaks() {
    peak_used = std::max(peak_used, used);
    peak_charged = std::max(peak_charged, used.saturating_add(reserved));
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
    return beyond(budget.value_or(Bytes::max()), reserved, requested);
  }
  /// The same for bytes that are going to be taken from the system, which may have a limit of its
  /// own. Reservations are not taken from it, but for `staging`.
  [[nodiscard]] Bytes lacking(Bytes requested) const noexcept {
    return std::max(over_budget(requested), over_limit(requested));
  }
  [[nodiscard]] Shortfall shortfall(Bytes requested) const noexcept {
    const bool of_system = over_limit(requested) > over_budget(requested);
    return {location, of_system ? *limit : budget.value_or(Bytes::max()),
            used,     of_system ? staging : reserved,
            retiring, requested,
            of_system};
  }

 private:
  [[nodiscard]] Bytes over_limit(Bytes requested) const noexcept {
    return limit.has_value() ? beyond(*limit, staging, requested) : Bytes();
  }
  [[nodiscard]] Bytes beyond(Bytes most, Bytes held, Bytes requested) const noexcept {
    // Four terms below 2^63 each, whose sum must not stop at 2^63-1 and then seem to fit.
    unsigned __int128 sum = 0;
    for (const Bytes each : {used, held, retiring, requested}) {
      sum += static_cast<unsigned __int128>(each.count());
    }
    const auto limit = static_cast<unsigned __int128>(most.count());
    if (sum <= limit) {
      return Bytes();
    }
    const unsigned __int128 over = sum - limit;
    return over < static_cast<unsigned __int128>(Bytes::max().count())
               ? Bytes(static_cast<std::int64_t>(over))
               : Bytes::max();
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
