#pragma once

#include <cuda_runtime_api.h>

#include "residency/core/location.h"

namespace residency {

/// Whether a device that answered so answers every later call so: NVIDIA documents these as leaving
/// the process in a state in which any further CUDA work fails.
[[nodiscard]] bool is_lost(cudaError_t error) noexcept;

/// Throws `DeviceLostError` for a lost device, `CaptureError` for what a capture forbids,
/// `std::bad_alloc` when memory is out, and otherwise `UnavailableError` with the call's name. The
/// thread's last error is cleared.
[[noreturn]] void throw_cuda_error(cudaError_t error, Location device, const char* call);

inline void check_cuda(cudaError_t error, Location device, const char* call) {
  if (error != cudaSuccess) {
    throw_cuda_error(error, device, call);
  }
}

/// In its scope calls of this thread do not disturb a capture that another thread has under way.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }
  // A scope of the thread: there is nothing to hand over.
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() { (void)cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace residency
