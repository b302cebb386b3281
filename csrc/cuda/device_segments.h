#pragma once

#include <cstdint>
#include <vector>

#include "csrc/cuda/range_memory.h"
#include "residency/core/location.h"

namespace residency {

/// Segments from PyTorch's caching allocator, on a stream of the arena's own. Each is of a size for
/// which one block is one segment of the allocator (a multiple of 2 MiB, at least 10 MiB), so that
/// an empty one goes back whole.
class DeviceSegments final : public SegmentSource {
 public:
  /// What ranges begin at, as the caching allocator's blocks do.
  static constexpr Bytes kAlignment = Bytes(512);

  /// c10/cuda/CUDACachingAllocator.cpp, kMinLargeAlloc and kRoundLarge: from the first on a request
  /// is a segment of its own, rounded to the second.
  static constexpr Bytes kSmallestSegment = Bytes(std::int64_t{10} << 20);
  static constexpr std::int64_t kSegmentRounding = std::int64_t{2} << 20;

  explicit DeviceSegments(Location device) : location_(device) {}

  [[nodiscard]] Bytes segment_bytes(Bytes request, Bytes in_segments) const override;
  /// Throws `c10::OutOfMemoryError`, and what `throw_cuda_error` throws.
  [[nodiscard]] Segment make(Bytes nbytes) override;
  void give_back(void* data, Bytes nbytes, const std::vector<FencePtr>& after) noexcept override;
  [[nodiscard]] c10::Device device() const override;
  [[nodiscard]] std::vector<Stream> current_streams() override;
  [[nodiscard]] FencePtr record(const Stream& stream) override;
  [[nodiscard]] bool wait_for_others() noexcept override;
  [[nodiscard]] bool keeps_empty_segments() const override { return false; }

 private:
  const Location location_;
};

}  // namespace residency
