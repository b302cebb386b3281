#include "csrc/cuda/copy_batch.h"

#include "csrc/cuda/runtime.h"

namespace residency {
namespace {

bool enqueue_together(std::span<const Piece> pieces, cudaStream_t stream) {
  constexpr std::size_t kMostInline = 256;
  c10::SmallVector<void*, kMostInline> to;
  c10::SmallVector<const void*, kMostInline> from;
  c10::SmallVector<std::size_t, kMostInline> num_bytes;
  for (const Piece& piece : pieces) {
    to.push_back(piece.to);
    from.push_back(piece.from);
    num_bytes.push_back(piece.nbytes);
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  std::size_t first_with_them = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t error =
      cudaMemcpyBatchAsync(to.data(), from.data(), num_bytes.data(), pieces.size(), &attributes,
                           &first_with_them, 1, stream);
#else  // of 12.8 and 12.9, which also tell which of them has failed
  std::size_t failed = 0;
  const cudaError_t error =
      cudaMemcpyBatchAsync(to.data(), const_cast<void**>(from.data()), num_bytes.data(),
                           pieces.size(), &attributes, &first_with_them, 1, &failed, stream);
#endif
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
  }
  return error == cudaSuccess;
}

cudaError_t enqueue(const Piece& piece, const std::optional<Peers>& peers, cudaStream_t stream) {
  return peers.has_value()
             ? cudaMemcpyPeerAsync(piece.to, peers->to, piece.from, peers->from, piece.nbytes,
                                   stream)
             : cudaMemcpyAsync(piece.to, piece.from, piece.nbytes, cudaMemcpyDefault, stream);
}

}  // namespace

cudaError_t enqueue_copies(std::span<const Piece> pieces, const std::optional<Peers>& peers,
                           cudaStream_t stream) {
  // Not between devices, and not on the legacy stream; nor by a driver that has no such call.
  const bool may_be_together =
      pieces.size() > 1 && !peers.has_value() && stream != nullptr && stream != cudaStreamLegacy;
  if (may_be_together && enqueue_together(pieces, stream)) {
    return cudaSuccess;
  }
  for (const Piece& piece : pieces) {
    if (const cudaError_t error = enqueue(piece, peers, stream); error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}

}  // namespace residency
