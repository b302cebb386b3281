#include "csrc/simcuda/operators/copy.h"

#include <memory>

#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "csrc/simcuda/operators/cost.h"
#include "csrc/simcuda/operators/on_worker.h"
#include "csrc/simcuda/operators/tensor_spec.h"

namespace at::native {
// In libtorch_cpu and its headers' name, but declared in none of them.
TORCH_API Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking);
}  // namespace at::native

namespace residency::simcuda {
namespace {

using at::Tensor;

// What copy_device_to_device gives to cudaMemcpyAsync: the same bytes in the same order.
bool is_plain(const Tensor& self, const Tensor& source) {
  return self.dtype() == source.dtype() && self.is_conj() == source.is_conj() &&
         self.is_neg() == source.is_neg() && self.sizes().equals(source.sizes()) &&
         ((self.is_contiguous() && source.is_contiguous()) ||
          (self.strides().equals(source.strides()) && self.is_non_overlapping_and_dense()));
}

struct StridedCopy {
  TensorSpec to_spec;
  TensorSpec from_spec;
  const void* to;
  const void* from;

  static int run(void* opaque) {
    const auto& copy = *static_cast<const StridedCopy*>(opaque);
    void* to = simcuda_host_address(copy.to);
    void* from = simcuda_host_address(copy.from);
    if (to == nullptr || from == nullptr) {
      return cudaErrorIllegalAddress;
    }
    const OnWorker on_worker;
    host_alias(copy.to_spec, to).copy_(host_alias(copy.from_spec, from));
    return cudaSuccess;
  }
  static void destroy(void* opaque) { delete static_cast<StridedCopy*>(opaque); }
};

void launch_copy(const Tensor& self, const Tensor& source) {
  const c10::cuda::CUDAGuard guard(self.device());
  auto copy =
      std::make_unique<StridedCopy>(StridedCopy{TensorSpec::of(self), TensorSpec::of(source),
                                                self.const_data_ptr(), source.const_data_ptr()});
  simcuda_work work{"aten::copy_", 0, 0, SIMCUDA_FP32};
  work.bytes = copy->to_spec.touched_bytes() + copy->from_spec.touched_bytes();
  C10_CUDA_CHECK(static_cast<cudaError_t>(simcuda_launch(c10::cuda::getCurrentCUDAStream().stream(),
                                                         &work, &StridedCopy::run,
                                                         &StridedCopy::destroy, copy.release())));
}

}  // namespace

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  const bool within_cuda = self.is_cuda() && source.is_cuda() && self.numel() != 0;
  if (!within_cuda || source.layout() != c10::kStrided || self.layout() != c10::kStrided ||
      is_plain(self, source)) {
    return at::native::copy_(self, source, non_blocking);
  }
  const Tensor expanded = source.expand_as(self);
  if (self.device() == source.device()) {
    launch_copy(self, expanded);
    return self;
  }
  // Between devices, only plain bytes travel: converted and gathered on one side, spread on the
  // other.
  const Tensor packed = expanded.to(self.scalar_type()).contiguous();
  const Tensor arrived = at::empty_like(packed, packed.options().device(self.device()));
  arrived.copy_(packed, non_blocking);
  return self.copy_(arrived, non_blocking);
}

at::Scalar dry_item(const Tensor& self) {
  // For what it costs; nothing was copied to where it looks.
  (void)at::native::_local_scalar_dense_cuda(self);
  if (c10::isFloatingType(self.scalar_type())) {
    return 0.0;
  }
  return self.scalar_type() == c10::kBool ? at::Scalar(false) : at::Scalar(0);
}

}  // namespace residency::simcuda
