// Dry mode: eight devices of 640 GiB on any machine.
#include <cstring>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "include/residency/simcuda/control.h"

namespace simcuda_test {
namespace {

constexpr uint64_t kGiB = uint64_t{1} << 30;

#ifdef __SANITIZE_THREAD__
// ThreadSanitizer leaves the program little address space.
constexpr uint64_t kDeviceGiB = 16;
#else
constexpr uint64_t kDeviceGiB = 640;
#endif

const bool configured = [] {
  simcuda_set("devices", "8");
  simcuda_set("memory", (std::to_string(kDeviceGiB) + "GiB").c_str());
  simcuda_set("mode", "dry");
  return true;
}();

TEST(DryTest, HundredsOfGigabytesOnEveryDevice) {
  ASSERT_TRUE(configured);
  std::vector<void*> blocks(16);
  for (int i = 0; i < 16; ++i) {
    ASSERT_EQ(cudaSetDevice(i / 2), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&blocks[static_cast<size_t>(i)], kDeviceGiB / 2 * kGiB), cudaSuccess);
  }
  void* more = nullptr;
  EXPECT_EQ(cudaMalloc(&more, 1), cudaErrorMemoryAllocation);
  EXPECT_EQ(simcuda_host_address(blocks[0]), nullptr);
  for (void* block : blocks) EXPECT_EQ(cudaFree(block), cudaSuccess);
}

TEST(DryTest, CopiesMoveNothingButTakeTheirTime) {
  simcuda_set("card", "none");
  simcuda_set("h2d", "1GB/s");
  simcuda_set("d2h", "1GB/s");
  simcuda_set("pageable_d2h", "1GB/s");
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  simcuda_reset_counters();
  void* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, 10 * kGiB), cudaSuccess);
  void* host = nullptr;
  ASSERT_EQ(cudaHostAlloc(&host, 1000000, 0), cudaSuccess);
  memset(host, 7, 1000000);
  uint64_t before = simcuda_now();
  EXPECT_EQ(cudaMemcpy(device, host, 1000000, cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(cudaMemset(device, 0, 10 * kGiB), cudaSuccess);
  memset(host, 8, 1000000);
  EXPECT_EQ(cudaMemcpy(host, device, 1000000, cudaMemcpyDeviceToHost), cudaSuccess);
  char pageable = 9;
  EXPECT_EQ(cudaMemcpy(&pageable, device, 1, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(simcuda_now() - before, 2000001u);
  simcuda_counters counters;
  ASSERT_EQ(simcuda_read_counters(0, &counters), 0);
  EXPECT_EQ(counters.copied_bytes[SIMCUDA_H2D], 1000000u);
  EXPECT_EQ(counters.peak_device_bytes, 10 * kGiB);
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
  EXPECT_EQ(cudaFree(device), cudaSuccess);
}

// Bytes of 7, which are also the rows of a rectangle and what lies between them.
class HostBytes {
 public:
  static constexpr size_t kWidth = 4;
  static constexpr size_t kPitch = 8;
  static constexpr size_t kHeight = 3;
  static constexpr size_t kSize = kPitch * kHeight;

  HostBytes() : bytes_(kSize, 7) {}
  char* get() { return bytes_.data(); }
  bool all_zero() const { return bytes_ == std::vector<char>(kSize, 0); }
  // The rectangle is zero, and what lies between its rows is as it was.
  bool rectangle_is_zero() const {
    for (size_t i = 0; i < kSize; ++i) {
      if (bytes_[i] != (i % kPitch < kWidth ? 0 : 7)) return false;
    }
    return true;
  }

 private:
  std::vector<char> bytes_;
};

TEST(DryTest, WhatIsCopiedToTheHostIsZeros) {
  constexpr size_t kSize = HostBytes::kSize;
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  void* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, kSize), cudaSuccess);
  HostBytes plain;
  EXPECT_EQ(cudaMemcpy(plain.get(), device, kSize, cudaMemcpyDefault), cudaSuccess);
  EXPECT_TRUE(plain.all_zero());
  HostBytes async;
  auto kind = cudaMemcpyDeviceToHost;
  EXPECT_EQ(cudaMemcpyAsync(async.get(), device, kSize, kind, stream), cudaSuccess);
  HostBytes rows;
  EXPECT_EQ(cudaMemcpy2D(rows.get(), HostBytes::kPitch, device, HostBytes::kPitch,
                         HostBytes::kWidth, HostBytes::kHeight, kind),
            cudaSuccess);
  EXPECT_TRUE(rows.rectangle_is_zero());
  HostBytes async_rows;
  EXPECT_EQ(cudaMemcpy2DAsync(async_rows.get(), HostBytes::kPitch, device, HostBytes::kPitch,
                              HostBytes::kWidth, HostBytes::kHeight, kind, stream),
            cudaSuccess);
  HostBytes batch[2];
  void* destinations[] = {batch[0].get(), batch[1].get()};
  const void* sources[] = {device, device};
  size_t sizes[] = {kSize, kSize};
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
  EXPECT_EQ(cudaMemcpyBatchAsync(destinations, sources, sizes, 2, &attributes, &first, 1, stream),
            cudaSuccess);
  EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
  EXPECT_TRUE(async.all_zero());
  EXPECT_TRUE(async_rows.rectangle_is_zero());
  EXPECT_TRUE(batch[0].all_zero() && batch[1].all_zero());

  HostBytes captured;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  EXPECT_EQ(cudaMemcpyAsync(captured.get(), device, kSize, kind, stream), cudaSuccess);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiateWithFlags(&exec, graph, 0), cudaSuccess);
  for (int launch = 0; launch < 2; ++launch) {
    memset(captured.get(), 7, kSize);
    EXPECT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    EXPECT_TRUE(captured.all_zero());
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  EXPECT_EQ(cudaFree(device), cudaSuccess);
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

TEST(DryTest, KernelsDoNotRunButEndTheirData) {
  struct Data {
    int num_runs = 0;
    int num_destroyed = 0;
  } data;
  auto run = [](void* given) {
    ++static_cast<Data*>(given)->num_runs;
    return 0;
  };
  auto destroy = [](void* given) { ++static_cast<Data*>(given)->num_destroyed; };
  ASSERT_EQ(simcuda_launch(nullptr, nullptr, run, destroy, &data), 0);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(data.num_runs, 0);
  EXPECT_EQ(data.num_destroyed, 1);
}

TEST(DryTest, HostFunctionsRun) {
  int num_calls = 0;
  cudaHostFn_t call = [](void* data) { ++*static_cast<int*>(data); };
  EXPECT_EQ(cudaLaunchHostFunc(nullptr, call, &num_calls), cudaSuccess);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_EQ(num_calls, 1);
}

}  // namespace
}  // namespace simcuda_test
