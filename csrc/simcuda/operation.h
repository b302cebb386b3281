// One thing that a stream does, as it was asked for (OperationSpec) and as it runs (Operation).
#ifndef RESIDENCY_CSRC_SIMCUDA_OPERATION_H
#define RESIDENCY_CSRC_SIMCUDA_OPERATION_H

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <cuda_runtime_api.h>

#include "csrc/simcuda/activity_link.h"

namespace simcuda {

struct Engine;
struct Event;
class Operation;
class Stream;

using OperationPtr = std::shared_ptr<Operation>;
// What really runs; the answer other than cudaSuccess breaks the device.
using Body = std::function<cudaError_t()>;

enum class OperationKind {
  kCopy,
  kMemset,
  kKernel,
  kHostFunction,
  kEventRecord,
  kEventWait,
  kEmpty
};

struct OperationSpec {
  OperationKind kind = OperationKind::kEmpty;
  const char* name = "";     // lives as long as the process
  Engine* engine = nullptr;  // what it occupies; null: nothing, and its duration runs freely
  int direction = -1;        // of a copy: SIMCUDA_H2D...
  bool pageable = false;
  uint32_t num_copies = 1;
  uint64_t num_bytes = 0;
  uint64_t duration_ns = 0;
  uint64_t launch_ns = 0;                  // from the enqueue to the earliest start
  std::shared_ptr<Body> body = nullptr;    // null: nothing really runs
  std::shared_ptr<Event> event = nullptr;  // of a record or wait that a graph holds
  bool secret_order = false;               // the race checker is not told what it waits for
};

// Where an operation stands on the virtual clock. Guarded by the clock's mutex.
struct ModelState {
  uint64_t ready_ns = 0;  // what is known so far of the earliest start
  uint64_t start_ns = 0;
  uint64_t end_ns = 0;
  uint32_t num_unresolved = 0;  // dependencies without a known end, and the gate
  bool resolved = false;        // start and end are known
};

// Thread-safe in the parts that several threads use: `model` and `dependents` under the clock's
// mutex, `waits_for` is the worker's once the operation is enqueued.
class Operation {
 public:
  Operation(OperationSpec operation_spec, std::shared_ptr<Stream> operation_stream)
      : spec(std::move(operation_spec)), stream(std::move(operation_stream)) {}

  // Waits until it really ran. The caller is ordered after it.
  void wait_until_run();
  // The same, but gives up after a second when a host function is in the way: only the program
  // can end that, perhaps once it has this answer.
  bool wait_until_run_or_blocked();
  bool has_run() const;

  OperationSpec spec;
  const std::shared_ptr<Stream> stream;
  uint64_t index = 0;                   // place in its stream, from 1
  uint64_t sequence = 0;                // place among all enqueued
  std::vector<OperationPtr> waits_for;  // of other streams, before it really runs
  simcuda_activity_tag tag{};           // set before it is enqueued, while a profiler records

  ModelState model;
  bool gated = false;  // its stream is held before it
  std::vector<OperationPtr> dependents;
};

}  // namespace simcuda

#endif
