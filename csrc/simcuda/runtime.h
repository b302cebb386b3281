// All state of the simulated runtime, made at the first use and never destroyed: threads of the
// program may call until the very end of the process.
#ifndef RESIDENCY_CSRC_SIMCUDA_RUNTIME_H
#define RESIDENCY_CSRC_SIMCUDA_RUNTIME_H

#include <array>
#include <memory>
#include <vector>

#include "csrc/simcuda/address_space.h"
#include "csrc/simcuda/clock.h"
#include "csrc/simcuda/device.h"
#include "csrc/simcuda/event.h"
#include "csrc/simcuda/graph.h"
#include "csrc/simcuda/handle_table.h"
#include "csrc/simcuda/settings.h"
#include "csrc/simcuda/stream.h"

namespace simcuda {

struct Runtime {
  Runtime();

  // What copies from one device to another occupy.
  Engine& peer_engine(int source, int destination);
  // All engines of all devices. The clock's mutex is held.
  const std::vector<Engine*>& engines() const { return all_engines_; }

  const bool dry;
  std::unique_ptr<Device> no_device;             // what current_device() is when there is none
  std::vector<std::unique_ptr<Device>> devices;  // those that the process sees
  Clock clock;
  AddressSpace memory;
  HandleTable<Stream> streams;
  HandleTable<Event> events;
  GraphTables graphs;
  std::atomic<uint64_t> next_id{1};
  // Host functions that are enqueued and have not returned.
  std::atomic<uint64_t> num_host_functions{0};

 private:
  std::unique_ptr<Device> make_device(int ordinal, int card);

  std::array<std::array<Engine, kMaxDevices>, kMaxDevices> peer_engines_;
  std::vector<Engine*> all_engines_;
};

Runtime& runtime();
// True once runtime() was called.
bool runtime_in_use();

}  // namespace simcuda

#endif
