// What PyTorch's caching allocator does around a `c10::FreeMemoryCallback`; the allocator plugin
// relies on each of these. Source of the expectations: `DeviceCachingAllocator::malloc`,
// `trigger_free_memory_callbacks` and `release_cached_blocks` in c10/cuda/CUDACachingAllocator.cpp.

#include <chrono>
#include <future>
#include <stdexcept>

#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>

#include "tests/cuda/fixture.h"

namespace residency::testing {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

std::int64_t num_retries() {
  return allocator::getDeviceStats(0).num_alloc_retries;
}

std::int64_t num_segments() {
  using c10::CachingAllocator::StatType;
  return allocator::getDeviceStats(0)
      .segment[static_cast<std::size_t>(StatType::AGGREGATE)]
      .current;
}

class FreeMemoryCallbackTest : public CudaTest {};

TEST_F(FreeMemoryCallbackTest, IsCalledOnEveryMissEvenWhenThereIsRoom) {
  at::Tensor first = on_device(30 * kMiB);
  EXPECT_EQ(num_callbacks(), 1);
  const at::Tensor second = on_device(30 * kMiB);
  EXPECT_EQ(num_callbacks(), 2);
  first.reset();
  const at::Tensor cached = on_device(30 * kMiB);
  EXPECT_EQ(num_callbacks(), 2) << "a hit needs nothing";
}

TEST_F(FreeMemoryCallbackTest, BlockFreedInItIsTakenFromTheCache) {
  at::Tensor victim = on_device(most_of_the_device());
  const std::int64_t nbytes = victim.numel();
  const std::int64_t segments = num_segments();
  on_free_memory([&] {
    const bool frees = victim.defined();
    victim.reset();
    return frees;
  });
  const at::Tensor fits = on_device(nbytes);
  EXPECT_TRUE(fits.defined());
  EXPECT_EQ(num_segments(), segments);
}

TEST_F(FreeMemoryCallbackTest, WithoutHelpTheDeviceRunsOut) {
  const at::Tensor keeps = on_device(most_of_the_device());
  EXPECT_TRUE(runs_out_of_memory(keeps.numel()));
}

TEST_F(FreeMemoryCallbackTest, SmallerBlocksFreedInItAreGivenBackAndTheAllocationRetried) {
  const std::int64_t nbytes = most_of_the_device();
  at::Tensor one = on_device(nbytes / 2);
  at::Tensor other = on_device(nbytes / 2);
  const std::int64_t retries = num_retries();
  on_free_memory([&] {
    one.reset();
    other.reset();
    return true;
  });
  EXPECT_TRUE(on_device(nbytes + 4 * kMiB).defined());
  EXPECT_EQ(num_retries(), retries + 1);
}

TEST_F(FreeMemoryCallbackTest, MemoryFreedByOneThatSaysFalseHelpsToo) {
  at::Tensor victim = on_device(most_of_the_device());
  const std::int64_t nbytes = victim.numel();
  on_free_memory([&] {
    victim.reset();
    return false;
  });
  EXPECT_TRUE(on_device(nbytes).defined());
}

TEST_F(FreeMemoryCallbackTest, MayAllocate) {
  at::Tensor victim = on_device(most_of_the_device());
  const std::int64_t nbytes = victim.numel();
  at::Tensor nested;
  int depth = 0;
  on_free_memory([&] {
    if (depth > 0) {
      return false;  // a miss in the callback calls it again
    }
    ++depth;
    nested = on_device(30 * kMiB);
    victim.reset();
    --depth;
    return true;
  });
  EXPECT_TRUE(on_device(nbytes).defined());
  EXPECT_TRUE(nested.defined());
  EXPECT_GE(num_callbacks(), 2);
}

TEST_F(FreeMemoryCallbackTest, MayEvictToPageLockedMemory) {
  at::Tensor victim = on_device(most_of_the_device());
  const std::int64_t nbytes = victim.numel();
  const std::int64_t kept_bytes = std::min(nbytes, 64 * kMiB);
  const auto side = c10::cuda::getStreamFromPool();
  at::Tensor kept;
  on_free_memory([&] {
    if (!victim.defined()) {
      return false;
    }
    kept = page_locked(kept_bytes);
    at::cuda::CUDAEvent before;
    before.record(c10::cuda::getCurrentCUDAStream());
    before.block(side);
    {
      const c10::cuda::CUDAStreamGuard guard(side);
      kept.copy_(victim.narrow(0, 0, kept_bytes), /*non_blocking=*/true);
    }
    at::cuda::CUDAEvent after;
    after.record(side);
    after.synchronize();
    victim.reset();
    return true;
  });
  EXPECT_TRUE(on_device(nbytes).defined());
  EXPECT_TRUE(kept.defined());
}

TEST_F(FreeMemoryCallbackTest, BlockWithARecordedStreamIsWaitedForByTheAllocator) {
  at::Tensor victim = on_device(most_of_the_device());
  const std::int64_t nbytes = victim.numel();
  const at::Tensor kept = page_locked(kMiB);
  const auto side = c10::cuda::getStreamFromPool();
  on_free_memory([&] {
    if (victim.defined()) {
      const c10::cuda::CUDAStreamGuard guard(side);
      kept.copy_(victim.narrow(0, 0, kMiB), /*non_blocking=*/true);
      allocator::recordStream(victim.storage().data_ptr(), side);
      victim.reset();
    }
    return true;
  });
  EXPECT_TRUE(on_device(nbytes).defined());
}

TEST_F(FreeMemoryCallbackTest, MayEmptyTheCache) {
  at::Tensor victim = on_device(most_of_the_device());
  const std::int64_t nbytes = victim.numel();
  on_free_memory([&] {
    victim.reset();
    allocator::emptyCache();
    return true;
  });
  EXPECT_TRUE(on_device(nbytes + 4 * kMiB).defined());
}

TEST_F(FreeMemoryCallbackTest, ExceptionPassesThroughAndTheAllocatorGoesOn) {
  on_free_memory([]() -> bool { throw std::runtime_error("from the callback"); });
  EXPECT_THROW(on_device(30 * kMiB), std::runtime_error);
  on_free_memory(nullptr);
  EXPECT_TRUE(on_device(30 * kMiB).defined());
}

TEST_F(FreeMemoryCallbackTest, CurrentDeviceIsTheAllocatingOne) {
  if (c10::cuda::device_count() < 2) {
    GTEST_SKIP() << "needs two devices";
  }
  int seen = -1;
  on_free_memory([&] {
    seen = c10::cuda::current_device();
    return false;
  });
  const at::Tensor allocated = on_device(30 * kMiB, 1);
  EXPECT_EQ(seen, 1);
}

// Whether `work` on another thread ends while the callback runs. What waits ends afterwards.
class WhileTheCallbackRuns : public FreeMemoryCallbackTest {
 protected:
  bool goes_on(const std::function<void()>& work) {
    bool finished = false;
    bool first = true;
    std::future<void> other;
    on_free_memory([&] {
      if (first) {
        first = false;
        other = std::async(std::launch::async, work);
        finished = other.wait_for(std::chrono::milliseconds(300)) == std::future_status::ready;
      }
      return false;
    });
    allocator::emptyCache();  // so that it is a miss, also the second time
    const at::Tensor miss = on_device(30 * kMiB);
    other.get();
    return finished;
  }
};

TEST_F(WhileTheCallbackRuns, OtherThreadsAllocationsAndStatisticsOfTheDeviceWait) {
  const at::Tensor cached = on_device(kMiB);
  EXPECT_FALSE(goes_on([] { on_device(512); }));
  EXPECT_FALSE(goes_on([] { static_cast<void>(allocator::getDeviceStats(0)); }));
}

TEST_F(WhileTheCallbackRuns, OtherThreadsFreesOnTheDeviceWait) {
  at::Tensor held = on_device(4 * kMiB);
  EXPECT_FALSE(goes_on([&] { held.reset(); }));
}

TEST_F(WhileTheCallbackRuns, OtherDevicesGoOn) {
  if (c10::cuda::device_count() < 2) {
    GTEST_SKIP() << "needs two devices";
  }
  EXPECT_TRUE(goes_on([] { on_device(512, 1); }));
}

TEST_F(WhileTheCallbackRuns, PageLockedMemoryCopiesAndEventsGoOn) {
  const at::Tensor source = page_locked(kMiB);
  const at::Tensor target = on_device(kMiB);
  const auto side = c10::cuda::getStreamFromPool();
  EXPECT_TRUE(goes_on([&] {
    const at::Tensor more = page_locked(8 * kMiB);
    const c10::cuda::CUDAStreamGuard guard(side);
    target.copy_(source, /*non_blocking=*/true);
    at::cuda::CUDAEvent event;
    event.record(side);
    event.synchronize();
  }));
}

TEST_F(FreeMemoryCallbackTest, OneFailedCudaMallocIsRetried) {
  if (!simulated()) {
    GTEST_SKIP() << "a GPU's cudaMalloc cannot be made to fail once";
  }
  const std::int64_t retries = num_retries();
  ASSERT_EQ(simcuda_fail("cudaMalloc", 0, 1, cudaErrorMemoryAllocation), 0);
  EXPECT_TRUE(on_device(50 * kMiB).defined());
  EXPECT_EQ(num_retries(), retries + 1);
}

TEST_F(FreeMemoryCallbackTest, OutOfMemoryObserverIsCalledWithoutTheLock) {
  static bool observed = false;
  static bool finished = false;
  // Cannot be detached, so that it must stay harmless for the tests that follow.
  allocator::attachOutOfMemoryObserver([](std::int64_t, std::size_t, std::size_t, std::size_t) {
    if (!observed) {
      observed = true;
      auto other = std::async(std::launch::async, [] { on_device(512); });
      finished = other.wait_for(std::chrono::seconds(10)) == std::future_status::ready;
    }
  });
  observed = false;
  EXPECT_TRUE(runs_out_of_memory(std::int64_t{1} << 50));
  EXPECT_TRUE(observed);
  EXPECT_TRUE(finished);
}

}  // namespace
}  // namespace residency::testing
