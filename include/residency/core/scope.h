#pragma once

#include <exception>
#include <memory>

#include "residency/core/export.h"
#include "residency/core/options.h"
#include "residency/core/plan.h"
#include "residency/core/report.h"

namespace residency {

class ManagerState;
class [[nodiscard]] Scope;
struct ScopeState;

/// One use of a plan around a body. Making it does nothing.
///
/// Thread-compatible, movable, not copyable; one that was moved from may only be destroyed or
/// assigned to. `Manager::with` runs a body with these rules; a scope made by hand must be closed:
/// destroying an entered one releases its reservations and warns, and its exit actions are not run.
class RESIDENCY_API Scope {
 public:
  Scope(Scope&&) noexcept;
  Scope& operator=(Scope&&) noexcept;
  ~Scope();

  [[nodiscard]] const ResidencyPlan& plan() const noexcept;
  [[nodiscard]] bool entered() const noexcept;
  [[nodiscard]] bool closed() const noexcept;

  /// Version check, simulation of reclaim + reservations + enter + exit, then reclaim,
  /// reservations, enter. Throws `StaleStateError` or `PlanError` with nothing changed,
  /// `PlanExecutionError` when something failed on the way (its reservations are released, no exit
  /// actions run), and `LifetimeClosedError` the second time, even after a failed first.
  void enter();
  /// Exit actions against the state as the body left it, then the reservations in reverse. Throws
  /// `PlanExecutionError` with phase `exit`; the reservations are released all the same. Closing a
  /// scope that is closed or was never entered does nothing.
  void close();
  /// Reclaim, enter and exit transitions in order, and what was used of each reservation.
  [[nodiscard]] const PlanReport& report() const noexcept;

 private:
  friend class ManagerState;
  explicit Scope(std::unique_ptr<ScopeState> state) noexcept;
  std::unique_ptr<ScopeState> state_;
};

}  // namespace residency
