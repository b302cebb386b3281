#include "csrc/simcuda/cupti_record.h"

#include <new>

#include <cupti_activity_deprecated.h>

#include "include/residency/simcuda/control.h"

namespace simcuda {
namespace {

constexpr size_t kKernelRoom = 384;
constexpr size_t kTransferRoom = 192;
constexpr size_t kCorrelationRoom = 64;

static_assert(sizeof(CUpti_ActivityKernel9) <= kKernelRoom);
static_assert(sizeof(CUpti_ActivityMemcpy5) <= kTransferRoom);
static_assert(sizeof(CUpti_ActivityMemset4) <= kTransferRoom);
static_assert(sizeof(CUpti_ActivityExternalCorrelation) <= kCorrelationRoom);

// What all device activities have.
template <class Record>
Record& begin_record(const simcuda_activity& activity, uint8_t* room) {
  auto* record = new (room) Record{};
  record->kind = record_kind_of(activity.kind);
  int64_t offset = activity.tag.host_offset_ns;
  record->start = static_cast<uint64_t>(static_cast<int64_t>(activity.start_ns) + offset);
  record->end = static_cast<uint64_t>(static_cast<int64_t>(activity.end_ns) + offset);
  record->deviceId = static_cast<uint32_t>(activity.device);
  record->contextId = static_cast<uint32_t>(activity.device) + 1;
  record->streamId = static_cast<uint32_t>(activity.stream);
  record->correlationId = static_cast<uint32_t>(activity.tag.id);
  return *record;
}

void write_kernel(const simcuda_activity& activity, uint8_t* room) {
  auto& record = begin_record<CUpti_ActivityKernel9>(activity, room);
  record.name = activity.name;
  // What has no grid is shown as one thread: a profiler divides by these.
  record.gridX = record.gridY = record.gridZ = 1;
  record.blockX = record.blockY = record.blockZ = 1;
}

struct Route {
  CUpti_ActivityMemcpyKind kind;
  CUpti_ActivityMemoryKind source;
  CUpti_ActivityMemoryKind destination;
};

Route route_of(const simcuda_activity& activity) {
  constexpr auto kDevice = CUPTI_ACTIVITY_MEMORY_KIND_DEVICE;
  auto host =
      activity.pageable ? CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE : CUPTI_ACTIVITY_MEMORY_KIND_PINNED;
  switch (activity.direction) {
    case SIMCUDA_H2D: return {CUPTI_ACTIVITY_MEMCPY_KIND_HTOD, host, kDevice};
    case SIMCUDA_D2H: return {CUPTI_ACTIVITY_MEMCPY_KIND_DTOH, kDevice, host};
    case SIMCUDA_D2D: return {CUPTI_ACTIVITY_MEMCPY_KIND_DTOD, kDevice, kDevice};
    case SIMCUDA_PEER: return {CUPTI_ACTIVITY_MEMCPY_KIND_PTOP, kDevice, kDevice};
    default: return {CUPTI_ACTIVITY_MEMCPY_KIND_HTOH, host, host};
  }
}

void write_copy(const simcuda_activity& activity, uint8_t* room) {
  auto& record = begin_record<CUpti_ActivityMemcpy5>(activity, room);
  Route route = route_of(activity);
  record.copyKind = static_cast<uint8_t>(route.kind);
  record.srcKind = static_cast<uint8_t>(route.source);
  record.dstKind = static_cast<uint8_t>(route.destination);
  record.bytes = activity.num_bytes;
}

void write_memset(const simcuda_activity& activity, uint8_t* room) {
  auto& record = begin_record<CUpti_ActivityMemset4>(activity, room);
  record.bytes = activity.num_bytes;
  record.memoryKind = static_cast<uint16_t>(CUPTI_ACTIVITY_MEMORY_KIND_DEVICE);
}

}  // namespace

size_t room_of(CUpti_ActivityKind kind) {
  switch (kind) {
    case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL: return kKernelRoom;
    case CUPTI_ACTIVITY_KIND_MEMCPY:
    case CUPTI_ACTIVITY_KIND_MEMSET: return kTransferRoom;
    case CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION: return kCorrelationRoom;
    default: return 0;
  }
}

CUpti_ActivityKind record_kind_of(int activity_kind) {
  switch (activity_kind) {
    case SIMCUDA_ACTIVITY_KERNEL: return CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    case SIMCUDA_ACTIVITY_COPY: return CUPTI_ACTIVITY_KIND_MEMCPY;
    case SIMCUDA_ACTIVITY_MEMSET: return CUPTI_ACTIVITY_KIND_MEMSET;
    default: return CUPTI_ACTIVITY_KIND_INVALID;
  }
}

void write_record(const simcuda_activity& activity, uint8_t* room) {
  switch (activity.kind) {
    case SIMCUDA_ACTIVITY_KERNEL: return write_kernel(activity, room);
    case SIMCUDA_ACTIVITY_COPY: return write_copy(activity, room);
    case SIMCUDA_ACTIVITY_MEMSET: return write_memset(activity, room);
    default: return;
  }
}

void write_external_correlation(CUpti_ExternalCorrelationKind kind, uint64_t external_id,
                                uint64_t correlation_id, uint8_t* room) {
  auto* record = new (room) CUpti_ActivityExternalCorrelation{};
  record->kind = CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION;
  record->externalKind = kind;
  record->externalId = external_id;
  record->correlationId = static_cast<uint32_t>(correlation_id);
}

}  // namespace simcuda
