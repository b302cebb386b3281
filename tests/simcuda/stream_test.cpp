// The real order of execution: streams, events, holding, host functions.
#include <atomic>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include "tests/simcuda/fixture.h"

namespace simcuda_test {
namespace {

class StreamTest : public SimcudaTest {};

TEST_F(StreamTest, OperationsOfAStreamRunInOrder) {
  Stream stream;
  DeviceBytes device(kMiB);
  PinnedBytes ones(kMiB, 1);
  PinnedBytes twos(kMiB, 2);
  PinnedBytes result(kMiB);
  EXPECT_CUDA(cudaMemcpyAsync(device.get(), ones.get(), kMiB, cudaMemcpyHostToDevice, stream));
  EXPECT_CUDA(cudaMemcpyAsync(device.get(), twos.get(), kMiB, cudaMemcpyHostToDevice, stream));
  EXPECT_CUDA(cudaMemcpyAsync(result.get(), device.get(), kMiB, cudaMemcpyDeviceToHost, stream));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(result.get()[0], 2);
  EXPECT_EQ(result.get()[kMiB - 1], 2);
}

TEST_F(StreamTest, HeldStreamRunsNothingUntilReleased) {
  Stream stream;
  DeviceBytes device(100);
  PinnedBytes result(100, 7);
  ASSERT_EQ(simcuda_hold(stream), 0);
  EXPECT_CUDA(cudaMemsetAsync(device.get(), 3, 100, stream));
  EXPECT_CUDA(cudaMemcpyAsync(result.get(), device.get(), 100, cudaMemcpyDeviceToHost, stream));
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(peek(result.get()), 7);
  EXPECT_EQ(simcuda_pending(stream), 2u);
  ASSERT_EQ(simcuda_release(stream), 0);
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(simcuda_pending(stream), 0u);
  EXPECT_EQ(result.get()[0], 3);
}

TEST_F(StreamTest, StepRunsSoManyOperations) {
  Stream stream;
  PinnedBytes bytes(3);
  ASSERT_EQ(simcuda_hold(stream), 0);
  for (int i = 0; i < 3; ++i) EXPECT_CUDA(cudaMemsetAsync(bytes.get() + i, 1, 1, stream));
  ASSERT_EQ(simcuda_step(stream, 2), 0);
  EXPECT_EQ(simcuda_pending(stream), 1u);
  EXPECT_EQ(peek(bytes.get() + 1), 1);
  EXPECT_EQ(peek(bytes.get() + 2), 0);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  ASSERT_EQ(simcuda_step(stream, 1), 0);
  EXPECT_CUDA(cudaStreamQuery(stream));
  ASSERT_EQ(simcuda_release(stream), 0);
}

TEST_F(StreamTest, StepsThatAreLeftGoToLaterOperations) {
  Stream stream;
  PinnedBytes bytes(2);
  ASSERT_EQ(simcuda_hold(stream), 0);
  ASSERT_EQ(simcuda_step(stream, 1), 0);
  EXPECT_CUDA(cudaMemsetAsync(bytes.get(), 1, 1, stream));
  EXPECT_CUDA(cudaMemsetAsync(bytes.get() + 1, 1, 1, stream));
  while (simcuda_pending(stream) > 1) std::this_thread::yield();
  EXPECT_EQ(peek(bytes.get()), 1);
  EXPECT_EQ(peek(bytes.get() + 1), 0);
  ASSERT_EQ(simcuda_release(stream), 0);
}

TEST_F(StreamTest, StepDoesNotWaitForWhatAnotherHeldStreamBlocks) {
  Stream first;
  Stream second;
  Event event;
  ASSERT_EQ(simcuda_hold(first), 0);
  ASSERT_EQ(simcuda_hold(second), 0);
  PinnedBytes bytes(1);
  EXPECT_CUDA(cudaMemsetAsync(bytes.get(), 1, 1, first));
  EXPECT_CUDA(cudaEventRecord(event, first));
  EXPECT_CUDA(cudaStreamWaitEvent(second, event, 0));
  ASSERT_EQ(simcuda_step(second, 1), 0);
  EXPECT_EQ(simcuda_pending(second), 1u);
  ASSERT_EQ(simcuda_release(first), 0);
  EXPECT_CUDA(cudaStreamSynchronize(second));
  ASSERT_EQ(simcuda_release(second), 0);
}

TEST_F(StreamTest, WaitTakesTheRecordThatWasCurrentAtTheCall) {
  Stream first;
  Stream second;
  Event event;
  EXPECT_CUDA(cudaEventRecord(event, first));
  EXPECT_CUDA(cudaStreamWaitEvent(second, event, 0));
  ASSERT_EQ(simcuda_hold(first), 0);
  EXPECT_CUDA(cudaEventRecord(event, first));
  EXPECT_CUDA(cudaStreamSynchronize(second));
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  ASSERT_EQ(simcuda_release(first), 0);
}

TEST_F(StreamTest, WaitForAnEventOrdersTheBytes) {
  Stream first;
  Stream second;
  Event event;
  DeviceBytes device(100);
  PinnedBytes result(100, 7);
  ASSERT_EQ(simcuda_hold(first), 0);
  EXPECT_CUDA(cudaMemsetAsync(device.get(), 3, 100, first));
  EXPECT_CUDA(cudaEventRecord(event, first));
  EXPECT_CUDA(cudaStreamWaitEvent(second, event, 0));
  EXPECT_CUDA(cudaMemcpyAsync(result.get(), device.get(), 100, cudaMemcpyDeviceToHost, second));
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(peek(result.get()), 7);
  ASSERT_EQ(simcuda_release(first), 0);
  EXPECT_CUDA(cudaStreamSynchronize(second));
  EXPECT_EQ(result.get()[99], 3);
}

TEST_F(StreamTest, EventThatWasNeverRecordedIsComplete) {
  Stream stream;
  Event event;
  EXPECT_CUDA(cudaEventQuery(event));
  EXPECT_CUDA(cudaStreamWaitEvent(stream, event, 0));
  EXPECT_CUDA(cudaEventSynchronize(event));
}

TEST_F(StreamTest, DestroyedStreamFinishesItsWork) {
  DeviceBytes device(kMiB);
  PinnedBytes source(kMiB, 5);
  PinnedBytes result(kMiB);
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  EXPECT_CUDA(cudaMemcpyAsync(device.get(), source.get(), kMiB, cudaMemcpyHostToDevice, stream));
  EXPECT_CUDA(cudaMemcpyAsync(result.get(), device.get(), kMiB, cudaMemcpyDeviceToHost, stream));
  EXPECT_CUDA(cudaStreamDestroy(stream));
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(result.get()[kMiB - 1], 5);
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorInvalidResourceHandle);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaErrorInvalidResourceHandle);
}

TEST_F(StreamTest, HostFunctionsAndCallbacksRunInStreamOrder) {
  Stream stream;
  std::vector<int> order;
  cudaHostFn_t first = [](void* data) { static_cast<std::vector<int>*>(data)->push_back(1); };
  cudaStreamCallback_t second = [](cudaStream_t, cudaError_t, void* data) {
    static_cast<std::vector<int>*>(data)->push_back(2);
  };
  EXPECT_CUDA(cudaLaunchHostFunc(stream, first, &order));
  EXPECT_CUDA(cudaStreamAddCallback(stream, second, &order, 0));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST_F(StreamTest, QueryDoesNotHangOnAHostFunctionThatWaitsForTheHost) {
  Stream stream;
  std::atomic<bool> go{false};
  cudaHostFn_t wait = [](void* data) {
    while (!*static_cast<std::atomic<bool>*>(data)) std::this_thread::yield();
  };
  EXPECT_CUDA(cudaLaunchHostFunc(stream, wait, &go));
  EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady);
  EXPECT_EQ(simcuda_deterministic(), 0);
  go = true;
  EXPECT_CUDA(cudaStreamSynchronize(stream));
}

TEST_F(StreamTest, LaunchedKernelRunsAndItsDataIsDestroyedOnce) {
  struct Data {
    int num_runs = 0;
    int num_destroyed = 0;
  } data;
  Stream stream;
  auto run = [](void* given) {
    ++static_cast<Data*>(given)->num_runs;
    return 0;
  };
  auto destroy = [](void* given) { ++static_cast<Data*>(given)->num_destroyed; };
  EXPECT_EQ(simcuda_launch(stream, nullptr, run, destroy, &data), cudaSuccess);
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(data.num_runs, 1);
  EXPECT_EQ(data.num_destroyed, 1);
  EXPECT_EQ(counters().kernels, 1u);
  EXPECT_EQ(simcuda_launch(reinterpret_cast<void*>(0x1234), nullptr, run, destroy, &data),
            cudaErrorInvalidResourceHandle);
  EXPECT_EQ(data.num_runs, 1);
  EXPECT_EQ(data.num_destroyed, 2);
}

TEST_F(StreamTest, CompiledKernelIsRefused) {
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(cudaLaunchKernel(reinterpret_cast<void*>(&counters), {}, {}, nullptr, 0, nullptr),
            cudaErrorNoKernelImageForDevice);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("kernel refused"), std::string::npos);
  EXPECT_EQ(cudaGetLastError(), cudaErrorNoKernelImageForDevice);
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
}

TEST_F(StreamTest, ChildOfAForkCannotUseTheRuntime) {
  pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    void* block = nullptr;
    bool refused = cudaMalloc(&block, 1) == cudaErrorInitializationError;
    _exit(refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_F(StreamTest, FlagsPriorityAndIdentity) {
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, -100));
  int priority = 0;
  unsigned flags = 0;
  unsigned long long id = 0;
  unsigned long long default_id = 0;
  EXPECT_CUDA(cudaStreamGetPriority(stream, &priority));
  EXPECT_CUDA(cudaStreamGetFlags(stream, &flags));
  EXPECT_CUDA(cudaStreamGetId(stream, &id));
  EXPECT_CUDA(cudaStreamGetId(nullptr, &default_id));
  EXPECT_EQ(priority, -5);
  EXPECT_EQ(flags, unsigned{cudaStreamNonBlocking});
  EXPECT_NE(id, default_id);
  EXPECT_CUDA(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace simcuda_test
