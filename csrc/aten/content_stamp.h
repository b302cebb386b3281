#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "residency/core/export.h"

namespace residency {

/// The identity of a run of bytes: their XXH64 with seed 0, so that other tools can recompute it.
/// Bytes may be added in pieces of any size; thread-compatible.
/// Exported for the tests alone.
class RESIDENCY_API ContentStamp {
 public:
  void add(const void* data, std::size_t nbytes) noexcept;
  [[nodiscard]] std::uint64_t value() const noexcept;

 private:
  std::array<std::uint64_t, 4> lanes_ = {0x60ea27eeadc0b5d6U, 0xc2b2ae3d27d4eb4fU, 0U,
                                         0x61c8864e7a143579U};
  std::array<std::byte, 32> tail_{};
  std::uint64_t num_bytes_ = 0;
};

/// Sixteen lower-case hexadecimal digits, whatever the number.
[[nodiscard]] RESIDENCY_API std::string fixed_width_hex(std::uint64_t number);

}  // namespace residency
