#include "csrc/cuda/runtime.h"

#include <array>
#include <atomic>
#include <new>

#include <fmt/format.h>

#include "residency/core/errors.h"

namespace residency {
namespace {

std::array<std::atomic<bool>, kMaxDevices> g_lost{};

std::atomic<bool>& lost_flag(Location device) noexcept {
  return g_lost[static_cast<std::size_t>(device.cuda_index())];
}

}  // namespace

bool is_known_lost(Location device) noexcept {
  return device.is_cuda() && lost_flag(device).load(std::memory_order_relaxed);
}

void note_lost(Location device) noexcept {
  lost_flag(device).store(true, std::memory_order_relaxed);
}

bool is_lost(cudaError_t error) noexcept {
  switch (error) {
    case cudaErrorCudartUnloading:
    case cudaErrorDevicesUnavailable:
    case cudaErrorECCUncorrectable:
    case cudaErrorContained:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
    case cudaErrorContextIsDestroyed:
    case cudaErrorUnknown: return true;
    default: return false;
  }
}

void throw_cuda_error(cudaError_t error, Location device, const char* call) {
  (void)cudaGetLastError();
  const std::string text = fmt::format("{} at {} failed: {} ({})", call, to_string(device),
                                       cudaGetErrorString(error), cudaGetErrorName(error));
  switch (error) {
    case cudaErrorMemoryAllocation: throw std::bad_alloc();
    case cudaErrorInitializationError:  // what the runtime answers in a forked child
      throw ForkError(text);
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureMerge:
    case cudaErrorStreamCaptureUnmatched:
    case cudaErrorStreamCaptureUnjoined:
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureImplicit:
    case cudaErrorStreamCaptureWrongThread:
    case cudaErrorCapturedEvent: throw CaptureError(text);
    default: break;
  }
  if (is_lost(error)) {
    note_lost(device);
    throw DeviceLostError(device, text + "; every later call to this device fails as well");
  }
  throw UnavailableError(text);
}

}  // namespace residency
