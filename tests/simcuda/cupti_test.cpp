// What a profiler gets from the simulated CUPTI.
#include <ctime>
#include <map>
#include <memory>
#include <thread>

#include <cupti.h>

#include "tests/simcuda/fixture.h"

namespace simcuda_test {
namespace {

#define EXPECT_CUPTI(call) EXPECT_EQ(call, CUPTI_SUCCESS)

// The profiler's buffers: the simulated CUPTI's callbacks have no argument of ours.
struct Buffers {
  size_t size = 1 << 16;
  size_t max_records = 0;
  bool refuse = false;
  std::map<uint8_t*, std::unique_ptr<uint8_t[]>> requested;
  std::vector<std::pair<std::unique_ptr<uint8_t[]>, size_t>> completed;
};
Buffers* g_buffers = nullptr;

void CUPTIAPI request(uint8_t** buffer, size_t* size, size_t* max_records) {
  *buffer = nullptr;
  *size = 0;
  if (g_buffers->refuse) return;
  auto bytes = std::make_unique<uint8_t[]>(g_buffers->size);
  *buffer = bytes.get();
  *size = g_buffers->size;
  *max_records = g_buffers->max_records;
  g_buffers->requested[bytes.get()] = std::move(bytes);
}

void CUPTIAPI complete(CUcontext, uint32_t, uint8_t* buffer, size_t, size_t num_bytes) {
  g_buffers->completed.emplace_back(std::move(g_buffers->requested[buffer]), num_bytes);
  g_buffers->requested.erase(buffer);
}

constexpr CUpti_ActivityKind kKinds[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL,
                                         CUPTI_ACTIVITY_KIND_MEMCPY, CUPTI_ACTIVITY_KIND_MEMSET,
                                         CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION};

class CuptiTest : public SimcudaTest {
 protected:
  void SetUp() override {
    SimcudaTest::SetUp();
    set("card", "h200");
    for (const char* rate : {"h2d", "d2h", "d2d", "peer"}) set(rate, "1GB/s");
    g_buffers = &buffers_;
    EXPECT_CUPTI(cuptiActivityRegisterCallbacks(request, complete));
    for (CUpti_ActivityKind kind : kKinds) EXPECT_CUPTI(cuptiActivityEnable(kind));
  }
  void TearDown() override {
    for (CUpti_ActivityKind kind : kKinds) EXPECT_CUPTI(cuptiActivityDisable(kind));
    EXPECT_CUPTI(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
    EXPECT_TRUE(buffers_.requested.empty());
    g_buffers = nullptr;
  }

  std::vector<CUpti_Activity*> records() {
    EXPECT_CUPTI(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
    std::vector<CUpti_Activity*> found;
    for (const auto& [buffer, num_bytes] : buffers_.completed) {
      CUpti_Activity* record = nullptr;
      while (cuptiActivityGetNextRecord(buffer.get(), num_bytes, &record) == CUPTI_SUCCESS) {
        found.push_back(record);
      }
    }
    return found;
  }
  template <class Record>
  std::vector<const Record*> records_of(CUpti_ActivityKind kind) {
    std::vector<const Record*> found;
    for (const CUpti_Activity* record : records()) {
      if (record->kind == kind) found.push_back(reinterpret_cast<const Record*>(record));
    }
    return found;
  }
  auto kernels() {
    return records_of<CUpti_ActivityKernel9>(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
  }

  static constexpr uint64_t kKB = 1000;
  Buffers buffers_;
  DeviceBytes device_{64 * kKB};
  PinnedBytes host_{64 * kKB};
  Stream a_;
  Stream b_;
};

TEST_F(CuptiTest, DurationsAndDistancesAreTheModelledOnes) {
  launch_kernel(a_, 5000);
  EXPECT_CUDA(cudaMemcpyAsync(device_.get(), host_.get(), 2 * kKB, cudaMemcpyHostToDevice, b_));
  launch_kernel(a_, 700);
  EXPECT_CUDA(cudaDeviceSynchronize());
  auto kernel = kernels();
  auto copy = records_of<CUpti_ActivityMemcpy5>(CUPTI_ACTIVITY_KIND_MEMCPY);
  ASSERT_EQ(kernel.size(), 2u);
  ASSERT_EQ(copy.size(), 1u);
  EXPECT_STREQ(kernel[0]->name, "kernel");
  EXPECT_EQ(kernel[0]->end - kernel[0]->start, 5000u);
  EXPECT_EQ(kernel[1]->start, kernel[0]->end);
  EXPECT_EQ(kernel[1]->end - kernel[1]->start, 700u);
  EXPECT_EQ(copy[0]->start, kernel[0]->start);
  EXPECT_EQ(copy[0]->end - copy[0]->start, 2000u);
  EXPECT_EQ(kernel[0]->streamId, kernel[1]->streamId);
  EXPECT_NE(kernel[0]->streamId, copy[0]->streamId);
}

TEST_F(CuptiTest, IdleTimeStretchesToTheCallThatEndsIt) {
  launch_kernel(a_, 1000);
  EXPECT_CUDA(cudaDeviceSynchronize());
  struct timespec before {};
  clock_gettime(CLOCK_REALTIME, &before);
  launch_kernel(a_, 1000);
  EXPECT_CUDA(cudaDeviceSynchronize());
  auto kernel = kernels();
  ASSERT_EQ(kernel.size(), 2u);
  EXPECT_GE(kernel[1]->start, static_cast<uint64_t>(before.tv_sec) * 1000000000 +
                                  static_cast<uint64_t>(before.tv_nsec));
}

TEST_F(CuptiTest, CopiesAndFillsSayWhatTheyMoved) {
  std::vector<char> pageable(kKB);
  ASSERT_CUDA(cudaSetDevice(1));
  DeviceBytes on_other(kKB);
  ASSERT_CUDA(cudaSetDevice(0));
  EXPECT_CUDA(cudaMemcpyAsync(pageable.data(), device_.get(), kKB, cudaMemcpyDeviceToHost, a_));
  EXPECT_CUDA(cudaMemcpyAsync(device_.get(), device_.get() + 32 * kKB, 2 * kKB,
                              cudaMemcpyDeviceToDevice, a_));
  EXPECT_CUDA(cudaMemcpyPeerAsync(on_other.get(), 1, device_.get(), 0, kKB, a_));
  EXPECT_CUDA(cudaMemsetAsync(device_.get(), 1, 3 * kKB, a_));
  EXPECT_CUDA(cudaDeviceSynchronize());
  auto copy = records_of<CUpti_ActivityMemcpy5>(CUPTI_ACTIVITY_KIND_MEMCPY);
  ASSERT_EQ(copy.size(), 3u);
  EXPECT_EQ(copy[0]->copyKind, CUPTI_ACTIVITY_MEMCPY_KIND_DTOH);
  EXPECT_EQ(copy[0]->srcKind, CUPTI_ACTIVITY_MEMORY_KIND_DEVICE);
  EXPECT_EQ(copy[0]->dstKind, CUPTI_ACTIVITY_MEMORY_KIND_PAGEABLE);
  EXPECT_EQ(copy[1]->copyKind, CUPTI_ACTIVITY_MEMCPY_KIND_DTOD);
  EXPECT_EQ(copy[1]->bytes, 2 * kKB);
  EXPECT_EQ(copy[2]->copyKind, CUPTI_ACTIVITY_MEMCPY_KIND_PTOP);
  auto fill = records_of<CUpti_ActivityMemset4>(CUPTI_ACTIVITY_KIND_MEMSET);
  ASSERT_EQ(fill.size(), 1u);
  EXPECT_EQ(fill[0]->bytes, 3 * kKB);
  EXPECT_EQ(fill[0]->end - fill[0]->start, 3000u);
}

TEST_F(CuptiTest, ExternalIdsAreThoseOfTheCallingThread) {
  constexpr auto kKind = CUPTI_EXTERNAL_CORRELATION_KIND_CUSTOM0;
  EXPECT_CUPTI(cuptiActivityPushExternalCorrelationId(kKind, 7));
  EXPECT_CUPTI(cuptiActivityPushExternalCorrelationId(kKind, 8));
  launch_kernel(a_, 10);
  std::thread([&] { launch_kernel(a_, 10); }).join();
  uint64_t last = 0;
  EXPECT_CUPTI(cuptiActivityPopExternalCorrelationId(kKind, &last));
  EXPECT_EQ(last, 8u);
  launch_kernel(a_, 10);
  EXPECT_CUPTI(cuptiActivityPopExternalCorrelationId(kKind, nullptr));
  EXPECT_EQ(cuptiActivityPopExternalCorrelationId(kKind, nullptr), CUPTI_ERROR_QUEUE_EMPTY);
  EXPECT_CUDA(cudaDeviceSynchronize());
  std::map<uint32_t, uint64_t> external;
  for (const auto* record :
       records_of<CUpti_ActivityExternalCorrelation>(CUPTI_ACTIVITY_KIND_EXTERNAL_CORRELATION)) {
    external[record->correlationId] = record->externalId;
  }
  auto kernel = kernels();
  ASSERT_EQ(kernel.size(), 3u);
  EXPECT_EQ(external[kernel[0]->correlationId], 8u);
  EXPECT_EQ(external.count(kernel[1]->correlationId), 0u);
  EXPECT_EQ(external[kernel[2]->correlationId], 7u);
}

TEST_F(CuptiTest, OnlyEnabledKindsAreRecorded) {
  EXPECT_CUPTI(cuptiActivityDisable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL));
  launch_kernel(a_, 10);
  EXPECT_CUDA(cudaMemsetAsync(device_.get(), 1, kKB, a_));
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(records().size(), 1u);
}

TEST_F(CuptiTest, WithoutAProfilerNoBufferIsAskedFor) {
  for (CUpti_ActivityKind kind : kKinds) EXPECT_CUPTI(cuptiActivityDisable(kind));
  launch_kernel(a_, 10);
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(records().empty());
  EXPECT_TRUE(buffers_.completed.empty());
}

TEST_F(CuptiTest, FullBuffersAreHandedBack) {
  buffers_.size = 1000;
  for (int i = 0; i < 10; ++i) launch_kernel(a_, 10);
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(kernels().size(), 10u);
  EXPECT_GT(buffers_.completed.size(), 1u);
}

TEST_F(CuptiTest, RecordsPerBufferAreLimitedWhereTheProfilerLimitsThem) {
  buffers_.max_records = 3;
  for (int i = 0; i < 7; ++i) launch_kernel(a_, 10);
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(kernels().size(), 7u);
  EXPECT_EQ(buffers_.completed.size(), 3u);
}

TEST_F(CuptiTest, RecordsWithoutABufferAreCountedAsDropped) {
  buffers_.refuse = true;
  launch_kernel(a_, 10);
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_TRUE(records().empty());
  size_t num_dropped = 0;
  EXPECT_CUPTI(cuptiActivityGetNumDroppedRecords(nullptr, 0, &num_dropped));
  EXPECT_EQ(num_dropped, 1u);
}

TEST_F(CuptiTest, HeldWorkIsRecordedWhenItRan) {
  ASSERT_EQ(simcuda_hold(a_), 0);
  launch_kernel(a_, 10);
  EXPECT_TRUE(kernels().empty());
  ASSERT_EQ(simcuda_release(a_), 0);
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(kernels().size(), 1u);
}

}  // namespace
}  // namespace simcuda_test
