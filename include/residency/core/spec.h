#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "residency/core/bytes.h"
#include "residency/core/export.h"

namespace residency {

/// Whether several materializations of a value may coexist.
enum class ReplicaMode : std::uint8_t { kExclusive, kReplicable };

/// Whether a value's bytes must be kept, or a Source can make them again.
enum class Recoverability : std::uint8_t { kMustPreserve, kReconstructible };

/// Whether a value is written by anyone after it was registered.
enum class Mutability : std::uint8_t { kImmutable, kMutable };

[[nodiscard]] RESIDENCY_API std::string_view to_string(ReplicaMode mode);
[[nodiscard]] RESIDENCY_API std::string_view to_string(Recoverability recoverability);
[[nodiscard]] RESIDENCY_API std::string_view to_string(Mutability mutability);

/// How the bytes of a value are arranged, as the backend understands it (fields, sizes, strides,
/// shared storages). Immutable and shared between values of equal layout; owns no bytes.
class RESIDENCY_API Layout {
 public:
  Layout() = default;
  Layout(const Layout&) = delete;
  Layout& operator=(const Layout&) = delete;
  virtual ~Layout();
  [[nodiscard]] virtual bool equals(const Layout& other) const = 0;
  /// One line for people.
  [[nodiscard]] virtual std::string describe() const = 0;
};

/// What is known of a value before any of its bytes are anywhere.
struct ValueSpec {
  /// Sum over fields of elements x element size. Ties and expanded views make it larger than
  /// `storage_bytes`; it never enters a charge.
  Bytes logical_bytes;
  /// Bytes of the unique storages, each counted once.
  Bytes storage_bytes;
  /// May be null where the backend needs none.
  std::shared_ptr<const Layout> layout;
  ReplicaMode mode = ReplicaMode::kExclusive;
  Recoverability recoverability = Recoverability::kMustPreserve;
  Mutability mutability = Mutability::kImmutable;
};

}  // namespace residency
