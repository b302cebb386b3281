// Stream capture and graphs. All of it is guarded by the clock's mutex.
#ifndef RESIDENCY_CSRC_SIMCUDA_GRAPH_H
#define RESIDENCY_CSRC_SIMCUDA_GRAPH_H

#include <atomic>
#include <memory>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <cuda_runtime_api.h>

#include "csrc/simcuda/handle_table.h"
#include "csrc/simcuda/operation.h"
#include "csrc/simcuda/stream.h"

namespace simcuda {

// Something of the program's that lives as long as a graph refers to it.
class UserObject {
 public:
  UserObject(void* object, cudaHostFn_t destroy) : object_(object), destroy_(destroy) {}
  ~UserObject() { destroy_(object_); }
  UserObject(const UserObject&) = delete;
  UserObject& operator=(const UserObject&) = delete;

  uint64_t num_own_references = 0;  // the program's, which cudaUserObjectRelease takes back

 private:
  void* object_;
  cudaHostFn_t destroy_;
};

struct Graph;

struct GraphNode {
  Graph* graph = nullptr;
  size_t id = 0;  // place in its graph
  OperationSpec spec;
  std::vector<GraphNode*> dependencies;  // all before it in the graph
};

struct Graph {
  std::vector<std::unique_ptr<GraphNode>> nodes;
  std::unordered_map<std::shared_ptr<UserObject>, uint64_t> user_objects;
};

// What a launch replays: the nodes as they were when it was instantiated.
struct GraphExec {
  struct Step {
    OperationSpec spec;
    std::vector<size_t> dependencies = {};  // places of earlier steps
    bool is_leaf = true;
  };
  std::vector<Step> steps;
  std::vector<std::shared_ptr<UserObject>> user_objects;
};

struct Capture {
  uint64_t id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id thread;
  bool invalidated = false;
  StreamPtr origin;
  std::vector<StreamPtr> streams;  // the origin first, then what joined it through events
  std::shared_ptr<Graph> graph;
  bool made_graph = true;  // which goes with the capture if that fails
};

struct GraphTables {
  HandleTable<Graph> graphs;
  HandleTable<GraphExec> execs;
  HandleTable<UserObject> user_objects;
  std::unordered_set<const GraphNode*> nodes;
  std::vector<std::shared_ptr<Capture>> captures;  // that are going on
  std::atomic<size_t> num_captures{0};             // their number, readable without the lock
};

// Enqueues on the stream or, while it is being captured, makes a node of it. `enqueued` gets the
// operation, null in a capture.
cudaError_t submit(StreamPtr& stream, OperationSpec spec, OperationPtr* enqueued = nullptr);
// The same with the clock's mutex held.
cudaError_t submit(Clock::Lock& lock, Stream& stream, OperationSpec spec,
                   OperationPtr* enqueued = nullptr);

// Why the calling thread may not make a call that could disturb a capture: allocate, free,
// synchronise, query. Such a call ends the captures that it would disturb.
cudaError_t refuse_during_capture();
// The same for a call that waits for a stream, which must not be captured itself.
cudaError_t refuse_on_captured(Stream& stream);

// Makes a stream that waits for an event of a capture a part of it.
cudaError_t wait_for_captured(Stream& stream, const Event& event);
// Notes what an event that is recorded in a captured stream comes after.
cudaError_t record_captured(Stream& stream, Event& event);

}  // namespace simcuda

#endif
