#include "csrc/cuda/tenants.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "csrc/core/cheapest_cover.h"

namespace residency {
namespace {

struct Tenant {
  std::function<std::shared_ptr<RangeMemory>(Location)> find_memory;
  std::weak_ptr<Reclaimer> reclaimer;
};

struct Process {
  /// Held while it is chosen what leaves, and not while it does: what is destroyed then may need
  /// the GIL, whose holder may allocate. Managers are asked under it, so that it comes before
  /// theirs.
  std::mutex mutex;
  std::vector<Tenant> tenants;
  std::unordered_set<Handle> leaving;  // for some thread, which has counted their segments
};

Process& process() {
  static Process& process = *new Process;  // allocations may outlive all else
  return process;
}

struct Departure {
  std::shared_ptr<Reclaimer> reclaimer;
  Handle handle;
};

/// Who may have something at a device. It may turn out to be the last to refer to them: then they
/// die with it, which must not be under the mutex.
struct Present {
  std::vector<std::shared_ptr<Reclaimer>> reclaimers;
  std::vector<std::shared_ptr<RangeMemory>> memories;
};

Present present_at(Location device) {
  std::vector<Tenant> tenants;
  {
    Process& all = process();
    const std::lock_guard lock(all.mutex);
    tenants = all.tenants;
  }
  Present present;
  for (const Tenant& tenant : tenants) {
    auto reclaimer = tenant.reclaimer.lock();
    auto memory = reclaimer != nullptr ? tenant.find_memory(device) : nullptr;
    if (memory == nullptr) {
      continue;
    }
    present.reclaimers.push_back(std::move(reclaimer));
    if (std::find(present.memories.begin(), present.memories.end(), memory) ==
        present.memories.end()) {
      present.memories.push_back(std::move(memory));
    }
  }
  return present;
}

/// With the mutex held.
std::vector<Departure> choose(const Process& all, const Present& present, Location device,
                              Bytes needed) {
  std::vector<Departure> candidates;
  std::vector<Bytes> costs;
  std::vector<std::uintptr_t> beginnings;
  for (const std::shared_ptr<Reclaimer>& reclaimer : present.reclaimers) {
    for (const Evictable& each : reclaimer->evictable(device)) {
      if (each.ranges.size() != 0 && !all.leaving.contains(each.handle)) {
        candidates.push_back({reclaimer, each.handle});
        costs.push_back(each.cost);
        beginnings.push_back(each.ranges.begin()->begin);
      }
    }
  }
  std::vector<RangeMemory::Emptiable> segments;
  std::vector<CoverItem> items;
  for (const auto& memory : present.memories) {
    for (RangeMemory::Emptiable& segment : memory->emptiable(beginnings)) {
      CoverItem item{segment.nbytes, {}, segment.leaving.size()};
      for (const std::size_t candidate : segment.leaving) {
        item.cost += costs[candidate];
      }
      items.push_back(item);
      segments.push_back(std::move(segment));
    }
  }
  std::vector<Departure> departures;
  for (const std::size_t item :
       cheapest_cover(items, needed).value_or(std::vector<std::size_t>())) {
    for (const std::size_t candidate : segments[item].leaving) {
      departures.push_back(std::move(candidates[candidate]));
    }
  }
  return departures;
}

/// Values that nobody else chooses to have leave, for as long as this lives.
class Leaving {
 public:
  Leaving(const Present& present, Location device, Bytes needed) {
    Process& all = process();
    const std::lock_guard lock(all.mutex);
    departures_ = choose(all, present, device, needed);
    try {
      for (const Departure& each : departures_) {
        all.leaving.insert(each.handle);
      }
    } catch (...) {
      forget(all);
      throw;
    }
  }
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;
  ~Leaving() {
    Process& all = process();
    const std::lock_guard lock(all.mutex);
    forget(all);
  }

  [[nodiscard]] const std::vector<Departure>& departures() const noexcept { return departures_; }

 private:
  void forget(Process& all) noexcept {
    for (const Departure& each : departures_) {
      all.leaving.erase(each.handle);
    }
  }

  std::vector<Departure> departures_;
};

}  // namespace

void add_tenant(std::function<std::shared_ptr<RangeMemory>(Location)> find_memory,
                std::weak_ptr<Reclaimer> reclaimer) {
  Process& all = process();
  std::vector<Tenant> gone;  // dies after the lock
  const std::lock_guard lock(all.mutex);
  const auto first = std::partition(all.tenants.begin(), all.tenants.end(),
                                    [](const Tenant& each) { return !each.reclaimer.expired(); });
  std::move(first, all.tenants.end(), std::back_inserter(gone));
  all.tenants.erase(first, all.tenants.end());
  all.tenants.push_back({std::move(find_memory), std::move(reclaimer)});
}

std::uint64_t evict_for(Location device, Bytes needed, const std::string& why) {
  const Present present = present_at(device);
  const Leaving leaving(present, device, needed);
  std::uint64_t num_left = 0;
  for (const Departure& each : leaving.departures()) {
    num_left += each.reclaimer->evict(each.handle, device, why) ? 1U : 0U;
  }
  return num_left;
}

std::string describe_holders(Location device) {
  constexpr std::size_t kMostNamed = 5;
  std::vector<std::shared_ptr<Reclaimer>> reclaimers;
  {
    Process& all = process();
    const std::lock_guard lock(all.mutex);
    for (const Tenant& tenant : all.tenants) {
      if (auto reclaimer = tenant.reclaimer.lock(); reclaimer != nullptr) {
        reclaimers.push_back(std::move(reclaimer));
      }
    }
  }
  std::vector<Holder> holders;
  for (const auto& reclaimer : reclaimers) {
    std::vector<Holder> more = reclaimer->holders(device);
    std::move(more.begin(), more.end(), std::back_inserter(holders));
  }
  if (holders.empty()) {
    return {};
  }
  std::stable_sort(holders.begin(), holders.end(),
                   [](const Holder& a, const Holder& b) { return a.charge > b.charge; });
  Bytes sum;
  for (const Holder& each : holders) {
    sum += each.charge;
  }
  std::string text = fmt::format("{} managed value(s) hold {} B at {}:", holders.size(),
                                 sum.count(), to_string(device));
  for (std::size_t i = 0; i < std::min(kMostNamed, holders.size()); ++i) {
    const Holder& each = holders[i];
    text += fmt::format(
        "{} {} ({} B, {})", i == 0 ? "" : ",", to_string(each.handle), each.charge.count(),
        each.why_it_stays.empty() ? "could leave, which is not enough" : each.why_it_stays);
  }
  return holders.size() > kMostNamed ? text + ", and others" : text;
}

}  // namespace residency
