#pragma once

#include <string_view>

#include "residency/core/warning.h"

namespace residency {

/// Passes a warning to the handler; never throws. Says nothing while the process is exiting.
void warn(std::string_view message) noexcept;

}  // namespace residency
