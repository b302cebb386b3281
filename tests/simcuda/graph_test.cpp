// Capture and replay.
#include <fstream>
#include <sstream>
#include <thread>

#include "tests/simcuda/fixture.h"

namespace simcuda_test {
namespace {

class GraphTest : public SimcudaTest {
 protected:
  static constexpr uint64_t kBytes = 1000;

  void begin(cudaStream_t stream, cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal) {
    ASSERT_CUDA(cudaStreamBeginCapture(stream, mode));
  }
  cudaGraph_t end(cudaStream_t stream) {
    cudaGraph_t graph = nullptr;
    EXPECT_CUDA(cudaStreamEndCapture(stream, &graph));
    return graph;
  }
  static cudaGraphExec_t instantiate(cudaGraph_t graph) {
    cudaGraphExec_t exec = nullptr;
    EXPECT_CUDA(cudaGraphInstantiateWithFlags(&exec, graph, 0));
    return exec;
  }
  static cudaStreamCaptureStatus status_of(cudaStream_t stream) {
    cudaStreamCaptureStatus status;
    EXPECT_CUDA(cudaStreamIsCapturing(stream, &status));
    return status;
  }
  // Ends a capture that was invalidated.
  static void expect_invalidated(cudaStream_t stream) {
    EXPECT_EQ(status_of(stream), cudaStreamCaptureStatusInvalidated);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaErrorStreamCaptureInvalidated);
    EXPECT_EQ(graph, nullptr);
    EXPECT_EQ(status_of(stream), cudaStreamCaptureStatusNone);
  }

  DeviceBytes device_{kBytes};
  PinnedBytes source_{kBytes, 1};
  PinnedBytes result_{kBytes};
  Stream stream_;
};

struct Counted {
  int num_runs = 0;
  int num_destroyed = 0;
  static int run(void* data) {
    ++static_cast<Counted*>(data)->num_runs;
    return 0;
  }
  static void destroy(void* data) { ++static_cast<Counted*>(data)->num_destroyed; }
};

TEST_F(GraphTest, CapturedOperationsRunAtEachLaunch) {
  Counted kernel;
  int num_calls = 0;
  cudaHostFn_t call = [](void* data) { ++*static_cast<int*>(data); };
  begin(stream_);
  EXPECT_CUDA(
      cudaMemcpyAsync(device_.get(), source_.get(), kBytes, cudaMemcpyHostToDevice, stream_));
  EXPECT_CUDA(cudaMemsetAsync(device_.get(), 9, 1, stream_));
  EXPECT_EQ(simcuda_launch(stream_, nullptr, Counted::run, Counted::destroy, &kernel), cudaSuccess);
  EXPECT_CUDA(cudaLaunchHostFunc(stream_, call, &num_calls));
  EXPECT_CUDA(
      cudaMemcpyAsync(result_.get(), device_.get(), kBytes, cudaMemcpyDeviceToHost, stream_));
  cudaGraph_t graph = end(stream_);
  cudaGraphExec_t exec = instantiate(graph);
  EXPECT_CUDA(cudaStreamSynchronize(stream_));
  EXPECT_EQ(result_.get()[1], 0);  // nothing has run
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 0u);

  for (char value : {2, 3}) {
    memset(source_.get(), value, kBytes);
    EXPECT_CUDA(cudaGraphLaunch(exec, stream_));
    EXPECT_CUDA(cudaStreamSynchronize(stream_));
    EXPECT_EQ(result_.get()[0], 9);
    EXPECT_EQ(result_.get()[kBytes - 1], value);
  }
  EXPECT_EQ(kernel.num_runs, 2);
  EXPECT_EQ(num_calls, 2);
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 2u);
  EXPECT_EQ(counters().kernels, 2u);

  EXPECT_CUDA(cudaGraphDestroy(graph));
  EXPECT_EQ(kernel.num_destroyed, 0);
  EXPECT_CUDA(cudaGraphExecDestroy(exec));
  EXPECT_EQ(kernel.num_destroyed, 1);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaErrorInvalidValue);
}

TEST_F(GraphTest, NodesHaveTypesAndDependencies) {
  begin(stream_);
  EXPECT_CUDA(cudaMemsetAsync(device_.get(), 1, kBytes, stream_));
  EXPECT_CUDA(
      cudaMemcpyAsync(result_.get(), device_.get(), kBytes, cudaMemcpyDeviceToHost, stream_));
  EXPECT_EQ(simcuda_launch(stream_, nullptr, nullptr, nullptr, nullptr), cudaSuccess);
  cudaGraph_t graph = end(stream_);
  size_t count = 0;
  EXPECT_CUDA(cudaGraphGetNodes(graph, nullptr, &count));
  ASSERT_EQ(count, 3u);
  cudaGraphNode_t nodes[3];
  EXPECT_CUDA(cudaGraphGetNodes(graph, nodes, &count));
  cudaGraphNodeType expected[3] = {cudaGraphNodeTypeMemset, cudaGraphNodeTypeMemcpy,
                                   cudaGraphNodeTypeKernel};
  for (int i = 0; i < 3; ++i) {
    cudaGraphNodeType type;
    EXPECT_CUDA(cudaGraphNodeGetType(nodes[i], &type));
    EXPECT_EQ(type, expected[i]);
  }
  cudaGraphNode_t before = nullptr;
  count = 1;
  EXPECT_CUDA(cudaGraphNodeGetDependencies(nodes[2], &before, nullptr, &count));
  EXPECT_EQ(count, 1u);
  EXPECT_EQ(before, nodes[1]);
  EXPECT_CUDA(cudaGraphNodeGetDependencies(nodes[0], nullptr, nullptr, &count));
  EXPECT_EQ(count, 0u);

  std::string path = ::testing::TempDir() + "simcuda_graph.dot";
  EXPECT_CUDA(cudaGraphDebugDotPrint(graph, path.c_str(), 0));
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  EXPECT_NE(text.str().find("n1 -> n2"), std::string::npos) << text.str();
  EXPECT_CUDA(cudaGraphDestroy(graph));
  EXPECT_EQ(cudaGraphNodeGetType(nodes[0], nullptr), cudaErrorInvalidValue);
}

TEST_F(GraphTest, BranchesForkAndJoinThroughEventsAndOverlapOnTheClock) {
  set("h2d", "1GB/s");
  set("d2h", "1GB/s");
  Stream branch;
  Event fork;
  Event join;
  begin(stream_);
  EXPECT_CUDA(cudaEventRecord(fork, stream_));
  EXPECT_CUDA(cudaStreamWaitEvent(branch, fork, 0));
  EXPECT_EQ(status_of(branch), cudaStreamCaptureStatusActive);
  EXPECT_CUDA(cudaMemcpyAsync(device_.get(), source_.get(), 500, cudaMemcpyHostToDevice, stream_));
  EXPECT_CUDA(
      cudaMemcpyAsync(result_.get(), device_.get() + 500, 500, cudaMemcpyDeviceToHost, branch));
  EXPECT_CUDA(cudaEventRecord(join, branch));
  EXPECT_CUDA(cudaStreamWaitEvent(stream_, join, 0));
  cudaGraph_t graph = end(stream_);
  EXPECT_EQ(status_of(branch), cudaStreamCaptureStatusNone);
  cudaGraphExec_t exec = instantiate(graph);
  uint64_t before = simcuda_now();
  EXPECT_CUDA(cudaGraphLaunch(exec, stream_));
  EXPECT_CUDA(cudaStreamSynchronize(stream_));
  EXPECT_EQ(simcuda_now() - before, 500u);  // not 1000
  EXPECT_CUDA(cudaGraphExecDestroy(exec));
  EXPECT_CUDA(cudaGraphDestroy(graph));
}

TEST_F(GraphTest, LaunchCostsOnceForTheWholeGraph) {
  set("card", "h200");
  begin(stream_);
  set("launch", "5us");
  launch_kernel(stream_, 1000);
  launch_kernel(stream_, 1000);
  cudaGraph_t graph = end(stream_);
  cudaGraphExec_t exec = instantiate(graph);
  uint64_t before = simcuda_now();
  EXPECT_CUDA(cudaGraphLaunch(exec, stream_));
  EXPECT_EQ(simcuda_device_end(0) - before, 7000u);
  EXPECT_CUDA(cudaGraphExecDestroy(exec));
  EXPECT_CUDA(cudaGraphDestroy(graph));
}

TEST_F(GraphTest, LaunchesFollowTheStream) {
  begin(stream_);
  EXPECT_CUDA(
      cudaMemcpyAsync(result_.get(), device_.get(), kBytes, cudaMemcpyDeviceToHost, stream_));
  cudaGraph_t graph = end(stream_);
  cudaGraphExec_t exec = instantiate(graph);
  Stream other;
  EXPECT_CUDA(cudaMemsetAsync(device_.get(), 5, kBytes, other));
  EXPECT_CUDA(cudaGraphLaunch(exec, other));
  EXPECT_CUDA(cudaStreamSynchronize(other));
  EXPECT_EQ(result_.get()[0], 5);
  // The executable may go while it runs.
  ASSERT_EQ(simcuda_hold(other), 0);
  EXPECT_CUDA(cudaMemsetAsync(device_.get(), 6, kBytes, other));
  EXPECT_CUDA(cudaGraphLaunch(exec, other));
  EXPECT_CUDA(cudaGraphExecDestroy(exec));
  EXPECT_CUDA(cudaGraphDestroy(graph));
  ASSERT_EQ(simcuda_release(other), 0);
  EXPECT_CUDA(cudaStreamSynchronize(other));
  EXPECT_EQ(result_.get()[0], 6);
}

TEST_F(GraphTest, ExternalRecordHappensAtTheLaunch) {
  Event event;
  set("h2d", "1GB/s");
  begin(stream_);
  EXPECT_CUDA(
      cudaMemcpyAsync(device_.get(), source_.get(), kBytes, cudaMemcpyHostToDevice, stream_));
  EXPECT_CUDA(cudaEventRecordWithFlags(event, stream_, cudaEventRecordExternal));
  cudaGraph_t graph = end(stream_);
  cudaGraphExec_t exec = instantiate(graph);
  EXPECT_CUDA(cudaEventQuery(event));
  EXPECT_CUDA(cudaGraphLaunch(exec, stream_));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_CUDA(cudaEventSynchronize(event));
  EXPECT_CUDA(cudaGraphExecDestroy(exec));
  EXPECT_CUDA(cudaGraphDestroy(graph));
}

TEST_F(GraphTest, CaptureInfoShowsTheGraphAndItsEnd) {
  cudaStreamCaptureStatus status;
  unsigned long long id = 0;
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* tail = nullptr;
  size_t count = 7;
  begin(stream_);
  EXPECT_CUDA(cudaMemsetAsync(device_.get(), 1, kBytes, stream_));
  EXPECT_CUDA(cudaStreamGetCaptureInfo(stream_, &status, &id, &graph, &tail, nullptr, &count));
  EXPECT_EQ(status, cudaStreamCaptureStatusActive);
  EXPECT_NE(id, 0u);
  ASSERT_EQ(count, 1u);

  // A node of one's own, put at the end as torch's allocator does.
  cudaGraphNode_t marker = nullptr;
  EXPECT_CUDA(cudaGraphAddEmptyNode(&marker, graph, tail, count));
  EXPECT_CUDA(cudaStreamUpdateCaptureDependencies(stream_, &marker, nullptr, 1,
                                                  cudaStreamSetCaptureDependencies));
  EXPECT_CUDA(cudaStreamGetCaptureInfo(stream_, &status, &id, &graph, &tail, nullptr, &count));
  ASSERT_EQ(count, 1u);
  EXPECT_EQ(tail[0], marker);
  cudaGraph_t ended = end(stream_);
  EXPECT_EQ(ended, graph);
  EXPECT_CUDA(
      cudaStreamGetCaptureInfo(stream_, &status, nullptr, nullptr, nullptr, nullptr, nullptr));
  EXPECT_EQ(status, cudaStreamCaptureStatusNone);
  EXPECT_CUDA(cudaGraphDestroy(ended));
}

TEST_F(GraphTest, SynchronisingInvalidatesTheCapture) {
  begin(stream_);
  EXPECT_EQ(cudaStreamSynchronize(stream_), cudaErrorStreamCaptureUnsupported);
  expect_invalidated(stream_);
  begin(stream_);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaErrorStreamCaptureUnsupported);
  expect_invalidated(stream_);
  begin(stream_);
  EXPECT_EQ(cudaStreamQuery(stream_), cudaErrorStreamCaptureUnsupported);
  EXPECT_EQ(cudaMemsetAsync(device_.get(), 1, 1, stream_), cudaErrorStreamCaptureInvalidated);
  expect_invalidated(stream_);
}

TEST_F(GraphTest, AllocationIsRefusedUnlessTheThreadIsRelaxed) {
  void* block = nullptr;
  begin(stream_);
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  EXPECT_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, cudaStreamCaptureModeGlobal);
  EXPECT_CUDA(cudaMalloc(&block, 1));
  EXPECT_CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(status_of(stream_), cudaStreamCaptureStatusActive);
  EXPECT_EQ(cudaMalloc(&block, 1), cudaErrorStreamCaptureUnsupported);
  expect_invalidated(stream_);
  EXPECT_CUDA(cudaFree(block));
}

TEST_F(GraphTest, OtherThreadsAreRefusedOnlyByGlobalCaptures) {
  auto allocate_elsewhere = [] {
    cudaError_t answer = cudaSuccess;
    std::thread([&] {
      void* block = nullptr;
      answer = cudaMalloc(&block, 1);
      if (answer == cudaSuccess) cudaFree(block);
    }).join();
    return answer;
  };
  begin(stream_, cudaStreamCaptureModeThreadLocal);
  EXPECT_CUDA(allocate_elsewhere());
  EXPECT_CUDA(cudaGraphDestroy(end(stream_)));
  begin(stream_, cudaStreamCaptureModeGlobal);
  EXPECT_EQ(allocate_elsewhere(), cudaErrorStreamCaptureUnsupported);
  expect_invalidated(stream_);
}

TEST_F(GraphTest, EventOfACaptureCannotBeQueried) {
  Event event;
  begin(stream_);
  EXPECT_CUDA(cudaEventRecord(event, stream_));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorCapturedEvent);
  expect_invalidated(stream_);
}

TEST_F(GraphTest, UncapturedWorkCannotBeWaitedFor) {
  Event event;
  Stream other;
  EXPECT_CUDA(cudaEventRecord(event, other));
  begin(stream_);
  EXPECT_EQ(cudaStreamWaitEvent(stream_, event, 0), cudaErrorStreamCaptureIsolation);
  expect_invalidated(stream_);
}

TEST_F(GraphTest, CapturesDoNotMerge) {
  Event event;
  Stream other;
  begin(stream_);
  begin(other);
  EXPECT_CUDA(cudaEventRecord(event, stream_));
  EXPECT_EQ(cudaStreamWaitEvent(other, event, 0), cudaErrorStreamCaptureMerge);
  expect_invalidated(stream_);
  expect_invalidated(other);
}

TEST_F(GraphTest, CaptureEndsWhereItBeganWithAllWorkJoined) {
  Event fork;
  Stream branch;
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorIllegalState);
  begin(stream_);
  EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaErrorIllegalState);
  EXPECT_CUDA(cudaEventRecord(fork, stream_));
  EXPECT_CUDA(cudaStreamWaitEvent(branch, fork, 0));
  EXPECT_CUDA(cudaMemsetAsync(device_.get(), 1, 1, branch));
  EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaErrorStreamCaptureUnjoined);
  EXPECT_EQ(status_of(branch), cudaStreamCaptureStatusNone);

  begin(stream_);
  EXPECT_CUDA(cudaEventRecord(fork, stream_));
  EXPECT_CUDA(cudaStreamWaitEvent(branch, fork, 0));
  EXPECT_EQ(cudaStreamEndCapture(branch, &graph), cudaErrorStreamCaptureUnmatched);
  expect_invalidated(stream_);

  begin(stream_);
  cudaError_t elsewhere = cudaSuccess;
  std::thread([&] { elsewhere = cudaStreamEndCapture(stream_, &graph); }).join();
  EXPECT_EQ(elsewhere, cudaErrorStreamCaptureWrongThread);
  EXPECT_CUDA(cudaGraphDestroy(end(stream_)));
}

TEST_F(GraphTest, DefaultStreamCannotBeCapturedNorDependOnACapture) {
  EXPECT_EQ(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal),
            cudaErrorStreamCaptureUnsupported);
  Stream blocking(cudaStreamDefault);
  begin(blocking);
  EXPECT_EQ(cudaMemsetAsync(device_.get(), 1, 1, nullptr), cudaErrorStreamCaptureImplicit);
  expect_invalidated(blocking);
}

TEST_F(GraphTest, CaptureIntoAGraphAddsToIt) {
  cudaGraph_t graph = nullptr;
  EXPECT_CUDA(cudaGraphCreate(&graph, 0));
  cudaGraphNode_t root = nullptr;
  EXPECT_CUDA(cudaGraphAddEmptyNode(&root, graph, nullptr, 0));
  EXPECT_CUDA(cudaStreamBeginCaptureToGraph(stream_, graph, &root, nullptr, 1,
                                            cudaStreamCaptureModeGlobal));
  EXPECT_CUDA(cudaMemsetAsync(result_.get(), 4, 1, stream_));
  EXPECT_EQ(end(stream_), graph);
  cudaGraphExec_t exec = instantiate(graph);
  EXPECT_CUDA(cudaGraphLaunch(exec, stream_));
  EXPECT_CUDA(cudaStreamSynchronize(stream_));
  EXPECT_EQ(result_.get()[0], 4);
  size_t count = 0;
  EXPECT_CUDA(cudaGraphGetRootNodes(graph, nullptr, &count));
  EXPECT_EQ(count, 1u);
  EXPECT_CUDA(cudaGraphExecDestroy(exec));
  EXPECT_CUDA(cudaGraphDestroy(graph));
}

TEST_F(GraphTest, UserObjectLivesAsLongAsAGraphHasIt) {
  Counted object;
  cudaUserObject_t handle;
  EXPECT_CUDA(
      cudaUserObjectCreate(&handle, &object, Counted::destroy, 1, cudaUserObjectNoDestructorSync));
  begin(stream_);
  EXPECT_CUDA(cudaMemsetAsync(device_.get(), 4, 1, stream_));
  cudaGraph_t graph = end(stream_);
  EXPECT_CUDA(cudaGraphRetainUserObject(graph, handle, 1, cudaGraphUserObjectMove));
  EXPECT_EQ(cudaUserObjectRelease(handle, 1), cudaErrorInvalidValue);
  cudaGraphExec_t exec = instantiate(graph);
  EXPECT_CUDA(cudaGraphDestroy(graph));
  EXPECT_EQ(object.num_destroyed, 0);
  EXPECT_CUDA(cudaGraphExecDestroy(exec));
  EXPECT_EQ(object.num_destroyed, 1);
}

}  // namespace
}  // namespace simcuda_test
