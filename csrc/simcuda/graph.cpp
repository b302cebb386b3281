#include "csrc/simcuda/graph.h"

#include <algorithm>
#include <fstream>
#include <utility>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/runtime.h"

namespace simcuda {
namespace {

thread_local cudaStreamCaptureMode t_interaction_mode = cudaStreamCaptureModeGlobal;

Clock::Lock lock_clock() {
  return Clock::Lock(runtime().clock.mutex);
}

GraphNode* add_node(Graph& graph, OperationSpec spec, std::vector<GraphNode*> dependencies) {
  auto node = std::make_unique<GraphNode>();
  node->graph = &graph;
  node->id = graph.nodes.size();
  node->spec = std::move(spec);
  node->dependencies = std::move(dependencies);
  runtime().graphs.nodes.insert(node.get());
  graph.nodes.push_back(std::move(node));
  return graph.nodes.back().get();
}

void forget_nodes(const Graph& graph) {
  for (const auto& node : graph.nodes) runtime().graphs.nodes.erase(node.get());
}

GraphNode* find_node(cudaGraphNode_t handle) {
  auto* node = reinterpret_cast<GraphNode*>(handle);
  return runtime().graphs.nodes.contains(node) ? node : nullptr;
}

cudaGraphNode_t handle_of(GraphNode* node) {
  return reinterpret_cast<cudaGraphNode_t>(node);
}

// False when one of them is no node of the graph.
bool find_nodes(const Graph& graph, const cudaGraphNode_t* handles, size_t count,
                std::vector<GraphNode*>& nodes) {
  for (size_t i = 0; i < count; ++i) {
    GraphNode* node = find_node(handles[i]);
    if (!node || node->graph != &graph) return false;
    nodes.push_back(node);
  }
  return true;
}

void add_missing(std::vector<GraphNode*>& nodes, const std::vector<GraphNode*>& more) {
  for (GraphNode* node : more) {
    if (std::find(nodes.begin(), nodes.end(), node) == nodes.end()) nodes.push_back(node);
  }
}

bool blocking_stream_is_captured(const Device& device) {
  return std::any_of(device.streams.begin(), device.streams.end(), [](const StreamPtr& stream) {
    return stream->capture && stream->is_blocking() &&
           stream->capture->mode != cudaStreamCaptureModeRelaxed;
  });
}

void invalidate_blocking_captures(const Device& device) {
  for (const StreamPtr& stream : device.streams) {
    if (stream->capture && stream->is_blocking()) stream->capture->invalidated = true;
  }
}

// Why the stream may not take an operation now.
cudaError_t check_stream(const Stream& stream) {
  if (stream.is_legacy && blocking_stream_is_captured(stream.device)) {
    invalidate_blocking_captures(stream.device);
    return cudaErrorStreamCaptureImplicit;
  }
  if (stream.capture && stream.capture->invalidated) return cudaErrorStreamCaptureInvalidated;
  return cudaSuccess;
}

// True when every node that the capture made comes before the end of its origin.
bool is_joined(const Capture& capture) {
  std::vector<bool> reached(capture.graph->nodes.size(), false);
  std::vector<GraphNode*> to_visit = capture.origin->capture_tail;
  while (!to_visit.empty()) {
    GraphNode* node = to_visit.back();
    to_visit.pop_back();
    if (reached[node->id]) continue;
    reached[node->id] = true;
    to_visit.insert(to_visit.end(), node->dependencies.begin(), node->dependencies.end());
  }
  for (const StreamPtr& stream : capture.streams) {
    for (GraphNode* node : stream->capture_tail) {
      if (!reached[node->id]) return false;
    }
  }
  return true;
}

void end_capture(const std::shared_ptr<Capture>& capture) {
  for (const StreamPtr& stream : capture->streams) {
    stream->capture = nullptr;
    stream->capture_tail.clear();
  }
  GraphTables& tables = runtime().graphs;
  std::erase(tables.captures, capture);
  tables.num_captures = tables.captures.size();
  // Streams and their capture refer to each other.
  capture->streams.clear();
  capture->origin = nullptr;
}

// Into `graph`, or into one of its own when that is null.
cudaError_t begin_capture(cudaStream_t handle, std::shared_ptr<Graph> graph,
                          std::vector<GraphNode*> tail, cudaStreamCaptureMode mode) {
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return error;
  if (stream->is_legacy) return cudaErrorStreamCaptureUnsupported;
  if (mode < cudaStreamCaptureModeGlobal || mode > cudaStreamCaptureModeRelaxed) {
    return cudaErrorInvalidValue;
  }
  if (stream->capture) return cudaErrorIllegalState;
  auto capture = std::make_shared<Capture>();
  capture->id = runtime().next_id++;
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->origin = stream;
  capture->streams.push_back(stream);
  capture->made_graph = graph == nullptr;
  capture->graph = graph ? std::move(graph) : std::make_shared<Graph>();
  // The program may ask for the graph while it is captured.
  if (capture->made_graph) runtime().graphs.graphs.insert(capture->graph);
  stream->capture = capture;
  stream->capture_tail = std::move(tail);
  GraphTables& tables = runtime().graphs;
  tables.captures.push_back(std::move(capture));
  tables.num_captures = tables.captures.size();
  return cudaSuccess;
}

// Whether the present thread may make an unsafe call in spite of the capture.
bool disturbs(const Capture& capture) {
  if (t_interaction_mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.mode == cudaStreamCaptureModeRelaxed) return false;
  if (capture.thread == std::this_thread::get_id()) return true;
  return capture.mode == cudaStreamCaptureModeGlobal &&
         t_interaction_mode == cudaStreamCaptureModeGlobal;
}

cudaGraphNodeType type_of(const GraphNode& node) {
  switch (node.spec.kind) {
    case OperationKind::kCopy: return cudaGraphNodeTypeMemcpy;
    case OperationKind::kMemset: return cudaGraphNodeTypeMemset;
    case OperationKind::kKernel: return cudaGraphNodeTypeKernel;
    case OperationKind::kHostFunction: return cudaGraphNodeTypeHost;
    case OperationKind::kEventRecord: return cudaGraphNodeTypeEventRecord;
    case OperationKind::kEventWait: return cudaGraphNodeTypeWaitEvent;
    case OperationKind::kEmpty: return cudaGraphNodeTypeEmpty;
  }
  return cudaGraphNodeTypeEmpty;
}

cudaError_t instantiate(cudaGraphExec_t* handle, cudaGraph_t graph_handle) {
  auto lock = lock_clock();
  std::shared_ptr<Graph> graph = runtime().graphs.graphs.find(graph_handle);
  if (!handle || !graph) return cudaErrorInvalidValue;
  auto exec = std::make_shared<GraphExec>();
  for (const auto& node : graph->nodes) {
    GraphExec::Step step{.spec = node->spec};
    for (const GraphNode* dependency : node->dependencies) {
      step.dependencies.push_back(dependency->id);
      exec->steps[dependency->id].is_leaf = false;
    }
    exec->steps.push_back(std::move(step));
  }
  for (const auto& [object, count] : graph->user_objects) exec->user_objects.push_back(object);
  *handle = static_cast<cudaGraphExec_t>(runtime().graphs.execs.insert(std::move(exec)));
  return cudaSuccess;
}

// One node of a launched graph, after `dependencies`.
OperationPtr enqueue_step(Clock::Lock& lock, Stream& stream, const GraphExec::Step& step,
                          std::vector<OperationPtr> dependencies) {
  OperationSpec spec = step.spec;
  EventPtr event = std::move(spec.event);
  bool waits = spec.kind == OperationKind::kEventWait;
  if (waits && event && event->record) dependencies.push_back(event->record);
  OperationPtr operation = stream.enqueue_branch(lock, std::move(spec), std::move(dependencies));
  if (event && !waits) event->record = operation;
  return operation;
}

cudaError_t launch(cudaGraphExec_t handle, cudaStream_t stream_handle) {
  StreamPtr stream;
  if (cudaError_t error = open_stream(stream_handle, stream)) return error;
  std::shared_ptr<GraphExec> exec = runtime().graphs.execs.find(handle);
  if (!exec) return cudaErrorInvalidValue;
  auto lock = lock_clock();
  if (cudaError_t error = check_stream(*stream)) return error;
  if (stream->capture) {
    not_simulated("cudaGraphLaunch on a captured stream");
    return cudaErrorNotSupported;
  }
  // One launch for the whole graph; its nodes need none of their own.
  OperationPtr begin =
      stream->enqueue(lock, {.name = "graph begin", .launch_ns = time_ns(kLaunch)});
  std::vector<OperationPtr> operations;
  std::vector<OperationPtr> leaves{begin};
  for (const GraphExec::Step& step : exec->steps) {
    std::vector<OperationPtr> dependencies{begin};
    for (size_t dependency : step.dependencies) dependencies.push_back(operations[dependency]);
    operations.push_back(enqueue_step(lock, *stream, step, std::move(dependencies)));
    if (step.is_leaf) leaves.push_back(operations.back());
  }
  stream->enqueue(lock, {.name = "graph end"}, std::move(leaves));
  return cudaSuccess;
}

// Writes up to *count handles and the number there are, as the functions that list nodes do.
cudaError_t list(const std::vector<GraphNode*>& nodes, cudaGraphNode_t* handles, size_t* count) {
  if (!count) return cudaErrorInvalidValue;
  size_t num_written = handles ? std::min(*count, nodes.size()) : 0;
  for (size_t i = 0; i < num_written; ++i) handles[i] = handle_of(nodes[i]);
  for (size_t i = num_written; handles && i < *count; ++i) handles[i] = nullptr;
  *count = handles ? num_written : nodes.size();
  return cudaSuccess;
}

std::string dot_text(const Graph& graph) {
  std::string text = "digraph {\n";
  for (const auto& node : graph.nodes) {
    std::string id = std::to_string(node->id);
    text += "  n" + id + " [label=\"" + id + ": " + node->spec.name + "\"];\n";
    for (const GraphNode* dependency : node->dependencies) {
      text += "  n" + std::to_string(dependency->id) + " -> n" + id + ";\n";
    }
  }
  return text + "}\n";
}

}  // namespace

cudaError_t submit(Clock::Lock& lock, Stream& stream, OperationSpec spec, OperationPtr* enqueued) {
  if (cudaError_t error = check_stream(stream)) return error;
  if (!stream.capture) {
    OperationPtr operation = stream.enqueue(lock, std::move(spec));
    if (enqueued) *enqueued = std::move(operation);
    return cudaSuccess;
  }
  // A graph's launch stands for those of its nodes.
  spec.launch_ns = 0;
  Graph& graph = *stream.capture->graph;
  stream.capture_tail = {add_node(graph, std::move(spec), std::move(stream.capture_tail))};
  return cudaSuccess;
}

cudaError_t submit(StreamPtr& stream, OperationSpec spec, OperationPtr* enqueued) {
  auto lock = lock_clock();
  return submit(lock, *stream, std::move(spec), enqueued);
}

cudaError_t refuse_during_capture() {
  if (runtime().graphs.num_captures.load(std::memory_order_relaxed) == 0) return cudaSuccess;
  auto lock = lock_clock();
  cudaError_t answer = cudaSuccess;
  for (const auto& capture : runtime().graphs.captures) {
    if (!disturbs(*capture)) continue;
    capture->invalidated = true;
    answer = cudaErrorStreamCaptureUnsupported;
  }
  return answer;
}

cudaError_t refuse_on_captured(Stream& stream) {
  if (runtime().graphs.num_captures.load(std::memory_order_relaxed) == 0) return cudaSuccess;
  {
    auto lock = lock_clock();
    if (stream.is_legacy && blocking_stream_is_captured(stream.device)) {
      invalidate_blocking_captures(stream.device);
      return cudaErrorStreamCaptureImplicit;
    }
    if (stream.capture) {
      stream.capture->invalidated = true;
      return cudaErrorStreamCaptureUnsupported;
    }
  }
  return refuse_during_capture();
}

cudaError_t wait_for_captured(Stream& stream, const Event& event) {
  const std::shared_ptr<Capture>& capture = event.capture;
  // The capture that the event belonged to has ended: there is nothing to wait for any more.
  if (!capture->origin) return cudaErrorCapturedEvent;
  if (capture->invalidated) return cudaErrorStreamCaptureInvalidated;
  if (stream.is_legacy) {
    capture->invalidated = true;
    return cudaErrorStreamCaptureImplicit;
  }
  if (stream.capture && stream.capture != capture) {
    capture->invalidated = true;
    stream.capture->invalidated = true;
    return cudaErrorStreamCaptureMerge;
  }
  if (!stream.capture) {
    stream.capture = capture;
    capture->streams.push_back(stream.shared_from_this());
  }
  add_missing(stream.capture_tail, event.captured);
  return cudaSuccess;
}

cudaError_t record_captured(Stream& stream, Event& event) {
  if (cudaError_t error = check_stream(stream)) return error;
  event.capture = stream.capture;
  event.captured = stream.capture_tail;
  event.record = nullptr;
  return cudaSuccess;
}

}  // namespace simcuda

using namespace simcuda;

// ---- Capture

SIMCUDA_EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  SIMCUDA_ENTER(cudaStreamBeginCapture, kHostCall);
  auto lock = lock_clock();
  return fail(begin_capture(handle, nullptr, {}, mode));
}

SIMCUDA_EXPORT cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t handle, cudaGraph_t graph,
                                                         const cudaGraphNode_t* dependencies,
                                                         const cudaGraphEdgeData*, size_t count,
                                                         cudaStreamCaptureMode mode) {
  SIMCUDA_ENTER(cudaStreamBeginCaptureToGraph, kHostCall);
  auto lock = lock_clock();
  std::shared_ptr<Graph> into = runtime().graphs.graphs.find(graph);
  std::vector<GraphNode*> tail;
  bool found = into && find_nodes(*into, dependencies, count, tail);
  if (!found) return fail(cudaErrorInvalidValue);
  return fail(begin_capture(handle, std::move(into), std::move(tail), mode));
}

SIMCUDA_EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  SIMCUDA_ENTER(cudaStreamEndCapture, kHostCall);
  if (!graph) return fail(cudaErrorInvalidValue);
  *graph = nullptr;
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  auto lock = lock_clock();
  std::shared_ptr<Capture> capture = stream->capture;
  if (!capture) return fail(cudaErrorIllegalState);
  if (capture->origin != stream) {
    capture->invalidated = true;
    return fail(cudaErrorStreamCaptureUnmatched);
  }
  bool own_thread = capture->thread == std::this_thread::get_id();
  if (capture->mode != cudaStreamCaptureModeRelaxed && !own_thread) {
    return fail(cudaErrorStreamCaptureWrongThread);
  }
  cudaError_t error = cudaSuccess;
  if (capture->invalidated) {
    error = cudaErrorStreamCaptureInvalidated;
  } else if (!is_joined(*capture)) {
    error = cudaErrorStreamCaptureUnjoined;
  }
  end_capture(capture);
  if (error != cudaSuccess) {
    if (!capture->made_graph) return fail(error);
    forget_nodes(*capture->graph);
    runtime().graphs.graphs.take(capture->graph.get());
    return fail(error);
  }
  *graph = reinterpret_cast<cudaGraph_t>(capture->graph.get());
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t handle,
                                                 cudaStreamCaptureStatus* status) {
  SIMCUDA_ENTER(cudaStreamIsCapturing, kNothing);
  *status = cudaStreamCaptureStatusNone;
  if (runtime().graphs.num_captures == 0) return cudaSuccess;
  StreamPtr stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  auto lock = lock_clock();
  if (stream->is_legacy && blocking_stream_is_captured(stream->device)) {
    return fail(cudaErrorStreamCaptureImplicit);
  }
  if (stream->capture) {
    *status = stream->capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                           : cudaStreamCaptureStatusActive;
  }
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle,
                                                    cudaStreamCaptureStatus* status,
                                                    unsigned long long* id, cudaGraph_t* graph,
                                                    const cudaGraphNode_t** dependencies,
                                                    const cudaGraphEdgeData** edges,
                                                    size_t* count) {
  SIMCUDA_ENTER(cudaStreamGetCaptureInfo, kNothing);
  if (!status) return fail(cudaErrorInvalidValue);
  *status = cudaStreamCaptureStatusNone;
  if (edges) *edges = nullptr;
  if (runtime().graphs.num_captures == 0) return cudaSuccess;
  StreamPtr stream = find_stream(handle);
  if (!stream) return fail(cudaErrorInvalidResourceHandle);
  auto lock = lock_clock();
  if (stream->is_legacy && blocking_stream_is_captured(stream->device)) {
    return fail(cudaErrorStreamCaptureImplicit);
  }
  if (!stream->capture) return cudaSuccess;
  *status = stream->capture->invalidated ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
  if (stream->capture->invalidated) return cudaSuccess;
  if (id) *id = stream->capture->id;
  if (graph) *graph = reinterpret_cast<cudaGraph_t>(stream->capture->graph.get());
  // Valid until the stream's next operation, as the real one's.
  if (dependencies) {
    *dependencies = reinterpret_cast<const cudaGraphNode_t*>(stream->capture_tail.data());
  }
  if (count) *count = stream->capture_tail.size();
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t handle,
                                                               cudaGraphNode_t* dependencies,
                                                               const cudaGraphEdgeData*,
                                                               size_t count, unsigned flags) {
  SIMCUDA_ENTER(cudaStreamUpdateCaptureDependencies, kHostCall);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  auto lock = lock_clock();
  if (!stream->capture) return fail(cudaErrorIllegalState);
  std::vector<GraphNode*> nodes;
  if (!find_nodes(*stream->capture->graph, dependencies, count, nodes)) {
    return fail(cudaErrorInvalidValue);
  }
  if (flags == cudaStreamSetCaptureDependencies) stream->capture_tail.clear();
  add_missing(stream->capture_tail, nodes);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  SIMCUDA_ENTER(cudaThreadExchangeStreamCaptureMode, kNothing);
  if (!mode) return fail(cudaErrorInvalidValue);
  std::swap(*mode, t_interaction_mode);
  return cudaSuccess;
}

// ---- Graphs

SIMCUDA_EXPORT cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned flags) {
  SIMCUDA_ENTER(cudaGraphCreate, kHostCall);
  if (!graph || flags != 0) return fail(cudaErrorInvalidValue);
  *graph = static_cast<cudaGraph_t>(runtime().graphs.graphs.insert(std::make_shared<Graph>()));
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t handle) {
  SIMCUDA_ENTER(cudaGraphDestroy, kHostCall);
  std::shared_ptr<Graph> graph = runtime().graphs.graphs.take(handle);
  if (!graph) return fail(cudaErrorInvalidValue);
  {
    auto lock = lock_clock();
    forget_nodes(*graph);
  }
  // The program's destroy functions run here, without the lock.
  graph.reset();
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t* node, cudaGraph_t handle,
                                                 const cudaGraphNode_t* dependencies,
                                                 size_t count) {
  SIMCUDA_ENTER(cudaGraphAddEmptyNode, kHostCall);
  auto lock = lock_clock();
  std::shared_ptr<Graph> graph = runtime().graphs.graphs.find(handle);
  std::vector<GraphNode*> nodes;
  bool found = node && graph && find_nodes(*graph, dependencies, count, nodes);
  if (!found) return fail(cudaErrorInvalidValue);
  *node = handle_of(add_node(*graph, {.name = "empty"}, std::move(nodes)));
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph,
                                                unsigned long long) {
  SIMCUDA_ENTER(cudaGraphInstantiate, kHostCall);
  return fail(instantiate(exec, graph));
}

SIMCUDA_EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* exec, cudaGraph_t graph,
                                                         unsigned long long) {
  SIMCUDA_ENTER(cudaGraphInstantiateWithFlags, kHostCall);
  return fail(instantiate(exec, graph));
}

SIMCUDA_EXPORT cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t) {
  SIMCUDA_ENTER(cudaGraphUpload, kHostCall);
  return runtime().graphs.execs.find(exec) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

SIMCUDA_EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  SIMCUDA_ENTER(cudaGraphLaunch, kHostCall);
  return fail(launch(exec, stream));
}

SIMCUDA_EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  SIMCUDA_ENTER(cudaGraphExecDestroy, kHostCall);
  return runtime().graphs.execs.take(exec) ? cudaSuccess : fail(cudaErrorInvalidValue);
}

SIMCUDA_EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t* nodes,
                                             size_t* count) {
  SIMCUDA_ENTER(cudaGraphGetNodes, kNothing);
  auto lock = lock_clock();
  std::shared_ptr<Graph> graph = runtime().graphs.graphs.find(handle);
  if (!graph) return fail(cudaErrorInvalidValue);
  std::vector<GraphNode*> all;
  for (const auto& node : graph->nodes) all.push_back(node.get());
  return fail(list(all, nodes, count));
}

SIMCUDA_EXPORT cudaError_t cudaGraphGetRootNodes(cudaGraph_t handle, cudaGraphNode_t* nodes,
                                                 size_t* count) {
  SIMCUDA_ENTER(cudaGraphGetRootNodes, kNothing);
  auto lock = lock_clock();
  std::shared_ptr<Graph> graph = runtime().graphs.graphs.find(handle);
  if (!graph) return fail(cudaErrorInvalidValue);
  std::vector<GraphNode*> roots;
  for (const auto& node : graph->nodes) {
    if (node->dependencies.empty()) roots.push_back(node.get());
  }
  return fail(list(roots, nodes, count));
}

SIMCUDA_EXPORT cudaError_t cudaGraphNodeGetType(cudaGraphNode_t handle, cudaGraphNodeType* type) {
  SIMCUDA_ENTER(cudaGraphNodeGetType, kNothing);
  auto lock = lock_clock();
  GraphNode* node = find_node(handle);
  if (!node || !type) return fail(cudaErrorInvalidValue);
  *type = type_of(*node);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t handle,
                                                        cudaGraphNode_t* dependencies,
                                                        cudaGraphEdgeData*, size_t* count) {
  SIMCUDA_ENTER(cudaGraphNodeGetDependencies, kNothing);
  auto lock = lock_clock();
  GraphNode* node = find_node(handle);
  if (!node) return fail(cudaErrorInvalidValue);
  return fail(list(node->dependencies, dependencies, count));
}

SIMCUDA_EXPORT cudaError_t cudaGraphNodeGetDependentNodes(cudaGraphNode_t handle,
                                                          cudaGraphNode_t* dependents,
                                                          cudaGraphEdgeData*, size_t* count) {
  SIMCUDA_ENTER(cudaGraphNodeGetDependentNodes, kNothing);
  auto lock = lock_clock();
  GraphNode* node = find_node(handle);
  if (!node) return fail(cudaErrorInvalidValue);
  std::vector<GraphNode*> found;
  for (const auto& other : node->graph->nodes) {
    const auto& before = other->dependencies;
    if (std::find(before.begin(), before.end(), node) != before.end()) found.push_back(other.get());
  }
  return fail(list(found, dependents, count));
}

SIMCUDA_EXPORT cudaError_t cudaGraphDebugDotPrint(cudaGraph_t handle, const char* path, unsigned) {
  SIMCUDA_ENTER(cudaGraphDebugDotPrint, kNothing);
  auto lock = lock_clock();
  std::shared_ptr<Graph> graph = runtime().graphs.graphs.find(handle);
  if (!graph || !path) return fail(cudaErrorInvalidValue);
  std::ofstream file(path);
  file << dot_text(*graph);
  file.close();
  return file ? cudaSuccess : fail(cudaErrorOperatingSystem);
}

// ---- User objects

SIMCUDA_EXPORT cudaError_t cudaUserObjectCreate(cudaUserObject_t* handle, void* object,
                                                cudaHostFn_t destroy, unsigned num_references,
                                                unsigned flags) {
  SIMCUDA_ENTER(cudaUserObjectCreate, kHostCall);
  bool valid = handle && destroy && num_references > 0 && flags == cudaUserObjectNoDestructorSync;
  if (!valid) return fail(cudaErrorInvalidValue);
  auto user_object = std::make_shared<UserObject>(object, destroy);
  user_object->num_own_references = num_references;
  void* inserted = runtime().graphs.user_objects.insert(std::move(user_object));
  *handle = static_cast<cudaUserObject_t>(inserted);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaUserObjectRetain(cudaUserObject_t handle, unsigned count) {
  SIMCUDA_ENTER(cudaUserObjectRetain, kHostCall);
  auto lock = lock_clock();
  std::shared_ptr<UserObject> object = runtime().graphs.user_objects.find(handle);
  if (!object || count == 0) return fail(cudaErrorInvalidValue);
  object->num_own_references += count;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaUserObjectRelease(cudaUserObject_t handle, unsigned count) {
  SIMCUDA_ENTER(cudaUserObjectRelease, kHostCall);
  std::shared_ptr<UserObject> object = runtime().graphs.user_objects.find(handle);
  if (!object) return fail(cudaErrorInvalidValue);
  {
    auto lock = lock_clock();
    if (count == 0 || object->num_own_references < count) return fail(cudaErrorInvalidValue);
    object->num_own_references -= count;
    if (object->num_own_references > 0) return cudaSuccess;
  }
  // The program has no reference left; graphs may.
  runtime().graphs.user_objects.take(handle);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph_handle,
                                                     cudaUserObject_t handle, unsigned count,
                                                     unsigned flags) {
  SIMCUDA_ENTER(cudaGraphRetainUserObject, kHostCall);
  auto lock = lock_clock();
  std::shared_ptr<Graph> graph = runtime().graphs.graphs.find(graph_handle);
  std::shared_ptr<UserObject> object = runtime().graphs.user_objects.find(handle);
  if (!graph || !object || count == 0) return fail(cudaErrorInvalidValue);
  bool moves = (flags & cudaGraphUserObjectMove) != 0;
  if (moves && object->num_own_references < count) return fail(cudaErrorInvalidValue);
  graph->user_objects[object] += count;
  if (!moves) return cudaSuccess;
  object->num_own_references -= count;
  if (object->num_own_references == 0) runtime().graphs.user_objects.take(handle);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaGraphReleaseUserObject(cudaGraph_t graph_handle,
                                                      cudaUserObject_t handle, unsigned count) {
  SIMCUDA_ENTER(cudaGraphReleaseUserObject, kHostCall);
  auto lock = lock_clock();
  std::shared_ptr<Graph> graph = runtime().graphs.graphs.find(graph_handle);
  if (!graph) return fail(cudaErrorInvalidValue);
  auto found = std::find_if(
      graph->user_objects.begin(), graph->user_objects.end(),
      [&](const auto& held) { return static_cast<void*>(held.first.get()) == handle; });
  if (found == graph->user_objects.end() || found->second < count) {
    return fail(cudaErrorInvalidValue);
  }
  found->second -= count;
  if (found->second == 0) graph->user_objects.erase(found);
  return cudaSuccess;
}
