#pragma once

#include <functional>
#include <string_view>

#include "residency/core/export.h"

namespace residency {

/// Receives warnings about guards that were destroyed while active, and about errors that could
/// not be thrown. Null restores the default, which writes one line to standard error. Must not
/// throw. Thread-safe.
RESIDENCY_API void set_warning_handler(std::function<void(std::string_view)> handler);

}  // namespace residency
