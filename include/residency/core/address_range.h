#pragma once

#include <cstdint>

#include "residency/core/inline_vector.h"

namespace residency {

/// Addresses that a block occupies, half open. Device and host addresses share one space.
struct AddressRange {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;
  friend bool operator==(const AddressRange&, const AddressRange&) = default;
};
using AddressRanges = InlineVector<AddressRange, 1>;

}  // namespace residency
