#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "residency/core/export.h"

namespace residency {

/// The kinds of place where bytes can live, in canonical order.
enum class LocationKind : std::uint8_t { kPageableHost, kPinnedHost, kCuda, kDisk };

/// One place where bytes can live: `pageable-host`, `pinned-host`, `cuda:N`, `disk:NAME`.
///
/// An immutable four-byte value, ordered (kind, then index or name) and hashable. It can name a
/// device or a disk tier that does not exist here: only a manager checks that. Disk names are
/// interned for the life of the process, so a location costs nothing to copy and compare.
class RESIDENCY_API Location {
 public:
  /// Pageable host memory.
  constexpr Location() noexcept = default;
  [[nodiscard]] static constexpr Location pageable_host() noexcept { return Location(); }
  [[nodiscard]] static constexpr Location pinned_host() noexcept {
    return Location(LocationKind::kPinnedHost, 0);
  }
  /// `cuda:index`. Throws `std::out_of_range` unless 0 <= index <= 127.
  [[nodiscard]] static Location cuda(int index);
  /// `disk:name`. Throws `std::invalid_argument` unless the name is 1 to 64 characters of
  /// `[A-Za-z0-9_.-]`, the first of which is a letter or a digit.
  [[nodiscard]] static Location disk(std::string_view name);

  /// The exact inverse of `to_string`, which also accepts `cpu` and `cpu:0` for pageable host.
  /// Anything else (`cuda`, `cuda:01`, ` cuda:0`, `cuda:128`) throws `std::invalid_argument`.
  [[nodiscard]] static Location parse(std::string_view text);

  [[nodiscard]] constexpr LocationKind kind() const noexcept { return kind_; }
  [[nodiscard]] constexpr bool is_host() const noexcept {
    return kind_ == LocationKind::kPageableHost || kind_ == LocationKind::kPinnedHost;
  }
  [[nodiscard]] constexpr bool is_cuda() const noexcept { return kind_ == LocationKind::kCuda; }
  [[nodiscard]] constexpr bool is_disk() const noexcept { return kind_ == LocationKind::kDisk; }
  /// The device index of a `cuda:N` location; throws `std::invalid_argument` for other kinds.
  [[nodiscard]] int cuda_index() const;
  /// The name of a `disk:NAME` location; throws `std::invalid_argument` for other kinds.
  [[nodiscard]] const std::string& disk_name() const;

  friend constexpr bool operator==(Location, Location) noexcept = default;
  friend RESIDENCY_API std::strong_ordering operator<=>(Location left, Location right) noexcept;

  /// Same value for equal locations of this process; not stable across processes.
  [[nodiscard]] constexpr std::uint32_t hash_code() const noexcept {
    return (static_cast<std::uint32_t>(kind_) << 16) | index_;
  }

 private:
  constexpr Location(LocationKind kind, std::uint16_t index) noexcept
      : kind_(kind), index_(index) {}
  LocationKind kind_ = LocationKind::kPageableHost;
  std::uint16_t index_ = 0;  // device index, or the number of an interned disk name
};

/// The canonical text: `pageable-host`, `pinned-host`, `cuda:0`, `disk:NAME`.
[[nodiscard]] RESIDENCY_API std::string to_string(Location location);
[[nodiscard]] RESIDENCY_API std::string_view to_string(LocationKind kind);

}  // namespace residency

template <>
struct std::hash<residency::Location> {
  std::size_t operator()(residency::Location location) const noexcept {
    return std::hash<std::uint32_t>{}(location.hash_code());
  }
};
