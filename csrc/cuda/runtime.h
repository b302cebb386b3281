#pragma once

#include <chrono>
#include <cstddef>
#include <thread>

#include <cuda_runtime_api.h>

#include "residency/core/location.h"

namespace residency {

/// The indices that a device's Location can have.
inline constexpr std::size_t kMaxDevices = 128;

/// Whether a device that answered so answers every later call so: NVIDIA documents these as leaving
/// the process in a state in which any further CUDA work fails.
[[nodiscard]] bool is_lost(cudaError_t error) noexcept;

/// Whether a call at the device was answered so.
[[nodiscard]] bool is_known_lost(Location device) noexcept;
void note_lost(Location device) noexcept;

/// Throws `DeviceLostError` for a lost device, of which it makes a note, `CaptureError` for what a
/// capture forbids, `std::bad_alloc` when memory is out, and otherwise `UnavailableError` with the
/// call's name. The thread's last error is cleared.
[[noreturn]] void throw_cuda_error(cudaError_t error, Location device, const char* call);

inline void check_cuda(cudaError_t error, Location device, const char* call) {
  if (error != cudaSuccess) {
    throw_cuda_error(error, device, call);
  }
}

/// For calls that fail without a device being lost: they have another chance, but not for ever, as
/// what the caller would wait for may never come.
inline constexpr auto kLongEnough = std::chrono::seconds(1);

/// Calls `attempt` until it returns true, for a second.
template <class Attempt>
bool try_for_a_second(const Attempt& attempt) {
  const auto until = std::chrono::steady_clock::now() + kLongEnough;
  while (!attempt()) {
    if (std::chrono::steady_clock::now() > until) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

/// In its scope calls of this thread do not disturb a capture that another thread has under way.
class RelaxedCapture {
 public:
  RelaxedCapture() noexcept : exchanged_(exchange()) {}
  // A scope of the thread: there is nothing to hand over.
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture() {
    if (exchanged_) {
      (void)exchange();
    }
  }

 private:
  bool exchange() noexcept {
    if (cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess) {
      return true;
    }
    (void)cudaGetLastError();  // or c10 would take it for an error of its own next call
    return false;
  }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  const bool exchanged_;
};

}  // namespace residency
