// A simulated card: its engines, streams, memory and state.
#ifndef RESIDENCY_CSRC_SIMCUDA_DEVICE_H
#define RESIDENCY_CSRC_SIMCUDA_DEVICE_H

#include <array>
#include <atomic>
#include <memory>
#include <set>
#include <vector>

#include <cuda_runtime_api.h>

#include "csrc/simcuda/clock.h"
#include "include/residency/simcuda/control.h"

namespace simcuda {

enum EngineIndex { kEngineH2D, kEngineD2H, kEngineD2D, kEngineCompute, kNumEngines };

struct Device {
  int ordinal = 0;
  int card = 0;  // its place in the machine, of which the process may see a part
  std::atomic<bool> has_context{false};
  std::atomic<int> broken{cudaSuccess};  // what every call on it returns

  std::shared_ptr<Stream> default_stream;

  // Guarded by the clock's mutex.
  std::array<Engine, kNumEngines> engines;
  std::vector<std::shared_ptr<Stream>> streams;  // the default stream included
  std::vector<OperationPtr> orphans;             // last operations of destroyed streams
  std::set<int> peers;
  simcuda_counters counters{};  // what is of memory is kept by the address space

  // Guarded by the address space's mutex, but for readers of the capacity.
  std::atomic<uint64_t> capacity_bytes{0};
  uint64_t used_bytes = 0;
  uint64_t peak_used_bytes = 0;
  uint64_t failed_allocations = 0;
};

// The calling thread's current device. It comes to have a context by being used. When the process
// sees no device, one that is not there: every call on it gives cudaErrorNoDevice.
Device& current_device();
int current_ordinal();
// cudaErrorInvalidDevice when there is none of that number.
cudaError_t set_current_device(int ordinal);
bool is_device(int ordinal);

// What the last operations of all streams are, destroyed ones included. Some are null. The clock's
// mutex is held.
std::vector<OperationPtr> last_operations(const Device& device);

}  // namespace simcuda

#endif
