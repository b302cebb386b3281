#ifndef RESIDENCY_SIMCUDA_OPERATORS_TENSOR_SPEC_H
#define RESIDENCY_SIMCUDA_OPERATORS_TENSOR_SPEC_H

#include <cstddef>

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>

namespace residency::simcuda {

/// What a kernel is told of a tensor besides its address.
struct TensorSpec {
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::DimVector sizes;
  c10::DimVector strides;
  bool conj = false;
  bool neg = false;
  size_t extent_bytes = 0;  ///< from the first to past the last element

  [[nodiscard]] static TensorSpec of(const at::Tensor& tensor);
  [[nodiscard]] bool defined() const { return dtype != c10::ScalarType::Undefined; }
  /// Bytes a kernel touches: an expanded dimension is read once.
  [[nodiscard]] double touched_bytes() const;
};

/// A CPU tensor over the bytes at `address`. It holds no reference to them, as a kernel does not,
/// and refuses to be resized: a result that does not fit its output is an error, not a lost result.
[[nodiscard]] at::Tensor host_alias(const TensorSpec& spec, void* address);

/// A tensor without bytes, for shape inference.
[[nodiscard]] at::Tensor meta_tensor(const TensorSpec& spec);

}  // namespace residency::simcuda

#endif
