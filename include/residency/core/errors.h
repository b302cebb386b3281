#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/handle.h"
#include "residency/core/location.h"
#include "residency/core/report.h"
#include "residency/core/verdict.h"

namespace residency {

/// The stable code of an error class; its text (`BUDGET`) crosses language borders unchanged.
enum class ErrorCode : std::uint8_t {
  kBudget,
  kCapture,
  kClosed,
  kDeviceLost,
  kFork,
  kHandle,
  kHeadroom,
  kInfeasible,
  kInUse,
  kLifetimeClosed,
  kMaterialization,
  kOwnership,
  kPageLock,
  kPlan,
  kPlanExecution,
  kReentrancy,
  kSearchLimit,
  kStaleState,
  kStorage,
  kTransfer,
  kUnavailable,
  kUndeclaredWrite,
};
[[nodiscard]] RESIDENCY_API std::string_view to_string(ErrorCode code);

/// The base of every state fault. Argument faults are `std::invalid_argument` and
/// `std::out_of_range`. Fields of the classes below are set once and public; the message says what
/// was expected, what came, and what to do.
class RESIDENCY_API Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  [[nodiscard]] ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

/// used + reserved + retiring + requested > budget.
class RESIDENCY_API BudgetError : public Error {
 public:
  explicit BudgetError(const Shortfall& shortfall);
  BudgetError(const Shortfall& shortfall, const std::string& message)
      : Error(ErrorCode::kBudget, message), shortfall(shortfall) {}
  Shortfall shortfall;
};

/// The manager has closed.
class RESIDENCY_API ClosedError : public Error {
 public:
  explicit ClosedError(const std::string& message) : Error(ErrorCode::kClosed, message) {}
};

/// A handle that is foreign, unknown or discarded; `reason` says which.
class RESIDENCY_API HandleError : public Error {
 public:
  HandleError(const Handle& handle, Reason reason, ManagerId manager);
  Handle handle;
  Reason reason;      ///< kForeignHandle, kUnknownHandle, kDiscardedHandle
  ManagerId manager;  ///< the one that was asked
};

/// A reservation that cannot be backed by real headroom.
class RESIDENCY_API HeadroomError : public Error {
 public:
  HeadroomError(Location location, Bytes requested, std::optional<Bytes> free_bytes,
                std::optional<Bytes> largest_run, const std::string& message)
      : Error(ErrorCode::kHeadroom, message),
        location(location),
        requested(requested),
        free_bytes(free_bytes),
        largest_run(largest_run) {}
  Location location;
  Bytes requested;
  std::optional<Bytes> free_bytes;
  std::optional<Bytes> largest_run;
};

/// Something is leased, held, reserved or shared.
class RESIDENCY_API InUseError : public Error {
 public:
  InUseError(const Protection& protection, const std::string& message)
      : Error(ErrorCode::kInUse, message), protection(protection) {}
  Protection protection;
  std::uint32_t num_reservations = 0;  ///< close only
  std::uint32_t num_scopes = 0;        ///< close only
  std::uint32_t num_only_on_disk = 0;  ///< close only: values whose only copy is on disk
};

/// A lookup in a lease, hold, scope or reservation that has ended.
class RESIDENCY_API LifetimeClosedError : public Error {
 public:
  explicit LifetimeClosedError(const std::string& message)
      : Error(ErrorCode::kLifetimeClosed, message) {}
};

/// Bytes that are not what the spec, the layout or the content stamp says.
class RESIDENCY_API MaterializationError : public Error {
 public:
  explicit MaterializationError(const std::string& message)
      : Error(ErrorCode::kMaterialization, message) {}
};

/// Ensure of an exclusive value elsewhere, drop of the last copy, overlap of storages.
class RESIDENCY_API OwnershipError : public Error {
 public:
  explicit OwnershipError(const std::string& message) : Error(ErrorCode::kOwnership, message) {}
};

/// A plan that cannot be carried out in this state; nothing has changed.
class RESIDENCY_API PlanError : public Error {
 public:
  PlanError(std::string plan, Phase phase, std::size_t index, Verdict verdict,
            const std::string& message, ErrorCode code = ErrorCode::kPlan)
      : Error(code, message), plan(std::move(plan)), phase(phase), index(index), verdict(verdict) {}
  std::string plan;
  Phase phase;
  std::size_t index;  ///< of the first failing action or reservation in its phase
  Verdict verdict;    ///< on that action; for a reservation its reason and shortfall
};

/// The state is not the one that the caller planned for; nothing has changed.
class RESIDENCY_API StaleStateError : public PlanError {
 public:
  StaleStateError(std::string plan, std::uint64_t expected, std::uint64_t actual);
  std::uint64_t expected;
  std::uint64_t actual;
};

/// A search that ended without an answer.
class RESIDENCY_API SearchLimitError : public PlanError {
 public:
  SearchLimitError(std::string plan, std::uint64_t limit);
  std::uint64_t limit;
};

/// A request that no sequence of actions can satisfy.
class RESIDENCY_API InfeasibleError : public PlanError {
 public:
  InfeasibleError(std::string plan, Bytes needed, Bytes freeable, std::string protectors);
  Bytes needed;
  Bytes freeable;
  std::string protectors;
};

/// A plan that failed after its first action began. Not a PlanError: something was done.
class RESIDENCY_API PlanExecutionError : public Error {
 public:
  PlanExecutionError(std::string plan, Phase phase, std::size_t index, std::string failed,
                     PlanReport completed, std::exception_ptr cause, bool state_restored,
                     const std::string& message);
  std::string plan;
  Phase phase;
  std::size_t index;   ///< of the failed action or reservation in its phase
  std::string failed;  ///< the failed action or reservation, in words
  PlanReport completed;
  std::exception_ptr cause;
  /// Everything was undone: apart from version, trace and peaks the state equals the start.
  bool state_restored;
};

/// A manager called from inside a source's `load` on the same thread.
class RESIDENCY_API ReentrancyError : public Error {
 public:
  explicit ReentrancyError(const std::string& message) : Error(ErrorCode::kReentrancy, message) {}
};

/// Not there: a location, a materialization, a source.
class RESIDENCY_API UnavailableError : public Error {
 public:
  explicit UnavailableError(const std::string& message) : Error(ErrorCode::kUnavailable, message) {}
};

/// An immutable or unleased value was written; the lease has ended, other copies are stale.
class RESIDENCY_API UndeclaredWriteError : public Error {
 public:
  UndeclaredWriteError(const Handle& handle, std::string field, const std::string& message)
      : Error(ErrorCode::kUndeclaredWrite, message), handle(handle), field(std::move(field)) {}
  Handle handle;
  std::string field;
};

/// A transfer that failed after it was enqueued; its source is what it was.
class RESIDENCY_API TransferError : public Error {
 public:
  TransferError(const Handle& handle, TransferPath path, std::exception_ptr cause,
                const std::string& message)
      : Error(ErrorCode::kTransfer, message), handle(handle), path(path), cause(std::move(cause)) {}
  Handle handle;
  TransferPath path;
  std::exception_ptr cause;
};

/// A file system call that failed.
class RESIDENCY_API StorageError : public Error {
 public:
  StorageError(std::string path, int error_number, const std::string& what_was_done);
  std::string path;
  int error_number;  ///< errno
};

/// Page-locking that the system refuses.
class RESIDENCY_API PageLockError : public Error {
 public:
  PageLockError(Bytes limit, Bytes requested, const std::string& message)
      : Error(ErrorCode::kPageLock, message), limit(limit), requested(requested) {}
  Bytes limit;
  Bytes requested;
};

/// What cannot be done while a stream is being captured.
class RESIDENCY_API CaptureError : public Error {
 public:
  explicit CaptureError(const std::string& message) : Error(ErrorCode::kCapture, message) {}
};

/// A device that answers every call with an error.
class RESIDENCY_API DeviceLostError : public Error {
 public:
  DeviceLostError(Location device, const std::string& message)
      : Error(ErrorCode::kDeviceLost, message), device(device) {}
  Location device;
};

/// Used in a forked child, where devices and workers do not exist.
class RESIDENCY_API ForkError : public Error {
 public:
  explicit ForkError(const std::string& message) : Error(ErrorCode::kFork, message) {}
};

/// The text of an exception, whatever it is.
[[nodiscard]] RESIDENCY_API std::string describe(const std::exception_ptr& error);

}  // namespace residency
