// Events: what a record completed, or stands for in a capture.
#ifndef RESIDENCY_CSRC_SIMCUDA_EVENT_H
#define RESIDENCY_CSRC_SIMCUDA_EVENT_H

#include <memory>
#include <vector>

#include <cuda_runtime_api.h>

#include "csrc/simcuda/operation.h"

namespace simcuda {

struct Capture;
struct Device;
struct GraphNode;

struct Event {
  Device& device;
  const unsigned flags;

  // Guarded by the clock's mutex.
  OperationPtr record = nullptr;               // null: never recorded
  std::shared_ptr<Capture> capture = nullptr;  // set by a record in a capture
  std::vector<GraphNode*> captured = {};       // the nodes that such a record comes after
};

using EventPtr = std::shared_ptr<Event>;

}  // namespace simcuda

#endif
