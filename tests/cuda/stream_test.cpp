// The order that CUDA streams, events and PyTorch's two caching allocators promise; everything that
// the moves rely on. The same on the simulated runtime and on a GPU.

#include <cstring>
#include <string>

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "tests/cuda/fixture.h"

namespace residency::testing {
namespace {

at::Tensor filled(std::int64_t nbytes, int byte) {
  at::Tensor tensor = page_locked(nbytes);
  std::memset(tensor.mutable_data_ptr(), byte, static_cast<std::size_t>(nbytes));
  return tensor;
}

int byte_of(const at::Tensor& tensor, std::int64_t at) {
  return static_cast<const std::uint8_t*>(tensor.const_data_ptr())[at];
}

class StreamTest : public CudaTest {
 protected:
  c10::cuda::CUDAStream one_ = c10::cuda::getStreamFromPool();
  c10::cuda::CUDAStream other_ = c10::cuda::getStreamFromPool();
};

TEST_F(StreamTest, CopyRunsWhenItsStreamGoesOnAndTheHostDoesNotWait) {
  const at::Tensor source = filled(kMiB, 7);
  const at::Tensor back = filled(kMiB, 0);
  const at::Tensor device = on_device(kMiB);
  at::cuda::CUDAEvent done;
  {
    Gate gate(one_);
    const c10::cuda::CUDAStreamGuard guard(one_);
    device.copy_(source, /*non_blocking=*/true);
    back.copy_(device, /*non_blocking=*/true);
    done.record(one_);
    EXPECT_FALSE(done.query());
    EXPECT_EQ(byte_of(back, 0), 0);
  }
  done.synchronize();
  EXPECT_EQ(byte_of(back, kMiB - 1), 7);
}

TEST_F(StreamTest, EventOrdersTwoStreams) {
  const at::Tensor source = filled(kMiB, 3);
  const at::Tensor back = filled(kMiB, 0);
  const at::Tensor device = on_device(kMiB);
  Gate gate(one_);
  at::cuda::CUDAEvent copied;
  {
    const c10::cuda::CUDAStreamGuard guard(one_);
    device.copy_(source, /*non_blocking=*/true);
    copied.record(one_);
  }
  copied.block(other_);
  at::cuda::CUDAEvent read;
  {
    const c10::cuda::CUDAStreamGuard guard(other_);
    back.copy_(device, /*non_blocking=*/true);
    read.record(other_);
  }
  EXPECT_FALSE(read.query());
  gate.open();
  read.synchronize();
  EXPECT_EQ(byte_of(back, 0), 3);
}

TEST_F(StreamTest, EventIsWhatWasRecordedWhenTheWaitWasEnqueued) {
  at::cuda::CUDAEvent event;
  event.record(other_);
  event.block(one_);
  at::cuda::CUDAEvent passed;
  passed.record(one_);
  Gate gate(other_);
  event.record(other_);
  EXPECT_FALSE(event.query());
  passed.synchronize();  // would never end if the wait saw the second record
  EXPECT_TRUE(passed.query());
}

// c10/cuda/CUDACachingAllocator.cpp: `insert_events` and `process_events`.
TEST_F(StreamTest, BlockWithARecordedStreamIsReusedOnlyAfterItsEvent) {
  at::Tensor block = on_device(4 * kMiB);
  const void* address = block.data_ptr();
  Gate gate(one_);
  c10::cuda::CUDACachingAllocator::recordStream(block.storage().data_ptr(), one_);
  block.reset();
  {
    const at::Tensor while_in_use = on_device(4 * kMiB);
    EXPECT_NE(while_in_use.data_ptr(), address);
  }
  gate.open();
  one_.synchronize();
  // Both blocks are free now; the lower address is taken first among equals, so take both.
  const at::Tensor first = on_device(4 * kMiB);
  const at::Tensor second = on_device(4 * kMiB);
  EXPECT_TRUE(first.data_ptr() == address || second.data_ptr() == address);
}

TEST_F(StreamTest, BlockOfAStreamIsReusedByThatStreamAtOnceAndByNoOther) {
  const void* address = nullptr;
  {
    const c10::cuda::CUDAStreamGuard guard(one_);
    address = on_device(4 * kMiB).data_ptr();
  }
  {
    const c10::cuda::CUDAStreamGuard guard(other_);
    EXPECT_NE(on_device(4 * kMiB).data_ptr(), address);
  }
  const c10::cuda::CUDAStreamGuard guard(one_);
  EXPECT_EQ(on_device(4 * kMiB).data_ptr(), address);
}

// ATen/core/CachingHostAllocator.h: `record_event` and `process_events`.
TEST_F(StreamTest, PageLockedBlockIsReusedOnlyAfterTheCopiesOutOfIt) {
  at::Tensor source = filled(3 * kMiB, 9);
  const void* address = source.data_ptr();
  const at::Tensor device = on_device(3 * kMiB);
  Gate gate(one_);
  {
    const c10::cuda::CUDAStreamGuard guard(one_);
    device.copy_(source, /*non_blocking=*/true);
  }
  source.reset();
  const at::Tensor while_in_use = page_locked(3 * kMiB);
  EXPECT_NE(while_in_use.data_ptr(), address);
  gate.open();
  one_.synchronize();
  EXPECT_EQ(page_locked(3 * kMiB).data_ptr(), address);
}

TEST_F(StreamTest, CopyBetweenDevicesKeepsTheBytes) {
  if (c10::cuda::device_count() < 2) {
    GTEST_SKIP() << "needs two devices";
  }
  const at::Tensor source = filled(kMiB, 5);
  const at::Tensor first = on_device(kMiB, 0);
  const at::Tensor second = on_device(kMiB, 1);
  const at::Tensor back = filled(kMiB, 0);
  first.copy_(source, /*non_blocking=*/true);
  second.copy_(first, /*non_blocking=*/true);
  const c10::cuda::CUDAGuard guard(1);
  back.copy_(second, /*non_blocking=*/true);
  c10::cuda::getCurrentCUDAStream(1).synchronize();
  EXPECT_EQ(byte_of(back, kMiB - 1), 5);
}

TEST_F(StreamTest, ElapsedTimeIsThatOfTheWorkBetween) {
  const at::Tensor source = filled(64 * kMiB, 1);
  const at::Tensor device = on_device(64 * kMiB);
  at::cuda::CUDAEvent begin(cudaEventDefault);
  at::cuda::CUDAEvent end(cudaEventDefault);
  const c10::cuda::CUDAStreamGuard guard(one_);
  begin.record(one_);
  device.copy_(source, /*non_blocking=*/true);
  end.record(one_);
  end.synchronize();
  const double seconds = static_cast<double>(begin.elapsed_time(end)) / 1e3;
  if (simulated()) {
    // 64 MiB at the modelled bandwidth of the link, and the latency of a copy.
    const std::string rate = simcuda_get("h2d");
    ASSERT_EQ(simcuda_set("h2d", "50GB/s"), 0);
    begin.record(one_);
    device.copy_(source, /*non_blocking=*/true);
    end.record(one_);
    end.synchronize();
    EXPECT_GE(begin.elapsed_time(end) * 1e-3, 64.0 * kMiB / 50e9);
    EXPECT_LE(begin.elapsed_time(end) * 1e-3, 64.0 * kMiB / 50e9 + 50e-6);
    EXPECT_EQ(simcuda_set("h2d", rate.c_str()), 0);
  }
  EXPECT_GT(seconds, 0);
}

}  // namespace
}  // namespace residency::testing
