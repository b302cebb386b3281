// The virtual clock, to the nanosecond.
#include <atomic>
#include <fstream>
#include <thread>

#include <nlohmann/json.hpp>

#include "tests/simcuda/fixture.h"

namespace simcuda_test {
namespace {

class ClockTest : public SimcudaTest {
 protected:
  void SetUp() override {
    SimcudaTest::SetUp();
    // A megabyte then takes a millisecond.
    for (const char* rate : {"h2d", "d2h", "d2d", "peer"}) set(rate, "1GB/s");
    start_ = simcuda_now();
  }
  // Virtual time since the test began.
  uint64_t now() const { return simcuda_now() - start_; }
  uint64_t end() const { return simcuda_device_end(-1) - start_; }

  static constexpr uint64_t kMB = 1000000;
  // Each copy has a destination of its own, as nothing orders them.
  void h2d(cudaStream_t stream, uint64_t num_bytes) {
    EXPECT_CUDA(cudaMemcpyAsync(device_.get() + uploaded_, host_.get(), num_bytes,
                                cudaMemcpyHostToDevice, stream));
    uploaded_ += num_bytes;
  }
  void d2h(cudaStream_t stream, uint64_t num_bytes) {
    EXPECT_CUDA(cudaMemcpyAsync(other_host_.get() + downloaded_, unwritten_.get(), num_bytes,
                                cudaMemcpyDeviceToHost, stream));
    downloaded_ += num_bytes;
  }

  DeviceBytes device_{12 * kMB};
  DeviceBytes unwritten_{4 * kMB};
  PinnedBytes host_{4 * kMB};
  PinnedBytes other_host_{12 * kMB};
  uint64_t uploaded_ = 0;
  uint64_t downloaded_ = 0;

  Stream a_;
  Stream b_;

 private:
  uint64_t start_ = 0;
};

TEST_F(ClockTest, CopyTakesLatencyAndBandwidth) {
  set("copy_latency", "10us");
  h2d(a_, 2 * kMB);
  EXPECT_EQ(now(), 0u);
  EXPECT_EQ(end(), 2010000u);
  EXPECT_CUDA(cudaStreamSynchronize(a_));
  EXPECT_EQ(now(), 2010000u);
}

TEST_F(ClockTest, BothDirectionsOverlap) {
  h2d(a_, 2 * kMB);
  d2h(b_, 3 * kMB);
  EXPECT_EQ(end(), 3000000u);
}

TEST_F(ClockTest, CopiesInOneDirectionShareTheEngine) {
  h2d(a_, 2 * kMB);
  h2d(b_, 3 * kMB);
  EXPECT_EQ(end(), 5000000u);
}

TEST_F(ClockTest, CopyThatWaitsDoesNotBlockTheEngine) {
  // The first H2D is enqueued first but waits 4 ms for a copy of another stream.
  Event done;
  d2h(b_, 4 * kMB);
  EXPECT_CUDA(cudaEventRecord(done, b_));
  EXPECT_CUDA(cudaStreamWaitEvent(a_, done, 0));
  h2d(a_, 1 * kMB);
  Stream c;
  h2d(c, 2 * kMB);
  EXPECT_CUDA(cudaStreamSynchronize(c));
  EXPECT_EQ(now(), 2000000u);
  EXPECT_CUDA(cudaStreamSynchronize(a_));
  EXPECT_EQ(now(), 5000000u);
}

TEST_F(ClockTest, EngineServesInTheOrderOfReadiness) {
  // Both become ready while the engine is busy: the one that is ready first goes first, though it
  // was enqueued last.
  h2d(a_, 4 * kMB);
  Event late;
  Event early;
  Stream c;
  Stream d;
  d2h(b_, 2 * kMB);
  EXPECT_CUDA(cudaEventRecord(late, b_));
  launch_kernel(d, 0);
  EXPECT_CUDA(cudaEventRecord(early, d));
  EXPECT_CUDA(cudaStreamWaitEvent(c, late, 0));
  EXPECT_CUDA(cudaStreamWaitEvent(d, early, 0));
  h2d(c, 1 * kMB);
  h2d(d, 1 * kMB);
  EXPECT_CUDA(cudaStreamSynchronize(d));
  EXPECT_EQ(now(), 5000000u);
  EXPECT_CUDA(cudaStreamSynchronize(c));
  EXPECT_EQ(now(), 6000000u);
}

TEST_F(ClockTest, QueriesAnswerByTheClockThoughTheCopyReallyRan) {
  Event event;
  h2d(a_, 1 * kMB);
  EXPECT_CUDA(cudaEventRecord(event, a_));
  while (simcuda_pending(a_) > 0) std::this_thread::yield();
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  EXPECT_EQ(cudaStreamQuery(a_), cudaErrorNotReady);
  simcuda_work work{"host", 0, 0, SIMCUDA_FP32};
  set("host", "epyc9654");
  work.bytes = 460.8e9 / 1000;  // a millisecond
  simcuda_host_work(&work);
  EXPECT_EQ(now(), 1000000u);
  EXPECT_CUDA(cudaEventQuery(event));
  EXPECT_CUDA(cudaStreamQuery(a_));
}

TEST_F(ClockTest, PollingMakesProgress) {
  set("host_call", "100us");
  uint64_t before = now();
  h2d(a_, 1 * kMB);
  int num_polls = 0;
  while (cudaStreamQuery(a_) == cudaErrorNotReady) ++num_polls;
  // Enqueued 0.1 ms after `before`, done at 1.1 ms, seen by the call that ends then.
  EXPECT_EQ(num_polls, 9);
  EXPECT_EQ(now() - before, 1100000u);
}

TEST_F(ClockTest, ElapsedTimeIsTheModelledOne) {
  Event begin;
  Event end_event;
  EXPECT_CUDA(cudaEventRecord(begin, a_));
  h2d(a_, 2500000);
  EXPECT_CUDA(cudaEventRecord(end_event, a_));
  float milliseconds = -1;
  EXPECT_EQ(cudaEventElapsedTime(&milliseconds, begin, end_event), cudaErrorNotReady);
  EXPECT_CUDA(cudaEventSynchronize(end_event));
  EXPECT_CUDA(cudaEventElapsedTime(&milliseconds, begin, end_event));
  EXPECT_FLOAT_EQ(milliseconds, 2.5F);
}

TEST_F(ClockTest, KernelsOfADeviceShareItsComputeEngine) {
  set("card", "h200");
  launch_kernel(a_, 1000);
  launch_kernel(b_, 2000);
  EXPECT_EQ(end(), 3000u);
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(counters().kernel_time, 3000u);
}

TEST_F(ClockTest, RooflineTakesTheSlowerOfArithmeticAndMemory) {
  set("card", "h200");
  simcuda_work bound_by_arithmetic{"gemm", 989.5e12 / 1e6, 4.8e12 / 2e6, SIMCUDA_FP16};
  EXPECT_EQ(simcuda_launch(a_, &bound_by_arithmetic, nullptr, nullptr, nullptr), cudaSuccess);
  EXPECT_EQ(end(), 1000u);
}

TEST_F(ClockTest, LaunchDelaysTheStartAndOverlapsWithWhatRuns) {
  set("card", "h200");
  set("launch", "5us");
  launch_kernel(a_, 8000);
  launch_kernel(a_, 1000);
  EXPECT_EQ(end(), 14000u);
}

TEST_F(ClockTest, DeviceEndForeseesWithoutDeciding) {
  // The copy of `a` becomes ready at 4 ms; foreseeing that must not keep the engine from one that
  // is ready before.
  Event done;
  d2h(b_, 4 * kMB);
  EXPECT_CUDA(cudaEventRecord(done, b_));
  EXPECT_CUDA(cudaStreamWaitEvent(a_, done, 0));
  h2d(a_, 1 * kMB);
  EXPECT_EQ(end(), 5000000u);
  Stream c;
  h2d(c, 2 * kMB);
  EXPECT_EQ(end(), 5000000u);
  EXPECT_CUDA(cudaStreamSynchronize(c));
  EXPECT_EQ(now(), 2000000u);
}

TEST_F(ClockTest, LargePageableCopyBlocksTheHost) {
  set("pageable_h2d", "500MB/s");
  std::vector<char> pageable(1 * kMB);
  EXPECT_CUDA(cudaMemcpyAsync(device_.get(), pageable.data(), 1 * kMB, cudaMemcpyHostToDevice, a_));
  EXPECT_EQ(now(), 2000000u);
  simcuda_counters seen = counters();
  EXPECT_EQ(seen.host_syncs, 1u);
  EXPECT_EQ(seen.busy_host_syncs, 0u);
  EXPECT_EQ(seen.blocked_time, 2000000u);
  EXPECT_EQ(seen.pageable_copies[SIMCUDA_H2D], 1u);
}

TEST_F(ClockTest, SmallPageableSourceIsStaged) {
  set("pageable_h2d", "500MB/s");
  std::vector<char> pageable(50000, 1);
  EXPECT_CUDA(cudaMemcpyAsync(device_.get(), pageable.data(), 50000, cudaMemcpyHostToDevice, a_));
  EXPECT_EQ(now(), 100000u);  // the staging
  EXPECT_EQ(end(), 150000u);  // then the transfer
  EXPECT_EQ(counters().host_syncs, 0u);
  // The source is the program's again.
  memset(pageable.data(), 2, pageable.size());
  EXPECT_CUDA(cudaStreamSynchronize(a_));
  char first = 0;
  EXPECT_CUDA(cudaMemcpy(&first, device_.get(), 1, cudaMemcpyDeviceToHost));
  EXPECT_EQ(first, 1);
}

TEST_F(ClockTest, PageableDestinationAlwaysBlocks) {
  set("pageable_d2h", "1GB/s");
  char byte[1000];
  EXPECT_CUDA(cudaMemcpyAsync(byte, device_.get(), 1000, cudaMemcpyDeviceToHost, a_));
  EXPECT_EQ(now(), 1000u);
}

TEST_F(ClockTest, FreeWaitsForTheDevice) {
  void* block = nullptr;
  ASSERT_CUDA(cudaMalloc(&block, 100));
  h2d(a_, 2 * kMB);
  EXPECT_CUDA(cudaFree(block));
  EXPECT_EQ(now(), 2000000u);
  EXPECT_EQ(counters().busy_host_syncs, 1u);
}

TEST_F(ClockTest, PageLockingCostsTimePerMebibyte) {
  set("page_lock", "100us");
  PinnedBytes bytes(4 * kMiB);
  EXPECT_EQ(now(), 400000u);
}

TEST_F(ClockTest, HeldOperationsStartAtTheRelease) {
  Event event;
  ASSERT_EQ(simcuda_hold(a_), 0);
  h2d(a_, 1 * kMB);
  EXPECT_CUDA(cudaEventRecord(event, a_));
  EXPECT_CUDA(cudaStreamWaitEvent(b_, event, 0));
  d2h(b_, 1 * kMB);
  EXPECT_EQ(end(), 0u);
  // Other work passes meanwhile.
  Stream c;
  h2d(c, 3 * kMB);
  EXPECT_CUDA(cudaStreamSynchronize(c));
  EXPECT_EQ(now(), 3000000u);
  EXPECT_EQ(cudaEventQuery(event), cudaErrorNotReady);
  ASSERT_EQ(simcuda_release(a_), 0);
  EXPECT_CUDA(cudaStreamSynchronize(b_));
  EXPECT_EQ(now(), 5000000u);
}

TEST_F(ClockTest, WaitingForAHeldStreamBlocksUntilAnotherThreadReleasesIt) {
  Event event;
  ASSERT_EQ(simcuda_hold(a_), 0);
  h2d(a_, 1 * kMB);
  EXPECT_CUDA(cudaEventRecord(event, a_));
  std::atomic<bool> waited{false};
  std::thread waiting([&] {
    EXPECT_CUDA(cudaEventSynchronize(event));
    waited = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_FALSE(waited);
  ASSERT_EQ(simcuda_release(a_), 0);
  waiting.join();
  EXPECT_EQ(now(), 1000000u);
}

TEST_F(ClockTest, OverlapCountsTimeWithAKernelAndAHostCopy) {
  set("card", "h200");
  h2d(a_, 2 * kMB);
  d2h(b_, 3 * kMB);
  Stream c;
  launch_kernel(c, 2500000);
  EXPECT_CUDA(cudaDeviceSynchronize());
  // From 0 to 2.5 ms; the second direction adds nothing.
  EXPECT_EQ(counters().overlap_time, 2500000u);
  EXPECT_EQ(counters().copy_time[SIMCUDA_H2D], 2000000u);
  EXPECT_EQ(counters().copy_time[SIMCUDA_D2H], 3000000u);
}

TEST_F(ClockTest, CopyDuringAKernelOverlapsForItsLength) {
  set("card", "h200");
  launch_kernel(b_, 5000000);
  EXPECT_CUDA(cudaStreamQuery(a_));
  h2d(a_, 2 * kMB);
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(counters().overlap_time, 2000000u);
}

TEST_F(ClockTest, DefaultStreamWaitsForBlockingStreams) {
  Stream blocking(cudaStreamDefault);
  h2d(blocking, 1 * kMB);
  d2h(nullptr, 1 * kMB);
  EXPECT_CUDA(cudaStreamSynchronize(nullptr));
  EXPECT_EQ(now(), 2000000u);
  // And a blocking stream for the default stream.
  d2h(nullptr, 1 * kMB);
  h2d(blocking, 1 * kMB);
  EXPECT_CUDA(cudaStreamSynchronize(blocking));
  EXPECT_EQ(now(), 4000000u);
}

TEST_F(ClockTest, DefaultStreamDoesNotWaitForOthers) {
  h2d(a_, 1 * kMB);
  d2h(nullptr, 1 * kMB);
  EXPECT_CUDA(cudaStreamSynchronize(nullptr));
  EXPECT_EQ(now(), 1000000u);
}

TEST_F(ClockTest, PeerCopiesHaveTheirOwnEngine) {
  ASSERT_CUDA(cudaSetDevice(1));
  DeviceBytes on_other(1 * kMB);
  ASSERT_CUDA(cudaSetDevice(0));
  EXPECT_CUDA(cudaMemcpyPeerAsync(on_other.get(), 1, unwritten_.get(), 0, 1 * kMB, a_));
  h2d(b_, 1 * kMB);
  EXPECT_EQ(end(), 1000000u);
  EXPECT_EQ(counters().copies[SIMCUDA_PEER], 1u);
}

TEST_F(ClockTest, JitterChangesNoFigure) {
  set("jitter", "200us");
  for (int i = 0; i < 20; ++i) {
    h2d(a_, 1000);
    d2h(b_, 2000);
  }
  EXPECT_CUDA(cudaDeviceSynchronize());
  EXPECT_EQ(now(), 40000u);
}

TEST_F(ClockTest, TimelineHoldsStartsAndEnds) {
  simcuda_record_timeline(1);
  h2d(a_, 1 * kMB);
  EXPECT_CUDA(cudaStreamSynchronize(a_));
  simcuda_record_timeline(0);
  std::string path = ::testing::TempDir() + "simcuda_timeline.json";
  ASSERT_EQ(simcuda_write_timeline(path.c_str()), 0) << simcuda_message();
  nlohmann::json trace = nlohmann::json::parse(std::ifstream(path));
  int num_copies = 0;
  int num_waits = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    EXPECT_EQ(event["dur"], 1000.0);  // microseconds
    if (event["name"] == "copy H2D") {
      ++num_copies;
      EXPECT_EQ(event["args"]["bytes"], 1 * kMB);
    }
    if (event["name"] == "wait") ++num_waits;
  }
  EXPECT_EQ(num_copies, 1);
  EXPECT_EQ(num_waits, 1);
  EXPECT_EQ(simcuda_write_timeline("/nonexistent/x.json"), -1);
  EXPECT_NE(std::string(simcuda_message()).find("/nonexistent/x.json"), std::string::npos);
}

}  // namespace
}  // namespace simcuda_test
