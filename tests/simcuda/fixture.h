// What the tests of the simulated runtime share: a process with two devices of 64 MiB, and a clock
// on which nothing takes time but what a test gives a duration.
#ifndef RESIDENCY_TESTS_SIMCUDA_FIXTURE_H
#define RESIDENCY_TESTS_SIMCUDA_FIXTURE_H

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "include/residency/simcuda/control.h"

#define EXPECT_CUDA(call) EXPECT_EQ((call), cudaSuccess)
#define ASSERT_CUDA(call) ASSERT_EQ((call), cudaSuccess)

namespace simcuda_test {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

// Before the first use of the runtime, which fixes these.
inline const bool configured = [] {
  simcuda_set("devices", "2");
  simcuda_set("memory", "64MiB");
  return true;
}();

inline void set(const char* key, const std::string& value) {
  ASSERT_EQ(simcuda_set(key, value.c_str()), 0) << simcuda_message();
}

inline simcuda_counters counters(int device = -1) {
  simcuda_counters counters;
  EXPECT_EQ(simcuda_read_counters(device, &counters), 0);
  return counters;
}

class SimcudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_CUDA(cudaSetDevice(0));
    set("card", "none");
    set("host", "none");
    for (const char* rate : {"h2d", "d2h", "d2d", "peer", "pageable_h2d", "pageable_d2h"}) {
      set(rate, "none");
    }
    for (const char* time : {"copy_latency", "launch", "host_call", "page_lock", "jitter"}) {
      set(time, "0");
    }
    set("pinned_limit", "none");
    set("peer_access", "on");
    set("poison", "none");
    for (int device = 0; device < 2; ++device) {
      ASSERT_EQ(simcuda_set_capacity(device, 64 * kMiB), 0);
      ASSERT_CUDA(cudaSetDevice(device));
      ASSERT_CUDA(cudaDeviceSynchronize());
    }
    ASSERT_CUDA(cudaSetDevice(0));
    cudaGetLastError();
    simcuda_reset_counters();
  }
};

// A stream that does not wait for the default stream, as torch's.
class Stream {
 public:
  explicit Stream(unsigned flags = cudaStreamNonBlocking) {
    EXPECT_CUDA(cudaStreamCreateWithFlags(&stream_, flags));
  }
  ~Stream() { EXPECT_CUDA(cudaStreamDestroy(stream_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  explicit Event(unsigned flags = cudaEventDefault) {
    EXPECT_CUDA(cudaEventCreateWithFlags(&event_, flags));
  }
  ~Event() { EXPECT_CUDA(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

class DeviceBytes {
 public:
  explicit DeviceBytes(uint64_t num_bytes) { EXPECT_CUDA(cudaMalloc(&bytes_, num_bytes)); }
  ~DeviceBytes() { EXPECT_CUDA(cudaFree(bytes_)); }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes& operator=(const DeviceBytes&) = delete;
  char* get() const { return static_cast<char*>(bytes_); }

 private:
  void* bytes_ = nullptr;
};

class PinnedBytes {
 public:
  explicit PinnedBytes(uint64_t num_bytes, int value = 0) {
    EXPECT_CUDA(cudaHostAlloc(&bytes_, num_bytes, cudaHostAllocDefault));
    memset(bytes_, value, num_bytes);
  }
  ~PinnedBytes() { EXPECT_CUDA(cudaFreeHost(bytes_)); }
  PinnedBytes(const PinnedBytes&) = delete;
  PinnedBytes& operator=(const PinnedBytes&) = delete;
  char* get() const { return static_cast<char*>(bytes_); }

 private:
  void* bytes_ = nullptr;
};

// A byte that an operation may write at this moment. Tests that hold a stream look on purpose where
// a program must not without synchronising, so ThreadSanitizer is told to look away.
__attribute__((no_sanitize("thread"), noinline)) inline int peek(const char* byte) {
  return *static_cast<const volatile char*>(byte);
}

// Launches a kernel without a body that takes so long on the card h200, by its bytes at 4.8 TB/s.
inline void launch_kernel(cudaStream_t stream, uint64_t duration_ns) {
  simcuda_work work{"kernel", 0, static_cast<double>(duration_ns) * 4800, SIMCUDA_FP32};
  ASSERT_EQ(simcuda_launch(stream, &work, nullptr, nullptr, nullptr), cudaSuccess);
}

}  // namespace simcuda_test

#endif
