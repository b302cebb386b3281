// Injected faults, broken devices, settings and what is told of them.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include <unistd.h>

#include "tests/simcuda/fixture.h"

namespace simcuda_test {
namespace {

class FaultTest : public SimcudaTest {};

TEST_F(FaultTest, NthCallsOfAnEntryPointFail) {
  ASSERT_EQ(simcuda_fail("cudaMalloc", 1, 2, cudaErrorMemoryAllocation), 0);
  void* block = nullptr;
  std::vector<cudaError_t> seen;
  for (int i = 0; i < 4; ++i) {
    seen.push_back(cudaMalloc(&block, 1));
    if (seen.back() == cudaSuccess) cudaFree(block);
  }
  EXPECT_EQ(seen, (std::vector<cudaError_t>{cudaSuccess, cudaErrorMemoryAllocation,
                                            cudaErrorMemoryAllocation, cudaSuccess}));
  EXPECT_EQ(counters().failed_allocations, 0u);
  EXPECT_EQ(simcuda_calls("cudaMalloc"), 4u);
}

TEST_F(FaultTest, FaultIsTakenBack) {
  ASSERT_EQ(simcuda_fail("cudaEventCreateWithFlags", 0, 1, cudaErrorUnknown), 0);
  ASSERT_EQ(simcuda_fail("cudaEventCreateWithFlags", 0, 0, 0), 0);
  Event event;
}

TEST_F(FaultTest, UnknownEntryPointIsRefused) {
  EXPECT_EQ(simcuda_fail("cudaMaloc", 0, 1, cudaErrorUnknown), -1);
  EXPECT_NE(std::string(simcuda_message()).find("cudaMaloc"), std::string::npos);
  EXPECT_EQ(simcuda_calls("cudaMaloc"), 0u);
  EXPECT_EQ(simcuda_fail("cudaMalloc", 0, 1, cudaSuccess), -1);
}

// A broken device stays broken, so each of these is in a process of its own.
TEST_F(FaultTest, BrokenDeviceAnswersEveryCallWithItsError) {
  auto break_it = [] {
    Stream stream;
    Event event;
    void* block = nullptr;
    bool told = simcuda_break_device(0, cudaErrorIllegalAddress) == 0 &&
                cudaMalloc(&block, 1) == cudaErrorIllegalAddress &&
                cudaEventRecord(event, stream) == cudaErrorIllegalAddress &&
                cudaEventQuery(event) == cudaErrorIllegalAddress &&
                cudaStreamSynchronize(stream) == cudaErrorIllegalAddress &&
                cudaDeviceSynchronize() == cudaErrorIllegalAddress;
    // The other device works.
    told = told && cudaSetDevice(1) == cudaSuccess && cudaMalloc(&block, 1) == cudaSuccess;
    _exit(told ? 0 : 1);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(break_it(), ::testing::ExitedWithCode(0), "");
}

TEST_F(FaultTest, KernelThatFailsBreaksItsDevice) {
  auto run_it = [] {
    auto run = [](void*) { return static_cast<int>(cudaErrorAssert); };
    bool launched = simcuda_launch(nullptr, nullptr, run, nullptr, nullptr) == cudaSuccess;
    bool told = cudaDeviceSynchronize() == cudaErrorAssert;
    _exit(launched && told ? 0 : 1);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(run_it(), ::testing::ExitedWithCode(0), "");
}

TEST_F(FaultTest, CopyOfMemoryThatWasFreedMeanwhileIsAnIllegalAccess) {
  auto run_it = [] {
    ASSERT_CUDA(cudaSetDevice(1));
    void* remote = nullptr;
    ASSERT_CUDA(cudaMalloc(&remote, 100));
    ASSERT_CUDA(cudaSetDevice(0));
    DeviceBytes local(100);
    Stream stream;
    ASSERT_EQ(simcuda_hold(stream), 0);
    ASSERT_CUDA(cudaMemcpyPeerAsync(local.get(), 0, remote, 1, 100, stream));
    // Frees wait for the memory's own device only.
    ASSERT_CUDA(cudaFree(remote));
    ASSERT_EQ(simcuda_release(stream), 0);
    _exit(cudaStreamSynchronize(stream) == cudaErrorIllegalAddress ? 0 : 1);
  };
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(run_it(), ::testing::ExitedWithCode(0), "");
}

TEST_F(FaultTest, SettingsReadBackAsTextsThatSetAccepts) {
  set("h2d", "900MB/s");
  EXPECT_STREQ(simcuda_get("h2d"), "900000000B/s");
  set("copy_latency", "1.5ms");
  EXPECT_STREQ(simcuda_get("copy_latency"), "1500000ns");
  set("pinned_limit", "1GiB");
  EXPECT_STREQ(simcuda_get("pinned_limit"), "1073741824");
  EXPECT_STREQ(simcuda_get("memory"), "67108864");
  for (const char* key : {"card", "host", "h2d", "copy_latency", "pinned_limit", "peer_access",
                          "poison", "seed", "jitter"}) {
    std::string value = simcuda_get(key);
    EXPECT_EQ(simcuda_set(key, value.c_str()), 0) << key << " " << value;
  }
  EXPECT_EQ(simcuda_get("no_such"), nullptr);
}

TEST_F(FaultTest, CardChangesWhatWasNotSetByHand) {
  set("h2d", "1GB/s");
  set("card", "a100");
  EXPECT_STREQ(simcuda_get("h2d"), "1000000000B/s");
}

TEST_F(FaultTest, BadSettingsSayWhatWasExpected) {
  struct {
    const char* key;
    const char* value;
    const char* expected;
  } cases[] = {
      {"h2d", "fast", "55GB/s"},       {"h2d", "0GB/s", "55GB/s"},
      {"h2d", "55", "55GB/s"},         {"copy_latency", "10", "10us"},
      {"card", "h999", "h200"},        {"poison", "256", "0 to 255"},
      {"pinned_limit", "-1", "8GiB"},  {"mode", "dry", "first use"},
      {"devices", "3", "first use"},   {"peer_access", "yes", "on or off"},
      {"bandwidth", "1", "known are"},
  };
  for (const auto& bad : cases) {
    EXPECT_EQ(simcuda_set(bad.key, bad.value), -1) << bad.key;
    EXPECT_NE(std::string(simcuda_message()).find(bad.expected), std::string::npos)
        << simcuda_message();
  }
  set("h2d", "1GB/s");
  EXPECT_STREQ(simcuda_message(), "");
}

TEST_F(FaultTest, OrderIsKeptSecretOnlyByWhatPutsThingsInOrder) {
  EXPECT_EQ(simcuda_keep_order_secret("cudaEventRecord", 0, 1), -1);
  EXPECT_NE(std::string(simcuda_message()).find("cudaStreamWaitEvent"), std::string::npos);
  EXPECT_EQ(simcuda_keep_order_secret(nullptr, 0, 1), -1);
  EXPECT_EQ(simcuda_keep_order_secret("cudaEventQuery", 0, 0), 0) << simcuda_message();
}

TEST_F(FaultTest, WrongEnvironmentEndsTheProcessWithOneLine) {
  auto run_with = [](const std::string& variable) {
    std::string self = "/proc/" + std::to_string(getpid()) + "/exe";
    std::string command = "env '" + variable + "' " + self + " --gtest_list_tests 2>&1 >/dev/null";
    FILE* pipe = popen(command.c_str(), "r");
    char text[1000] = {};
    size_t length = fread(text, 1, sizeof text - 1, pipe);
    int status = pclose(pipe);
    return std::pair(WEXITSTATUS(status), std::string(text, length));
  };
  auto [bad_status, bad_text] = run_with("SIMCUDA_MEMORY=much");
  EXPECT_EQ(bad_status, 2);
  EXPECT_NE(bad_text.find("24GiB"), std::string::npos) << bad_text;
  EXPECT_EQ(std::count(bad_text.begin(), bad_text.end(), '\n'), 1) << bad_text;
  auto [unknown_status, unknown_text] = run_with("SIMCUDA_MEMORIES=1GiB");
  EXPECT_EQ(unknown_status, 2);
  EXPECT_NE(unknown_text.find("memories"), std::string::npos) << unknown_text;
  EXPECT_EQ(run_with("SIMCUDA_MEMORY=2GiB").first, 0);
}

TEST_F(FaultTest, FunctionsThatAreNotSimulatedSaySo) {
  ::testing::internal::CaptureStderr();
  cudaMemPool_t pool;
  EXPECT_EQ(cudaDeviceGetDefaultMemPool(&pool, 0), cudaErrorNotSupported);
  EXPECT_EQ(cudaDeviceGetDefaultMemPool(&pool, 0), cudaErrorNotSupported);
  // Once.
  EXPECT_EQ(::testing::internal::GetCapturedStderr(),
            "simcuda: cudaDeviceGetDefaultMemPool is not simulated\n");
  EXPECT_EQ(simcuda_calls("cudaDeviceGetDefaultMemPool"), 2u);
}

TEST_F(FaultTest, ErrorsHaveNames) {
  EXPECT_STREQ(cudaGetErrorName(cudaErrorMemoryAllocation), "cudaErrorMemoryAllocation");
  EXPECT_STREQ(cudaGetErrorString(cudaErrorMemoryAllocation), "out of memory");
  EXPECT_STREQ(cudaGetErrorName(static_cast<cudaError_t>(123456)), "unrecognized error code");
}

}  // namespace
}  // namespace simcuda_test
