#include <map>
#include <stdexcept>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "manager_state.h"

namespace residency {

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
      num_ranges += each->block->address_ranges().size();
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
      num_ranges += each.departing_ranges.size();
      if (!each.escape_watch) {
        recount[each.from].retiring += each.departing->charge;
      }
    }
  }
  for (const auto& [number, open] : reservations_) {
    recount[open.fields.location].reserved += open.fields.nbytes;
  }
  for (const Account& account : ledger_.accounts()) {
    Account& counted = recount[account.location];
    counted.reserved += account.staging;
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
