#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/location.h"

namespace residency {

/// Why an action does what it does, does nothing, or cannot be done.
enum class Reason : std::uint8_t {
  // It changes something.
  kCopied,     ///< bytes are copied from another materialization
  kLoaded,     ///< bytes are produced by the value's source
  kRefreshed,  ///< a stale materialization is overwritten from a good one
  kReleased,   ///< a materialization is given up, nothing is copied
  kDiscarded,  ///< the value ends
  kTaken,      ///< management ends, the tensors go to the caller
  // It changes nothing.
  kAlreadyResident,
  kAlreadyAbsent,
  kSameLocation,  ///< a move from a location to itself
  // It cannot be done.
  kForeignHandle,
  kUnknownHandle,
  kDiscardedHandle,
  kLocationUnavailable,
  kExclusiveElsewhere,   ///< ensure of an exclusive value that lives elsewhere; use move
  kNothingToCopy,        ///< no materialization and no source
  kFromLocationAbsent,   ///< no materialization at the given from_location
  kProtected,            ///< leased or held
  kShared,               ///< strict_aliases: somebody else keeps the memory alive
  kLastMaterialization,  ///< drop of the only good copy of a value that nothing can make again
  kOverBudget,
  kTransferFailed,  ///< an earlier transfer of this value failed and was not yet reported
  kWouldBlock,      ///< may_block = false and it needs to wait
};
/// A stable word (`already-resident`, `over-budget`).
[[nodiscard]] RESIDENCY_API std::string_view to_string(Reason reason);

enum class Outcome : std::uint8_t { kChange, kNoOp, kRefused };
[[nodiscard]] constexpr Outcome outcome_of(Reason reason) noexcept {
  return reason <= Reason::kTaken          ? Outcome::kChange
         : reason <= Reason::kSameLocation ? Outcome::kNoOp
                                           : Outcome::kRefused;
}

/// What keeps a materialization where it is.
struct Protection {
  std::uint32_t num_leases = 0;
  std::uint32_t num_holds = 0;
  std::uint32_t num_pending = 0;  ///< last uses not yet complete
  friend bool operator==(const Protection&, const Protection&) = default;
};

/// An admission that failed: used + reserved + retiring + requested > budget.
struct Shortfall {
  Location location;
  Bytes budget;
  Bytes used;
  Bytes reserved;
  Bytes retiring;
  Bytes requested;
  bool of_system = false;  ///< `budget` is what the system lets the process have there
  friend bool operator==(const Shortfall&, const Shortfall&) = default;
};

enum class TransitionKind : std::uint8_t { kReconstruct, kCopy, kRefresh, kRelease };

/// One step of an action, with what it does to the ledger.
struct Transition {
  TransitionKind kind = TransitionKind::kCopy;
  Location from{};  ///< what is read or released
  Location to{};    ///< what is made; equals `from` for reconstruct and release
  Bytes charge{};   ///< bytes charged at `to` (reconstruct, copy) or given back at `from` (release)
  bool temporary =
      false;  ///< a reconstruct whose result does not outlive the action, and its release
  bool escapes = false;  ///< a release whose bytes stay in use because the memory is shared
  friend bool operator==(const Transition&, const Transition&) = default;
};

/// The planner's answer for one action in one state: a plain value without allocations.
struct Verdict {
  Reason reason = Reason::kAlreadyResident;
  std::optional<Location> source;
  std::optional<Location> destination;
  Bytes bytes;  ///< bytes that travel (the charge at the destination)
  /// It needs retiring bytes, or an arrival that can still fail: the host waits for fences first.
  bool waits = false;
  Protection protection;  ///< of the materialization in the way (kProtected)
  Shortfall shortfall;  ///< kOverBudget, or what it waits for when only retiring bytes are lacking
  /// Page-locked buffers that its copy goes through and that are not reserved yet.
  Bytes staging;
  std::array<Transition, 3> transitions{};
  std::uint8_t num_transitions = 0;

  [[nodiscard]] Outcome outcome() const noexcept { return outcome_of(reason); }
  [[nodiscard]] bool feasible() const noexcept { return outcome() != Outcome::kRefused; }
  [[nodiscard]] bool no_op() const noexcept { return outcome() == Outcome::kNoOp; }
};

/// One sentence: what was expected, what came, what to do.
[[nodiscard]] RESIDENCY_API std::string describe(const Verdict& verdict);

}  // namespace residency
