#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include <c10/util/SmallVector.h>
#include <cuda_runtime_api.h>

namespace residency {

/// One copy of a run of bytes.
struct Piece {
  std::byte* to;
  const std::byte* from;
  std::size_t nbytes;
};

using Pieces = c10::SmallVector<Piece, 1>;

/// The devices of a copy between two.
struct Peers {
  int from;
  int to;
};

/// Enqueues copies, in no particular order among themselves; with `peers`, between two devices.
/// When that fails some of them may be in flight.
[[nodiscard]] cudaError_t enqueue_copies(std::span<const Piece> pieces,
                                         const std::optional<Peers>& peers, cudaStream_t stream);

/// Copies between a device and page-locked memory, or within a device, that are enqueued together:
/// one call costs a fraction of one for each.
class CopyBatch {
 public:
  void add(const Piece& piece);
  [[nodiscard]] bool empty() const noexcept { return to_.empty(); }
  /// Enqueues the copies, in no particular order among themselves. When that fails those which were
  /// enqueued are no longer in the batch. Leaves the thread's last error clear.
  [[nodiscard]] cudaError_t enqueue_on(cudaStream_t stream) noexcept;

 private:
  void remove_first(std::size_t count) noexcept;

  std::vector<void*> to_;
  std::vector<const void*> from_;
  std::vector<std::size_t> num_bytes_;
};

}  // namespace residency
