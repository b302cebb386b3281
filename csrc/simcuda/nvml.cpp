// libnvidia-ml.so.1: what torch looks up (fabric query of expandable segments, processes in
// out-of-memory messages, number of devices). Declared here, since the toolkit does not always
// come with nvml.h.
#include <cstdint>
#include <cstdio>

#include "csrc/simcuda/driver_link.h"

#define SIMCUDA_NVML extern "C" __attribute__((visibility("default"))) int

namespace {

enum { kSuccess = 0, kInvalidArgument = 2, kNotSupported = 3 };

// A handle is the card's number, moved away from null.
void* handle_of(unsigned card) {
  return reinterpret_cast<void*>(uintptr_t{card} + 1);
}

int card_of(void* handle) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(handle)) - 1;
}

// nvmlGpuFabricInfoV_t, of which torch looks at the state.
struct FabricInfo {
  unsigned version;
  unsigned char cluster_uuid[16];
  int status;
  unsigned clique;
  unsigned char state;
};

struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

}  // namespace

SIMCUDA_NVML nvmlInit() {
  return kSuccess;
}

SIMCUDA_NVML nvmlInit_v2() {
  return kSuccess;
}

SIMCUDA_NVML nvmlShutdown() {
  return kSuccess;
}

SIMCUDA_NVML nvmlDeviceGetCount_v2(unsigned* count) {
  *count = static_cast<unsigned>(simcuda_driver_num_cards());
  return kSuccess;
}

SIMCUDA_NVML nvmlDeviceGetHandleByIndex_v2(unsigned index, void** handle) {
  if (index >= static_cast<unsigned>(simcuda_driver_num_cards())) return kInvalidArgument;
  *handle = handle_of(index);
  return kSuccess;
}

SIMCUDA_NVML nvmlDeviceGetHandleByPciBusId_v2(const char* text, void** handle) {
  unsigned domain = 0;
  unsigned bus = 0;
  // As cudaDeviceGetPCIBusId writes it; cards are on buses from 1 on.
  if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus == 0) return kInvalidArgument;
  return nvmlDeviceGetHandleByIndex_v2(bus - 1, handle);
}

SIMCUDA_NVML nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, int*) {
  return kNotSupported;
}

SIMCUDA_NVML nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) {
  return kNotSupported;
}

SIMCUDA_NVML nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, void*) {
  *count = 0;
  return kSuccess;
}

SIMCUDA_NVML nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = 13000;
  return kSuccess;
}

SIMCUDA_NVML nvmlDeviceGetGpuFabricInfoV(void*, FabricInfo* info) {
  constexpr unsigned char kFabricNotSupported = 0;
  info->status = kSuccess;
  info->clique = 0;
  info->state = kFabricNotSupported;
  return kSuccess;
}

SIMCUDA_NVML nvmlDeviceGetUUID(void* handle, char* text, unsigned size) {
  // As uuid_text, in the runtime.
  snprintf(text, size, "GPU-51c00000-0000-0000-0000-%012x", static_cast<unsigned>(card_of(handle)));
  return kSuccess;
}

SIMCUDA_NVML nvmlDeviceGetMemoryInfo(void* handle, Memory* memory) {
  int card = card_of(handle);
  memory->total = simcuda_driver_card_capacity(card);
  memory->used = simcuda_driver_card_used(card);
  memory->free = memory->total > memory->used ? memory->total - memory->used : 0;
  return kSuccess;
}

extern "C" __attribute__((visibility("default"))) const char* nvmlErrorString(int code) {
  return code == kSuccess ? "Success" : "Not simulated";
}
