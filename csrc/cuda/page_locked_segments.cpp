#include "csrc/cuda/page_locked_segments.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <new>
#include <optional>
#include <string>
#include <thread>

#include <c10/cuda/CUDAFunctions.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include "csrc/cuda/event_fence.h"
#include "csrc/cuda/lock_limits.h"
#include "csrc/cuda/numa_node.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

/// By this process, through this library.
std::atomic<std::int64_t> g_locked{0};

/// From here on rounding to pages is 1/16 at most.
constexpr auto kLarge = Bytes(std::int64_t{64} << 10);

std::int64_t page_bytes() {
  static const std::int64_t bytes = ::sysconf(_SC_PAGESIZE);
  return bytes;
}

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14
#endif

void touch(std::byte* data, std::size_t nbytes) {
  if (::madvise(data, nbytes, MADV_POPULATE_WRITE) == 0) {
    return;
  }
  for (std::size_t at = 0; at < nbytes; at += static_cast<std::size_t>(page_bytes())) {
    const_cast<volatile std::byte*>(data)[at] = std::byte{0};
  }
}

/// Locking would touch page after page on one thread.
void touch_in_parallel(void* data, std::size_t nbytes) {
  constexpr std::size_t kWorthAThread = std::size_t{64} << 20;
  constexpr std::size_t kMostThreads = 8;
  const std::size_t num_threads = std::clamp<std::size_t>(
      nbytes / kWorthAThread, 1,
      std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, kMostThreads));
  const auto page = static_cast<std::size_t>(page_bytes());
  const std::size_t share = (nbytes / num_threads + page - 1) / page * page;
  auto* const begin = static_cast<std::byte*>(data);
  std::vector<std::thread> threads;
  for (std::size_t at = share; at < nbytes; at += share) {
    try {
      threads.emplace_back(touch, begin + at, std::min(share, nbytes - at));
    } catch (...) {
      touch(begin + at, nbytes - at);  // no thread to be had
      break;
    }
  }
  touch(begin, std::min(share, nbytes));
  for (std::thread& thread : threads) {
    thread.join();
  }
}

/// Page-locked memory is one location for all devices. The current device is the one that the bytes
/// come from where they come from a device, and otherwise the best guess of where they will go.
std::optional<int> node_of_current_device() {
  std::array<char, 32> pci_id{};
  c10::DeviceIndex device = 0;
  if (c10::cuda::GetDevice(&device) != cudaSuccess ||
      cudaDeviceGetPCIBusId(pci_id.data(), static_cast<int>(pci_id.size()), device) !=
          cudaSuccess) {
    (void)cudaGetLastError();
    return std::nullopt;
  }
  const char* sysfs = std::getenv("RESIDENCY_SYSFS");  // of tests
  return node_of_pci_device(pci_id.data(), sysfs != nullptr ? sysfs : "/sys");
}

/// Those that can have been given anything.
std::vector<Location> devices_in_use() {
  std::vector<Location> devices;
  for (int index = 0; index < c10::cuda::device_count(); ++index) {
    if (find_streams(Location::cuda(index)) != nullptr) {
      devices.push_back(Location::cuda(index));
    }
  }
  return devices;
}

}  // namespace

std::optional<Bytes> PageLockedSegments::lockable_bytes() {
  return residency::lockable_bytes(Bytes(g_locked.load()));
}

Bytes PageLockedSegments::range_bytes(Bytes nbytes) {
  const std::int64_t rounding = nbytes < kLarge ? kAlignment.count() : page_bytes();
  return nbytes.rounded_up(rounding);
}

Bytes PageLockedSegments::segment_bytes(Bytes request, Bytes in_segments) const {
  if (request >= kLarge) {
    return request.rounded_up(page_bytes());
  }
  const std::int64_t num_wanted = std::max<std::int64_t>(
      1, in_segments.count() / 128 / std::max<std::int64_t>(1, request.count()));
  const Bytes smallest = Bytes(4 * page_bytes());
  return std::max(smallest, Bytes(request.count() * num_wanted).rounded_up(page_bytes()));
}

SegmentSource::Segment PageLockedSegments::make(Bytes nbytes) {
  const auto refuse = [&](std::optional<Bytes> lockable, const std::string& why) {
    throw PageLockError(
        lockable.value_or(Bytes()), nbytes,
        fmt::format("{} bytes of host memory cannot be page-locked: {}", nbytes.count(), why));
  };
  const std::optional<Bytes> lockable = lockable_bytes();
  if (lockable.has_value() && *lockable < nbytes) {
    refuse(lockable, fmt::format("the limits of this process (ulimit -l, memory.max of its cgroup) "
                                 "leave {} bytes",
                                 lockable->count()));
  }
  const auto size = static_cast<std::size_t>(nbytes.count());
  void* data = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    throw std::bad_alloc();
  }
  try {
    if (const std::optional<int> node = node_of_current_device()) {
      (void)prefer_node(data, size, *node);
    }
    touch_in_parallel(data, size);
  } catch (...) {
    ::munmap(data, size);
    throw;
  }
  const RelaxedCapture relaxed;
  const cudaError_t error = cudaHostRegister(data, size, cudaHostRegisterPortable);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    ::munmap(data, size);
    refuse(lockable, fmt::format("cudaHostRegister answers {} ({})", cudaGetErrorString(error),
                                 cudaGetErrorName(error)));
  }
  g_locked += nbytes.count();
  return {data, nullptr};
}

void PageLockedSegments::give_back(void* data, Bytes nbytes,
                                   const std::vector<FencePtr>& after) noexcept {
  wait_all(after);
  const RelaxedCapture relaxed;
  if (cudaHostUnregister(data) != cudaSuccess) {
    (void)cudaGetLastError();
    return;  // a device can still reach the pages
  }
  g_locked -= nbytes.count();
  ::munmap(data, static_cast<std::size_t>(nbytes.count()));
}

bool PageLockedSegments::wait_for_others() noexcept {
  bool is_over = true;
  for (const Location device : devices_in_use()) {
    is_over &= synchronize_device(device);
  }
  return is_over;
}

std::vector<Stream> PageLockedSegments::current_streams() {
  std::vector<Stream> streams;
  for (const Location device : devices_in_use()) {
    streams.push_back(current_stream_of(device));
  }
  return streams;
}

FencePtr PageLockedSegments::record(const Stream& stream) {
  return record_stream(stream);
}

}  // namespace residency
