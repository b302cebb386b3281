// Each CUDA call that the moves make fails once, and devices are lost: typed errors, no value lost,
// and the manager works on. Only on the simulated runtime, which can be told to fail.

#include <cstdlib>
#include <functional>
#include <new>
#include <string_view>

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <sys/resource.h>
#include <unistd.h>

#include "residency/aten/manager.h"
#include "residency/core/errors.h"
#include "residency/core/warning.h"
#include "residency/cuda/cuda_layer.h"
#include "tests/aten/fixture.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/tier_fixture.h"

namespace residency::testing {
namespace {

class DeviceFault : public CudaTest {
 protected:
  void SetUp() override {
    if (!simulated()) {
      GTEST_SKIP() << "a GPU cannot be told to fail";
    }
  }

  static Handle value(Manager& manager, std::int64_t nbytes, int byte) {
    return testing::value(manager, nbytes, byte, Mutability::kMutable);
  }
  static bool holds(Manager& manager, const Handle& handle, Location at, int byte) {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return byte_of(manager, handle, at) == byte;
  }
  /// The good materializations of a value.
  static std::vector<Location> places(const Manager& manager, const Handle& handle) {
    std::vector<Location> found;
    for (const ValueSnapshot& each : manager.snapshot().values) {
      if (each.handle == handle) {
        for (const MaterializationSnapshot& materialization : each.materializations) {
          if (!materialization.stale) {
            found.push_back(materialization.location);
          }
        }
      }
    }
    return found;
  }

  static constexpr int kNumValues = 3;
  /// Every kind of transition between the tiers. Steps that throw are left out; says how many.
  static int run_scenario(Manager& manager, const std::vector<Handle>& handles) {
    int num_failed = 0;
    const auto step = [&](const std::function<void()>& body) {
      try {
        body();
      } catch (const Error&) {
        ++num_failed;
      } catch (const std::bad_alloc&) {
        ++num_failed;
      } catch (const c10::OutOfMemoryError&) {
        ++num_failed;
      }
    };
    const auto lease = [&](const Handle& handle, Location at, Access access) {
      Lease made = manager.borrow(one(handle), at, {.access = access});
      try {
        made.release();
      } catch (...) {
        made.release();  // it goes on until its use is recorded
        throw;
      }
    };
    for (const Handle& handle : handles) {
      step([&] { manager.ensure(handle, kPinned).wait(); });
      step([&] { manager.drop(handle, kHost); });
      step([&] { manager.move(handle, kDevice); });
      step([&] { lease(handle, kDevice, Access::kRead); });
      step([&] { manager.ensure(handle, kOther); });
      step([&] { lease(handle, kOther, Access::kWrite); });
      step([&] { manager.ensure(handle, kDevice); });  // refreshed in place
      step([&] { manager.drop(handle, kOther); });
      step([&] { manager.ensure(handle, kHost).wait(); });
      step([&] { manager.drop(handle, kDevice); });
      step([&] { manager.ensure(handle, kOther).wait(); });
      step([&] { manager.move(handle, kPinned); });
      step([&] { manager.move(handle, kDisk).wait(); });
      step([&] { manager.move(handle, kDevice).wait(); });
    }
    std::vector<ResidencyAction> to_host;
    std::vector<ResidencyAction> to_device;
    for (const Handle& handle : handles) {
      to_host.emplace_back(EnsureResident{handle, kPinned});
      to_device.emplace_back(EnsureResident{handle, kOther});
    }
    for (const OnFailure on_failure : {OnFailure::kRollback, OnFailure::kKeep}) {
      step([&] { manager.execute(to_host, {.on_failure = on_failure}); });
      step([&] { manager.execute(to_device, {.on_failure = on_failure}).wait(); });
    }
    for (const Handle& handle : handles) {  // into memory that is given back at once
      step([&] {
        manager.execute(std::vector<ResidencyAction>{EnsureResident{handle, kDevice},
                                                     DropResident{handle, kDevice}});
      });
    }
    step([&] { manager.synchronize(); });
    step([&] { (void)manager.trace(); });  // with the device's times
    return num_failed;
  }

  /// Only what is enqueued, while a consumer holds everything up.
  static int run_behind_a_consumer(Manager& manager, const std::vector<Handle>& handles) {
    int num_failed = 0;
    const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
    const Stream stream = named(consumer);
    // With this beside them no segment becomes empty: giving one back falls back on waiting.
    const Handle anchor = value(manager, 1000, 1);
    for (const Location device : {kDevice, kOther}) {
      manager.ensure(anchor, device).wait();
    }
    for (const Handle& handle : handles) {
      manager.ensure(handle, kPinned).wait();
      manager.drop(handle, kHost);
    }
    Gate gate(consumer);
    for (int round = 0; round < 2; ++round) {
      for (const Handle& handle : handles) {
        const auto step = [&](const std::function<void()>& body) {
          try {
            body();
          } catch (const Error&) {
            ++num_failed;
          }
        };
        step([&] { manager.move(handle, kDevice); });
        step([&] {
          Lease lease = manager.acquire(one(handle), kDevice, {.stream = stream});
          try {
            lease.release();
          } catch (...) {
            lease.release();
            throw;
          }
        });
        step([&] { manager.ensure(handle, kOther); });
        step([&] { manager.drop(handle, kOther); });
        step([&] { manager.move(handle, kPinned); });
      }
    }
    gate.open();
    manager.synchronize();
    return num_failed;
  }

  /// Copies ahead of need, of which one is given up before it is waited for.
  static int run_ahead_of_need(Manager& manager, const std::vector<Handle>& handles) {
    for (const Handle& handle : handles) {
      manager.ensure(handle, kPinned).wait();
    }
    int num_failed = 0;
    for (int round = 0; round < 2; ++round) {
      try {
        (void)manager.prefetch(handles, kDevice);
        manager.drop(handles.front(), kDevice);
        (void)manager.prefetch(handles, kDevice);
      } catch (const Error&) {
        ++num_failed;
      }
    }
    manager.synchronize();
    return num_failed;
  }

  [[noreturn]] static void exit_after(const std::function<void()>& body) {
    body();
    std::exit(::testing::Test::HasFailure() ? 1 : 0);
  }

  using Scenario = int (*)(Manager&, const std::vector<Handle>&);
  /// Runs the scenario with the first, the second, ... call failing. Returns in how many of these
  /// runs a step failed.
  static int fail_each_call(const char* entry_point, Scenario scenario) {
    std::uint64_t num_calls = 0;
    int num_failures = 0;
    for (std::uint64_t n = 0; n <= num_calls && !::testing::Test::HasFailure(); ++n) {
      SCOPED_TRACE(std::string(entry_point) + ", call " + std::to_string(n));
      c10::cuda::CUDACachingAllocator::emptyCache();
      const TemporaryDirectory directory;
      const auto manager = create_manager(with_disk(directory), {.devices = make_cuda_layer()});
      std::vector<Handle> handles;
      for (int i = 0; i < kNumValues; ++i) {
        handles.push_back(value(*manager, 100'000, 10 + i));
      }
      // Events are kept from one manager to the next: these take all there are.
      std::vector<FencePtr> fences;
      for (const Location device : {kDevice, kOther}) {
        Backend& backend = manager->backend();
        const std::uint64_t made = simcuda_calls("cudaEventCreateWithFlags");
        while (simcuda_calls("cudaEventCreateWithFlags") == made) {
          fences.push_back(backend.record_use(backend.current_stream(device)));
        }
      }
      const std::uint64_t before = simcuda_calls(entry_point);
      if (n != 0) {  // the first time counts
        EXPECT_EQ(simcuda_fail(entry_point, n - 1, 1, cudaErrorInvalidValue), 0);
      }
      const int num_failed = scenario(*manager, handles);
      num_failures += num_failed > 0 ? 1 : 0;
      const std::uint64_t made = simcuda_calls(entry_point) - before;
      EXPECT_EQ(simcuda_fail(entry_point, 0, 0, 0), 0);
      if (n == 0) {
        EXPECT_EQ(num_failed, 0);
        EXPECT_GT(made, 0U);
        num_calls = made;
      } else {
        // Before a wait it is asked of a capture, and what there is to wait for depends on time.
        const std::string_view name = entry_point;
        const bool is_as_often = name != "cudaStreamIsCapturing" && name != "cudaGetDevice" &&
                                 name != "cudaSetDevice" && name != "cudaEventSynchronize";
        EXPECT_TRUE(made >= n || !is_as_often) << "the fault has not happened";
      }
      manager->audit();
      for (int i = 0; i < kNumValues; ++i) {
        const Handle& handle = handles[static_cast<std::size_t>(i)];
        const std::vector<Location> found = places(*manager, handle);
        EXPECT_FALSE(found.empty()) << "value " << i << " is lost";
        EXPECT_NO_THROW(manager->ensure(handle, kPinned).wait());
        EXPECT_TRUE(holds(*manager, handle, kPinned, 10 + i)) << "value " << i;
        for (const Location at : found) {
          EXPECT_TRUE(at.is_disk() || holds(*manager, handle, at, 10 + i))
              << "value " << i << " at " << to_string(at);
        }
      }
      manager->close({.force = true});
    }
    return num_failures;
  }
};

// Case 12.
TEST_F(DeviceFault, EachCallFailsOnceAndNoValueIsLost) {
  for (const char* entry_point :
       {"cudaMalloc", "cudaMemcpyAsync", "cudaMemcpyPeerAsync", "cudaEventCreateWithFlags",
        "cudaEventRecord", "cudaStreamIsCapturing", "cudaHostRegister", "cudaEventSynchronize",
        "cudaGetDevice", "cudaSetDevice"}) {
    EXPECT_GT(fail_each_call(entry_point, &run_scenario), 0) << entry_point;
  }
}

// The order can be kept, or found out, in another way.
TEST_F(DeviceFault, CallsWhoseFailureIsMadeUpFor) {
  for (const char* entry_point :
       {"cudaEventQuery", "cudaThreadExchangeStreamCaptureMode", "cudaMemcpyBatchAsync",
        "cudaEventElapsedTime", "cudaDeviceGetPCIBusId"}) {
    EXPECT_EQ(fail_each_call(entry_point, &run_scenario), 0) << entry_point;
  }
}

// In a process of its own: the streams of a device are made once.
TEST_F(DeviceFault, StreamThatCannotBeMadeIsTriedAgain) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (std::uint64_t nth = 0; nth < 7; ++nth) {
    const auto body = [nth] {
      const auto manager = create_manager({}, {.devices = make_cuda_layer()});
      const Handle handle = value(*manager, 100'000, 1);
      manager->ensure(handle, kPinned).wait();
      ASSERT_EQ(simcuda_fail("cudaStreamCreateWithFlags", nth, 1, cudaErrorInvalidValue), 0);
      EXPECT_THROW(manager->ensure(handle, kDevice), Error);
      EXPECT_EQ(places(*manager, handle), (std::vector{kHost, kPinned}));
      manager->audit();
      manager->ensure(handle, kDevice);
      EXPECT_TRUE(holds(*manager, handle, kDevice, 1));
      manager->close();
    };
    EXPECT_EXIT(exit_after(body), ::testing::ExitedWithCode(0), "") << "stream " << nth;
  }
}

TEST_F(DeviceFault, CopyAheadOfNeedIsTriedAgain) {
  for (const char* entry_point : {"cudaMemcpyAsync", "cudaEventRecord"}) {
    EXPECT_EQ(fail_each_call(entry_point, &run_ahead_of_need), 0) << entry_point;
  }
}

TEST_F(DeviceFault, WaitsThatFailLoseNothing) {
  EXPECT_GT(fail_each_call("cudaStreamWaitEvent", &run_behind_a_consumer), 0);
}

// Case 2.
TEST_F(DeviceFault, PageLockThatIsRefusedIsATypedError) {
  const TemporaryDirectory directory;
  const auto manager = create_manager(with_disk(directory), {.devices = make_cuda_layer()});
  const Handle handle = value(*manager, 16 * kMiB, 7);
  const std::string limit = std::to_string(simcuda_pinned_bytes() + 4 * kMiB);
  ASSERT_EQ(simcuda_set("pinned_limit", limit.c_str()), 0) << simcuda_message();
  try {
    manager->ensure(handle, kPinned);
    ADD_FAILURE() << "more than may be locked";
  } catch (const PageLockError& error) {
    EXPECT_EQ(error.requested, Bytes(16 * kMiB));
  }
  // The buffers for staging are not to be had either, which is found out later.
  const ActionReport staged = manager->ensure(handle, kDevice);
  EXPECT_THROW(staged.wait(), TransferError);
  ASSERT_EQ(simcuda_set("pinned_limit", "none"), 0);
  EXPECT_EQ(places(*manager, handle), std::vector{kHost});
  manager->ensure(handle, kDevice).wait();
  EXPECT_TRUE(holds(*manager, handle, kDevice, 7));
  manager->move(handle, kPinned).wait();
  manager->audit();
  manager->close();
}

// The other half of case 2. In a process of its own, which is not root: root has no such limit.
TEST_F(DeviceFault, PlanThatWouldLockTooMuchIsRefusedBeforehand) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "only root can become somebody with a lower limit";
  }
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto body = [] {
    const rlimit limit{8 * kMiB, 8 * kMiB};
    ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    ASSERT_EQ(::seteuid(65534), 0);
    const auto manager = create_manager({}, {.devices = make_cuda_layer()});
    const Handle large = value(*manager, 16 * kMiB, 7);
    const Handle small = value(*manager, kMiB, 8);
    const std::vector<ResidencyAction> actions = {EnsureResident{small, kPinned},
                                                  EnsureResident{large, kPinned}};
    const Explanation explanation = manager->explain(actions);
    EXPECT_FALSE(explanation.feasible);
    EXPECT_NE(explanation.infeasible_because.find("ulimit -l"), std::string::npos)
        << explanation.infeasible_because;
    try {
      manager->execute(actions);
      ADD_FAILURE() << "more than may be locked";
    } catch (const PlanError& error) {
      EXPECT_EQ(error.index, 1U);
      EXPECT_TRUE(error.verdict.shortfall.of_system);
    }
    EXPECT_EQ(places(*manager, small), std::vector{kHost}) << "nothing was begun";
    EXPECT_THROW(manager->ensure(large, kPinned), PageLockError);
    manager->execute(std::vector<ResidencyAction>{EnsureResident{small, kPinned}}).wait();
    EXPECT_TRUE(holds(*manager, small, kPinned, 8));
    manager->close();
  };
  EXPECT_EXIT(exit_after(body), ::testing::ExitedWithCode(0), "");
}

// In a process of its own, as above. What is free in slabs is of no use to the buffers.
TEST_F(DeviceFault, StagingThatCannotBeLockedIsExplained) {
  if (::geteuid() != 0) {
    GTEST_SKIP() << "only root can become somebody with a lower limit";
  }
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto body = [] {
    const auto layer = make_cuda_layer();
    const auto manager = create_manager({}, {.devices = layer});
    for (const int byte : {1, 2, 3}) {
      const Handle handle = value(*manager, 8 * kMiB, byte);
      manager->ensure(handle, kPinned).wait();
    }
    for (const ValueSnapshot& each : manager->snapshot().values) {
      manager->drop(each.handle, kPinned);
    }
    EXPECT_EQ(layer->usage(kPinned).segments, Bytes(24 * kMiB)) << "more than the buffers need";
    const rlimit limit{8 * kMiB, 8 * kMiB};
    ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &limit), 0);
    ASSERT_EQ(::seteuid(65534), 0);
    const Handle handle = value(*manager, kMiB, 8);
    const std::vector<ResidencyAction> actions = {EnsureResident{handle, kDevice}};
    const Explanation explanation = manager->explain(actions);
    EXPECT_FALSE(explanation.feasible);
    EXPECT_NE(explanation.infeasible_because.find("ulimit -l"), std::string::npos)
        << explanation.infeasible_because;
    EXPECT_THROW(manager->execute(actions), PlanError);
    EXPECT_THROW(manager->ensure(handle, kDevice).wait(), TransferError) << "as was said";
    manager->close();
  };
  EXPECT_EXIT(exit_after(body), ::testing::ExitedWithCode(0), "");
}

TEST_F(DeviceFault, EmptySlabsGiveWayToOneThatIsNeeded) {
  const auto layer = make_cuda_layer();
  const auto manager = create_manager({}, {.devices = layer});
  const Handle first = value(*manager, 8 * kMiB, 1);
  manager->ensure(first, kPinned).wait();
  manager->drop(first, kPinned);
  const std::string limit = std::to_string(simcuda_pinned_bytes() + 6 * kMiB);
  ASSERT_EQ(simcuda_set("pinned_limit", limit.c_str()), 0) << simcuda_message();
  const Handle second = value(*manager, 12 * kMiB, 2);
  manager->ensure(second, kPinned).wait();
  ASSERT_EQ(simcuda_set("pinned_limit", "none"), 0);
  EXPECT_EQ(layer->usage(kPinned).segments, Bytes(12 * kMiB));
  EXPECT_TRUE(holds(*manager, second, kPinned, 2));
  manager->close();
}

TEST_F(DeviceFault, MemoryThatCannotBeUnlockedIsNotGivenBack) {
  const auto layer = make_cuda_layer();
  TensorResident fields({{"x", at::empty({100'000}, at::TensorOptions().dtype(at::kByte))}});
  const std::uint64_t locked = simcuda_pinned_bytes();
  (void)layer->allocate(fields.layout(), kPinned);
  EXPECT_EQ(simcuda_fail("cudaHostUnregister", 0, 1, cudaErrorInvalidValue), 0);
  (void)layer->trim();
  EXPECT_EQ(layer->usage(kPinned).segments, Bytes());
  EXPECT_GT(simcuda_pinned_bytes(), locked) << "others must not get pages that a device can reach";
}

// In a process of its own, as a lost device stays lost.
TEST_F(DeviceFault, LostDeviceTakesOnlyWhatWasThereAlone) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto body = [] {
    const TemporaryDirectory directory;
    const auto manager = create_manager(with_disk(directory), {.devices = make_cuda_layer()});
    const Handle kept = value(*manager, 100'000, 1);
    const Handle alone = value(*manager, 100'000, 2);
    const Handle elsewhere = value(*manager, 100'000, 3);
    manager->ensure(kept, kPinned).wait();
    manager->ensure(kept, kOther).wait();
    manager->move(alone, kPinned).wait();
    manager->move(alone, kOther).wait();
    manager->ensure(elsewhere, kDevice).wait();
    Lease lease = manager->acquire(one(kept), kOther);
    EXPECT_EQ(simcuda_break_device(1, cudaErrorIllegalAddress), 0);
    EXPECT_NO_THROW(lease.release());
    try {
      manager->move(alone, kPinned);
      FAIL() << "the device is lost";
    } catch (const DeviceLostError& error) {
      EXPECT_EQ(error.device, kOther);
    }
    EXPECT_THROW(manager->ensure(elsewhere, kOther).wait(), Error);
    manager->audit();
    manager->drop(kept, kOther);
    manager->move(kept, kDevice);
    EXPECT_TRUE(holds(*manager, kept, kDevice, 1));
    EXPECT_TRUE(holds(*manager, elsewhere, kDevice, 3));
    manager->move(elsewhere, kDisk).wait();
    manager->audit();
    manager->close({.force = true});
  };
  EXPECT_EXIT(exit_after(body), ::testing::ExitedWithCode(0), "");
}

TEST_F(DeviceFault, LossOfOneDeviceIsNotThatOfAnother) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto body = [] {
    const auto manager = create_manager({}, {.devices = make_cuda_layer()});
    const Handle handle = value(*manager, 16 * kMiB, 7);
    manager->move(handle, kPinned).wait();
    manager->move(handle, kOther).wait();
    const Handle other = value(*manager, kMiB, 8);
    manager->ensure(other, kDevice).wait();
    manager->drop(other, kDevice);
    ASSERT_EQ(simcuda_set("d2h", "1MB/s"), 0) << simcuda_message();
    manager->ensure(handle, kPinned);
    const PlanReport behind = manager->prefetch(one(handle), kDevice);  // what will not come
    EXPECT_EQ(simcuda_break_device(1, cudaErrorIllegalAddress), 0);
    try {
      behind.wait();
      ADD_FAILURE() << "its source is lost";
    } catch (const TransferError& error) {
      EXPECT_THROW(std::rethrow_exception(error.cause), DeviceLostError);
    }
    manager->ensure(other, kDevice).wait();
    EXPECT_TRUE(holds(*manager, other, kDevice, 8));
    manager->audit();
    manager->close({.force = true});
  };
  EXPECT_EXIT(exit_after(body), ::testing::ExitedWithCode(0), "");
}

// CUDA answers with the errors of earlier work, of which it does not say where it was.
TEST_F(DeviceFault, CurrentDeviceThatIsNotToldEndsNothing) {
  for (const cudaError_t error : {cudaErrorInvalidValue, cudaErrorIllegalAddress}) {
    const auto layer = make_cuda_layer();
    const auto manager = create_manager({}, {.devices = layer});
    const auto with_failure = [&](const char* what, const std::function<void()>& call) {
      SCOPED_TRACE(what);
      EXPECT_EQ(simcuda_fail("cudaGetDevice", 0, 1, error), 0);
      try {
        call();
      } catch (const Error& typed) {
        EXPECT_EQ(std::string_view(typed.what()).find("pinned-host failed"), std::string_view::npos)
            << typed.what();
      }
      EXPECT_EQ(simcuda_fail("cudaGetDevice", 0, 0, 0), 0);
      manager->audit();
    };
    const Handle handle = value(*manager, 100'000, 1);
    const Handle taken = value(*manager, 100'000, 2);
    manager->ensure(taken, kPinned).wait();
    manager->ensure(handle, kPinned).wait();
    manager->ensure(handle, kDevice).wait();
    with_failure("drop", [&] { manager->drop(handle, kPinned); });
    with_failure("drop from the device", [&] { manager->drop(handle, kDevice); });
    with_failure("ensure", [&] { manager->ensure(handle, kDevice).wait(); });
    with_failure("move", [&] { manager->move(handle, kPinned, kDevice).wait(); });
    with_failure("synchronize", [&] { manager->synchronize(); });
    with_failure("trim", [&] { (void)layer->trim(); });
    with_failure("adopt", [&] { manager->discard(value(*manager, 1000, 3)); });
    EXPECT_FALSE(layer->is_lost(kDevice));
    manager->ensure(handle, kDevice).wait();
    EXPECT_TRUE(holds(*manager, handle, kDevice, 1));
    TensorResident tensors({{"x", at::empty({1}, at::TensorOptions().dtype(at::kByte))}});
    with_failure("take", [&] { tensors = take(*manager, taken, kPinned); });
    EXPECT_EQ(simcuda_fail("cudaGetDevice", 0, 1, error), 0);
    try {
      manager->close({.force = true});
    } catch (const UnavailableError&) {
      manager->close({.force = true});
    }
    EXPECT_EQ(simcuda_fail("cudaGetDevice", 0, 0, 0), 0);
  }
}

// Nobody knows when the work that reads it is over.
TEST_F(DeviceFault, SegmentGoesToNobodyWhereItsUsesCannotBeWaitedFor) {
  const auto layer = make_cuda_layer();
  const auto manager = create_manager({}, {.devices = layer});
  const Handle handle = value(*manager, 32 * kMiB, 7);
  manager->ensure(handle, kPinned).wait();
  const std::int64_t before = allocated_bytes();
  manager->ensure(handle, kDevice).wait();
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  Gate gate(consumer);
  manager->acquire(one(handle), kDevice, {.stream = named(consumer)}).release();
  EXPECT_EQ(simcuda_fail("cudaStreamWaitEvent", 0, 1, cudaErrorInvalidValue), 0);
  EXPECT_EQ(simcuda_fail("cudaEventSynchronize", 0, 2000, cudaErrorInvalidValue), 0);
  EXPECT_EQ(simcuda_fail("cudaDeviceSynchronize", 0, 1, cudaErrorInvalidValue), 0);
  manager->drop(handle, kDevice);
  EXPECT_EQ(simcuda_fail("cudaEventSynchronize", 0, 0, 0), 0);
  EXPECT_EQ(layer->usage(kDevice).segments, Bytes());
  EXPECT_EQ(allocated_bytes(), before + 32 * kMiB);
  gate.open();
}

// The copy comes from the device that was lost, and not to it.
TEST_F(DeviceFault, LastIntactCopyIsNotGivenUpForOneThatWillNotCome) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto body = [] {
    const auto manager = create_manager({}, {.devices = make_cuda_layer()});
    const Handle handle = value(*manager, 16 * kMiB, 7);
    manager->ensure(handle, kDevice).wait();
    manager->ensure(handle, kOther).wait();
    manager->drop(handle, kDevice);
    ASSERT_EQ(simcuda_set("d2h", "1MB/s"), 0) << simcuda_message();
    const ActionReport moved = manager->move(handle, kPinned, kOther);
    EXPECT_EQ(simcuda_break_device(1, cudaErrorIllegalAddress), 0);
    EXPECT_THROW(manager->drop(handle, kHost), OwnershipError);
    EXPECT_ANY_THROW((void)manager->acquire(one(handle), kPinned));
    EXPECT_TRUE(holds(*manager, handle, kHost, 7));
    EXPECT_EQ(places(*manager, handle).front(), kHost);
    manager->audit();
    manager->ensure(handle, kDevice).wait();
    EXPECT_TRUE(holds(*manager, handle, kDevice, 7));
    manager->drop(handle, kPinned);
    manager->audit();
    manager->close({.force = true});
  };
  EXPECT_EXIT(exit_after(body), ::testing::ExitedWithCode(0), "");
}

TEST_F(DeviceFault, UseThatCannotBeRecordedWhenTheManagerClosesKeepsItsMemory) {
  set_warning_handler([](std::string_view) {});
  for (const std::uint64_t num_failures : {1U, 1000U}) {
    const auto layer = make_cuda_layer();
    const auto manager = create_manager({}, {.devices = layer});
    const auto other = create_manager({}, {.devices = layer});
    const Handle anchor = value(*other, 1000, 1);  // the segment stays
    other->ensure(anchor, kDevice).wait();
    const Handle handle = value(*manager, kMiB, 7);
    manager->ensure(handle, kDevice).wait();
    const Handle next = value(*other, kMiB, 9);
    other->ensure(next, kPinned).wait();
    const at::Tensor read = on_device(kMiB);
    const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
    Gate gate(consumer);
    Lease lease = manager->acquire(one(handle), kDevice, {.stream = named(consumer)});
    ASSERT_EQ(cudaMemcpyAsync(read.mutable_data_ptr(), tensors(lease, handle)[0].const_data_ptr(),
                              kMiB, cudaMemcpyDefault, consumer),
              cudaSuccess);
    EXPECT_EQ(simcuda_fail("cudaEventRecord", 0, num_failures, cudaErrorInvalidValue), 0);
    manager->close({.wait = false, .force = true});
    EXPECT_EQ(simcuda_fail("cudaEventRecord", 0, 0, 0), 0);
    other->ensure(next, kDevice);
    gate.open();
    consumer.synchronize();
    std::uint8_t byte = 0;
    EXPECT_EQ(cudaMemcpy(&byte, read.const_data_ptr(), 1, cudaMemcpyDefault), cudaSuccess);
    EXPECT_EQ(byte, 7);
    EXPECT_TRUE(holds(*other, next, kDevice, 9));
    other->close();
  }
  set_warning_handler(nullptr);
}

TEST_F(DeviceFault, LastIntactCopyIsNotGivenUpForOneThatWasLost) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const bool is_known : {false, true}) {
    const auto body = [is_known] {
      const TemporaryDirectory directory;
      const auto manager = create_manager(with_disk(directory), {.devices = make_cuda_layer()});
      const Handle pinned = value(*manager, 100'000, 1);
      const Handle pageable = value(*manager, 100'000, 2);
      const Handle known = value(*manager, 100'000, 3);
      manager->ensure(known, kDevice).wait();  // or the current device would still be the other
      manager->drop(known, kDevice);
      for (const Handle& handle : {pinned, pageable, known}) {
        manager->ensure(handle, kOther).wait();
      }
      manager->move(pinned, kPinned, kHost).wait();
      EXPECT_EQ(simcuda_break_device(1, cudaErrorIllegalAddress), 0);
      if (is_known) {
        EXPECT_THROW(manager->ensure(value(*manager, 1000, 4), kOther).wait(), Error);
      }
      EXPECT_ANY_THROW(manager->drop(pinned, kPinned));
      EXPECT_ANY_THROW(manager->move(pinned, kOther));
      EXPECT_ANY_THROW(manager->move(pageable, kOther, kHost));
      EXPECT_THROW((void)manager->acquire(one(pinned), kOther), DeviceLostError);
      EXPECT_THROW(manager->ensure(pinned, kOther), DeviceLostError);
      EXPECT_THROW((void)manager->hold(one(pinned), kOther), DeviceLostError);
      const std::vector<ResidencyAction> drop = {DropResident{pageable, kHost}};
      EXPECT_FALSE(manager->explain(drop).feasible);
      manager->audit();
      EXPECT_TRUE(holds(*manager, pinned, kPinned, 1));
      EXPECT_TRUE(holds(*manager, pageable, kHost, 2));
      EXPECT_EQ(take(*manager, known)["x"].const_data_ptr<std::uint8_t>()[0], 3);
      manager->drop(pinned, kOther);
      manager->move(pageable, kDisk, kHost).wait();
      manager->move(pageable, kHost).wait();
      EXPECT_TRUE(holds(*manager, pageable, kHost, 2));
      manager->close({.force = true});
    };
    EXPECT_EXIT(exit_after(body), ::testing::ExitedWithCode(0), "") << is_known;
  }
}

}  // namespace
}  // namespace residency::testing
