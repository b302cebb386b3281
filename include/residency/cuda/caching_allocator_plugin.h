#pragma once

#include <cstdint>

#include "residency/core/export.h"

namespace residency {

/// Stands before PyTorch's CUDA caching allocator, for every allocation of the process, whichever
/// library makes it.
///
/// Memory that was allocated before is freed as ever, blocks are the allocator's own, and its
/// statistics, pools, snapshots and `empty_cache` are what they were. What does not go through the
/// allocator (`cudaMalloc` called by a library, NCCL, workspaces of cuBLAS handles) is not seen.
///
/// An allocation that runs out of memory is tried a second time: by then freed blocks that other
/// streams were still using have been waited for, beside which the native allocator can fail
/// (pytorch/pytorch#189504). When that does not help, managers whose `ManagerOptions::reclaim` says
/// so give up the cheapest unprotected values whose departure empties enough whole segments of that
/// device, which may wait for copies; nothing leaves where that would not do, while the thread
/// captures a graph, or while allocations are routed into a pool. Then it is tried again. In the
/// end the caller gets the allocator's own `c10::OutOfMemoryError`, of the first time.
///
/// Thread-safe.
class RESIDENCY_API CachingAllocatorPlugin {
 public:
  CachingAllocatorPlugin() = delete;

  /// Idempotent, and may be called before CUDA is initialized. Throws `UnavailableError` where the
  /// allocator in force is not the native one (`cudaMallocAsync`, a pluggable one).
  static void install();
  /// The reverse; idempotent. False where another allocator has been put before it since, which
  /// keeps calling it: it then only passes calls on.
  static bool remove() noexcept;
  [[nodiscard]] static bool is_installed() noexcept;

  struct Counters {
    std::uint64_t num_pressed = 0;    ///< allocations that ran out of memory
    std::uint64_t num_recovered = 0;  ///< of those, given after all
    std::uint64_t num_evicted = 0;    ///< values that left a device for them
  };
  /// Since the process began.
  [[nodiscard]] static Counters counters() noexcept;
};

}  // namespace residency
