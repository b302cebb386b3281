#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "csrc/cuda/range_memory.h"
#include "residency/core/bytes.h"
#include "residency/core/location.h"
#include "residency/core/reclaim.h"

namespace residency {

/// Has a manager asked for memory of devices that others need. `find_memory` gives the arena that
/// its values lie in, null where there is none.
void add_tenant(std::function<std::shared_ptr<RangeMemory>(Location)> find_memory,
                std::weak_ptr<Reclaimer> reclaimer);

struct Eviction {
  std::uint64_t num_values = 0;
  Bytes bytes;  ///< of the segments that were emptied
};
/// Has the managers of this process evict the cheapest values with which whole segments of at least
/// `needed` bytes go back to the caching allocator; nothing where all that can go is less. Several
/// threads that do so at once each make room of their own. Called without any lock held; may wait
/// for copies.
[[nodiscard]] Eviction evict_for(Location device, Bytes needed, std::string_view why);

/// The managed values at the device, the largest named, and why they stay; empty when there are
/// none.
[[nodiscard]] std::string describe_holders(Location device);

}  // namespace residency
