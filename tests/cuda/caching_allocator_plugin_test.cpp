// The plugin before PyTorch's caching allocator: what goes through it is what would have gone on
// without it.

#include "residency/cuda/caching_allocator_plugin.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include "residency/core/errors.h"
#include "tests/cuda/fixture.h"

namespace residency::testing {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);

/// Not PyTorch's own, and with no memory to give.
std::shared_ptr<allocator::CUDAAllocator> make_foreign() {
  return torch::cuda::CUDAPluggableAllocator::createCustomAllocator(
      [](std::size_t, int, cudaStream_t) -> void* { return nullptr; },
      [](void*, std::size_t, int, cudaStream_t) {});
}

class PluginTest : public CudaTest {
 protected:
  PluginTest() : native_(allocator::get()) {}
  ~PluginTest() override {
    EXPECT_TRUE(CachingAllocatorPlugin::remove());
    EXPECT_EQ(allocator::get(), native_);
    EXPECT_EQ(c10::GetAllocator(c10::kCUDA), native_);
  }
  allocator::CUDAAllocator* const native_;
};

TEST_F(PluginTest, IsInForceFromInstallToRemove) {
  EXPECT_FALSE(CachingAllocatorPlugin::is_installed());
  for (int round = 0; round < 2; ++round) {
    CachingAllocatorPlugin::install();
    CachingAllocatorPlugin::install();
    EXPECT_TRUE(CachingAllocatorPlugin::is_installed());
    EXPECT_NE(allocator::get(), native_);
    EXPECT_EQ(c10::GetAllocator(c10::kCUDA), allocator::get());
    EXPECT_TRUE(CachingAllocatorPlugin::remove());
    EXPECT_TRUE(CachingAllocatorPlugin::remove());
    EXPECT_FALSE(CachingAllocatorPlugin::is_installed());
    EXPECT_EQ(allocator::get(), native_);
  }
}

TEST_F(PluginTest, MemoryIsFreedWhoeverAllocatedIt) {
  const std::int64_t before = allocated_bytes();
  at::Tensor early = on_device(3 * kMiB);
  CachingAllocatorPlugin::install();
  at::Tensor during = on_device(5 * kMiB);
  EXPECT_EQ(during.storage().allocator(), allocator::get());
  EXPECT_EQ(allocated_bytes(), before + 8 * kMiB);
  early.reset();
  EXPECT_EQ(allocated_bytes(), before + 5 * kMiB);
  EXPECT_TRUE(CachingAllocatorPlugin::remove());
  // A storage knows its allocator, and grows by it.
  during.resize_({7 * kMiB});
  EXPECT_EQ(allocated_bytes(), before + 7 * kMiB);
  during.reset();
  EXPECT_EQ(allocated_bytes(), before);
}

TEST_F(PluginTest, RawMemoryGoesThroughIt) {
  CachingAllocatorPlugin::install();
  const std::int64_t before = allocated_bytes();
  void* const one = allocator::raw_alloc(kMiB);
  void* const other =
      allocator::raw_alloc_with_stream(kMiB, c10::cuda::getCurrentCUDAStream().stream());
  EXPECT_EQ(allocated_bytes(), before + 2 * kMiB);
  std::size_t nbytes = 0;
  EXPECT_NE(allocator::getBaseAllocation(one, &nbytes), nullptr);
  EXPECT_GE(nbytes, static_cast<std::size_t>(kMiB));
  allocator::raw_delete(one);
  allocator::raw_delete(other);
  EXPECT_EQ(allocated_bytes(), before);
}

TEST_F(PluginTest, BlockWaitsForTheStreamThatWasRecorded) {
  CachingAllocatorPlugin::install();
  const c10::cuda::CUDAStream other = c10::cuda::getStreamFromPool();
  at::Tensor tensor = on_device(30 * kMiB);
  const void* const data = tensor.const_data_ptr();
  Gate gate(other);
  tensor.record_stream(other);
  tensor.reset();
  EXPECT_NE(on_device(30 * kMiB).const_data_ptr(), data);
  gate.open();
  other.synchronize();
  std::vector<at::Tensor> both = {on_device(30 * kMiB), on_device(30 * kMiB)};
  EXPECT_TRUE(both[0].const_data_ptr() == data || both[1].const_data_ptr() == data);
}

TEST_F(PluginTest, CacheIsEmptiedAndPoolsAreServed) {
  CachingAllocatorPlugin::install();
  const auto reserved = [] { return allocator::getDeviceStats(0).reserved_bytes[kAll].current; };
  const std::int64_t before = reserved();
  (void)on_device(30 * kMiB);
  EXPECT_EQ(reserved(), before + 30 * kMiB);
  allocator::emptyCache();
  EXPECT_EQ(reserved(), before);

  const c10::MempoolId_t pool{0, 4711};
  allocator::get()->createOrIncrefPool(0, pool, nullptr);
  allocator::get()->beginAllocateToPool(0, pool, [](cudaStream_t) { return true; });
  at::Tensor in_pool = on_device(30 * kMiB);
  allocator::get()->endAllocateToPool(0, pool);
  in_pool.reset();
  (void)on_device(30 * kMiB);
  EXPECT_EQ(reserved(), before + 60 * kMiB) << "what is free in the pool is the pool's";
  for (int i = 0; i < 2; ++i) {  // who made it, and who allocated in it
    allocator::get()->releasePool(0, pool);
  }
  allocator::emptyCache();
  EXPECT_EQ(reserved(), before);
}

// Freed, and still used by another stream: the allocator waits for that and fails all the same.
TEST_F(PluginTest, BlockThatIsFreeOnlyNowIsFound) {
  const std::int64_t part = most_of_the_device() / 16 / (2 * kMiB) * (2 * kMiB);
  const c10::cuda::CUDAStream other = c10::cuda::getStreamFromPool();
  const auto runs_out = [&] {
    allocator::emptyCache();
    // One segment, so that it cannot go while a part of it is in use.
    (void)on_device(16 * part);
    const at::Tensor keeps = on_device(part);
    at::Tensor leaves = on_device(15 * part);
    Gate gate(other);
    leaves.record_stream(other);
    leaves.reset();
    on_free_memory([&] {
      gate.open();  // while the allocator is at it
      return false;
    });
    return runs_out_of_memory(15 * part);
  };
  EXPECT_TRUE(runs_out());
  CachingAllocatorPlugin::install();
  const CachingAllocatorPlugin::Counters before = CachingAllocatorPlugin::counters();
  EXPECT_FALSE(runs_out());
  EXPECT_EQ(CachingAllocatorPlugin::counters().num_pressed, before.num_pressed + 1);
  EXPECT_EQ(CachingAllocatorPlugin::counters().num_recovered, before.num_recovered + 1);
}

TEST_F(PluginTest, ErrorIsTheAllocatorsOwn) {
  const at::Tensor keeps = on_device(most_of_the_device());
  const auto text = [&] {
    try {
      (void)on_device(keeps.numel());
      return std::string();
    } catch (const c10::OutOfMemoryError& error) {
      return std::string(error.what_without_backtrace());
    }
  };
  const std::string without = text();
  ASSERT_NE(without, "");
  CachingAllocatorPlugin::install();
  const CachingAllocatorPlugin::Counters before = CachingAllocatorPlugin::counters();
  EXPECT_EQ(text(), without);
  EXPECT_THROW((void)allocator::raw_alloc(static_cast<std::size_t>(keeps.numel())),
               c10::OutOfMemoryError);
  EXPECT_EQ(CachingAllocatorPlugin::counters().num_pressed, before.num_pressed + 2);
  EXPECT_EQ(CachingAllocatorPlugin::counters().num_recovered, before.num_recovered);
}

TEST_F(PluginTest, AnotherAllocatorIsRefused) {
  const auto foreign = make_foreign();
  allocator::allocator.store(foreign.get());
  try {
    CachingAllocatorPlugin::install();
    ADD_FAILURE();
  } catch (const UnavailableError& error) {
    EXPECT_NE(std::string(error.what()).find(foreign->name()), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("move as before"), std::string::npos) << error.what();
  }
  EXPECT_EQ(allocator::get(), foreign.get());
  allocator::allocator.store(native_);
}

TEST_F(PluginTest, StaysBehindAnAllocatorThatWasPutBeforeIt) {
  CachingAllocatorPlugin::install();
  allocator::CUDAAllocator* const plugin = allocator::get();
  const auto foreign = make_foreign();
  allocator::allocator.store(foreign.get());
  EXPECT_FALSE(CachingAllocatorPlugin::is_installed());
  EXPECT_FALSE(CachingAllocatorPlugin::remove());
  EXPECT_EQ(allocator::get(), foreign.get());
  allocator::allocator.store(plugin);
}

TEST_F(PluginTest, ComesAndGoesWhileThreadsAllocate) {
  constexpr int kNumThreads = 4;
  const std::int64_t before = allocated_bytes();
  std::atomic<bool> done{false};
  std::atomic<int> num_rounds{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kNumThreads; ++i) {
    threads.emplace_back([&, i] {
      std::vector<at::Tensor> kept;
      while (!done) {
        kept.push_back(on_device((1 + (num_rounds++ + i) % 5) * 300'000));
        if (kept.size() == 16) {
          kept.clear();
        }
      }
    });
  }
  for (int round = 0; round < 2000 || num_rounds < 2000; ++round) {
    CachingAllocatorPlugin::install();
    EXPECT_TRUE(CachingAllocatorPlugin::remove());
  }
  done = true;
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(allocated_bytes(), before);
}

}  // namespace
}  // namespace residency::testing
