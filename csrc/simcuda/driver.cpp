// libcuda.so.1: the driver functions that torch looks up, on top of the simulated runtime. The
// others are stubs made from symbols/driver.txt.
#include <cstring>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "csrc/simcuda/driver_link.h"

#define SIMCUDA_DRIVER extern "C" __attribute__((visibility("default"))) CUresult CUDAAPI

#define SIMCUDA_DRIVER_ENTER(name) \
  if (int refused = simcuda_driver_enter(#name)) return static_cast<CUresult>(refused);

namespace {

// A context is its device's number, moved away from zero.
constexpr uintptr_t kFirstContext = 0x51c0000;

CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(kFirstContext + static_cast<uintptr_t>(device));
}

int device_of(CUcontext context) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(context) - kFirstContext);
}

CUresult result(int code) {
  return static_cast<CUresult>(code);
}

bool is_device(CUdevice device) {
  return device >= 0 && device < simcuda_driver_num_devices();
}

}  // namespace

SIMCUDA_DRIVER cuInit(unsigned) {
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuDriverGetVersion(int* version) {
  *version = CUDA_VERSION;
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuDeviceGetCount(int* count) {
  *count = simcuda_driver_num_devices();
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuDeviceGet(CUdevice* device, int ordinal) {
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED ||
      attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) {
    *value = 1;
    return CUDA_SUCCESS;
  }
  cudaError_t error = cudaDeviceGetAttribute(value, static_cast<cudaDeviceAttr>(attribute), device);
  return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

SIMCUDA_DRIVER cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *flags = 0;
  *active = simcuda_driver_has_context(device);
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (!is_device(device)) return CUDA_ERROR_INVALID_DEVICE;
  *context = context_of(device);
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuCtxGetCurrent(CUcontext* context) {
  int device = simcuda_driver_current_device();
  *context = simcuda_driver_has_context(device) ? context_of(device) : nullptr;
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuCtxSetCurrent(CUcontext context) {
  if (!context) return CUDA_SUCCESS;
  cudaError_t error = cudaSetDevice(device_of(context));
  return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

SIMCUDA_DRIVER cuCtxGetDevice(CUdevice* device) {
  *device = simcuda_driver_current_device();
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuGetErrorName(CUresult error, const char** text) {
  *text = cudaGetErrorName(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuGetErrorString(CUresult error, const char** text) {
  // The codes of both interfaces agree.
  *text = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuPointerGetAttribute(void* value, CUpointer_attribute attribute,
                                     CUdeviceptr pointer) {
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, reinterpret_cast<void*>(pointer));
  if (attributes.type != cudaMemoryTypeDevice) return CUDA_ERROR_INVALID_VALUE;
  if (attribute != CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) return CUDA_ERROR_NOT_SUPPORTED;
  *static_cast<int*>(value) = attributes.device;
  return CUDA_SUCCESS;
}

// ---- Virtual memory management

SIMCUDA_DRIVER cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp*,
                                             CUmemAllocationGranularity_flags) {
  *granularity = simcuda_driver_granularity();
  return CUDA_SUCCESS;
}

SIMCUDA_DRIVER cuMemAddressReserve(CUdeviceptr* base, size_t num_bytes, size_t, CUdeviceptr,
                                   unsigned long long) {
  SIMCUDA_DRIVER_ENTER(cuMemAddressReserve)
  uint64_t reserved = 0;
  int code = simcuda_driver_reserve(&reserved, num_bytes);
  if (code == CUDA_SUCCESS) *base = reserved;
  return result(code);
}

SIMCUDA_DRIVER cuMemAddressFree(CUdeviceptr base, size_t num_bytes) {
  SIMCUDA_DRIVER_ENTER(cuMemAddressFree)
  return result(simcuda_driver_unreserve(base, num_bytes));
}

SIMCUDA_DRIVER cuMemCreate(CUmemGenericAllocationHandle* handle, size_t num_bytes,
                           const CUmemAllocationProp* properties, unsigned long long) {
  SIMCUDA_DRIVER_ENTER(cuMemCreate)
  uint64_t created = 0;
  int code = simcuda_driver_create(&created, num_bytes, properties->location.id);
  if (code == CUDA_SUCCESS) *handle = created;
  return result(code);
}

SIMCUDA_DRIVER cuMemRelease(CUmemGenericAllocationHandle handle) {
  SIMCUDA_DRIVER_ENTER(cuMemRelease)
  return result(simcuda_driver_release(handle));
}

SIMCUDA_DRIVER cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  SIMCUDA_DRIVER_ENTER(cuMemRetainAllocationHandle)
  uint64_t retained = 0;
  int code = simcuda_driver_retain(&retained, reinterpret_cast<uintptr_t>(address));
  if (code == CUDA_SUCCESS) *handle = retained;
  return result(code);
}

SIMCUDA_DRIVER cuMemMap(CUdeviceptr base, size_t num_bytes, size_t offset,
                        CUmemGenericAllocationHandle handle, unsigned long long) {
  SIMCUDA_DRIVER_ENTER(cuMemMap)
  return result(simcuda_driver_map(base, num_bytes, offset, handle));
}

SIMCUDA_DRIVER cuMemSetAccess(CUdeviceptr base, size_t num_bytes, const CUmemAccessDesc*, size_t) {
  SIMCUDA_DRIVER_ENTER(cuMemSetAccess)
  return result(simcuda_driver_set_access(base, num_bytes));
}

SIMCUDA_DRIVER cuMemUnmap(CUdeviceptr base, size_t num_bytes) {
  SIMCUDA_DRIVER_ENTER(cuMemUnmap)
  return result(simcuda_driver_unmap(base, num_bytes));
}

SIMCUDA_DRIVER cuMemExportToShareableHandle(void* file, CUmemGenericAllocationHandle handle,
                                            CUmemAllocationHandleType type, unsigned long long) {
  SIMCUDA_DRIVER_ENTER(cuMemExportToShareableHandle)
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_NOT_SUPPORTED;
  return result(simcuda_driver_export(static_cast<int*>(file), handle));
}

SIMCUDA_DRIVER cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                      CUmemGenericAllocationHandle handle) {
  SIMCUDA_DRIVER_ENTER(cuMemGetAllocationPropertiesFromHandle)
  memset(properties, 0, sizeof *properties);
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  return result(simcuda_driver_device_of(&properties->location.id, handle));
}

SIMCUDA_DRIVER cuMemGetAddressRange(CUdeviceptr* base, size_t* num_bytes, CUdeviceptr address) {
  SIMCUDA_DRIVER_ENTER(cuMemGetAddressRange)
  uint64_t range_base = 0;
  uint64_t range_bytes = 0;
  int code = simcuda_driver_range(&range_base, &range_bytes, address);
  if (code != CUDA_SUCCESS) return result(code);
  if (base) *base = range_base;
  if (num_bytes) *num_bytes = range_bytes;
  return CUDA_SUCCESS;
}
