// Which devices a process sees, in processes of their own.
#include <cstdlib>

#include "tests/simcuda/fixture.h"

namespace simcuda_test {
namespace {

class VisibilityTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  static void TearDownTestSuite() { GTEST_FLAG_SET(death_test_style, "fast"); }
};

// Ends the process with 0 when everything is as it should be.
void expect(bool as_it_should_be) {
  if (!as_it_should_be) exit(1);
}

TEST_F(VisibilityTest, TheVariableIsReadAtTheFirstUse) {
  auto look = [] {
    setenv("CUDA_VISIBLE_DEVICES", "1", 1);
    int count = 0;
    expect(cudaGetDeviceCount(&count) == cudaSuccess && count == 1);
    setenv("CUDA_VISIBLE_DEVICES", "0,1", 1);
    expect(cudaGetDeviceCount(&count) == cudaSuccess && count == 1);
    expect(std::string(simcuda_get("visible_devices")) == "1");
    char bus[32];
    expect(cudaDeviceGetPCIBusId(bus, sizeof bus, 0) == cudaSuccess);
    expect(std::string(bus) == "0000:02:00.0");
    expect(cudaSetDevice(1) == cudaErrorInvalidDevice);
    // Its capacity is the visible device's.
    expect(simcuda_set_capacity(0, 8 * kMiB) == 0);
    expect(simcuda_set_capacity(1, 8 * kMiB) == -1);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    expect(cudaMemGetInfo(&free_bytes, &total_bytes) == cudaSuccess);
    expect(total_bytes == 8 * kMiB);
    exit(0);
  };
  EXPECT_EXIT(look(), ::testing::ExitedWithCode(0), "");
}

TEST_F(VisibilityTest, WithoutADeviceEveryCallIsRefused) {
  auto look = [] {
    setenv("CUDA_VISIBLE_DEVICES", "", 1);
    int count = -1;
    expect(cudaGetDeviceCount(&count) == cudaErrorNoDevice && count == 0);
    expect(cudaGetLastError() == cudaErrorNoDevice && cudaGetLastError() == cudaSuccess);
    void* bytes = nullptr;
    cudaStream_t stream = nullptr;
    size_t size = 0;
    expect(cudaGetDevice(&count) == cudaErrorNoDevice);
    expect(cudaSetDevice(0) == cudaErrorNoDevice);
    expect(cudaMalloc(&bytes, 1) == cudaErrorNoDevice);
    expect(cudaHostAlloc(&bytes, 1, 0) == cudaErrorNoDevice);
    expect(cudaStreamCreate(&stream) == cudaErrorNoDevice);
    expect(cudaMemGetInfo(&size, &size) == cudaErrorNoDevice);
    expect(cudaStreamSynchronize(nullptr) == cudaErrorNoDevice);
    expect(cudaDeviceSynchronize() == cudaErrorNoDevice);
    exit(0);
  };
  EXPECT_EXIT(look(), ::testing::ExitedWithCode(0), "");
}

TEST_F(VisibilityTest, ItIsNoSetting) {
  EXPECT_EQ(simcuda_set("visible_devices", "0"), -1);
  EXPECT_NE(std::string(simcuda_message()).find("CUDA_VISIBLE_DEVICES"), std::string::npos);
}

}  // namespace
}  // namespace simcuda_test
