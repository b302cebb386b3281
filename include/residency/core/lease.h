#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "residency/core/backend.h"
#include "residency/core/export.h"
#include "residency/core/handle.h"
#include "residency/core/location.h"
#include "residency/core/report.h"
#include "residency/core/stream.h"

namespace residency {

class ManagerState;
class [[nodiscard]] Lease;
class [[nodiscard]] Hold;
struct LeaseState;
struct HoldState;

struct AcquireOptions {
  Access access = Access::kRead;
  /// The stream that uses the values; at a CUDA location it defaults to the caller's current
  /// stream, at a host location giving one is an argument error.
  std::optional<Stream> stream = std::nullopt;
  /// When false, `UnavailableError` instead of a wait on the host: for bytes that the host itself
  /// is to use, for an arrival that can still fail, before a write for those who still read, and,
  /// in `borrow`, as in ActionOptions. A `borrow` sees before it begins that it would come to this.
  bool may_block = true;
};

/// The right to read (or write) materializations at one location. Nothing leased is moved or
/// freed, and its addresses stay.
///
/// Thread-safe, movable, not copyable; one that was moved from may only be destroyed, assigned to,
/// released (which does nothing) and asked whether it is active. Destroying an active lease
/// releases it and warns.
class RESIDENCY_API Lease {
 public:
  Lease(Lease&&) noexcept;
  Lease& operator=(Lease&&) noexcept;
  ~Lease();

  /// Readable after release too. Duplicates were collapsed.
  [[nodiscard]] std::span<const Handle> handles() const noexcept;
  [[nodiscard]] Location location() const noexcept;
  [[nodiscard]] Access access() const noexcept;
  [[nodiscard]] bool active() const noexcept;
  /// What `borrow` did to bring the values here; empty for `acquire`.
  [[nodiscard]] const PlanReport& transitions() const noexcept;

  /// What the backend shows of the value: made at the first call, the same object afterwards,
  /// gone with the lease. Throws `std::invalid_argument` for a value that is not in the lease,
  /// `HandleError` for one of another manager, and `LifetimeClosedError` after release.
  [[nodiscard]] View& view(const Handle& handle) const;

  /// Makes another stream wait for the values and count as their user. Throws
  /// `std::invalid_argument` for one of another location, `LifetimeClosedError` after release,
  /// `CaptureError` while the stream is captured and a value is not ready.
  void add_stream(const Stream& stream);

  /// Ends the lease: last uses are recorded on every stream, and a later drop or move is ordered
  /// after them on the device. With `wait` the host waits until nothing is pending. The second
  /// release returns at once, also when the first has not waited. Throws `UndeclaredWriteError`
  /// after the lease has ended, naming the first field that was written without a write lease; and,
  /// with the lease active still, `CaptureError` while one of its streams is captured into a graph,
  /// or with `wait` while the caller captures (take leases before a capture and release them after
  /// it), and `UnavailableError` when a use
  /// cannot be recorded. For a stream that was destroyed meanwhile the host waits for its device.
  void release(bool wait = false);

 private:
  friend class ManagerState;
  explicit Lease(std::unique_ptr<LeaseState> state) noexcept;
  std::unique_ptr<LeaseState> state_;
};

/// Keeps materializations from being removed without giving access. Orders no work: what uses the
/// bytes while they may change takes a lease.
///
/// Thread-safe, movable, not copyable; one that was moved from may only be destroyed, assigned to,
/// released (which does nothing) and asked whether it is active. Destroying an active hold releases
/// it and warns.
class RESIDENCY_API Hold {
 public:
  Hold(Hold&&) noexcept;
  Hold& operator=(Hold&&) noexcept;
  ~Hold();
  [[nodiscard]] std::span<const Handle> handles() const noexcept;
  [[nodiscard]] Location location() const noexcept;
  [[nodiscard]] bool active() const noexcept;
  /// Twice is harmless.
  void release();

 private:
  friend class ManagerState;
  explicit Hold(std::unique_ptr<HoldState> state) noexcept;
  std::unique_ptr<HoldState> state_;
};

}  // namespace residency
