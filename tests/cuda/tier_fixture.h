#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "residency/aten/manager.h"
#include "tests/aten/fixture.h"

namespace residency::testing {

inline const Location kPinned = Location::pinned_host();
inline const Location kDevice = Location::cuda(0);
inline const Location kOther = Location::cuda(1);

inline c10::cuda::CUDAStream current(Location at) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(at.cuda_index()));
}

/// A value in pageable memory whose bytes are all `byte`.
inline Handle value(Manager& manager, std::int64_t nbytes, int byte, Mutability mutability) {
  at::Tensor tensor = at::empty({nbytes}, at::TensorOptions().dtype(at::kByte));
  std::memset(tensor.mutable_data_ptr(), byte, static_cast<std::size_t>(nbytes));
  TensorResident fields({{"x", std::move(tensor)}});
  return adopt(manager, std::move(fields),
               {.mode = ReplicaMode::kReplicable, .mutability = mutability});
}

/// The value's bytes where it is, all equal, or -1.
inline int byte_of(Manager& manager, const Handle& handle, Location at) {
  Lease lease = manager.acquire(one(handle), at);
  const at::Tensor tensor = tensors(lease, handle)["x"];
  std::vector<unsigned char> found(static_cast<std::size_t>(tensor.numel()));
  if (at.is_cuda()) {
    current(at).synchronize();
  }
  EXPECT_EQ(cudaMemcpy(found.data(), tensor.const_data_ptr(), found.size(), cudaMemcpyDefault),
            cudaSuccess);
  lease.release();
  const bool equal = std::all_of(found.begin(), found.end(),
                                 [&](unsigned char each) { return each == found.front(); });
  return equal ? found.front() : -1;
}

}  // namespace residency::testing
