// The driver's virtual memory management, which torch's expandable segments use: physical memory
// (a file without a name) is mapped into reserved address space.
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <cuda.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "csrc/simcuda/driver_link.h"
#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/runtime.h"

using namespace simcuda;

namespace {

// Gives its memory back when neither a handle nor a mapping refers to it.
class Physical {
 public:
  Physical(Device& owner, uint64_t size, int backing)
      : device(owner), num_bytes(size), file(backing) {}
  ~Physical() {
    if (file >= 0) close(file);
    runtime().memory.uncharge(device, num_bytes);
  }
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;

  Device& device;
  const uint64_t num_bytes;
  const int file;  // -1 in dry mode
};

struct Mapping {
  std::shared_ptr<Physical> physical;
  uint64_t num_bytes = 0;
};

struct Handle {
  std::shared_ptr<Physical> physical;
  uint64_t num_references = 0;
};

struct VirtualMemory {
  std::mutex mutex;
  uint64_t next_handle = 1;
  std::map<uint64_t, Handle> handles;
  std::map<uint64_t, Mapping> mappings;
  std::map<uint64_t, uint64_t> reservations;
};

VirtualMemory& virtual_memory() {
  static VirtualMemory* memory = new VirtualMemory;
  return *memory;
}

bool is_aligned(uint64_t quantity) {
  return quantity > 0 && quantity % kGranularity == 0;
}

int make_file(uint64_t num_bytes) {
  int file = static_cast<int>(syscall(SYS_memfd_create, "simcuda", 1U));
  if (file < 0) return -1;
  if (ftruncate(file, static_cast<off_t>(num_bytes)) == 0) return file;
  close(file);
  return -1;
}

// The mappings that lie within the bytes.
std::vector<uint64_t> mappings_in(const VirtualMemory& memory, uint64_t base, uint64_t num_bytes) {
  std::vector<uint64_t> bases;
  for (auto at = memory.mappings.lower_bound(base);
       at != memory.mappings.end() && at->first < base + num_bytes; ++at) {
    bases.push_back(at->first);
  }
  return bases;
}

// Null when this process does not see the card.
const Device* device_on(int card) {
  for (const auto& device : runtime().devices) {
    if (device->card == card) return device.get();
  }
  return nullptr;
}

}  // namespace

SIMCUDA_EXPORT int simcuda_driver_enter(const char* entry_point) {
  Hidden hidden;
  return EntryPoint::named(entry_point).enter(Cost::kHostCall);
}

SIMCUDA_EXPORT void simcuda_driver_refuse(const char* entry_point, const char* advice) {
  Hidden hidden;
  not_simulated(entry_point, advice);
}

SIMCUDA_EXPORT int simcuda_driver_num_devices(void) {
  Hidden hidden;
  return static_cast<int>(runtime().devices.size());
}

SIMCUDA_EXPORT int simcuda_driver_num_cards(void) {
  return settings().num_devices;
}

SIMCUDA_EXPORT uint64_t simcuda_driver_card_capacity(int card) {
  Hidden hidden;
  const Device* device = device_on(card);
  return device ? device->capacity_bytes.load() : settings().memory_bytes.load();
}

SIMCUDA_EXPORT uint64_t simcuda_driver_card_used(int card) {
  Hidden hidden;
  const Device* device = device_on(card);
  return device ? runtime().memory.usage(*device).used_bytes : 0;
}

SIMCUDA_EXPORT int simcuda_driver_has_context(int device) {
  Hidden hidden;
  return is_device(device) && runtime_in_use() &&
         runtime().devices[static_cast<size_t>(device)]->has_context;
}

SIMCUDA_EXPORT int simcuda_driver_current_device(void) {
  return current_ordinal();
}

SIMCUDA_EXPORT uint64_t simcuda_driver_granularity(void) {
  return kGranularity;
}

SIMCUDA_EXPORT int simcuda_driver_reserve(uint64_t* base, uint64_t num_bytes) {
  Hidden hidden;
  if (!is_aligned(num_bytes)) return CUDA_ERROR_INVALID_VALUE;
  *base = runtime().memory.reserve(num_bytes);
  if (*base == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard lock(virtual_memory().mutex);
  virtual_memory().reservations[*base] = num_bytes;
  return CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_driver_unreserve(uint64_t base, uint64_t num_bytes) {
  Hidden hidden;
  VirtualMemory& memory = virtual_memory();
  std::lock_guard lock(memory.mutex);
  auto found = memory.reservations.find(base);
  bool whole = found != memory.reservations.end() && found->second == num_bytes;
  if (!whole || !mappings_in(memory, base, num_bytes).empty()) return CUDA_ERROR_INVALID_VALUE;
  memory.reservations.erase(found);
  runtime().memory.unreserve(base, num_bytes);
  return CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_driver_create(uint64_t* handle, uint64_t num_bytes, int ordinal) {
  Hidden hidden;
  if (!is_aligned(num_bytes)) return CUDA_ERROR_INVALID_VALUE;
  if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE;
  Device& device = *runtime().devices[static_cast<size_t>(ordinal)];
  if (!runtime().memory.charge(device, num_bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  int file = runtime().dry ? -1 : make_file(num_bytes);
  if (file < 0 && !runtime().dry) {
    runtime().memory.uncharge(device, num_bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  auto physical = std::make_shared<Physical>(device, num_bytes, file);
  std::lock_guard lock(virtual_memory().mutex);
  *handle = virtual_memory().next_handle++;
  virtual_memory().handles[*handle] = {std::move(physical), 1};
  return CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_driver_release(uint64_t handle) {
  Hidden hidden;
  VirtualMemory& memory = virtual_memory();
  std::lock_guard lock(memory.mutex);
  auto found = memory.handles.find(handle);
  if (found == memory.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.num_references == 0) memory.handles.erase(found);
  return CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_driver_retain(uint64_t* handle, uint64_t address) {
  Hidden hidden;
  VirtualMemory& memory = virtual_memory();
  std::lock_guard lock(memory.mutex);
  auto after = memory.mappings.upper_bound(address);
  if (after == memory.mappings.begin()) return CUDA_ERROR_INVALID_VALUE;
  const auto& [base, mapping] = *std::prev(after);
  if (address >= base + mapping.num_bytes) return CUDA_ERROR_INVALID_VALUE;
  for (auto& [number, known] : memory.handles) {
    if (known.physical != mapping.physical) continue;
    ++known.num_references;
    *handle = number;
    return CUDA_SUCCESS;
  }
  // Its handles were all released; the mapping kept the memory.
  *handle = memory.next_handle++;
  memory.handles[*handle] = {mapping.physical, 1};
  return CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_driver_map(uint64_t base, uint64_t num_bytes, uint64_t offset,
                                      uint64_t handle) {
  Hidden hidden;
  VirtualMemory& memory = virtual_memory();
  std::lock_guard lock(memory.mutex);
  auto found = memory.handles.find(handle);
  if (found == memory.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  const std::shared_ptr<Physical>& physical = found->second.physical;
  bool fits = is_aligned(num_bytes) && base % kGranularity == 0 &&
              offset + num_bytes <= physical->num_bytes;
  if (!fits || !runtime().memory.in_window(reinterpret_cast<void*>(base))) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!mappings_in(memory, base, num_bytes).empty()) return CUDA_ERROR_ALREADY_MAPPED;
  bool mapped =
      runtime().memory.commit_file(base, num_bytes, physical->file, static_cast<int64_t>(offset));
  if (!mapped) return CUDA_ERROR_OUT_OF_MEMORY;
  memory.mappings[base] = {physical, num_bytes};
  return CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_driver_set_access(uint64_t base, uint64_t num_bytes) {
  Hidden hidden;
  VirtualMemory& memory = virtual_memory();
  std::lock_guard lock(memory.mutex);
  std::vector<uint64_t> bases = mappings_in(memory, base, num_bytes);
  if (bases.empty()) return CUDA_ERROR_INVALID_VALUE;
  // From here on copies may use it.
  for (uint64_t mapped : bases) {
    const Mapping& mapping = memory.mappings[mapped];
    runtime().memory.insert({mapped, mapping.num_bytes, mapping.physical->device.ordinal,
                             RangeKind::kMapped, mapping.num_bytes, 0});
  }
  return CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_driver_unmap(uint64_t base, uint64_t num_bytes) {
  Hidden hidden;
  VirtualMemory& memory = virtual_memory();
  std::vector<Mapping> unmapped;
  // The real driver leaves the waiting to the program, which then loses the bytes of running
  // copies; here it would crash them.
  let_running_operations_finish();
  std::lock_guard lock(memory.mutex);
  std::vector<uint64_t> bases = mappings_in(memory, base, num_bytes);
  if (bases.empty()) return CUDA_ERROR_INVALID_VALUE;
  for (uint64_t mapped : bases) {
    auto found = memory.mappings.find(mapped);
    runtime().memory.take(reinterpret_cast<void*>(mapped), RangeKind::kMapped);
    runtime().memory.decommit(mapped, found->second.num_bytes);
    unmapped.push_back(std::move(found->second));
    memory.mappings.erase(found);
  }
  return CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_driver_export(int* file, uint64_t handle) {
  Hidden hidden;
  VirtualMemory& memory = virtual_memory();
  std::lock_guard lock(memory.mutex);
  auto found = memory.handles.find(handle);
  if (found == memory.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (found->second.physical->file < 0) return CUDA_ERROR_NOT_SUPPORTED;
  *file = fcntl(found->second.physical->file, F_DUPFD_CLOEXEC, 0);
  return *file < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_driver_device_of(int* device, uint64_t handle) {
  Hidden hidden;
  VirtualMemory& memory = virtual_memory();
  std::lock_guard lock(memory.mutex);
  auto found = memory.handles.find(handle);
  if (found == memory.handles.end()) return CUDA_ERROR_INVALID_VALUE;
  *device = found->second.physical->device.ordinal;
  return CUDA_SUCCESS;
}

SIMCUDA_EXPORT int simcuda_driver_range(uint64_t* base, uint64_t* num_bytes, uint64_t address) {
  Hidden hidden;
  std::optional<Range> range = runtime().memory.find(reinterpret_cast<void*>(address));
  if (!range) return CUDA_ERROR_NOT_FOUND;
  *base = range->base;
  *num_bytes = range->num_bytes;
  return CUDA_SUCCESS;
}
