#pragma once

#include <algorithm>
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
  Bytes used{};      ///< materializations, temporary loads, escaped memory
  Bytes reserved{};  ///< open reservations
  Bytes retiring{};  ///< given up, but something still reads it
  Bytes escaped{};   ///< part of used: given up, but others keep the memory alive
  Bytes peak_used{};
  Bytes peak_charged{};  ///< of used + reserved
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

  [[nodiscard]] bool has_lower_limit() const noexcept {
    return limit.has_value() && *limit < budget.value_or(Bytes::max());
  }
  [[nodiscard]] Bytes most() const noexcept {
    return has_lower_limit() ? *limit : budget.value_or(Bytes::max());
  }
  /// Bytes by which `requested` does not fit. Without a budget the limit is what can be counted.
  [[nodiscard]] Bytes lacking(Bytes requested) const noexcept {
    // Four terms below 2^63 each, whose sum must not stop at 2^63-1 and then seem to fit.
    unsigned __int128 sum = 0;
    for (const Bytes each : {used, reserved, retiring, requested}) {
      sum += static_cast<unsigned __int128>(each.count());
    }
    const auto most = static_cast<unsigned __int128>(this->most().count());
    if (sum <= most) {
      return Bytes();
    }
    const unsigned __int128 over = sum - most;
    return over < static_cast<unsigned __int128>(Bytes::max().count())
               ? Bytes(static_cast<std::int64_t>(over))
               : Bytes::max();
  }
  [[nodiscard]] Shortfall shortfall(Bytes requested) const noexcept {
    return {location, most(), used, reserved, retiring, requested, has_lower_limit()};
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
