#pragma once

#include <cstdint>

namespace residency::test {

/// From now on the n-th allocation (from 1) that this thread makes in the code of residency::core
/// throws `std::bad_alloc`; 0: none. Those of tests, and of the fake backend, are not counted.
void fail_allocation(std::uint64_t n) noexcept;
/// Whether it has. Then no other does.
[[nodiscard]] bool allocation_has_failed() noexcept;

/// In its scope none fails, nor is counted.
class AllocationsPass {
 public:
  AllocationsPass() noexcept;
  AllocationsPass(const AllocationsPass&) = delete;
  AllocationsPass& operator=(const AllocationsPass&) = delete;
  ~AllocationsPass();

 private:
  const std::uint64_t left_;
};

}  // namespace residency::test
