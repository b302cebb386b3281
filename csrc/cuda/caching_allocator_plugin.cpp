#include "residency/cuda/caching_allocator_plugin.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <string>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <fmt/format.h>
#include <pthread.h>

#include "csrc/cuda/allocator_decorator.h"
#include "csrc/cuda/device_segments.h"
#include "csrc/cuda/tenants.h"

namespace residency {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// c10/cuda/CUDACachingAllocator.cpp, get_allocation_size: what is asked of the device for a request
// that nothing in the cache fits.
Bytes segment_bytes(std::size_t nbytes) {
  constexpr std::int64_t kMiB = std::int64_t{1} << 20;
  const Bytes request(static_cast<std::int64_t>(nbytes));
  if (request <= Bytes(kMiB)) {
    return Bytes(2 * kMiB);
  }
  return request < DeviceSegments::kSmallestSegment
             ? Bytes(20 * kMiB)
             : request.rounded_up(DeviceSegments::kSegmentRounding);
}

/// What the process can still take of the device.
Bytes spare_bytes(c10::DeviceIndex device) {
  const auto [free_bytes, total_bytes] = caching::get()->getMemoryInfo(device);
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  const auto allowed = static_cast<std::int64_t>(caching::getMemoryFraction(device) *
                                                 static_cast<double>(total_bytes));
  const std::int64_t reserved = caching::getDeviceStats(device).reserved_bytes[kAll].current;
  return Bytes(
      std::clamp<std::int64_t>(allowed - reserved, 0, static_cast<std::int64_t>(free_bytes)));
}

class Pressure final : public AllocationPressure {
 public:
  bool make_room(const Shortage& shortage) noexcept override {
    if (shortage.attempt == 1) {
      // Before it gives up the allocator waits for freed blocks that streams still use, but does
      // not look among them: so the second call finds what the first has waited for.
      num_pressed_.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
    if (shortage.attempt > kMostAttempts || shortage.in_pool_context) {
      return false;
    }
    try {
      return evict(shortage);
    } catch (...) {
      return false;  // there is no more than the allocator's own error to tell
    }
  }
  std::string explain(const Shortage& shortage) override {
    const Location device = Location::cuda(shortage.device);
    const std::string holders = describe_holders(device);
    if (holders.empty()) {
      return {};
    }
    return fmt::format("torch-residency: {}{}", holders,
                       shortage.in_pool_context
                           ? "; nothing leaves while allocations are routed into a pool or captured"
                           : "");
  }
  void recovered() noexcept override { num_recovered_.fetch_add(1, std::memory_order_relaxed); }
  [[nodiscard]] CachingAllocatorPlugin::Counters counters() const noexcept {
    return {num_pressed_.load(std::memory_order_relaxed),
            num_recovered_.load(std::memory_order_relaxed),
            num_evicted_.load(std::memory_order_relaxed)};
  }

 private:
  // Another thread may take what was made room for.
  static constexpr int kMostAttempts = 10;

  bool evict(const Shortage& shortage) {
    if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
      return false;
    }
    const Bytes wanted = segment_bytes(shortage.nbytes);
    const Bytes spare = spare_bytes(shortage.device);
    if (spare >= wanted) {
      return true;  // made room for by another thread
    }
    std::array<char, 16> thread{};
    (void)pthread_getname_np(pthread_self(), thread.data(), thread.size());
    const Location device = Location::cuda(shortage.device);
    const std::uint64_t num_left =
        evict_for(device, wanted - spare,
                  fmt::format("{} B at {} asked for by thread '{}'", shortage.nbytes,
                              to_string(device), thread.data()));
    num_evicted_.fetch_add(num_left, std::memory_order_relaxed);
    return num_left != 0;
  }

  std::atomic<std::uint64_t> num_pressed_{0};
  std::atomic<std::uint64_t> num_recovered_{0};
  std::atomic<std::uint64_t> num_evicted_{0};
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
