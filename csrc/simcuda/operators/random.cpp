#include "csrc/simcuda/operators/random.h"

#include <cstdint>
#include <mutex>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include "residency/simcuda/control.h"

namespace residency::simcuda {
namespace {

// The offset counts in fours, as each Philox round gives four numbers.
constexpr uint64_t kOffsetPerKernel = 4;

uint64_t mix(uint64_t value) {  // splitmix64's finalizer
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

uint32_t mix(uint32_t value) {  // murmur3's finalizer, a bijection
  value = (value ^ (value >> 16)) * 0x85ebca6bU;
  value = (value ^ (value >> 13)) * 0xc2b2ae35U;
  return value ^ (value >> 16);
}

uint64_t read_device(const int64_t* address) {
  return static_cast<uint64_t>(*static_cast<const int64_t*>(simcuda_host_address(address)));
}

}  // namespace

at::PhiloxCudaState draw(const std::optional<at::Generator>& generator) {
  auto* impl = at::get_generator_or_default<at::CUDAGeneratorImpl>(
      generator, at::cuda::detail::getDefaultCUDAGenerator());
  const std::lock_guard<std::mutex> lock(impl->mutex_);
  return impl->philox_cuda_state(kOffsetPerKernel);
}

at::Generator cpu_generator(const at::PhiloxCudaState& state) {
  const uint64_t seed = state.captured_ ? read_device(state.seed_.ptr) : state.seed_.val;
  const uint64_t offset = state.captured_
                              ? read_device(state.offset_.ptr) + state.offset_intragraph_
                              : state.offset_.val;
  // The Mersenne twister takes 32 bits. Bijective in the number of the kernel, so that no two of
  // the first 2^32 kernels after a seed draw the same numbers.
  const auto kernel = static_cast<uint32_t>(offset / kOffsetPerKernel);
  return at::make_generator<at::CPUGeneratorImpl>(mix(kernel + static_cast<uint32_t>(mix(seed))));
}

}  // namespace residency::simcuda
