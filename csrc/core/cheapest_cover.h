#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "residency/core/bytes.h"
#include "residency/core/export.h"

namespace residency {

/// Something that frees bytes at a cost.
struct CoverItem {
  Bytes frees;
  Bytes cost;
  std::size_t count = 1;  ///< of equally cheap choices the one of the lowest sum is taken
};

/// The items that together free at least `needed`, at the lowest cost: their positions, ascending;
/// none where all of them do not do. No item of the choice could be left out.
///
/// Exact where items x (needed / 2 MiB) is up to 64 Mi, with `frees` counted in whole 2 MiB;
/// beyond that by cost for each byte, and what then is superfluous left out, dearest first.
[[nodiscard]] RESIDENCY_API std::optional<std::vector<std::size_t>> cheapest_cover(
    std::span<const CoverItem> items, Bytes needed);

}  // namespace residency
