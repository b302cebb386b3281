#include "csrc/simcuda/device.h"

#include <cstdio>
#include <cstring>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/graph.h"
#include "csrc/simcuda/runtime.h"

namespace simcuda {
namespace {

thread_local int t_ordinal = 0;

// An H100 class card; what a card of control.h has of its own is put in by the caller.
void fill_fixed_properties(cudaDeviceProp& properties) {
  properties.sharedMemPerBlock = 49152;
  properties.regsPerBlock = 65536;
  properties.warpSize = 32;
  properties.memPitch = 2147483647;
  properties.maxThreadsPerBlock = 1024;
  properties.maxThreadsDim[0] = 1024;
  properties.maxThreadsDim[1] = 1024;
  properties.maxThreadsDim[2] = 64;
  properties.maxGridSize[0] = 2147483647;
  properties.maxGridSize[1] = 65535;
  properties.maxGridSize[2] = 65535;
  properties.totalConstMem = 65536;
  properties.textureAlignment = 512;
  properties.texturePitchAlignment = 32;
  properties.canMapHostMemory = 1;
  properties.concurrentKernels = 1;
  properties.ECCEnabled = 1;
  properties.asyncEngineCount = 3;
  properties.unifiedAddressing = 1;
  properties.memoryBusWidth = 5120;
  properties.maxThreadsPerMultiProcessor = 2048;
  properties.streamPrioritiesSupported = 1;
  properties.globalL1CacheSupported = 1;
  properties.localL1CacheSupported = 1;
  properties.sharedMemPerMultiprocessor = 233472;
  properties.regsPerMultiprocessor = 65536;
  properties.sharedMemPerBlockOptin = 232448;
  properties.cooperativeLaunch = 1;
  properties.maxBlocksPerMultiProcessor = 32;
  properties.reservedSharedMemPerBlock = 1024;
  properties.hostRegisterSupported = 1;
  properties.canUseHostPointerForRegisteredMem = 1;
}

cudaDeviceProp properties_of(const Device& device) {
  const CardModel& card = *settings().card;
  cudaDeviceProp properties;
  memset(&properties, 0, sizeof properties);
  fill_fixed_properties(properties);
  snprintf(properties.name, sizeof properties.name, "%s", card.title);
  properties.uuid.bytes[0] = 0x51;  // as NVML writes it, see uuid_text
  properties.uuid.bytes[1] = static_cast<char>(0xc0);
  properties.uuid.bytes[15] = static_cast<char>(device.card);
  properties.totalGlobalMem = device.capacity_bytes;
  properties.major = card.compute_major;
  properties.minor = card.compute_minor;
  properties.multiProcessorCount = card.num_multiprocessors;
  properties.l2CacheSize = card.l2_mib << 20;
  properties.pciBusID = device.card + 1;
  return properties;
}

int attribute_of(const cudaDeviceProp& properties, cudaDeviceAttr attribute) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: return properties.major;
    case cudaDevAttrComputeCapabilityMinor: return properties.minor;
    case cudaDevAttrMultiProcessorCount: return properties.multiProcessorCount;
    case cudaDevAttrMaxThreadsPerBlock: return properties.maxThreadsPerBlock;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return properties.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return properties.maxBlocksPerMultiProcessor;
    case cudaDevAttrMaxBlockDimX: return properties.maxThreadsDim[0];
    case cudaDevAttrMaxBlockDimY: return properties.maxThreadsDim[1];
    case cudaDevAttrMaxBlockDimZ: return properties.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX: return properties.maxGridSize[0];
    case cudaDevAttrMaxGridDimY: return properties.maxGridSize[1];
    case cudaDevAttrMaxGridDimZ: return properties.maxGridSize[2];
    case cudaDevAttrMaxSharedMemoryPerBlock: return static_cast<int>(properties.sharedMemPerBlock);
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      return static_cast<int>(properties.sharedMemPerBlockOptin);
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      return static_cast<int>(properties.sharedMemPerMultiprocessor);
    case cudaDevAttrMaxRegistersPerBlock: return properties.regsPerBlock;
    case cudaDevAttrTotalConstantMemory: return static_cast<int>(properties.totalConstMem);
    case cudaDevAttrWarpSize: return properties.warpSize;
    case cudaDevAttrL2CacheSize: return properties.l2CacheSize;
    case cudaDevAttrAsyncEngineCount: return properties.asyncEngineCount;
    case cudaDevAttrPciBusId: return properties.pciBusID;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrCanUseHostPointerForRegisteredMem: return 1;
    default: return 0;
  }
}

}  // namespace

int current_ordinal() {
  return t_ordinal;
}

bool is_device(int ordinal) {
  return ordinal >= 0 && static_cast<size_t>(ordinal) < runtime().devices.size();
}

Device& current_device() {
  if (runtime().devices.empty()) return *runtime().no_device;
  Device& device = *runtime().devices[static_cast<size_t>(t_ordinal)];
  device.has_context.store(true, std::memory_order_relaxed);
  return device;
}

cudaError_t set_current_device(int ordinal) {
  if (runtime().devices.empty()) return cudaErrorNoDevice;
  if (!is_device(ordinal)) return cudaErrorInvalidDevice;
  t_ordinal = ordinal;
  current_device();
  return cudaSuccess;
}

std::vector<OperationPtr> last_operations(const Device& device) {
  std::vector<OperationPtr> operations = device.orphans;
  for (const StreamPtr& stream : device.streams) operations.push_back(stream->last);
  return operations;
}

}  // namespace simcuda

using namespace simcuda;

SIMCUDA_EXPORT cudaError_t cudaGetDeviceCount(int* count) {
  SIMCUDA_ENTER(cudaGetDeviceCount, kNothing);
  *count = static_cast<int>(runtime().devices.size());
  return *count > 0 ? cudaSuccess : fail(cudaErrorNoDevice);
}

SIMCUDA_EXPORT cudaError_t cudaGetDevice(int* device) {
  SIMCUDA_ENTER(cudaGetDevice, kNothing);
  // The first use is not here, since the list of visible devices may still change.
  if (runtime_in_use() && runtime().devices.empty()) return fail(cudaErrorNoDevice);
  *device = current_ordinal();
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaSetDevice(int device) {
  SIMCUDA_ENTER(cudaSetDevice, kNothing);
  return fail(set_current_device(device));
}

SIMCUDA_EXPORT cudaError_t cudaDriverGetVersion(int* version) {
  SIMCUDA_ENTER(cudaDriverGetVersion, kNothing);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaRuntimeGetVersion(int* version) {
  SIMCUDA_ENTER(cudaRuntimeGetVersion, kNothing);
  *version = CUDART_VERSION;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  SIMCUDA_ENTER(cudaGetDeviceProperties, kNothing);
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  *properties = properties_of(*runtime().devices[static_cast<size_t>(device)]);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute,
                                                  int device) {
  SIMCUDA_ENTER(cudaDeviceGetAttribute, kNothing);
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  *value = attribute_of(properties_of(*runtime().devices[static_cast<size_t>(device)]), attribute);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaDeviceGetPCIBusId(char* text, int size, int device) {
  SIMCUDA_ENTER(cudaDeviceGetPCIBusId, kNothing);
  if (!is_device(device)) return fail(cudaErrorInvalidDevice);
  if (!text || size <= 0) return fail(cudaErrorInvalidValue);
  snprintf(text, static_cast<size_t>(size), "0000:%02x:00.0",
           static_cast<unsigned>(runtime().devices[static_cast<size_t>(device)]->card + 1));
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  SIMCUDA_ENTER(cudaDeviceGetStreamPriorityRange, kNothing);
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaDeviceSynchronize() {
  SIMCUDA_ENTER(cudaDeviceSynchronize, kHostCall);
  if (cudaError_t error = refuse_during_capture()) return fail(error);
  Device& device = current_device();
  synchronize_device(device);
  return fail(static_cast<cudaError_t>(device.broken.load()));
}

SIMCUDA_EXPORT cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  SIMCUDA_ENTER(cudaDeviceCanAccessPeer, kNothing);
  if (!is_device(device) || !is_device(peer)) return fail(cudaErrorInvalidDevice);
  *can = device != peer && settings().peer_access;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  SIMCUDA_ENTER(cudaDeviceEnablePeerAccess, kHostCall);
  if (flags != 0) return fail(cudaErrorInvalidValue);
  bool possible = is_device(peer) && peer != current_ordinal() && settings().peer_access;
  if (!possible) return fail(cudaErrorInvalidDevice);
  Device& device = current_device();
  Clock::Lock lock(runtime().clock.mutex);
  bool added = device.peers.insert(peer).second;
  return added ? cudaSuccess : fail(cudaErrorPeerAccessAlreadyEnabled);
}

SIMCUDA_EXPORT cudaError_t cudaDeviceDisablePeerAccess(int peer) {
  SIMCUDA_ENTER(cudaDeviceDisablePeerAccess, kHostCall);
  if (!is_device(peer)) return fail(cudaErrorInvalidDevice);
  Device& device = current_device();
  Clock::Lock lock(runtime().clock.mutex);
  return device.peers.erase(peer) ? cudaSuccess : fail(cudaErrorPeerAccessNotEnabled);
}
