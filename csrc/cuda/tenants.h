#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "csrc/cuda/range_memory.h"
#include "residency/core/bytes.h"
#include "residency/core/location.h"
#include "residency/core/reclaim.h"

namespace residency {

/// Has a manager asked for memory of devices that others need. `find_memory` gives the arena that
/// its values lie in, null where there is none.
void add_tenant(std::function<std::shared_ptr<RangeMemory>(Location)> find_memory,
                std::weak_ptr<Reclaimer> reclaimer);

/// Has the managers of this process evict the cheapest values with which whole segments of at least
/// `needed` bytes go back to the caching allocator; nothing where all that can go is less. Several
/// threads that do so at once each make room of their own. Returns how many left. Called without
/// any lock held; may wait for copies.
[[nodiscard]] std::uint64_t evict_for(Location device, Bytes needed, const std::string& why);

/// The managed values at the device, the largest named, and why they stay; empty when there are
/// none.
[[nodiscard]] std::string describe_holders(Location device);

}  // namespace residency
