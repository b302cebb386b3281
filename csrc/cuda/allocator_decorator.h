#pragma once

#include <cstddef>
#include <string>

#include <c10/core/Device.h>

namespace residency {

/// What the decorator asks while it is in force. Called with no lock of the allocator held, by
/// whichever thread allocates.
class AllocationPressure {
 public:
  AllocationPressure() = default;
  AllocationPressure(const AllocationPressure&) = delete;
  AllocationPressure& operator=(const AllocationPressure&) = delete;
  virtual ~AllocationPressure() = default;

  struct Shortage {
    c10::DeviceIndex device = 0;
    std::size_t nbytes = 0;  ///< asked for
    int attempt = 1;         ///< so many have run out of memory
    /// Allocations are routed into a pool somewhere, as they are while a graph is captured: the
    /// allocator then gives nothing of its cache back.
    bool in_pool_context = false;
  };
  /// True: the allocation is to be tried again.
  [[nodiscard]] virtual bool make_room(const Shortage& shortage) noexcept = 0;
  /// What to add to the allocator's error when that is what the caller gets; may be empty.
  [[nodiscard]] virtual std::string explain(const Shortage& shortage) = 0;
  /// It was given after all.
  virtual void recovered() noexcept = 0;
};

/// Puts a decorator before PyTorch's caching allocator, for every allocation of the process: all
/// calls go on to that allocator, whose memory is given out as it is, so that frees go there by
/// themselves. Idempotent; `pressure` must live as long as the process. Throws `UnavailableError`
/// where the allocator in force is not the native one.
void install_decorator(AllocationPressure& pressure);
/// Takes it away again. It stays where storages know it, and merely passes calls on. False where
/// another allocator has been put before it since: then it does so in its place.
bool remove_decorator() noexcept;
[[nodiscard]] bool is_decorator_installed() noexcept;

}  // namespace residency
