// Allocation of device memory, page-locking of host memory, and what a pointer is.
#include <cstdlib>
#include <cstring>

#include <sys/mman.h>
#include <unistd.h>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/graph.h"
#include "csrc/simcuda/runtime.h"

using namespace simcuda;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

uint64_t page_bytes() {
  static const uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

Device& device_of(const Range& range) {
  return *runtime().devices[static_cast<size_t>(range.device)];
}

uintptr_t address_of(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

cudaError_t allocate(void** pointer, uint64_t num_bytes) {
  Device& device = current_device();
  if (int broken = device.broken) return static_cast<cudaError_t>(broken);
  if (cudaError_t error = refuse_during_capture()) return error;
  *pointer = nullptr;
  if (num_bytes == 0) return cudaSuccess;
  AddressSpace& memory = runtime().memory;
  uint64_t charged = round_up(num_bytes, kGranularity);
  // Rounding up what is near the end of the type gives too little.
  if (charged < num_bytes || !memory.charge(device, charged)) return cudaErrorMemoryAllocation;
  uintptr_t base = memory.reserve(charged);
  if (!base || !memory.commit(base, charged)) {
    if (base) memory.unreserve(base, charged);
    memory.uncharge(device, charged);
    return cudaErrorMemoryAllocation;
  }
  void* address = reinterpret_cast<void*>(base);
  int poison = settings().poison;
  if (poison >= 0 && !runtime().dry) memset(memory.bytes_at(address), poison, charged);
  memory.insert({base, num_bytes, device.ordinal, RangeKind::kDevice, charged, 0});
  *pointer = address;
  return cudaSuccess;
}

// Memory of the host, in whole pages.
void* allocate_pages(uint64_t num_bytes) {
#ifdef __SANITIZE_ADDRESS__
  // From the allocator, so that AddressSanitizer knows its ends.
  return aligned_alloc(page_bytes(), num_bytes);
#else
  void* pages =
      mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return pages == MAP_FAILED ? nullptr : pages;
#endif
}

void free_pages(void* pages, [[maybe_unused]] uint64_t num_bytes) {
#ifdef __SANITIZE_ADDRESS__
  free(pages);
#else
  munmap(pages, num_bytes);
#endif
}

// The host works for as long as locking these pages takes.
void pass_page_lock(uint64_t num_bytes) {
  double num_mib = static_cast<double>(num_bytes) / static_cast<double>(kMiB);
  runtime().clock.pass(static_cast<uint64_t>(num_mib * static_cast<double>(time_ns(kPageLock))));
}

cudaError_t allocate_pinned(void** pointer, uint64_t num_bytes, unsigned flags) {
  Device& device = current_device();
  if (int broken = device.broken) return static_cast<cudaError_t>(broken);
  if (cudaError_t error = refuse_during_capture()) return error;
  *pointer = nullptr;
  if (num_bytes == 0) return cudaSuccess;
  AddressSpace& memory = runtime().memory;
  uint64_t charged = round_up(num_bytes, page_bytes());
  if (charged < num_bytes || !memory.charge_pinned(charged)) return cudaErrorMemoryAllocation;
  void* pages = allocate_pages(charged);
  if (!pages) {
    memory.uncharge_pinned(charged);
    return cudaErrorMemoryAllocation;
  }
  pass_page_lock(charged);
  memory.insert({address_of(pages), charged, device.ordinal, RangeKind::kPinned, charged, flags});
  *pointer = pages;
  return cudaSuccess;
}

bool is_host_memory(const Range& range) {
  return range.kind == RangeKind::kPinned || range.kind == RangeKind::kRegistered;
}

}  // namespace

SIMCUDA_EXPORT cudaError_t cudaMalloc(void** pointer, size_t num_bytes) {
  SIMCUDA_ENTER(cudaMalloc, kHostCall);
  if (!pointer) return fail(cudaErrorInvalidValue);
  return fail(allocate(pointer, num_bytes));
}

SIMCUDA_EXPORT cudaError_t cudaFree(void* pointer) {
  SIMCUDA_ENTER(cudaFree, kHostCall);
  Device& current = current_device();
  if (int broken = current.broken) return fail(static_cast<cudaError_t>(broken));
  if (!pointer) return cudaSuccess;
  if (cudaError_t error = refuse_during_capture()) return fail(error);
  AddressSpace& memory = runtime().memory;
  std::optional<Range> range = memory.find(pointer);
  bool freeable = range && range->base == address_of(pointer) && range->kind == RangeKind::kDevice;
  if (!freeable) return fail(cudaErrorInvalidValue);
  // As the real one: nothing may use the memory afterwards.
  Device& device = device_of(*range);
  synchronize_device(device);
  let_running_operations_finish();
  // Another thread may have freed it in the meantime.
  if (!memory.take(pointer, RangeKind::kDevice)) return fail(cudaErrorInvalidValue);
  memory.decommit(range->base, range->charged_bytes);
  memory.unreserve(range->base, range->charged_bytes);
  memory.uncharge(device, range->charged_bytes);
  return fail(static_cast<cudaError_t>(device.broken.load()));
}

SIMCUDA_EXPORT cudaError_t cudaMallocAsync(void** pointer, size_t, cudaStream_t) {
  SIMCUDA_ENTER(cudaMallocAsync, kHostCall);
  if (pointer) *pointer = nullptr;
  return not_simulated("cudaMallocAsync",
                       "; use torch's own allocator (PYTORCH_CUDA_ALLOC_CONF=backend:native)");
}

SIMCUDA_EXPORT cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  SIMCUDA_ENTER(cudaMemGetInfo, kNothing);
  Device& device = current_device();
  if (int broken = device.broken) return fail(static_cast<cudaError_t>(broken));
  uint64_t capacity = device.capacity_bytes;
  uint64_t used = runtime().memory.usage(device).used_bytes;
  *total_bytes = capacity;
  *free_bytes = capacity > used ? capacity - used : 0;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaHostAlloc(void** pointer, size_t num_bytes, unsigned flags) {
  SIMCUDA_ENTER(cudaHostAlloc, kHostCall);
  if (!pointer) return fail(cudaErrorInvalidValue);
  return fail(allocate_pinned(pointer, num_bytes, flags));
}

SIMCUDA_EXPORT cudaError_t cudaMallocHost(void** pointer, size_t num_bytes) {
  SIMCUDA_ENTER(cudaMallocHost, kHostCall);
  if (!pointer) return fail(cudaErrorInvalidValue);
  return fail(allocate_pinned(pointer, num_bytes, cudaHostAllocDefault));
}

SIMCUDA_EXPORT cudaError_t cudaFreeHost(void* pointer) {
  SIMCUDA_ENTER(cudaFreeHost, kHostCall);
  if (!pointer) return cudaSuccess;
  if (cudaError_t error = refuse_during_capture()) return fail(error);
  AddressSpace& memory = runtime().memory;
  std::optional<Range> range = memory.find(pointer);
  bool freeable = range && range->base == address_of(pointer) && range->kind == RangeKind::kPinned;
  if (!freeable) return fail(cudaErrorInvalidValue);
  synchronize_all_devices();
  if (!memory.take(pointer, RangeKind::kPinned)) return fail(cudaErrorInvalidValue);
  free_pages(pointer, range->charged_bytes);
  memory.uncharge_pinned(range->charged_bytes);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaHostRegister(void* pointer, size_t num_bytes, unsigned flags) {
  SIMCUDA_ENTER(cudaHostRegister, kHostCall);
  Device& device = current_device();
  if (int broken = device.broken) return fail(static_cast<cudaError_t>(broken));
  if (!pointer || num_bytes == 0) return fail(cudaErrorInvalidValue);
  if (cudaError_t error = refuse_during_capture()) return fail(error);
  AddressSpace& memory = runtime().memory;
  uint64_t first_page = address_of(pointer) / page_bytes() * page_bytes();
  uint64_t charged = round_up(address_of(pointer) + num_bytes, page_bytes()) - first_page;
  Range range{address_of(pointer),    num_bytes, device.ordinal,
              RangeKind::kRegistered, charged,   flags};
  if (!memory.insert_if_free(range)) return fail(cudaErrorHostMemoryAlreadyRegistered);
  if (!memory.charge_pinned(charged)) {
    memory.take(pointer, RangeKind::kRegistered);
    return fail(cudaErrorMemoryAllocation);
  }
  pass_page_lock(charged);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaHostUnregister(void* pointer) {
  SIMCUDA_ENTER(cudaHostUnregister, kHostCall);
  if (cudaError_t error = refuse_during_capture()) return fail(error);
  AddressSpace& memory = runtime().memory;
  std::optional<Range> range = memory.find(pointer);
  bool registered =
      range && range->kind == RangeKind::kRegistered && range->base == address_of(pointer);
  if (!registered) return fail(cudaErrorHostMemoryNotRegistered);
  synchronize_all_devices();
  if (!memory.take(pointer, RangeKind::kRegistered)) return fail(cudaErrorHostMemoryNotRegistered);
  memory.uncharge_pinned(range->charged_bytes);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaHostGetDevicePointer(void** device_pointer, void* pointer,
                                                    unsigned) {
  SIMCUDA_ENTER(cudaHostGetDevicePointer, kNothing);
  std::optional<Range> range = runtime().memory.find(pointer);
  if (!range || !is_host_memory(*range)) return fail(cudaErrorInvalidValue);
  *device_pointer = pointer;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaHostGetFlags(unsigned* flags, void* pointer) {
  SIMCUDA_ENTER(cudaHostGetFlags, kNothing);
  std::optional<Range> range = runtime().memory.find(pointer);
  if (!range || !is_host_memory(*range)) return fail(cudaErrorInvalidValue);
  *flags = range->flags;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes,
                                                    const void* pointer) {
  SIMCUDA_ENTER(cudaPointerGetAttributes, kNothing);
  if (!attributes) return fail(cudaErrorInvalidValue);
  memset(attributes, 0, sizeof *attributes);
  std::optional<Range> range = runtime().memory.find(pointer);
  if (!range) {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->device = cudaInvalidDeviceId;
    return cudaSuccess;
  }
  attributes->type = range->on_device() ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
  attributes->device = range->device;
  attributes->devicePointer = const_cast<void*>(pointer);
  attributes->hostPointer = range->on_device() ? nullptr : const_cast<void*>(pointer);
  return cudaSuccess;
}
