#ifndef RESIDENCY_SIMCUDA_OPERATORS_SIMULATION_MODE_H
#define RESIDENCY_SIMCUDA_OPERATORS_SIMULATION_MODE_H

#include <string_view>

#include "residency/simcuda/control.h"

namespace residency::simcuda {

/// Whether kernels compute nothing. Fixed once the runtime is in use.
inline bool dry_mode() {
  static const bool dry = [] {
    const char* mode = simcuda_get("mode");
    return mode != nullptr && std::string_view(mode) == "dry";
  }();
  return dry;
}

}  // namespace residency::simcuda

#endif
