#include "csrc/cuda/copy_batch.h"

#include "csrc/cuda/runtime.h"

namespace residency {

cudaError_t enqueue_copies(std::span<const Piece> pieces, const std::optional<Peers>& peers,
                           cudaStream_t stream) {
  cudaError_t error = cudaSuccess;
  if (peers.has_value() || pieces.size() == 1) {
    for (auto piece = pieces.begin(); piece != pieces.end() && error == cudaSuccess; ++piece) {
      error = peers.has_value() ? cudaMemcpyPeerAsync(piece->to, peers->to, piece->from,
                                                      peers->from, piece->nbytes, stream)
                                : cudaMemcpyAsync(piece->to, piece->from, piece->nbytes,
                                                  cudaMemcpyDefault, stream);
    }
    return error;
  }
  CopyBatch batch;
  for (const Piece& piece : pieces) {
    batch.add(piece);
  }
  return batch.enqueue_on(stream);
}

void CopyBatch::add(const Piece& piece) {
  if (to_.size() == to_.capacity()) {  // what can fail comes first: all three have equally many
    const std::size_t capacity = 2 * to_.size() + 1;
    from_.reserve(capacity);
    num_bytes_.reserve(capacity);
    to_.reserve(capacity);
  }
  to_.push_back(piece.to);
  from_.push_back(piece.from);
  num_bytes_.push_back(piece.nbytes);
}

cudaError_t CopyBatch::enqueue_on(cudaStream_t stream) noexcept {
  if (empty()) {
    return cudaSuccess;
  }
  const RelaxedCapture relaxed;
  // The legacy stream takes no batches.
  if (to_.size() > 1 && stream != nullptr && stream != cudaStreamLegacy) {
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
    std::size_t first_with_them = 0;
    if (cudaMemcpyBatchAsync(to_.data(), from_.data(), num_bytes_.data(), to_.size(), &attributes,
                             &first_with_them, 1, stream) == cudaSuccess) {
      remove_first(to_.size());
      return cudaSuccess;
    }
    (void)cudaGetLastError();  // a driver that has no such call, perhaps: one by one then
  }
  for (std::size_t i = 0; i < to_.size(); ++i) {
    const cudaError_t error =
        cudaMemcpyAsync(to_[i], from_[i], num_bytes_[i], cudaMemcpyDefault, stream);
    if (error != cudaSuccess) {
      (void)cudaGetLastError();
      remove_first(i);
      return error;
    }
  }
  remove_first(to_.size());
  return cudaSuccess;
}

void CopyBatch::remove_first(std::size_t count) noexcept {
  const auto offset = static_cast<std::ptrdiff_t>(count);
  to_.erase(to_.begin(), to_.begin() + offset);
  from_.erase(from_.begin(), from_.begin() + offset);
  num_bytes_.erase(num_bytes_.begin(), num_bytes_.begin() + offset);
}

}  // namespace residency
