#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/handle.h"
#include "residency/core/location.h"
#include "residency/core/plan.h"
#include "residency/core/spec.h"

namespace residency {

enum class MaterializationState : std::uint8_t { kArriving, kReady };
[[nodiscard]] RESIDENCY_API std::string_view to_string(MaterializationState state);

struct MaterializationSnapshot {
  Location location;
  MaterializationState state = MaterializationState::kReady;
  bool stale = false;
  Bytes charged_bytes;
  std::uint32_t num_leases = 0;
  std::uint32_t num_holds = 0;
  std::uint32_t num_pending = 0;  ///< last uses not yet complete
  friend bool operator==(const MaterializationSnapshot&, const MaterializationSnapshot&) = default;
};

struct ValueSnapshot {
  Handle handle;
  ValueSpec spec;
  bool discarded = false;
  bool has_source = false;
  bool write_leased = false;
  std::optional<Location> source_location;
  std::vector<MaterializationSnapshot> materializations;  ///< ordered by location
};

/// The accounting of one location. Bytes as charged, after rounding by the location.
struct LocationSnapshot {
  Location location;
  std::optional<Bytes> budget;
  Bytes used;      ///< materializations, temporary loads, escaped memory
  Bytes reserved;  ///< `reservations`
  Bytes retiring;  ///< given up, but something still reads it
  Bytes arriving;  ///< part of used: copies under way to here
  Bytes escaped;   ///< part of used: given up, but others keep the memory alive
  Bytes peak_used;
  Bytes peak_charged;  ///< of used + reserved
  friend bool operator==(const LocationSnapshot&, const LocationSnapshot&) = default;
};

/// Bytes that a value gave up and that others (a caller's tensor, autograd) keep alive.
struct EscapedSnapshot {
  Handle handle;  ///< may be of a value that has ended since
  Location location;
  Bytes bytes;
  friend bool operator==(const EscapedSnapshot&, const EscapedSnapshot&) = default;
};

struct ReservationSnapshot {
  MemoryReservation reservation;
  bool physical = false;
};

/// One consistent view without tensors.
struct Snapshot {
  ManagerId manager{};
  std::uint64_t state_version = 0;
  std::int64_t time_ns = 0;                 ///< steady clock
  std::vector<ValueSnapshot> values;        ///< in registration order
  std::vector<LocationSnapshot> locations;  ///< in the order of `Manager::locations`
  std::vector<EscapedSnapshot> escaped;     ///< in the order of escape
  /// In creation order, after the one of the manager's own for staged copies (`staging`).
  std::vector<ReservationSnapshot> reservations;
  std::uint32_t num_leases = 0;
  std::uint32_t num_holds = 0;
  std::uint32_t num_scopes = 0;

  [[nodiscard]] RESIDENCY_API const ValueSnapshot* find(const Handle& handle) const noexcept;
  [[nodiscard]] RESIDENCY_API const LocationSnapshot* find(Location location) const noexcept;
};

[[nodiscard]] RESIDENCY_API std::string to_string(const Snapshot& snapshot);

}  // namespace residency
