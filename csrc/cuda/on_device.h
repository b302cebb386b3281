#pragma once

#include <new>

#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include "csrc/core/fork.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"
#include "residency/core/location.h"

namespace residency {

/// Calls c10 on behalf of a device; its errors come as what `throw_cuda_error` throws, but for
/// `c10::OutOfMemoryError`, which is the one that users of PyTorch expect.
template <class Call>
auto with_typed_errors(Location device, const char* what, const Call& call) {
  try {
    return call();
  } catch (const c10::AcceleratorError& error) {
    throw_cuda_error(static_cast<cudaError_t>(error.get_error_code()), device, what);
  }
}

/// Makes a device the current one of the thread in its scope. By c10, which makes no context at the
/// device that it goes back to; but not once the process exits, when c10's static objects may be
/// gone. Throws what `throw_cuda_error` throws.
class OnDevice {
 public:
  explicit OnDevice(Location device) {
    try {
      new (&guard_) c10::cuda::CUDAGuard(index_of(device));
    } catch (const c10::AcceleratorError& error) {
      throw_error_of_switching(static_cast<cudaError_t>(error.get_error_code()), device);
    }
  }
  // A scope of the thread: there is nothing to hand over.
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    if (generation_ == device_generation()) {
      guard_.~CUDAGuard();
    }
  }

 private:
  const std::uint64_t generation_ = device_generation();
  union {
    c10::cuda::CUDAGuard guard_;
  };
};

}  // namespace residency
