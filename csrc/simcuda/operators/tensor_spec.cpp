#include "csrc/simcuda/operators/tensor_spec.h"

#include <utility>

#include <ATen/EmptyTensor.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>

namespace residency::simcuda {

TensorSpec TensorSpec::of(const at::Tensor& tensor) {
  TensorSpec spec;
  if (!tensor.defined()) {
    return spec;
  }
  spec.dtype = tensor.scalar_type();
  spec.sizes.assign(tensor.sizes().begin(), tensor.sizes().end());
  spec.strides.assign(tensor.strides().begin(), tensor.strides().end());
  spec.conj = tensor.is_conj();
  spec.neg = tensor.is_neg();
  spec.extent_bytes = at::detail::computeStorageNbytes(spec.sizes, spec.strides, tensor.itemsize());
  return spec;
}

double TensorSpec::touched_bytes() const {
  double bytes = static_cast<double>(c10::elementSize(dtype));
  for (size_t i = 0; i < sizes.size(); ++i) {
    bytes *= strides[i] == 0 && sizes[i] > 0 ? 1.0 : static_cast<double>(sizes[i]);
  }
  return bytes;
}

at::Tensor host_alias(const TensorSpec& spec, void* address) {
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), spec.extent_bytes,
      at::DataPtr(address, c10::Device(c10::kCPU)), /*allocator=*/nullptr, /*resizable=*/false);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         c10::scalarTypeToTypeMeta(spec.dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(spec.sizes, spec.strides);
  if (spec.conj) {
    tensor._set_conj(true);
  }
  if (spec.neg) {
    tensor._set_neg(true);
  }
  return tensor;
}

at::Tensor meta_tensor(const TensorSpec& spec) {
  at::Tensor tensor = at::detail::empty_strided_meta(spec.sizes, spec.strides, spec.dtype);
  if (spec.conj) {
    tensor._set_conj(true);
  }
  if (spec.neg) {
    tensor._set_neg(true);
  }
  return tensor;
}

}  // namespace residency::simcuda
