#pragma once

#include <cstddef>
#include <optional>
#include <span>

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
/// Many cost a fraction of one call for each. When that fails some of them may be in flight.
[[nodiscard]] cudaError_t enqueue_copies(std::span<const Piece> pieces,
                                         const std::optional<Peers>& peers, cudaStream_t stream);

}  // namespace residency
