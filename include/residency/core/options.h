#pragma once

#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/location.h"
#include "residency/core/reclaim.h"
#include "residency/core/stream.h"

namespace residency {

/// Bounds what values, reservations and staging buffers are charged at a location. The memory that
/// they lie in comes in segments, which `explain` predicts and no budget bounds.
struct LocationBudget {
  Location location;
  std::optional<Bytes> budget = std::nullopt;  ///< none: accounted, never limited
};

/// A directory in which values can live as files. Each manager works in a subdirectory of its own,
/// under a held lock, which it removes when it closes.
struct DiskTier {
  std::string name;                 ///< `disk:NAME`
  std::filesystem::path directory;  ///< a relative one is that at the time the manager is made
  std::optional<Bytes> budget = std::nullopt;
  bool fsync = false;  ///< files do not outlive the manager, so this buys only early write errors
};

struct ManagerOptions {
  /// Listed first in `locations()`, in this order.
  std::vector<LocationBudget> budgets;
  std::vector<DiskTier> disks;
  /// Which materialization is read when several could be, cheapest path first. Kinds not listed
  /// come last, in canonical order; within a kind the lower index or name comes first.
  std::vector<LocationKind> link_order = {LocationKind::kPinnedHost, LocationKind::kPageableHost,
                                          LocationKind::kCuda, LocationKind::kDisk};
  /// Transitions kept; 0 keeps none.
  std::size_t trace_capacity = 4096;
  /// What leaves a device under pressure. Takes the allocator plugin.
  ReclaimMode reclaim = ReclaimMode::kOff;
  /// Giving up a materialization whose memory others keep alive is an `InUseError`.
  bool strict_aliases = false;
  /// Debug: leases compare bytes, so that writes which no version counter sees are found. In host
  /// memory alone: on a device a comparison would wait.
  bool checksum_leases = false;
};

enum class OnFailure : std::uint8_t {
  kKeep,      ///< completed actions stay
  kRollback,  ///< completed actions are undone in reverse; undoing may wait on the host
};

/// How one action is carried out.
struct ActionOptions {
  /// The stream to copy on; it must belong to the destination (or, from a device to the host, to
  /// the source). Default: the backend's own transfer stream.
  std::optional<Stream> stream = std::nullopt;
  /// Whether the call may wait on the host: for retiring bytes, for an arrival that can fail or
  /// that a thread brings and a device is to read, or for another call that is changing the value.
  /// Otherwise it is refused, with `BudgetError` for the first and `UnavailableError` for the
  /// others. Loading from a source is work, not waiting.
  bool may_block = true;
  /// The copy is ahead of need, as one of `Manager::prefetch`: of a replicable value. Without
  /// effect on copies on a stream of the caller's, and where the source is given up (`move`).
  bool prefetch = false;
};

struct ExecuteOptions {
  std::string name = "execute";
  OnFailure on_failure = OnFailure::kKeep;
  std::optional<std::uint64_t> expected_state_version = std::nullopt;
  bool may_block = true;
  /// At most one transfer stream per destination device.
  std::vector<Stream> streams = {};
};

struct ScopeOptions {
  OnFailure on_failure = OnFailure::kKeep;
  std::optional<std::uint64_t> expected_state_version = std::nullopt;
  bool may_block = true;
  /// A reservation that cannot be made physical is a `HeadroomError` instead of accounting only.
  bool require_physical = false;
  std::vector<Stream> streams = {};
};

struct CloseOptions {
  bool wait = true;    ///< the host waits for what is in flight
  bool force = false;  ///< ends leases, holds, scopes and reservations, and values only on disk
};

}  // namespace residency
