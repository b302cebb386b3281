#include "residency/core/bytes.h"

#include <array>

#include <fmt/format.h>

namespace residency {

std::string to_string(Bytes bytes) {
  constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes.count() < 1024) {
    return fmt::format("{} B", bytes.count());
  }
  auto scaled = static_cast<double>(bytes.count()) / 1024.0;
  std::size_t unit = 0;
  while (scaled >= 1023.995 && unit + 1 < kUnits.size()) {
    scaled /= 1024.0;
    ++unit;
  }
  return fmt::format("{:.2f} {}", scaled, kUnits[unit]);
}

}  // namespace residency
