// The thread's last error, and the names of errors.
#include <cstring>

#include "csrc/simcuda/entry.h"

using namespace simcuda;

namespace {

struct ErrorName {
  int code;
  const char* name;
};

constexpr ErrorName kErrorNames[] = {
#include "error_names.inc"  // generated from the toolkit's driver_types.h
};

struct ErrorText {
  cudaError_t code;
  const char* text;
};

// What programs are likely to show; the others are told by their name.
constexpr ErrorText kErrorTexts[] = {
    {cudaSuccess, "no error"},
    {cudaErrorInvalidValue, "invalid argument"},
    {cudaErrorMemoryAllocation, "out of memory"},
    {cudaErrorInitializationError, "initialization error"},
    {cudaErrorCudartUnloading, "driver shutting down"},
    {cudaErrorNoDevice, "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "invalid resource handle"},
    {cudaErrorNotReady, "device not ready"},
    {cudaErrorIllegalAddress, "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "unspecified launch failure"},
    {cudaErrorAssert, "device-side assert triggered"},
    {cudaErrorNotSupported, "operation not supported"},
    {cudaErrorNotPermitted, "operation not permitted"},
    {cudaErrorPeerAccessAlreadyEnabled, "peer access is already enabled"},
    {cudaErrorPeerAccessNotEnabled, "peer access has not been enabled"},
    {cudaErrorHostMemoryAlreadyRegistered,
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "pointer does not correspond to a registered memory region"},
    {cudaErrorNoKernelImageForDevice, "no kernel image is available for execution on the device"},
    {cudaErrorIllegalState, "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnsupported, "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge,
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit,
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent,
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread,
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorUnknown, "unknown error"},
};

}  // namespace

SIMCUDA_EXPORT cudaError_t cudaGetLastError() {
  SIMCUDA_ENTER(cudaGetLastError, kNothing);
  return take_last_error();
}

SIMCUDA_EXPORT cudaError_t cudaPeekAtLastError() {
  SIMCUDA_ENTER(cudaPeekAtLastError, kNothing);
  return last_error();
}

SIMCUDA_EXPORT const char* cudaGetErrorName(cudaError_t error) {
  for (const ErrorName& known : kErrorNames) {
    if (known.code == error) return known.name;
  }
  return "unrecognized error code";
}

SIMCUDA_EXPORT const char* cudaGetErrorString(cudaError_t error) {
  for (const ErrorText& known : kErrorTexts) {
    if (known.code == error) return known.text;
  }
  return cudaGetErrorName(error);
}
