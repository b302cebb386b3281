#include "csrc/simcuda/address_space.h"

#include <algorithm>
#include <array>
#include <cstdlib>

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "csrc/simcuda/device.h"
#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/sanitizer.h"
#include "csrc/simcuda/settings.h"

namespace simcuda {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

// The system call itself: a sanitizer's wrapper would set up its own tables for the whole window.
void* map_memory(uintptr_t address, uint64_t num_bytes, int protection, int flags, int file = -1,
                 int64_t offset = 0) {
  return reinterpret_cast<void*>(
      syscall(SYS_mmap, address, num_bytes, protection, flags, file, offset));
}

uintptr_t reserve_window(uint64_t num_bytes) {
  void* window = map_memory(0, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE);
  return window == MAP_FAILED ? 0 : reinterpret_cast<uintptr_t>(window);
}

}  // namespace

AddressSpace::AddressSpace(uint64_t capacity_bytes, bool dry) : dry_(dry) {
  // Each expandable segment of torch reserves more than a whole device's memory, per stream and
  // pool, so many times the capacity is wanted. A race checker leaves room for little.
  uint64_t most = race_checker_present() ? 256 * kGiB : 16384 * kGiB;
  uint64_t wanted = std::clamp(capacity_bytes * 16, 256 * kGiB, most);
  wanted = std::max(round_up(wanted, kGranularity), round_up(capacity_bytes * 2, kGranularity));
  uintptr_t window = 0;
  uintptr_t bytes = 0;
  while (true) {
    window = reserve_window(wanted);
    bytes = dry || !window ? window : reserve_window(wanted);
    if (window && bytes) break;
    if (window) syscall(SYS_munmap, window, wanted);
    wanted = wanted / 2 / kGranularity * kGranularity;
    if (wanted < capacity_bytes) {
      stop_process("the system refuses the address space of the simulated devices' memory");
    }
  }
  window_ = round_up(window, kGranularity);
  window_bytes_ = wanted - kGranularity;
  to_bytes_ = static_cast<ptrdiff_t>(bytes - window);
  free_[window_] = window_bytes_;
}

void* AddressSpace::bytes_at(const void* address) const {
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  if (!in_window(address)) return reinterpret_cast<void*>(at);
  if (dry_) return nullptr;
  return reinterpret_cast<void*>(at + static_cast<uintptr_t>(to_bytes_));
}

uintptr_t AddressSpace::reserve(uint64_t num_bytes) {
  std::lock_guard lock(space_mutex_);
  auto found = std::find_if(free_.begin(), free_.end(),
                            [&](const auto& hole) { return hole.second >= num_bytes; });
  if (found == free_.end()) return 0;
  auto [base, hole_bytes] = *found;
  free_.erase(found);
  if (hole_bytes > num_bytes) free_[base + num_bytes] = hole_bytes - num_bytes;
  return base;
}

void AddressSpace::unreserve(uintptr_t base, uint64_t num_bytes) {
  std::lock_guard lock(space_mutex_);
  auto hole = free_.emplace(base, num_bytes).first;
  auto next = std::next(hole);
  if (next != free_.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    free_.erase(next);
  }
  if (hole == free_.begin()) return;
  auto previous = std::prev(hole);
  if (previous->first + previous->second != hole->first) return;
  previous->second += hole->second;
  free_.erase(hole);
}

bool AddressSpace::charge(Device& device, uint64_t num_bytes) {
  std::lock_guard lock(space_mutex_);
  uint64_t capacity = device.capacity_bytes;
  if (num_bytes > capacity || device.used_bytes > capacity - num_bytes) {
    ++device.failed_allocations;
    return false;
  }
  device.used_bytes += num_bytes;
  device.peak_used_bytes = std::max(device.peak_used_bytes, device.used_bytes);
  return true;
}

void AddressSpace::uncharge(Device& device, uint64_t num_bytes) {
  std::lock_guard lock(space_mutex_);
  device.used_bytes -= num_bytes;
}

bool AddressSpace::commit(uintptr_t base, uint64_t num_bytes) {
  if (dry_) return true;
  uintptr_t bytes = base + static_cast<uintptr_t>(to_bytes_);
  if (syscall(SYS_mprotect, bytes, num_bytes, PROT_READ | PROT_WRITE) != 0) return false;
  // A hint: without huge pages it is only slower.
  syscall(SYS_madvise, bytes, num_bytes, MADV_HUGEPAGE);
  return true;
}

bool AddressSpace::commit_file(uintptr_t base, uint64_t num_bytes, int file, int64_t offset) {
  if (dry_) return true;
  uintptr_t bytes = base + static_cast<uintptr_t>(to_bytes_);
  return map_memory(bytes, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file,
                    offset) != MAP_FAILED;
}

void AddressSpace::decommit(uintptr_t base, uint64_t num_bytes) {
  if (dry_) return;
  map_memory(base + static_cast<uintptr_t>(to_bytes_), num_bytes, PROT_NONE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED);
}

void AddressSpace::insert(const Range& range) {
  std::lock_guard lock(ranges_mutex_);
  ranges_[range.base] = range;
  ++epoch_;
}

bool AddressSpace::insert_if_free(const Range& range) {
  std::lock_guard lock(ranges_mutex_);
  auto after = ranges_.lower_bound(range.end());
  if (after != ranges_.begin() && std::prev(after)->second.end() > range.base) return false;
  ranges_[range.base] = range;
  ++epoch_;
  return true;
}

const Range* AddressSpace::look_up(const void* address) const {
  uintptr_t at = reinterpret_cast<uintptr_t>(address);
  // Copies mostly go between the same two, and a lookup in a driver costs next to nothing.
  struct Recent {
    uint64_t epoch = 0;
    std::array<Range, 2> ranges = {};
    size_t next = 0;
  };
  thread_local Recent recent;
  uint64_t epoch = epoch_.load();
  if (recent.epoch != epoch) recent = {.epoch = epoch};
  for (const Range& range : recent.ranges) {
    if (range.base <= at && at < range.end()) return &range;
  }
  std::shared_lock lock(ranges_mutex_);
  auto after = ranges_.upper_bound(at);
  if (after == ranges_.begin()) return nullptr;
  const Range& range = std::prev(after)->second;
  if (at >= range.end()) return nullptr;
  Range& kept = recent.ranges[recent.next];
  kept = range;
  recent.next = 1 - recent.next;
  return &kept;
}

std::optional<Range> AddressSpace::find(const void* address) const {
  const Range* range = look_up(address);
  return range != nullptr ? std::optional(*range) : std::nullopt;
}

std::optional<Range> AddressSpace::take(const void* base, RangeKind kind) {
  std::lock_guard lock(ranges_mutex_);
  auto found = ranges_.find(reinterpret_cast<uintptr_t>(base));
  if (found == ranges_.end() || found->second.kind != kind) return std::nullopt;
  Range range = found->second;
  ranges_.erase(found);
  ++epoch_;
  return range;
}

std::optional<Range> AddressSpace::cover(const void* address, uint64_t num_bytes) const {
  const Range* found = look_up(address);
  if (found == nullptr) return std::nullopt;
  uintptr_t end = reinterpret_cast<uintptr_t>(address) + num_bytes;
  if (end <= found->end()) return *found;
  Range first = *found;
  Range range = first;
  while (range.end() < end) {
    std::optional<Range> next = find(reinterpret_cast<void*>(range.end()));
    if (range.kind != RangeKind::kMapped || !next || next->kind != RangeKind::kMapped) {
      return std::nullopt;
    }
    range = *next;
  }
  return first;
}

bool AddressSpace::charge_pinned(uint64_t num_bytes) {
  std::lock_guard lock(space_mutex_);
  uint64_t limit = settings().pinned_limit_bytes;
  if (num_bytes > limit || pinned_bytes_ > limit - num_bytes) return false;
  pinned_bytes_ += num_bytes;
  peak_pinned_bytes_ = std::max(peak_pinned_bytes_, pinned_bytes_);
  return true;
}

void AddressSpace::uncharge_pinned(uint64_t num_bytes) {
  std::lock_guard lock(space_mutex_);
  pinned_bytes_ -= num_bytes;
}

uint64_t AddressSpace::pinned_bytes() const {
  std::lock_guard lock(space_mutex_);
  return pinned_bytes_;
}

uint64_t AddressSpace::peak_pinned_bytes() const {
  std::lock_guard lock(space_mutex_);
  return peak_pinned_bytes_;
}

void AddressSpace::reset_peak_pinned() {
  std::lock_guard lock(space_mutex_);
  peak_pinned_bytes_ = pinned_bytes_;
}

AddressSpace::Usage AddressSpace::usage(const Device& device) const {
  std::lock_guard lock(space_mutex_);
  return {device.used_bytes, device.peak_used_bytes, device.failed_allocations};
}

void AddressSpace::reset_usage(Device& device) {
  std::lock_guard lock(space_mutex_);
  device.peak_used_bytes = device.used_bytes;
  device.failed_allocations = 0;
}

}  // namespace simcuda
