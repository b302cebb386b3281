#pragma once

#include <cstdint>

namespace residency {

/// How many forks lie between this process and the one in which the library was loaded. What was
/// made at another number belongs to an ancestor: its worker does not exist here and its files are
/// not ours to remove. One load of an atomic.
[[nodiscard]] std::uint32_t process_generation() noexcept;

}  // namespace residency
