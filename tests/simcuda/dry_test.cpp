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
  EXPECT_EQ(static_cast<char*>(host)[0], 8);
  char pageable = 9;
  EXPECT_EQ(cudaMemcpy(&pageable, device, 1, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(pageable, 9);
  EXPECT_EQ(simcuda_now() - before, 2000001u);
  simcuda_counters counters;
  ASSERT_EQ(simcuda_read_counters(0, &counters), 0);
  EXPECT_EQ(counters.copied_bytes[SIMCUDA_H2D], 1000000u);
  EXPECT_EQ(counters.peak_device_bytes, 10 * kGiB);
  EXPECT_EQ(cudaFreeHost(host), cudaSuccess);
  EXPECT_EQ(cudaFree(device), cudaSuccess);
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
