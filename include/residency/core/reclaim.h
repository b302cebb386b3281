#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "residency/core/address_range.h"
#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/handle.h"
#include "residency/core/location.h"

namespace residency {

/// What a manager gives up of a device when an allocation of anybody's there would fail otherwise.
enum class ReclaimMode : std::uint8_t {
  kOff,
  kReplicas,  ///< only copies that exist elsewhere
  kPolicy,    ///< also the only copy, which is moved to the host (page-locked first) or a disk
};

/// A value that can leave a location now: nothing protects it, and nobody else keeps its memory.
struct Evictable {
  Handle handle;
  AddressRanges ranges;  ///< of its memory there
  Bytes cost;  ///< bytes to be copied, now or to have it again; none when a copy is elsewhere
};

/// A value that takes memory of a location.
struct Holder {
  Handle handle;
  Bytes charge;
  std::string why_it_stays;  ///< empty when it could leave now
};

/// What a backend can ask of the manager that it serves when a location has no memory left.
/// Thread-safe; to be called without any lock held; waits for no other call on a value.
class RESIDENCY_API Reclaimer {
 public:
  Reclaimer() = default;
  Reclaimer(const Reclaimer&) = delete;
  Reclaimer& operator=(const Reclaimer&) = delete;
  virtual ~Reclaimer();

  /// In the order of registration. O(values).
  [[nodiscard]] virtual std::vector<Evictable> evictable(Location from) = 0;
  /// By charge, the largest first, and then in the order of registration. O(values).
  [[nodiscard]] virtual std::vector<Holder> holders(Location at) = 0;
  /// Makes the value leave, and returns when its memory has been given to the backend: after the
  /// copy, where that can fail. False, and nothing has changed, when it cannot leave any more.
  /// `why` names the plan in the trace.
  [[nodiscard]] virtual bool evict(const Handle& handle, Location from,
                                   const std::string& why) noexcept = 0;
};

}  // namespace residency
