#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "residency/aten/safetensors.h"
#include "residency/aten/tensor_resident.h"
#include "residency/aten/tensor_source.h"
#include "residency/aten/torch_backend.h"
#include "residency/core/export.h"
#include "residency/core/manager.h"

namespace residency {

/// Makes a manager of tensors. Throws what `Manager::create` throws, and `StorageError` for a disk
/// directory that is missing or cannot be written.
[[nodiscard]] RESIDENCY_API std::shared_ptr<Manager> create_manager(
    ManagerOptions options = {}, TorchBackendOptions backend = {});

struct AdoptOptions {
  /// Where the tensors must be; default: where they are.
  std::optional<Location> at = std::nullopt;
  ReplicaMode mode = ReplicaMode::kExclusive;
  Mutability mutability = Mutability::kImmutable;
  ValueType type = {};
  /// For tensors on a device, the stream behind whose work so far they are complete. Default: the
  /// calling thread's current one there.
  std::optional<Stream> stream = std::nullopt;
  /// Copies the tensors, at the same location, into memory of the library's own and lets go of
  /// theirs, so that predicted peaks are exact for this value too. On a device the copy is made on
  /// `stream`, which should be the one that they were allocated on.
  bool rehome = false;
};

/// Gives tensors to a manager. Their bytes are not copied (but for `rehome`); the value is
/// must-preserve. Keeping other references on the tensors or their storages is allowed, but their
/// memory then lives on when the value leaves (`escaped` in the snapshot); moving the last
/// reference in avoids that. Does not wait for a device; `rehome` of host memory returns when it is
/// copied.
///
/// Throws `MaterializationError` when they are not at `at`, are inference tensors and mutable, do
/// not own their memory, or changed into something that TensorResident refuses; `OwnershipError`
/// when they overlap memory that is already managed; `BudgetError`; `std::invalid_argument` for a
/// stream that is not one of the tensors' device; with `rehome` also what allocating and copying
/// there throw (`c10::OutOfMemoryError`, `PageLockError`, `CaptureError`, `DeviceLostError`,
/// `TransferError`, `UnavailableError`). Nothing has changed then.
[[nodiscard]] RESIDENCY_API Handle adopt(Manager& manager, TensorResident value,
                                         const AdoptOptions& options = {});

struct SourceOptions {
  Location at = Location::pageable_host();
  ReplicaMode mode = ReplicaMode::kReplicable;
  Mutability mutability = Mutability::kImmutable;
  ValueType type = {};
};

/// Registers a value that `source` can make; loads nothing. Throws what
/// `Manager::register_source` throws, and `std::invalid_argument` for a null layout.
[[nodiscard]] RESIDENCY_API Handle register_source(Manager& manager, std::shared_ptr<Source> source,
                                                   std::shared_ptr<const TensorLayout> layout,
                                                   const SourceOptions& options = {});
/// The same for tensors of a safetensors file.
[[nodiscard]] RESIDENCY_API Handle register_source(Manager& manager, const SafetensorsFile& file,
                                                   const std::vector<SafetensorsField>& fields,
                                                   const SourceOptions& options = {});

/// Ends management of an unprotected value and gives its tensors: the inverse of `adopt`. Waits
/// until they are complete. A value that is only on disk is brought to pageable host memory first.
/// Throws what `Manager::take` throws, and `std::invalid_argument` for a disk location.
[[nodiscard]] RESIDENCY_API TensorResident take(Manager& manager, const Handle& handle,
                                                std::optional<Location> at = std::nullopt);

/// Replaces the contents of a mutable value, under a write lease in pageable host memory, where a
/// value that is elsewhere is brought first. Its other materializations become stale.
///
/// Throws `MaterializationError`, with nothing changed, unless `value` has the layout of the
/// managed one (`requires_grad` aside) and lies in host memory; and what `Manager::acquire` throws.
RESIDENCY_API void assign(Manager& manager, const Handle& handle, const TensorResident& value);

/// The tensors of a leased value: shallow copies made at the first call, valid as long as the
/// lease. Writing to them without a write lease is an `UndeclaredWriteError` when the lease ends.
/// Giving one of them another storage (`set_`) changes that copy and not the value.
/// Throws what `Lease::view` throws.
[[nodiscard]] RESIDENCY_API const TensorResident& tensors(const Lease& lease, const Handle& handle);

}  // namespace residency
