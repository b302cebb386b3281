#pragma once

#include <cstdint>

#include "residency/core/export.h"

namespace residency {

/// How many forks lie between this process and the one in which the library was loaded. What was
/// made at another number belongs to an ancestor: its threads do not exist here and its files are
/// not ours to remove. One load of an atomic.
[[nodiscard]] RESIDENCY_API std::uint64_t fork_generation() noexcept;

}  // namespace residency
