#pragma once

#include <cstdint>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>

#include "csrc/core/fork.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"
#include "residency/core/location.h"

namespace residency {

/// Makes a device the current one of the thread in its scope. By c10, which makes no context at the
/// device that it goes back to; but not once the process exits, when c10's static objects may be
/// gone. Throws what `throw_cuda_error` throws.
class OnDevice {
 public:
  explicit OnDevice(Location device) {
    try {
      before_ = c10::cuda::ExchangeDevice(index_of(device));
    } catch (const c10::AcceleratorError& error) {
      throw_error_of_switching(static_cast<cudaError_t>(error.get_error_code()), device);
    }
  }
  // A scope of the thread: there is nothing to hand over.
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    constexpr int kMostTries = 3;  // c10's guard has one, and that ends the process in torch 2.11
    for (int i = 0; i < kMostTries && generation_ == device_generation(); ++i) {
      try {
        if (c10::cuda::MaybeSetDevice(before_) == cudaSuccess) {
          return;
        }
      } catch (const c10::Error&) {
        // The next may go well.
      }
      (void)cudaGetLastError();
    }
  }

 private:
  const std::uint64_t generation_ = device_generation();
  c10::DeviceIndex before_ = 0;
};

}  // namespace residency
