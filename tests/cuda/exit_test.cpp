// The end of the process with managers that nobody has closed (case 33). Each in a process of its
// own, which has used no device before the manager was made.

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <thread>

#include <gtest/gtest.h>

#include "residency/aten/manager.h"
#include "residency/cuda/cuda_layer.h"
#include "tests/aten/fixture.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/tier_fixture.h"

namespace residency::testing {
namespace {

class ManagerAtExit : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!simulated()) {
      GTEST_SKIP() << "the simulated runtime tells when copies come to an end";
    }
    GTEST_FLAG_SET(death_test_style, "threadsafe");
  }
  void TearDown() override { GTEST_FLAG_SET(death_test_style, "fast"); }

  static std::shared_ptr<Manager> make() {
    return create_manager({}, {.devices = make_cuda_layer()});
  }
  static Handle value(Manager& manager, std::int64_t nbytes) {
    return testing::value(manager, nbytes, 1, Mutability::kMutable);
  }
  /// Exits without a word, within the time of the test, as soon as `body` has run.
  static void expect_exits(const std::function<void()>& body) {
    const auto run = [&] {
      body();
      std::exit(::testing::Test::HasFailure() ? 1 : 0);
    };
    EXPECT_EXIT(run(), ::testing::ExitedWithCode(0), "^$");
  }
};

TEST_F(ManagerAtExit, StaticWithValuesOnADevice) {
  expect_exits([] {
    static const std::shared_ptr<Manager> manager = make();
    for (int i = 0; i < 8; ++i) {
      manager->ensure(value(*manager, 12 * kMiB), kDevice).wait();
    }
  });
}

TEST_F(ManagerAtExit, StaticWithCopiesInFlight) {
  for (const bool held : {false, true}) {
    expect_exits([held] {
      static const TemporaryDirectory directory;
      static const std::shared_ptr<Manager> manager =
          create_manager(with_disk(directory), {.devices = make_cuda_layer()});
      std::vector<Handle> pinned;
      for (int i = 0; i < 8; ++i) {
        pinned.push_back(value(*manager, 12 * kMiB));
        manager->ensure(pinned.back(), kPinned).wait();
        manager->drop(pinned.back(), kHost);
      }
      const Handle used = value(*manager, 12 * kMiB);
      manager->ensure(used, kDevice).wait();
      if (held) {  // the copies come behind a use that does not end
        const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
        EXPECT_EQ(simcuda_hold(consumer.stream()), 0) << simcuda_message();
        const at::Tensor into = on_device(1000);
        Lease lease = manager->acquire(one(used), kDevice, {.stream = named(consumer)});
        EXPECT_EQ(cudaMemcpyAsync(into.mutable_data_ptr(), tensors(lease, used)[0].const_data_ptr(),
                                  1000, cudaMemcpyDefault, consumer),
                  cudaSuccess);
        lease.release();
        manager->drop(used, kDevice);
      } else {
        EXPECT_EQ(simcuda_set("h2d", "1MB/s"), 0) << simcuda_message();
      }
      (void)manager->prefetch(std::span(pinned).first(4), kDevice);
      manager->ensure(pinned[4], kDevice);
      manager->move(pinned[5], kDevice);
      manager->ensure(value(*manager, 64 * kMiB), kDevice);  // staged
      manager->move(pinned[6], kDisk);
    });
  }
}

TEST_F(ManagerAtExit, LocalMadeAfterTheFirstUseOfADevice) {
  expect_exits([] {
    (void)on_device(1000);
    static const std::shared_ptr<Manager> manager = make();
    const Handle handle = value(*manager, 12 * kMiB);
    manager->ensure(handle, kPinned).wait();
    EXPECT_EQ(simcuda_set("h2d", "1MB/s"), 0) << simcuda_message();
    manager->prefetch(one(handle), kDevice);
    manager->ensure(value(*manager, 64 * kMiB), kDevice);
  });
}

// What waits for a copy on another thread is not left waiting, and files do not outlive the
// manager.
TEST_F(ManagerAtExit, StaticWithFilesAndAThreadThatWaits) {
  const TemporaryDirectory directory;
  ::setenv("RESIDENCY_EXIT_TEST", directory.path().c_str(), 0);  // the child's is its parent's
  const std::string path = std::getenv("RESIDENCY_EXIT_TEST");
  expect_exits([path] {
    static const std::shared_ptr<Manager> manager =
        create_manager(with_disk(path), {.devices = make_cuda_layer()});
    manager->move(value(*manager, kMiB), kDisk).wait();
    manager->ensure(value(*manager, kMiB), kDevice).wait();
    const ActionReport moved = manager->move(value(*manager, 64 * kMiB), kDisk);
    static std::jthread waiter([moved] { moved.wait(); });
  });
  for (const auto& each : std::filesystem::recursive_directory_iterator(path)) {
    ADD_FAILURE() << "left: " << each.path();
  }
  ::unsetenv("RESIDENCY_EXIT_TEST");
}

// A destructor of somebody's may still call the manager.
TEST_F(ManagerAtExit, StaticThatIsClosedByADestructor) {
  expect_exits([] {
    static const std::shared_ptr<Manager> manager = make();
    struct Closer {
      ~Closer() { manager->close({.force = true}); }
    };
    static const Closer closer;
    EXPECT_EQ(simcuda_set("h2d", "1MB/s"), 0) << simcuda_message();
    manager->ensure(value(*manager, 64 * kMiB), kDevice);
    const Handle handle = value(*manager, 12 * kMiB);
    manager->ensure(handle, kDevice);
  });
}

}  // namespace
}  // namespace residency::testing
