#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "residency/aten/manager.h"
#include "residency/cuda/cuda_layer.h"
#include "tests/aten/fixture.h"
#include "tests/cuda/fixture.h"

namespace residency::testing {

inline const Location kPinned = Location::pinned_host();
inline const Location kDevice = Location::cuda(0);
inline const Location kOther = Location::cuda(1);

inline c10::cuda::CUDAStream current(Location at) {
  return c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(at.cuda_index()));
}

inline Stream named(const c10::cuda::CUDAStream& stream) {
  return {Location::cuda(stream.device_index()), stream.id()};
}

/// A value in pageable memory whose bytes are all `byte`.
inline Handle value(Manager& manager, std::int64_t nbytes, int byte, Mutability mutability) {
  at::Tensor tensor = at::empty({nbytes}, at::TensorOptions().dtype(at::kByte));
  std::memset(tensor.mutable_data_ptr(), byte, static_cast<std::size_t>(nbytes));
  TensorResident fields({{"x", std::move(tensor)}});
  return adopt(manager, std::move(fields),
               {.mode = ReplicaMode::kReplicable, .mutability = mutability});
}

/// RESIDENCY_SEED, or a fresh seed. Printed at once: the test may crash, or hang.
inline std::uint32_t chosen_seed() {
  const char* chosen = std::getenv("RESIDENCY_SEED");
  const auto seed = chosen != nullptr
                        ? static_cast<std::uint32_t>(std::strtoul(chosen, nullptr, 10))
                        : std::random_device()();
  std::printf("RESIDENCY_SEED=%u\n", seed);
  std::fflush(stdout);
  return seed;
}

/// Ensure, twice as often as move or drop.
inline ResidencyAction random_action(std::mt19937& random, const Handle& handle, Location at) {
  switch (random() % 4) {
    case 0: return DropResident{handle, at};
    case 1: return MoveResident{handle, at, std::nullopt};
    default: return EnsureResident{handle, at};
  }
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

/// A manager with devices. What is left of it is audited at the end.
class DeviceTier : public CudaTest {
 protected:
  DeviceTier() {
    if (simulated()) {
      simcuda_reset_counters();
    }
  }
  ~DeviceTier() override {
    if (!manager_->closed()) {
      manager_->audit();
      manager_->close({.force = true});
    }
  }

  static std::shared_ptr<Manager> make(std::shared_ptr<DeviceLayer> layer,
                                       ManagerOptions options = {}) {
    return create_manager(std::move(options), {.devices = std::move(layer)});
  }
  Handle value(std::int64_t nbytes, int byte, Mutability mutability = Mutability::kImmutable) {
    return testing::value(*manager_, nbytes, byte, mutability);
  }
  int byte_of(const Handle& handle, Location at) { return testing::byte_of(*manager_, handle, at); }
  /// A consumer's read of the value's first bytes, enqueued.
  void enqueue_read(const Handle& handle, const c10::cuda::CUDAStream& consumer,
                    const at::Tensor& into) {
    const Location at = Location::cuda(consumer.device_index());
    Lease lease = manager_->acquire(one(handle), at, {.stream = named(consumer)});
    EXPECT_EQ(cudaMemcpyAsync(into.mutable_data_ptr(), tensors(lease, handle)[0].const_data_ptr(),
                              static_cast<std::size_t>(into.numel()), cudaMemcpyDefault, consumer),
              cudaSuccess);
    lease.release();
  }
  static int first_byte(const at::Tensor& tensor) {
    std::uint8_t byte = 0;
    EXPECT_EQ(cudaMemcpy(&byte, tensor.const_data_ptr(), 1, cudaMemcpyDefault), cudaSuccess);
    return byte;
  }
  /// The layer's own streams are known to it alone; the simulated runtime holds all there are.
  static simcuda_counters counters() {
    simcuda_counters read{};
    EXPECT_EQ(simcuda_read_counters(-1, &read), 0);
    return read;
  }

  std::shared_ptr<DeviceLayer> layer_ = make_cuda_layer();
  std::shared_ptr<Manager> manager_ = make(layer_);
};

}  // namespace residency::testing
