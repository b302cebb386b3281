// Values leave a device when an allocation of anybody's there would fail otherwise. Cases 26, 27
// and 29 of the field.

#include <algorithm>
#include <atomic>
#include <random>
#include <thread>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include "residency/cuda/caching_allocator_plugin.h"
#include "tests/cuda/tier_fixture.h"

namespace residency::testing {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

class PressureTest : public CudaTest {
 protected:
  PressureTest() { CachingAllocatorPlugin::install(); }
  ~PressureTest() override {
    for (const auto& manager : managers_) {
      manager->audit();
      manager->close({.force = true});
    }
    EXPECT_TRUE(CachingAllocatorPlugin::remove());
  }

  Manager& make(ReclaimMode mode, ManagerOptions options = {}) {
    options.reclaim = mode;
    managers_.push_back(create_manager(std::move(options), {.devices = make_cuda_layer()}));
    return *managers_.back();
  }
  /// Values of `part_` bytes on the device, each in a segment of its own; copies of them stay on
  /// the host.
  std::vector<Handle> fill(Manager& manager, int num_values = kNumParts - 1) {
    std::vector<Handle> handles;
    for (int i = 0; i < num_values; ++i) {
      handles.push_back(value(manager, part_, i, Mutability::kImmutable));
      manager.ensure(handles.back(), kDevice).wait();
    }
    return handles;
  }
  static int num_at(Manager& manager, const std::vector<Handle>& handles, Location at) {
    const Snapshot snapshot = manager.snapshot();
    return static_cast<int>(std::count_if(handles.begin(), handles.end(), [&](const Handle& each) {
      const auto& found = snapshot.find(each)->materializations;
      return std::any_of(found.begin(), found.end(),
                         [&](const MaterializationSnapshot& one) { return one.location == at; });
    }));
  }
  static std::uint64_t num_evicted() { return CachingAllocatorPlugin::counters().num_evicted; }

  static constexpr int kNumParts = 8;
  /// So many of them fill what is free of the device: `fill` leaves room for one.
  const std::int64_t part_ = [] {
    std::size_t free_bytes = 0;
    std::size_t total_bytes = 0;
    EXPECT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
    return static_cast<std::int64_t>(free_bytes) / kNumParts / (2 * kMiB) * (2 * kMiB);
  }();
  std::vector<std::shared_ptr<Manager>> managers_;
};

// Case 26.
TEST_F(PressureTest, ExactlyEnoughReplicasLeave) {
  Manager& manager = make(ReclaimMode::kReplicas);
  const std::vector<Handle> handles = fill(manager);
  Hold held = manager.hold(std::vector<Handle>{handles[0]}, kDevice);
  Lease leased = manager.acquire(one(handles[1]), kDevice);
  const std::uint64_t before = num_evicted();
  const at::Tensor large = on_device(3 * part_);  // one part was free
  EXPECT_TRUE(large.defined());
  EXPECT_EQ(num_evicted(), before + 2);
  EXPECT_EQ(num_at(manager, handles, kDevice), kNumParts - 3);
  EXPECT_EQ(num_at(manager, {handles[0], handles[1]}, kDevice), 2);
  const TransitionRecord entry = manager.trace().back();
  EXPECT_EQ(entry.phase, Phase::kReclaim);
  EXPECT_NE(entry.plan.find(std::to_string(3 * part_)), std::string::npos) << entry.plan;
  leased.release();
  held.release();
  for (std::size_t i = 0; i < handles.size(); ++i) {
    EXPECT_EQ(byte_of(manager, handles[i], kHost), static_cast<int>(i));
  }
}

TEST_F(PressureTest, NothingLeavesWhereItWouldNotDo) {
  Manager& manager = make(ReclaimMode::kReplicas);
  const std::vector<Handle> handles = fill(manager);
  Lease leased = manager.acquire(one(handles[0]), kDevice);
  const std::uint64_t before = num_evicted();
  EXPECT_TRUE(runs_out_of_memory(kNumParts * part_));
  EXPECT_EQ(num_evicted(), before);
  leased.release();
}

TEST_F(PressureTest, NothingLeavesUnlessTheManagerSaysSo) {
  Manager& off = make(ReclaimMode::kOff);
  const std::vector<Handle> handles = fill(off);
  const std::uint64_t before = num_evicted();
  try {
    (void)on_device(3 * part_);
    ADD_FAILURE();
  } catch (const c10::OutOfMemoryError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("Tried to allocate"), std::string::npos) << text;
    EXPECT_NE(text.find(to_string(handles[0])), std::string::npos) << text;
    EXPECT_NE(text.find("reclaim is off"), std::string::npos) << text;
  }
  EXPECT_EQ(num_evicted(), before);
}

TEST_F(PressureTest, OnlyCopyIsNoReplica) {
  Manager& manager = make(ReclaimMode::kReplicas);
  const std::vector<Handle> handles = fill(manager);
  for (const Handle& handle : handles) {
    manager.drop(handle, kHost);
  }
  EXPECT_TRUE(runs_out_of_memory(3 * part_));
  EXPECT_EQ(num_at(manager, handles, kDevice), kNumParts - 1);
}

TEST_F(PressureTest, OnlyCopyIsMovedWhereThePolicySaysSo) {
  ManagerOptions options;
  options.budgets = {{kPinned, Bytes(part_)}};  // for one: the other goes to pageable memory
  Manager& manager = make(ReclaimMode::kPolicy, std::move(options));
  const std::vector<Handle> handles = fill(manager);
  for (const Handle& handle : handles) {
    manager.drop(handle, kHost);
  }
  const at::Tensor large = on_device(3 * part_);
  EXPECT_EQ(num_at(manager, handles, kDevice), kNumParts - 3);
  EXPECT_EQ(num_at(manager, handles, kPinned) + num_at(manager, handles, kHost), 2);
  for (std::size_t i = 0; i < handles.size(); ++i) {
    const std::vector<Handle> it = {handles[i]};
    const Location at = num_at(manager, it, kDevice) == 1   ? kDevice
                        : num_at(manager, it, kPinned) == 1 ? kPinned
                                                            : kHost;
    EXPECT_EQ(byte_of(manager, handles[i], at), static_cast<int>(i));
  }
}

TEST_F(PressureTest, ReplicasLeaveBeforeAnOnlyCopyMoves) {
  Manager& manager = make(ReclaimMode::kPolicy);
  const std::vector<Handle> handles = fill(manager);
  for (std::size_t i = 0; i < 5; ++i) {
    manager.drop(handles[i], kHost);
  }
  const at::Tensor large = on_device(3 * part_);
  EXPECT_EQ(num_at(manager, handles, kDevice), kNumParts - 3);
  EXPECT_EQ(num_at(manager, {handles[5], handles[6]}, kDevice), 0);
}

// Case 27.
TEST_F(PressureTest, MissesOfTheCacheAreNoPressure) {
  Manager& manager = make(ReclaimMode::kPolicy);
  const std::vector<Handle> handles = fill(manager, 2);
  const std::uint64_t before = num_evicted();
  const auto pressed = CachingAllocatorPlugin::counters().num_pressed;
  for (int i = 0; i < 1000; ++i) {
    (void)on_device(i * 12'345 + 1);
  }
  EXPECT_EQ(num_evicted(), before);
  EXPECT_EQ(CachingAllocatorPlugin::counters().num_pressed, pressed);
}

TEST_F(PressureTest, ManagersOfTheProcessMakeRoomTogether) {
  Manager& one_manager = make(ReclaimMode::kReplicas);
  Manager& other = make(ReclaimMode::kReplicas);
  Manager& off = make(ReclaimMode::kOff);
  const std::vector<Handle> of_one = fill(one_manager, 2);
  const std::vector<Handle> of_other = fill(other, 2);
  const std::vector<Handle> of_off = fill(off, 3);
  const at::Tensor large = on_device(5 * part_);
  EXPECT_EQ(num_at(one_manager, of_one, kDevice) + num_at(other, of_other, kDevice), 0);
  EXPECT_EQ(num_at(off, of_off, kDevice), 3);
}

// The library's own allocations are like anybody's.
TEST_F(PressureTest, ValueMakesRoomForAnother) {
  Manager& manager = make(ReclaimMode::kReplicas);
  const std::vector<Handle> handles = fill(manager);
  const Handle large = value(manager, 2 * part_, 99, Mutability::kImmutable);
  manager.ensure(large, kDevice).wait();
  EXPECT_EQ(num_at(manager, handles, kDevice), kNumParts - 2);
  EXPECT_EQ(byte_of(manager, large, kDevice), 99);
}

// Small values share a segment: it goes only whole.
TEST_F(PressureTest, SegmentWithALeasedValueStays) {
  Manager& manager = make(ReclaimMode::kReplicas);
  std::vector<Handle> small;
  for (int i = 0; i < 20; ++i) {  // two segments of 10 MiB
    small.push_back(value(manager, kMiB, i, Mutability::kImmutable));
    manager.ensure(small.back(), kDevice).wait();
  }
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  ASSERT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  const auto rest = static_cast<std::int64_t>(free_bytes) / (2 * kMiB) * (2 * kMiB);
  at::Tensor fill_up = on_device(rest);
  Lease leased = manager.acquire(one(small[3]), kDevice);
  const at::Tensor fits = on_device(10 * kMiB);
  EXPECT_EQ(num_at(manager, small, kDevice), 10);
  EXPECT_TRUE(runs_out_of_memory(10 * kMiB));
  EXPECT_EQ(num_at(manager, small, kDevice), 10);
  leased.release();
  const at::Tensor fits_too = on_device(10 * kMiB);
  EXPECT_EQ(num_at(manager, small, kDevice), 0);
}

/// What `at::cuda::CUDAGraph` does around a capture, without its kernels.
template <class Allocator>
class Capture {
 public:
  explicit Capture(const c10::cuda::CUDAStream& stream) : stream_(stream) {
    allocator::get()->beginAllocateToPool(
        0, kPool, [stream](cudaStream_t each) { return each == stream.stream(); });
    if constexpr (requires(Allocator & of) { of.markCaptureBegin(0); }) {
      static_cast<Allocator*>(allocator::get())->markCaptureBegin(0);
    }
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture() {
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess) << "it stays valid";
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    if constexpr (requires(Allocator & of) { of.markCaptureEnd(0); }) {
      static_cast<Allocator*>(allocator::get())->markCaptureEnd(0);
    }
    allocator::get()->endAllocateToPool(0, kPool);
    allocator::get()->releasePool(0, kPool);
  }

 private:
  static constexpr c10::MempoolId_t kPool{0, 4712};
  const c10::cuda::CUDAStream stream_;
};

// Case 29.
TEST_F(PressureTest, NothingLeavesWhileAGraphIsCaptured) {
  Manager& manager = make(ReclaimMode::kPolicy);
  const std::vector<Handle> handles = fill(manager);
  const std::uint64_t before = num_evicted();
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  {
    const c10::cuda::CUDAStreamGuard guard(stream);
    const Capture<allocator::CUDAAllocator> capture(stream);
    EXPECT_TRUE(runs_out_of_memory(3 * part_));
    EXPECT_TRUE(on_device(1000).defined()) << "what fits goes on";
  }
  EXPECT_EQ(num_evicted(), before);
  EXPECT_EQ(num_at(manager, handles, kDevice), kNumParts - 1);
  EXPECT_FALSE(runs_out_of_memory(3 * part_)) << "afterwards they do";
}

TEST_F(PressureTest, ThreadsUnderPressureEachMakeRoom) {
  Manager& manager = make(ReclaimMode::kPolicy);
  const std::vector<Handle> handles = fill(manager);
  constexpr int kNumThreads = 4;
  std::atomic<int> num_failed{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < kNumThreads; ++i) {
    threads.emplace_back([&, i] {
      std::mt19937 random(static_cast<unsigned>(i));
      for (int round = 0; round < 30; ++round) {
        const Handle& handle = handles[random() % handles.size()];
        try {
          if (random() % 2 == 0) {
            (void)on_device(part_);
          } else {
            Lease lease = manager.borrow(one(handle), kDevice);
            lease.release();
          }
        } catch (const c10::OutOfMemoryError&) {
          ++num_failed;  // at most one part each is in use
        }
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(num_failed, 0);
  for (std::size_t i = 0; i < handles.size(); ++i) {
    EXPECT_EQ(byte_of(manager, handles[i], kHost), static_cast<int>(i));
  }
}

}  // namespace
}  // namespace residency::testing
