#pragma once

#include <cstdint>

#include "residency/core/location.h"

namespace residency {

/// A device stream as the backend numbers it (for PyTorch: the stream id of `c10::Stream`), with
/// the device that it belongs to. The core passes it on and never looks inside.
struct Stream {
  Location device;
  std::int64_t id = 0;
  friend bool operator==(const Stream&, const Stream&) = default;
};

}  // namespace residency
