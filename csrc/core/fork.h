#pragma once

#include <cstdint>

#include "residency/core/export.h"

namespace residency {

/// How many forks lie between this process and the one in which the library was loaded. What was
/// made at another number belongs to an ancestor: its threads do not exist here and its files are
/// not ours to remove. One load of an atomic.
[[nodiscard]] RESIDENCY_API std::uint64_t fork_generation() noexcept;

/// The same of what needs threads and devices, whose number changes also when the process exits:
/// then other static objects that CUDA code needs are about to go, and what is still there is left
/// to the system. One load of an atomic more.
[[nodiscard]] RESIDENCY_API std::uint64_t device_generation() noexcept;
/// The process exits.
RESIDENCY_API void end_devices() noexcept;

}  // namespace residency
