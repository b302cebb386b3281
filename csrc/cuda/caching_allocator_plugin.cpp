#include "residency/cuda/caching_allocator_plugin.h"

#include <atomic>

#include "csrc/cuda/allocator_decorator.h"

namespace residency {
namespace {

class Pressure final : public AllocationPressure {
 public:
  bool make_room(c10::DeviceIndex, std::size_t, int attempt) noexcept override {
    if (attempt == 1) {
      num_pressed_.fetch_add(1, std::memory_order_relaxed);
    }
    // Before it gives up the allocator waits for freed blocks that streams still use, but does not
    // look among them: so the second call finds what the first has waited for.
    return attempt == 1;
  }
  void recovered() noexcept override { num_recovered_.fetch_add(1, std::memory_order_relaxed); }
  [[nodiscard]] CachingAllocatorPlugin::Counters counters() const noexcept {
    return {num_pressed_.load(std::memory_order_relaxed),
            num_recovered_.load(std::memory_order_relaxed)};
  }

 private:
  std::atomic<std::uint64_t> num_pressed_{0};
  std::atomic<std::uint64_t> num_recovered_{0};
};

Pressure& pressure() {
  static Pressure& pressure = *new Pressure;  // allocations may outlive all else
  return pressure;
}

}  // namespace

void CachingAllocatorPlugin::install() {
  install_decorator(pressure());
}

bool CachingAllocatorPlugin::remove() noexcept {
  return remove_decorator();
}

bool CachingAllocatorPlugin::is_installed() noexcept {
  return is_decorator_installed();
}

CachingAllocatorPlugin::Counters CachingAllocatorPlugin::counters() noexcept {
  return pressure().counters();
}

}  // namespace residency
