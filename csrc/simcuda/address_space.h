// Device memory and page-locked host memory: which addresses are what.
//
// Note [Guarded device addresses]
// Device addresses lie in one reserved window of address space that is never readable, so the host
// faults when it touches one, as on a machine with a GPU. The bytes are in a second window at a
// fixed distance, which only copies and the operator layer use. In dry mode there is no second
// window.
#ifndef RESIDENCY_CSRC_SIMCUDA_ADDRESS_SPACE_H
#define RESIDENCY_CSRC_SIMCUDA_ADDRESS_SPACE_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>

#include <cuda_runtime_api.h>

namespace simcuda {

struct Device;

// The unit in which a device's memory is given out, as the driver's for large allocations.
inline constexpr uint64_t kGranularity = uint64_t{2} << 20;

enum class RangeKind { kDevice, kMapped, kPinned, kRegistered };

struct Range {
  uintptr_t base = 0;
  uint64_t num_bytes = 0;
  int device = 0;
  RangeKind kind = RangeKind::kDevice;
  uint64_t charged_bytes = 0;  // whole units or pages
  unsigned flags = 0;

  uintptr_t end() const { return base + num_bytes; }
  bool on_device() const { return kind == RangeKind::kDevice || kind == RangeKind::kMapped; }
};

// Thread-safe.
class AddressSpace {
 public:
  // Reserves the windows. Ends the process when the system refuses even a small one.
  AddressSpace(uint64_t capacity_bytes, bool dry);

  bool in_window(const void* address) const {
    uintptr_t at = reinterpret_cast<uintptr_t>(address);
    return at >= window_ && at < window_ + window_bytes_;
  }
  // Where the bytes are; the address itself when it is none of a device. Null in dry mode.
  void* bytes_at(const void* address) const;

  // Address space without memory. Zero when there is none.
  uintptr_t reserve(uint64_t num_bytes);
  void unreserve(uintptr_t base, uint64_t num_bytes);

  // Takes from the device's capacity. Counts a refusal.
  bool charge(Device& device, uint64_t num_bytes);
  void uncharge(Device& device, uint64_t num_bytes);

  // Makes the bytes behind a part of the window usable, or gives them back to the system.
  bool commit(uintptr_t base, uint64_t num_bytes);
  bool commit_file(uintptr_t base, uint64_t num_bytes, int file, int64_t offset);
  void decommit(uintptr_t base, uint64_t num_bytes);

  void insert(const Range& range);
  // False, and nothing is inserted, when a part of it is in a range already.
  bool insert_if_free(const Range& range);
  std::optional<Range> find(const void* address) const;
  // Removes the range that begins there and is of that kind.
  std::optional<Range> take(const void* base, RangeKind kind);
  // The range that all of the bytes are in. Neighbouring mapped ranges count as one.
  std::optional<Range> cover(const void* address, uint64_t num_bytes) const;

  // Page-locked bytes; false when the limit would be passed.
  bool charge_pinned(uint64_t num_bytes);
  void uncharge_pinned(uint64_t num_bytes);
  uint64_t pinned_bytes() const;
  uint64_t peak_pinned_bytes() const;
  void reset_peak_pinned();

  struct Usage {
    uint64_t used_bytes;
    uint64_t peak_bytes;
    uint64_t failed_allocations;
  };
  Usage usage(const Device& device) const;
  void reset_usage(Device& device);

 private:
  // What `find` finds, as this thread keeps it: valid until it has looked up two others.
  const Range* look_up(const void* address) const;

  const bool dry_;
  uintptr_t window_ = 0;
  uint64_t window_bytes_ = 0;
  ptrdiff_t to_bytes_ = 0;

  mutable std::shared_mutex ranges_mutex_;
  std::map<uintptr_t, Range> ranges_;
  std::atomic<uint64_t> epoch_{1};  // of ranges_

  mutable std::mutex space_mutex_;  // guards the rest, and the devices' used bytes
  std::map<uintptr_t, uint64_t> free_;
  uint64_t pinned_bytes_ = 0;
  uint64_t peak_pinned_bytes_ = 0;
};

inline uint64_t round_up(uint64_t num_bytes, uint64_t unit) {
  return (num_bytes + unit - 1) / unit * unit;
}

}  // namespace simcuda

#endif
