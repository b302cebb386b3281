#include "csrc/core/cheapest_cover.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <utility>

namespace residency {
namespace {

constexpr std::int64_t kUnit = std::int64_t{2} << 20;
constexpr std::size_t kMostCells = std::size_t{64} << 20;

struct Price {
  std::int64_t cost = std::numeric_limits<std::int64_t>::max();
  std::size_t count = 0;
  friend auto operator<=>(const Price&, const Price&) = default;
};

/// Dynamic programming over the units that are still to be covered.
std::vector<std::size_t> exact(std::span<const CoverItem> items, std::size_t num_units) {
  std::vector<Price> cheapest(num_units + 1);
  cheapest[0].cost = 0;
  std::vector<bool> takes(items.size() * (num_units + 1));
  const auto rest = [&](std::size_t item, std::size_t units) {
    const auto freed = static_cast<std::size_t>(items[item].frees.count() / kUnit);
    return units - std::min(units, freed);
  };
  for (std::size_t item = 0; item < items.size(); ++item) {
    for (std::size_t units = num_units; units > 0; --units) {
      const std::size_t left = rest(item, units);
      if (left == units || cheapest[left] == Price()) {
        continue;
      }
      const Price price{cheapest[left].cost + items[item].cost.count(),
                        cheapest[left].count + items[item].count};
      if (price < cheapest[units]) {
        cheapest[units] = price;
        takes[item * (num_units + 1) + units] = true;
      }
    }
  }
  std::vector<std::size_t> chosen;
  std::size_t units = num_units;
  for (std::size_t item = items.size(); item-- > 0 && units > 0;) {
    if (takes[item * (num_units + 1) + units]) {
      chosen.push_back(item);
      units = rest(item, units);
    }
  }
  std::ranges::reverse(chosen);
  return chosen;
}

std::vector<std::size_t> greedy(std::span<const CoverItem> items, Bytes needed) {
  std::vector<std::size_t> order(items.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto is_cheaper = [&](std::size_t a, std::size_t b) {
    const auto left = static_cast<__int128>(items[a].cost.count()) * items[b].frees.count();
    const auto right = static_cast<__int128>(items[b].cost.count()) * items[a].frees.count();
    return left != right ? left < right : items[a].frees > items[b].frees;
  };
  std::ranges::stable_sort(order, is_cheaper);
  std::vector<std::size_t> chosen;
  Bytes freed;
  for (const std::size_t item : order) {
    if (freed >= needed) {
      break;
    }
    chosen.push_back(item);
    freed += items[item].frees;
  }
  std::ranges::stable_sort(chosen, [&](std::size_t a, std::size_t b) {
    return std::pair(items[a].cost, items[a].count) > std::pair(items[b].cost, items[b].count);
  });
  std::erase_if(chosen, [&](std::size_t item) {
    const bool superfluous = freed - items[item].frees >= needed;
    freed -= superfluous ? items[item].frees : Bytes();
    return superfluous;
  });
  std::ranges::sort(chosen);
  return chosen;
}

}  // namespace

std::optional<std::vector<std::size_t>> cheapest_cover(std::span<const CoverItem> items,
                                                       Bytes needed) {
  Bytes most;
  Bytes most_units;
  for (const CoverItem& item : items) {
    most = most.saturating_add(item.frees);
    most_units = most_units.saturating_add(Bytes(item.frees.count() / kUnit * kUnit));
  }
  if (most < needed) {
    return std::nullopt;
  }
  if (needed <= Bytes()) {
    return std::vector<std::size_t>();
  }
  const Bytes in_units = needed.rounded_up(kUnit);
  const auto num_units = static_cast<std::size_t>(in_units.count() / kUnit);
  if (most_units >= in_units && num_units < kMostCells / items.size()) {
    return exact(items, num_units);
  }
  return greedy(items, needed);
}

}  // namespace residency
