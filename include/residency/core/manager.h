#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "residency/core/action.h"
#include "residency/core/backend.h"
#include "residency/core/bytes.h"
#include "residency/core/errors.h"
#include "residency/core/explanation.h"
#include "residency/core/export.h"
#include "residency/core/handle.h"
#include "residency/core/lease.h"
#include "residency/core/location.h"
#include "residency/core/options.h"
#include "residency/core/plan.h"
#include "residency/core/report.h"
#include "residency/core/reservation.h"
#include "residency/core/scope.h"
#include "residency/core/snapshot.h"
#include "residency/core/source.h"
#include "residency/core/spec.h"

namespace residency {

/// Owns values, knows where each one is, and changes that by plans.
///
/// Thread-safe. One mutex guards the ledger; no copy, wait, callback, tensor destruction or backend
/// allocation happens under it. A slow load or copy of one value does not block calls on others;
/// calls on the same value wait for it, in order. The manager starts no thread and never evicts by
/// itself.
///
/// Errors common to all operations: `ClosedError` after close, `ReentrancyError` from inside a
/// source's `load`, `HandleError` for a foreign, unknown or discarded handle, `UnavailableError`
/// for a location that does not exist here, `ForkError` in a forked child where the location or a
/// worker is lost. Where memory is out, what the allocator in question throws is passed on
/// (`std::bad_alloc`; of a device `c10::OutOfMemoryError`): a card's capacity is no budget and not
/// looked at beforehand. Every error leaves state and version as they were unless it says
/// otherwise.
class RESIDENCY_API Manager {
 public:
  /// Throws `std::invalid_argument` for duplicate budgets or disks, and what `Backend::open`
  /// throws.
  [[nodiscard]] static std::shared_ptr<Manager> create(ManagerOptions options,
                                                       std::shared_ptr<Backend> backend);
  /// The living manager that gave out this handle id, or null.
  [[nodiscard]] static std::shared_ptr<Manager> find(std::int64_t handle_id);

  Manager(const Manager&) = delete;
  Manager& operator=(const Manager&) = delete;
  /// Closes without waiting: leases, holds, scopes and reservations that are left have ended.
  ~Manager();

  [[nodiscard]] ManagerId id() const noexcept;
  [[nodiscard]] bool closed() const noexcept;
  [[nodiscard]] Backend& backend() const noexcept;
  [[nodiscard]] const ManagerOptions& options() const noexcept;

  /// Registers a value that `source` can make at `at`. Loads nothing. `spec.recoverability` must
  /// be reconstructible (`std::invalid_argument`).
  [[nodiscard]] Handle register_source(std::shared_ptr<Source> source, const ValueSpec& spec,
                                       Location at = Location::pageable_host(),
                                       ValueType type = {});
  /// Takes ownership of a block that lies at its own location. The value is must-preserve. Throws
  /// `OwnershipError` when it overlaps memory already managed here, by any byte, and
  /// `BudgetError`. Memory that escaped from here and comes back as a whole is charged once; a part
  /// of it is charged beside the escaped bytes, until those go. `ready` is done when the bytes are
  /// complete; null: they are.
  [[nodiscard]] Handle adopt(BlockPtr block, const ValueSpec& spec, ValueType type = {},
                             FencePtr ready = nullptr);
  /// The same for a block that is made only when there is room for it: `make` is called with its
  /// charge booked at `at` and without any lock held. Throws `BudgetError` before that, and what
  /// `make` throws; nothing is booked then.
  [[nodiscard]] Handle adopt(const std::function<CopyResult()>& make, Location at,
                             const ValueSpec& spec, ValueType type = {});
  /// Ends management of an unprotected value and gives its block at `at` (default: the only one in
  /// memory, or the cheapest by the link order), complete. A value that is only on disk is brought
  /// to pageable host memory first, as one step with the rest. Other materializations are released.
  /// Throws as the actions do, and `std::invalid_argument` for a disk; the value is then where it
  /// was, or in host memory. The handle is refused from then on. (`take` in residency/aten gives
  /// tensors.)
  [[nodiscard]] BlockPtr take(const Handle& handle, std::optional<Location> at = std::nullopt);

  // The five actions. Each returns when its work is enqueued; `ActionReport::wait` waits for the
  // end. They throw, with nothing changed: `HandleError`, `UnavailableError` (no way to make it
  // there, or it would wait where `may_block` forbids), `OwnershipError` (an exclusive value is
  // elsewhere, a must-preserve value's last copy), `InUseError` (a lease or hold protects what
  // would go), `BudgetError`, `StorageError`, whatever a source throws, and `TransferError` when an
  // earlier transfer of the value is found to have failed.

  /// Puts a materialization at the location, keeps the others. Charges the destination from now
  /// on. A stale one is refreshed in place.
  ActionReport ensure(const Handle& handle, Location location, const ActionOptions& options = {});
  /// Materializes at `to` and gives up one source (default: the cheapest by the link order). The
  /// destination is charged from now on, the source until the copy out of it has ended.
  ActionReport move(const Handle& handle, Location to,
                    std::optional<Location> from_location = std::nullopt,
                    const ActionOptions& options = {});
  /// Gives up the materialization at one location. Its bytes stay charged, as retiring, until its
  /// last uses are done.
  ActionReport drop(const Handle& handle, Location location);
  /// Ends the value everywhere, all or nothing.
  ActionReport discard(const Handle& handle);
  /// Any of the above, chosen at run time.
  ActionReport apply(const ResidencyAction& action, const ActionOptions& options = {});

  /// Simulates the whole sequence, then carries it out. Throws `PlanError` with nothing changed,
  /// `PlanExecutionError` after something was begun.
  PlanReport execute(std::span<const ResidencyAction> actions, const ExecuteOptions& options = {});
  /// A hint: brings copies of values to a location ahead of need, in this order, as far as they
  /// fit. It gives up nothing, waits for nothing and loads nothing, and stops at the first value
  /// that cannot be brought like that (an exclusive one, of which there is no second copy, or one
  /// that does not fit); the report has an entry for each before it, and `explain` of an `ensure`
  /// says why the next is none. The copies begin in that order, in chunks of 16 MiB of which at
  /// most two are outstanding in one direction of a device, so that copies which are needed now
  /// come at most two chunks late. One that has to wait for a busy stream holds up those after it
  /// in the same direction of the device, and no others. Whoever waits for a copy has the rest of
  /// it enqueued at once. Throws `HandleError`, `ClosedError`, `ForkError`, and `TransferError`
  /// when an earlier transfer of a value is found to have failed.
  PlanReport prefetch(std::span<const Handle> handles, Location at);
  /// The dry run: same order, same planner, no load, no allocation, no trace, no version.
  [[nodiscard]] Explanation explain(
      const ResidencyPlan& plan,
      std::optional<std::uint64_t> expected_state_version = std::nullopt) const;
  [[nodiscard]] Explanation explain(
      std::span<const ResidencyAction> actions,
      std::optional<std::uint64_t> expected_state_version = std::nullopt) const;
  /// A scope that has not been entered: nothing is checked, reserved or moved before
  /// `Scope::enter`.
  [[nodiscard]] Scope scope(ResidencyPlan plan, ScopeOptions options = {});
  /// Enters, runs the body, closes. When the body throws, the scope is closed, the body's error
  /// stays primary, and an error of the exit actions goes to `exit_error` (and to the warning
  /// handler where that is null).
  PlanReport with(ResidencyPlan plan, const std::function<void(Scope&)>& body,
                  ScopeOptions options = {}, std::exception_ptr* exit_error = nullptr);

  /// Borrows what is there; never loads or copies. All or none, duplicates collapse. At a host
  /// location the host waits until the bytes are there; at a device the consumer's stream does,
  /// and the host only for what no stream can wait for: an arrival that can still fail and,
  /// before a write, a copy that a worker makes.
  /// Throws `std::invalid_argument` for an empty list or a disk, `UnavailableError` for what is not
  /// there, `InUseError` against a write lease, `TransferError` for an arrival that has failed.
  [[nodiscard]] Lease acquire(std::span<const Handle> handles, Location at,
                              const AcquireOptions& options = {});
  /// Ensure and acquire as one step, all or none, protected before anyone else can evict. Waits as
  /// `acquire` does. Throws as both do, with what was brought here taken back, unless somebody else
  /// uses it by then.
  [[nodiscard]] Lease borrow(std::span<const Handle> handles, Location at,
                             const AcquireOptions& options = {});
  /// Protects materializations from being given up, without using them: no stream, no lease. All
  /// or none. Throws as `acquire` does; what is there must not be stale.
  [[nodiscard]] Hold hold(std::span<const Handle> handles, Location at);

  /// Throws `std::invalid_argument` for an empty label, `BudgetError`, and with
  /// `require_physical` `HeadroomError`.
  [[nodiscard]] Reservation reserve(MemoryReservation reservation, bool require_physical = false);
  /// None removes the limit. Lowering below used + reserved is a `BudgetError`; at pinned-host the
  /// buffers of staged copies are among the reserved bytes from the first such copy on, and nothing
  /// but closing gives them back. Retiring bytes do
  /// not count here: should a transfer fail later and its source come back, used may exceed a
  /// budget that was lowered meanwhile, until something is given up; nothing is admitted then.
  void set_budget(Location location, std::optional<Bytes> budget);
  /// Sets every location's peaks to what it holds now.
  void reset_peaks();
  /// Forgets discarded values; they cost nothing afterwards. Returns how many.
  std::size_t forget_discarded();

  /// What the value was registered with.
  [[nodiscard]] ValueSpec spec(const Handle& handle) const;
  /// Every location that was ever declared or used, in the order of `Snapshot::locations`.
  [[nodiscard]] std::vector<Location> locations() const;
  /// One consistent view of locations, values and guards, without tensors. O(values).
  [[nodiscard]] Snapshot snapshot() const;
  /// The newest `limit` transitions, oldest first.
  [[nodiscard]] std::vector<TransitionRecord> trace(
      std::optional<std::size_t> limit = std::nullopt) const;
  /// Rises whenever something that the planner reads changes, except by a fence completing.
  [[nodiscard]] std::uint64_t state_version() const;
  /// Waits on the host until nothing of this manager is in flight. Failed transfers are not
  /// raised here but at the next touch of their value.
  void synchronize();

  /// Throws `InUseError` with the counts while leases, holds, reservations or scopes are left, or
  /// while a must-preserve value's only copy is on disk; `force` ends them all. Idempotent. The
  /// calls of other threads are let end first, always. With `wait` the host also waits for what is
  /// in flight; a transfer that fails then is in the trace, and nobody is owed its error any more.
  void close(const CloseOptions& options = {});

  /// Recounts the ledger from the values, while no other call is under way (what one has charged is
  /// not yet a value's), and throws `std::logic_error` with every difference. For
  /// tests: O(values).
  void audit() const;

 private:
  explicit Manager(std::shared_ptr<ManagerState> state) noexcept;
  std::shared_ptr<ManagerState> state_;
};

}  // namespace residency
