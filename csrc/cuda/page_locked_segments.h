#pragma once

#include <vector>

#include "csrc/cuda/range_memory.h"

namespace residency {

/// Slabs of page-locked memory: whole pages of our own, registered with CUDA. The caching host
/// allocator of PyTorch would round each to a power of two.
///
/// Large ranges are whole pages and have a slab for themselves, or one that another left: what is
/// booked is what is locked. Small ones share slabs, which grow with what there is, by 1/128, so
/// that little is locked that is not used.
///
/// On a machine with several memory nodes a slab is on the one nearest to the calling thread's
/// current device, where that can be had.
class PageLockedSegments final : public SegmentSource {
 public:
  static constexpr Bytes kAlignment = Bytes(64);
  /// What a range of so many bytes takes.
  [[nodiscard]] static Bytes range_bytes(Bytes nbytes);

  [[nodiscard]] Bytes segment_bytes(Bytes request, Bytes in_segments) const override;
  /// Throws `PageLockError` where the system's limits or CUDA refuse, `std::bad_alloc`.
  [[nodiscard]] Segment make(Bytes nbytes) override;
  /// Waits for the fences on the host: other processes may get the pages.
  void give_back(void* data, Bytes nbytes, const std::vector<FencePtr>& after) noexcept override;
  [[nodiscard]] c10::Device device() const override { return c10::Device(c10::kCPU); }
  [[nodiscard]] std::vector<Stream> current_streams() override;
  [[nodiscard]] FencePtr record(const Stream& stream) override;
  [[nodiscard]] bool wait_for_others() noexcept override;
  [[nodiscard]] bool keeps_empty_segments() const override { return true; }

  /// What more this process may lock: the least of RLIMIT_MEMLOCK and of the memory limits of its
  /// cgroups (version 2). None where neither limits it.
  [[nodiscard]] static std::optional<Bytes> lockable_bytes();
};

}  // namespace residency
