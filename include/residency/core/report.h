#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "residency/core/action.h"
#include "residency/core/backend.h"
#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/handle.h"
#include "residency/core/location.h"
#include "residency/core/plan.h"
#include "residency/core/verdict.h"

namespace residency {

class ManagerState;

/// The parts of a plan's life in which something can be done, or fail.
enum class Phase : std::uint8_t { kExecute, kReclaim, kReserve, kEnter, kExit };
[[nodiscard]] RESIDENCY_API std::string_view to_string(Phase phase);

/// One action as it was carried out. Reports and the trace consist of these.
struct TransitionRecord {
  std::uint64_t sequence = 0;  ///< position in the trace of the manager, from 1
  ActionKind action = ActionKind::kEnsure;
  Phase phase = Phase::kExecute;
  Reason reason = Reason::kAlreadyResident;
  TransferPath path = TransferPath::kNone;
  bool failed = false;
  /// The host waited: for retiring bytes, for an arrival, or inside the copy.
  bool waited = false;
  Handle handle;
  std::optional<Location> source;
  std::optional<Location> destination;
  Bytes bytes;
  /// Steady clock. Copies that a call makes together have the times of all of them.
  std::int64_t host_start_ns = 0;
  std::int64_t host_end_ns = 0;
  /// How long the copy took, once it has completed. `direct` and `peer`: on the device, from the
  /// first chunk to the last where it was ahead of need. `staged`, and `file` to or from a device:
  /// there too, from its first copy to its last, with what those waited for in between. Otherwise a
  /// thread's time. None where it is not known, and where nothing was copied.
  std::optional<std::int64_t> device_elapsed_ns;
  std::string plan;     ///< name of the plan or execute call; empty for direct calls
  std::string failure;  ///< why, when `failed`

  [[nodiscard]] bool no_op() const noexcept { return outcome_of(reason) == Outcome::kNoOp; }
};

/// The outcome of a direct `ensure`, `move`, `drop` or `discard`. A value: const methods may be
/// called from several threads; it may outlive its manager.
class RESIDENCY_API ActionReport {
 public:
  ActionReport() = default;
  /// As it was at commit; once its transfer has ended also how (device time, failure).
  [[nodiscard]] TransitionRecord record() const;
  [[nodiscard]] bool no_op() const noexcept { return record_.no_op(); }
  [[nodiscard]] Reason reason() const noexcept { return record_.reason; }
  /// True once nothing of it is in flight. Never blocks.
  [[nodiscard]] bool done() const noexcept {
    return !fence_ || fence_->poll() != FenceStatus::kPending;
  }
  /// Blocks the host until the transfer has completed. Throws `TransferError` when it failed and
  /// nobody was told yet.
  void wait() const;

 private:
  friend class ManagerState;
  friend class PlanReport;
  TransitionRecord record_;
  FencePtr fence_;
  bool gave_up_stale_ = false;   // what it released was stale already: rollback cares
  bool gave_up_shared_ = false;  // its memory lives on as escaped: no rollback brings it back
  std::shared_ptr<ManagerState> state_;  // only while a fence may still fail
};

/// What became of one reservation of a plan.
struct ReservationUse {
  MemoryReservation reservation;
  bool physical = false;           ///< real headroom was made, not only accounted
  std::optional<Bytes> peak_used;  ///< what was really used of it, where it can be measured
};

/// The outcome of `execute`, or of a scope: one entry per action, in the order of execution. A
/// value, as ActionReport is.
class RESIDENCY_API PlanReport {
 public:
  [[nodiscard]] const std::string& plan() const noexcept { return plan_; }
  [[nodiscard]] std::size_t size() const noexcept { return entries_.size(); }
  [[nodiscard]] bool empty() const noexcept { return entries_.empty(); }
  /// Throws `std::out_of_range`.
  [[nodiscard]] TransitionRecord operator[](std::size_t index) const;
  [[nodiscard]] std::vector<TransitionRecord> entries() const;
  [[nodiscard]] const std::vector<ReservationUse>& reservations() const noexcept {
    return reservations_;
  }
  /// Bytes that travelled, over all entries.
  [[nodiscard]] Bytes moved_bytes() const;
  /// Waits for every entry; throws the first `TransferError` after all have ended.
  void wait() const;

 private:
  friend class ManagerState;
  std::string plan_;
  std::vector<ActionReport> entries_;
  std::vector<ReservationUse> reservations_;
};

/// A table for people.
[[nodiscard]] RESIDENCY_API std::string to_string(const PlanReport& report);
/// One JSON object per line.
[[nodiscard]] RESIDENCY_API std::string to_json_lines(const std::vector<TransitionRecord>& records);
/// A Chrome trace (`chrome://tracing`, Perfetto): one complete event per transition, one row per
/// destination. Times are the host's, in microseconds: they are those of the calls, which mostly
/// end before their copies do (`device_elapsed_ns` is among the arguments). The copies themselves
/// are in PyTorch's profiler and NVIDIA's tools, under the names of the library.
[[nodiscard]] RESIDENCY_API std::string to_chrome_trace(
    const std::vector<TransitionRecord>& records);

}  // namespace residency
