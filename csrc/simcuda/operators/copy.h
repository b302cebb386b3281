#ifndef RESIDENCY_SIMCUDA_OPERATORS_COPY_H
#define RESIDENCY_SIMCUDA_OPERATORS_COPY_H

#include <ATen/core/Tensor.h>

namespace residency::simcuda {

/// aten::copy_ for CUDA tensors: PyTorch's own code, which converts and gathers on either side and
/// then copies plain bytes, but for the copies within a device that a kernel does.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking);

/// aten::_local_scalar_dense in dry mode: waits for the device as item() does, and gives 0.
at::Scalar dry_item(const at::Tensor& self);

}  // namespace residency::simcuda

#endif
