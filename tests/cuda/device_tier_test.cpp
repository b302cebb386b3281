// Values on devices and in page-locked memory, through the manager. Cases 6 to 10 of the field.

#include <array>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <future>
#include <random>
#include <thread>

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "residency/aten/manager.h"
#include "residency/aten/tensor_source.h"
#include "residency/core/errors.h"
#include "residency/core/warning.h"
#include "residency/cuda/cuda_layer.h"
#include "tests/aten/fixture.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/tier_fixture.h"

namespace residency::testing {
namespace {

TEST_F(DeviceTier, BytesSurviveEveryWayThroughTheTiers) {
  TemporaryDirectory directory;
  manager_ = make(layer_, with_disk(directory));
  const Handle handle = value(3'000'000, 42);
  const Location way[] = {kPinned, kDevice, kOther, kPinned, kOther,  kHost, kDevice,
                          kDisk,   kOther,  kHost,  kOther,  kDevice, kHost};
  for (const Location to : way) {
    manager_->move(handle, to);
    const Snapshot snapshot = manager_->snapshot();
    EXPECT_EQ(snapshot.find(to)->used,
              manager_->backend().occupied_bytes(manager_->spec(handle), to))
        << to_string(to);
  }
  manager_->synchronize();
  EXPECT_EQ(byte_of(handle, kHost), 42);
}

std::int64_t max_memory_allocated(Location at) {
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return c10::cuda::CUDACachingAllocator::getDeviceStats(
             static_cast<c10::DeviceIndex>(at.cuda_index()))
      .allocated_bytes[kAll]
      .peak;
}

/// Counts what is asked of PyTorch's allocator for pageable memory while it lives.
class CountingAllocator final : public c10::Allocator {
 public:
  CountingAllocator() : former_(c10::GetCPUAllocator()) { c10::SetCPUAllocator(this, kPriority); }
  ~CountingAllocator() override { c10::SetCPUAllocator(former_, kPriority); }
  CountingAllocator(const CountingAllocator&) = delete;
  CountingAllocator& operator=(const CountingAllocator&) = delete;
  c10::DataPtr allocate(std::size_t nbytes) override {
    num_bytes += nbytes;
    return former_->allocate(nbytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return former_->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
  std::atomic<std::size_t> num_bytes{0};

 private:
  static constexpr std::uint8_t kPriority = 100;
  c10::Allocator* const former_;
};

// Charges of pageable memory would not be what is taken there.
TEST_F(DeviceTier, BytesOfFilesAndDevicesTakeNoPageableMemory) {
  TemporaryDirectory directory;
  manager_ = make(layer_, with_disk(directory));
  TensorResident fields({{"a", at::empty({33 * kMiB + 5}, at::TensorOptions().dtype(at::kByte))},
                         {"b", at::empty({777}, at::TensorOptions().dtype(at::kByte))}});
  for (std::int64_t i = 0; i < fields["a"].numel(); ++i) {
    static_cast<std::uint8_t*>(fields["a"].mutable_data_ptr())[i] =
        static_cast<std::uint8_t>(i * 7 / 1000);
  }
  std::memset(fields["b"].mutable_data_ptr(), 9, 777);
  const at::Tensor expected = fields["a"].clone();
  const Handle handle = adopt(*manager_, std::move(fields));
  manager_->move(handle, kDevice).wait();
  {
    const CountingAllocator allocator;
    for (const Location to : {kDisk, kOther, kDisk, kDevice}) {
      manager_->move(handle, to).wait();
    }
    EXPECT_EQ(allocator.num_bytes, 0U);
  }
  manager_->move(handle, kHost).wait();
  const TensorResident back = take(*manager_, handle);
  EXPECT_TRUE(back["a"].equal(expected));
  EXPECT_EQ(static_cast<const std::uint8_t*>(back["b"].const_data_ptr())[776], 9);
}

// Their allocations are neighbours here and there, and a copy must not span two.
TEST_F(DeviceTier, ManyFieldsAdoptedOnADeviceCanLeaveIt) {
  TemporaryDirectory directory;
  manager_ = make(layer_, with_disk(directory));
  constexpr int kNumFields = 1100;
  TensorResident::Fields made;
  for (int i = 0; i < kNumFields; ++i) {
    made.emplace_back(std::to_string(i), on_device(4096));
    EXPECT_EQ(cudaMemset(made.back().second.mutable_data_ptr(), i % 251, 4096), cudaSuccess);
  }
  const Handle handle =
      adopt(*manager_, TensorResident(std::move(made)), {.mode = ReplicaMode::kReplicable});
  for (const Location to : {kDisk, kHost}) {
    manager_->ensure(handle, to).wait();
  }
  manager_->drop(handle, kDevice);
  manager_->ensure(handle, kOther).wait();
  manager_->drop(handle, kHost);
  manager_->ensure(handle, kHost).wait();
  Lease lease = manager_->acquire(one(handle), kHost);
  for (int i = 0; i < kNumFields; ++i) {
    const auto* bytes = static_cast<const std::uint8_t*>(
        tensors(lease, handle)[std::to_string(i)].const_data_ptr());
    ASSERT_EQ(bytes[0], i % 251);
    ASSERT_EQ(bytes[4095], i % 251);
  }
  lease.release();
}

TEST_F(DeviceTier, WhatAWorkerReadsIsInThePredictionToTheEnd) {
  constexpr std::int64_t kBytes = 64 * kMiB;
  const Handle first = value(kBytes, 1);
  const Handle second = value(kBytes, 2);
  manager_->move(first, kDevice).wait();
  manager_->move(second, kPinned).wait();
  const std::vector<ResidencyAction> actions = {EnsureResident{first, kHost},
                                                MoveResident{first, kOther, kDevice},
                                                EnsureResident{second, kDevice}};
  const Explanation explanation = manager_->explain(actions);
  c10::cuda::CUDACachingAllocator::resetPeakStats(0);
  manager_->execute(actions);
  EXPECT_EQ(explanation.find(kDevice)->segments->peak, Bytes(2 * kBytes));
  EXPECT_LE(max_memory_allocated(kDevice), 2 * kBytes);
  manager_->synchronize();
  EXPECT_EQ(byte_of(second, kDevice), 2);
}

TEST_F(DeviceTier, FieldsKeepTheirShapesAndStayTied) {
  const at::Tensor base = at::empty({4, 6}, at::TensorOptions().dtype(at::kFloat));
  for (int i = 0; i < 24; ++i) {
    static_cast<float*>(base.mutable_data_ptr())[i] = static_cast<float>(i);
  }
  const at::Tensor other = base.clone();
  TensorResident fields(
      {{"base", base}, {"slice", base.slice(0, 1, 3)}, {"transposed", base.t()}, {"other", other}});
  const Handle handle = adopt(*manager_, std::move(fields));
  for (const Location to : {kPinned, kDevice, kOther, kHost}) {
    manager_->move(handle, to);
    Lease lease = manager_->acquire(one(handle), to);
    const TensorResident& view = tensors(lease, handle);
    EXPECT_TRUE(view["slice"].storage().is_alias_of(view["base"].storage()));
    EXPECT_TRUE(view["transposed"].storage().is_alias_of(view["base"].storage()));
    EXPECT_FALSE(view["other"].storage().is_alias_of(view["base"].storage()));
    EXPECT_EQ(view["slice"].storage_offset(), 6);
    EXPECT_EQ(view["transposed"].strides(), base.t().strides());
    EXPECT_EQ(view["base"].device().is_cuda(), to.is_cuda());
    EXPECT_EQ(view["base"].is_pinned(), to == kPinned);
    lease.release();
  }
  const TensorResident back = take(*manager_, handle);
  EXPECT_TRUE(back["transposed"].equal(other.t()));
}

// Cases 6 and 7.
TEST_F(DeviceTier, MoveReadsWhatAProducerIsStillWriting) {
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  const at::Tensor seven = page_locked(kMiB);
  std::memset(seven.mutable_data_ptr(), 7, kMiB);
  Gate gate(producer);
  at::Tensor made = on_device(kMiB);
  ASSERT_EQ(cudaMemcpyAsync(made.mutable_data_ptr(), seven.const_data_ptr(), kMiB,
                            cudaMemcpyHostToDevice, producer),
            cudaSuccess);
  TensorResident fields({{"x", std::move(made)}});
  const Handle handle = adopt(*manager_, std::move(fields), {.stream = named(producer)});
  manager_->move(handle, kPinned);
  // What was given up is still being read: the same size, on the caller's stream, is other memory.
  at::Tensor again = on_device(kMiB);
  ASSERT_EQ(cudaMemsetAsync(again.mutable_data_ptr(), 255, kMiB, current(kDevice)), cudaSuccess);
  if (simulated()) {
    EXPECT_EQ(counters().busy_host_syncs, 0U);
  }
  gate.open();
  EXPECT_EQ(byte_of(handle, kPinned), 7);
}

TEST_F(DeviceTier, MemoryIsReusedBehindTheConsumerThatStillReadsIt) {
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  const at::Tensor read = page_locked(kMiB);
  std::memset(read.mutable_data_ptr(), 0, kMiB);
  const Handle first = value(kMiB, 1);
  const Handle second = value(kMiB, 2);
  for (const Handle& handle : {first, second}) {
    manager_->ensure(handle, kPinned).wait();
  }
  manager_->ensure(first, kDevice);
  Gate gate(consumer);
  Lease lease = manager_->acquire(one(first), kDevice, {.stream = named(consumer)});
  const void* address = tensors(lease, first)["x"].const_data_ptr();
  ASSERT_EQ(
      cudaMemcpyAsync(read.mutable_data_ptr(), address, kMiB, cudaMemcpyDeviceToHost, consumer),
      cudaSuccess);
  lease.release();
  manager_->drop(first, kDevice);
  manager_->ensure(second, kDevice);
  Lease again = manager_->acquire(one(second), kDevice);
  EXPECT_EQ(tensors(again, second)["x"].const_data_ptr(), address) << "in device order, at once";
  again.release();
  if (simulated()) {
    EXPECT_EQ(counters().busy_host_syncs, 0U);
  }
  gate.open();
  consumer.synchronize();
  EXPECT_EQ(static_cast<const char*>(read.const_data_ptr())[kMiB - 1], 1);
  EXPECT_EQ(byte_of(second, kDevice), 2);
}

// Case 8.
TEST_F(DeviceTier, EnsureBehindAWriteBackThatIsInFlight) {
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  const Handle handle = value(kMiB, 5);
  manager_->ensure(handle, kPinned).wait();
  manager_->drop(handle, kHost);
  manager_->move(handle, kDevice);
  Gate gate(consumer);
  manager_->acquire(one(handle), kDevice, {.stream = named(consumer)}).release();
  const ActionReport out = manager_->move(handle, kPinned);
  const ActionReport in = manager_->ensure(handle, kDevice);
  EXPECT_EQ(in.record().path, TransferPath::kDirect);
  EXPECT_FALSE(in.record().waited);
  if (simulated()) {
    EXPECT_EQ(counters().busy_host_syncs, 0U);
  }
  gate.open();
  EXPECT_EQ(byte_of(handle, kDevice), 5);
  EXPECT_EQ(byte_of(handle, kPinned), 5);
}

// Case 9.
TEST_F(DeviceTier, SixteenThreadsThatEnsureOneValueMakeOneCopy) {
  const Handle handle = value(kMiB, 6);
  manager_->ensure(handle, kPinned).wait();
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      Lease lease = manager_->borrow(one(handle), kDevice);
      EXPECT_TRUE(tensors(lease, handle)["x"].is_cuda());
      lease.release();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  int num_copies = 0;
  for (const TransitionRecord& entry : manager_->trace()) {
    num_copies += entry.destination == kDevice && !entry.no_op() ? 1 : 0;
  }
  EXPECT_EQ(num_copies, 1);
  EXPECT_EQ(byte_of(handle, kDevice), 6);
}

// Case 10.
TEST_F(DeviceTier, CallersDeviceAndStreamAreWhatTheyWere) {
  const c10::cuda::CUDAStream side = c10::cuda::getStreamFromPool(false, 1);
  const c10::cuda::CUDAStreamGuard guard(side);
  c10::cuda::set_device(0);
  const Handle handle = value(kMiB, 8);
  for (const Location to : {kPinned, kOther, kDevice, kPinned, kOther}) {
    manager_->move(handle, to);
    EXPECT_EQ(c10::cuda::current_device(), 0);
    EXPECT_EQ(current(kOther), side);
  }
  EXPECT_EQ(manager_->trace().back().destination, kOther);
  EXPECT_EQ(byte_of(handle, kOther), 8);
}

// PyTorch puts off the way back to a device without a context, so that CUDA is at the other one.
// Not of the fixture, which gives each a context; and so it tells something in a process of its
// own.
TEST(DevicesWithoutContext, ThreadThatUsedAnotherDeviceFindsTheOneThatWasUsedMeanwhile) {
  const auto manager = create_manager({}, {.devices = make_cuda_layer()});
  const Handle handle = value(*manager, kMiB, 3, Mutability::kImmutable);
  const Handle between = value(*manager, kMiB, 4, Mutability::kImmutable);
  std::promise<void> used_other;
  std::promise<void> used_device;
  std::thread first([&] {
    manager->ensure(handle, kOther).wait();
    manager->ensure(handle, kPinned).wait();
    used_other.set_value();
    used_device.get_future().wait();
    for (int i = 0; i < 3; ++i) {  // events of the other device would be used again
      EXPECT_NO_THROW(manager->ensure(handle, kDevice).wait());
      EXPECT_NO_THROW(manager->drop(handle, i < 2 ? kDevice : kOther));
    }
  });
  used_other.get_future().wait();
  std::thread second([&] { manager->ensure(between, kDevice).wait(); });
  second.join();
  used_device.set_value();
  first.join();
  EXPECT_EQ(byte_of(*manager, handle, kDevice), 3);
  EXPECT_EQ(byte_of(*manager, between, kDevice), 4);
  manager->close();
}

TEST_F(DeviceTier, StreamOfAnotherDeviceIsRefused) {
  const c10::cuda::CUDAStream other = c10::cuda::getStreamFromPool(false, 1);
  const Handle handle = value(kMiB, 8);
  manager_->ensure(handle, kPinned).wait();
  EXPECT_THROW(manager_->ensure(handle, kDevice, {.stream = named(other)}), std::invalid_argument);
  manager_->ensure(handle, kDevice);
  EXPECT_THROW((void)manager_->acquire(one(handle), kDevice, {.stream = named(other)}),
               std::invalid_argument);
  TensorResident fields({{"x", on_device(100)}});
  EXPECT_THROW((void)adopt(*manager_, std::move(fields), {.stream = named(other)}),
               std::invalid_argument);
}

TEST_F(DeviceTier, NothingWaitsBetweenADeviceAndPageLockedMemory) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime counts";
  }
  constexpr int kNumValues = 20;
  std::vector<Handle> handles;
  for (int i = 0; i < kNumValues; ++i) {
    handles.push_back(value(kMiB, i));
    manager_->ensure(handles.back(), kPinned).wait();
    manager_->drop(handles.back(), kHost);
  }
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  {  // the streams are made and a segment is there
    manager_->ensure(handles[0], kDevice);
    manager_->move(handles[0], kPinned);
    manager_->synchronize();
  }
  Gate gate(consumer);
  simcuda_reset_counters();
  const ActionOptions impatient{.may_block = false};
  for (int round = 0; round < 3; ++round) {
    for (const Handle& handle : handles) {
      manager_->move(handle, kDevice, std::nullopt, impatient);
      manager_->acquire(one(handle), kDevice, {.stream = named(consumer), .may_block = false})
          .release();
      EXPECT_FALSE(manager_->move(handle, kPinned, std::nullopt, impatient).record().waited);
    }
  }
  EXPECT_EQ(counters().host_syncs, 0U);
  EXPECT_EQ(counters().blocked_time, 0U);
  gate.open();
  for (int i = 0; i < kNumValues; ++i) {
    EXPECT_EQ(byte_of(handles[static_cast<std::size_t>(i)], kPinned), i);
  }
}

TEST_F(DeviceTier, SmallCopyIsDoneBeforeWhatWasEnqueuedBehindIt) {
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  std::vector<Handle> small;
  for (int i = 0; i < 3; ++i) {
    small.push_back(value(4096, i));
    manager_->move(small.back(), kDevice).wait();
  }
  Gate gate(producer);
  TensorResident fields({{"x", on_device(4096)}});
  const Handle late = adopt(*manager_, std::move(fields),
                            {.mode = ReplicaMode::kReplicable, .stream = named(producer)});
  std::vector<ActionReport> reports;
  for (const Handle& handle : small) {
    reports.push_back(manager_->ensure(handle, kPinned));
  }
  const ActionReport waiting = manager_->ensure(late, kPinned);
  for (const ActionReport& report : reports) {
    report.wait();
    EXPECT_GT(report.record().device_elapsed_ns.value_or(0), 0);
  }
  EXPECT_FALSE(waiting.done());
  gate.open();
  waiting.wait();
}

// Page-locked memory that was given up stays locked until the thread that copies it is done.
TEST_F(DeviceTier, WhatAThreadStillReadsCountsUntilItIsDone) {
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  const Handle next = value(kMiB, 2);
  manager_->move(next, kPinned).wait();  // not staged: no buffers count there
  manager_->move(next, kDevice).wait();
  Gate gate(producer);
  const Handle late = adopt(*manager_, TensorResident({{"x", on_device(kMiB)}}),
                            {.mode = ReplicaMode::kReplicable, .stream = named(producer)});
  manager_->ensure(late, kPinned);
  const ActionReport away = manager_->move(late, kHost, kPinned);
  EXPECT_EQ(manager_->snapshot().find(kPinned)->used, Bytes());
  EXPECT_EQ(manager_->snapshot().find(kPinned)->retiring, Bytes(kMiB));
  manager_->set_budget(kPinned, Bytes(kMiB));
  const ResidencyPlan plan({.name = "next", .enter = {EnsureResident{next, kPinned}}});
  EXPECT_TRUE(manager_->explain(plan).actions.front().verdict.waits);
  EXPECT_THROW(manager_->ensure(next, kPinned, {.may_block = false}), BudgetError);
  gate.open();
  manager_->ensure(next, kPinned).wait();
  away.wait();
  EXPECT_EQ(manager_->snapshot().find(kPinned)->retiring, Bytes());
  EXPECT_EQ(byte_of(next, kPinned), 2);
}

// The thread that refreshes it may still be at it when it is dropped: so explain counts on both.
TEST_F(DeviceTier, WhatAThreadStillRefreshesIsNoRoomForTheNext) {
  const Handle written = value(kMiB, 1, Mutability::kMutable);
  const Handle next = value(kMiB, 2);
  manager_->ensure(written, kPinned).wait();
  manager_->acquire(one(written), kHost, {.access = Access::kWrite}).release();
  const std::vector<ResidencyAction> actions = {EnsureResident{written, kPinned},
                                                DropResident{written, kPinned},
                                                EnsureResident{next, kPinned}};
  const Explanation explanation = manager_->explain(actions);
  ASSERT_TRUE(explanation.feasible);
  EXPECT_EQ(explanation.actions[0].verdict.reason, Reason::kRefreshed);
  manager_->set_budget(kPinned, Bytes(kMiB));
  EXPECT_TRUE(manager_->explain(actions).actions[2].verdict.waits);
}

TEST_F(DeviceTier, SmallCopiesOfOneExecuteAreEnqueuedTogether) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime counts";
  }
  constexpr int kNumValues = 1000;
  std::vector<Handle> handles;
  std::vector<ResidencyAction> actions;
  for (int i = 0; i < kNumValues; ++i) {
    handles.push_back(value(4096, i % 128));
    manager_->ensure(handles.back(), kPinned).wait();
    actions.emplace_back(EnsureResident{handles.back(), kDevice});
  }
  simcuda_reset_counters();
  const PlanReport report = manager_->execute(actions);
  EXPECT_LE(simcuda_calls("cudaMemcpyBatchAsync"), 4U);
  EXPECT_EQ(simcuda_calls("cudaMemcpyAsync"), 0U);
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], kNumValues) << "nothing waits for somebody to ask";
  report.wait();
  for (int i = 0; i < kNumValues; i += 111) {
    EXPECT_EQ(byte_of(handles[static_cast<std::size_t>(i)], kDevice), i % 128);
  }
}

TEST_F(DeviceTier, SmallMovesOfOneExecuteAreEnqueuedTogether) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime counts";
  }
  constexpr int kNumValues = 100;
  std::vector<Handle> handles;
  std::vector<ResidencyAction> actions;
  for (int i = 0; i < kNumValues; ++i) {
    handles.push_back(value(4096, i));
    manager_->move(handles.back(), kPinned).wait();
    actions.emplace_back(MoveResident{handles.back(), kDevice});
  }
  simcuda_reset_counters();
  const PlanReport report = manager_->execute(actions);
  EXPECT_EQ(simcuda_calls("cudaMemcpyBatchAsync"), 1U);
  EXPECT_EQ(simcuda_calls("cudaMemcpyAsync"), 0U);
  report.wait();
  EXPECT_EQ(manager_->snapshot().find(kPinned)->used, Bytes());
  for (int i = 0; i < kNumValues; ++i) {
    EXPECT_EQ(byte_of(handles[static_cast<std::size_t>(i)], kDevice), i);
  }
}

TEST_F(DeviceTier, CopiesOfOneExecuteThatNeedNotWaitAreNotBehindOneThatDoes) {
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  const Handle small = value(4096, 1);
  const Handle large = value(3 * 4096, 2);
  for (const Handle& handle : {small, large}) {
    manager_->move(handle, kPinned).wait();
    manager_->move(handle, kDevice).wait();
  }
  Gate gate(producer);
  const Handle late = adopt(*manager_, TensorResident({{"x", on_device(4096)}}),
                            {.mode = ReplicaMode::kReplicable, .stream = named(producer)});
  const PlanReport report = manager_->execute(
      std::vector<ResidencyAction>{EnsureResident{small, kPinned}, EnsureResident{large, kPinned},
                                   EnsureResident{late, kPinned}});
  EXPECT_EQ(byte_of(small, kPinned), 1);  // waits for it
  EXPECT_EQ(byte_of(large, kPinned), 2);
  EXPECT_FALSE(report[2].device_elapsed_ns.has_value());
  if (simulated()) {
    // They shared an event, and its time by their bytes.
    const std::int64_t of_small = report[0].device_elapsed_ns.value_or(0);
    EXPECT_GT(of_small, 0);
    EXPECT_NEAR(static_cast<double>(report[1].device_elapsed_ns.value_or(0)),
                3.0 * static_cast<double>(of_small), 3.0);
  }
  gate.open();
  report.wait();
}

// Only the host can wait for that thread, and it must not hold others up meanwhile.
TEST_F(DeviceTier, CopyOfWhatAThreadStillBringsGoesAlone) {
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  const Handle small = value(4096, 1);
  manager_->move(small, kPinned).wait();
  Gate gate(producer);
  const Handle late = adopt(*manager_, TensorResident({{"x", on_device(4096)}}),
                            {.mode = ReplicaMode::kReplicable, .stream = named(producer)});
  manager_->ensure(late, kPinned);
  manager_->move(late, kHost, kPinned);  // by a thread, behind the producer
  manager_->drop(late, kDevice);
  manager_->ensure(late, kPinned);
  EXPECT_TRUE(manager_->explain(std::vector<ResidencyAction>{EnsureResident{late, kDevice}})
                  .actions[0]
                  .verdict.waits);
  EXPECT_THROW(manager_->ensure(late, kDevice, {.may_block = false}), UnavailableError);
  std::thread other([&] {
    manager_
        ->execute(std::vector<ResidencyAction>{EnsureResident{small, kDevice},
                                               EnsureResident{late, kDevice}})
        .wait();
  });
  const auto is_there = [&] {
    return manager_->snapshot().find(small)->materializations.size() == 2;
  };
  for (int i = 0; i < 10'000 && !is_there(); ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_NO_THROW(manager_->ensure(small, kDevice, {.may_block = false}));
  gate.open();
  other.join();
  EXPECT_EQ(byte_of(small, kDevice), 1);
}

TEST_F(DeviceTier, RefreshIsOrderedBehindACopyOfTheOldBytesWithoutWaiting) {
  const c10::cuda::CUDAStream writer = c10::cuda::getStreamFromPool();
  const Handle handle = value(kMiB, 1, Mutability::kMutable);
  manager_->move(handle, kPinned).wait();
  manager_->ensure(handle, kDevice).wait();
  const auto write = [&](int byte) {
    Lease lease =
        manager_->acquire(one(handle), kDevice,
                          {.access = Access::kWrite, .stream = named(writer), .may_block = false});
    EXPECT_EQ(cudaMemsetAsync(tensors(lease, handle)["x"].mutable_data_ptr(), byte, kMiB, writer),
              cudaSuccess);
    lease.release();
  };
  const ActionOptions impatient{.may_block = false};
  Gate gate(writer);
  write(2);
  manager_->ensure(handle, kPinned, impatient);
  manager_->drop(handle, kDevice);
  EXPECT_EQ(manager_->ensure(handle, kDevice, impatient).record().source, kPinned);  // reads it
  write(3);
  const ActionReport refreshed = manager_->ensure(handle, kPinned, impatient);
  EXPECT_EQ(refreshed.record().reason, Reason::kRefreshed);
  EXPECT_FALSE(refreshed.record().waited);
  gate.open();
  EXPECT_EQ(byte_of(handle, kPinned), 3);
  EXPECT_EQ(byte_of(handle, kDevice), 3);
}

TEST_F(DeviceTier, ExecuteRefusesAValueWhoseMemoryWasExchanged) {
  const at::Tensor alias = page_locked(4096);
  const at::Tensor other = page_locked(4096);
  const Handle handle =
      adopt(*manager_, TensorResident({{"x", alias}}), {.mode = ReplicaMode::kReplicable});
  at::DataPtr own =
      alias.storage().set_data_ptr(at::DataPtr(other.mutable_data_ptr(), c10::Device(c10::kCPU)));
  try {
    (void)manager_->execute(std::vector<ResidencyAction>{EnsureResident{handle, kDevice}});
    ADD_FAILURE();
  } catch (const PlanExecutionError& error) {
    EXPECT_THROW(std::rethrow_exception(error.cause), MaterializationError);
  }
  alias.storage().set_data_ptr_noswap(std::move(own));
  manager_->audit();
  manager_->execute(std::vector<ResidencyAction>{EnsureResident{handle, kDevice}}).wait();
}

// When the device takes none of them nothing has changed, and a second try goes through.
TEST_F(DeviceTier, CopiesOfOneExecuteThatCannotBeEnqueued) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime fails on demand";
  }
  std::vector<Handle> handles;
  std::vector<ResidencyAction> actions;
  for (int i = 0; i < 10; ++i) {
    handles.push_back(value(4096, i));
    manager_->move(handles.back(), kPinned).wait();
    actions.emplace_back(i % 2 == 0 ? ResidencyAction(EnsureResident{handles.back(), kDevice})
                                    : ResidencyAction(MoveResident{handles.back(), kDevice}));
  }
  for (const char* call : {"cudaMemcpyBatchAsync", "cudaMemcpyAsync"}) {
    ASSERT_EQ(simcuda_fail(call, 0, 1, cudaErrorInvalidValue), 0);
  }
  try {
    (void)manager_->execute(actions);
    FAIL();
  } catch (const PlanExecutionError& error) {
    EXPECT_EQ(error.index, 0U);
    EXPECT_TRUE(error.completed.empty());
    EXPECT_THROW(std::rethrow_exception(error.cause), TransferError);
  }
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(byte_of(handles[static_cast<std::size_t>(i)], kPinned), i);
  }
  EXPECT_EQ(manager_->snapshot().find(kPinned)->used, Bytes(10 * 4096));
  manager_->audit();
  manager_->execute(actions).wait();
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(byte_of(handles[static_cast<std::size_t>(i)], kDevice), i);
  }
  EXPECT_EQ(manager_->snapshot().find(kPinned)->used, Bytes(5 * 4096));
  manager_->audit();
}

// Copies of a batch are in no order among themselves.
TEST_F(DeviceTier, CopyIsNotOvertaken) {
  const std::int64_t room = 2 * 4096;  // the second value comes where the first was
  const Handle anchor = value(room, 0);
  manager_->ensure(anchor, kDevice).wait();  // or an empty segment would be given back
  const Handle first = value(room, 1, Mutability::kMutable);
  const Handle second = value(room, 2);
  manager_->ensure(first, kPinned).wait();
  manager_->ensure(second, kPinned).wait();
  // There and back, into the place of another that was on its way, and there again.
  const std::vector<ResidencyAction> actions = {
      EnsureResident{first, kDevice},         DropResident{first, kDevice},
      EnsureResident{second, kDevice},        MoveResident{first, kDevice, kPinned},
      DropResident{second, kPinned},          MoveResident{first, kPinned, kDevice},
      MoveResident{second, kPinned, kDevice}, EnsureResident{second, kDevice},
      EnsureResident{first, kDevice}};
  for (int round = 0; round < 3; ++round) {
    manager_->execute(actions).wait();
    EXPECT_EQ(byte_of(first, kDevice), 1);
    EXPECT_EQ(byte_of(second, kDevice), 2);
    EXPECT_EQ(byte_of(first, kPinned), 1);
    EXPECT_EQ(byte_of(second, kPinned), 2);
    manager_->drop(first, kDevice);
    manager_->drop(second, kDevice);
  }
}

// An execute that comes to a halt behind a source still has its copies under way.
TEST_F(DeviceTier, CopiesBeforeASourceThatTakesItsTimeAreUnderWay) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime counts";
  }
  const auto tensor = [] {
    return TensorResident(
        {{"x", at::zeros({64}, at::TensorOptions().dtype(at::kByte).device(at::kCPU))}});
  };
  const Handle small = value(4096, 3);
  manager_->ensure(small, kPinned).wait();
  std::uint64_t num_copies = 0;
  const auto source = std::make_shared<CallbackSource>([&] {
    num_copies = counters().copies[SIMCUDA_H2D];
    return tensor();
  });
  const Handle loaded = register_source(*manager_, source, tensor().layout());
  simcuda_reset_counters();
  manager_->execute(
      std::vector<ResidencyAction>{EnsureResident{small, kDevice}, EnsureResident{loaded, kHost}});
  EXPECT_EQ(num_copies, 1U);
}

TEST_F(DeviceTier, SmallCopiesShareAnEvent) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime counts";
  }
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  constexpr int kNumValues = 100;
  std::vector<Handle> handles;
  for (int i = 0; i < kNumValues; ++i) {
    handles.push_back(value(4096, i));
    manager_->move(handles.back(), kDevice).wait();
    manager_->ensure(handles.back(), kPinned).wait();  // the slabs are there
    manager_->drop(handles.back(), kPinned);
  }
  Gate gate(producer);
  TensorResident fields({{"x", on_device(4096)}});
  const Handle first = adopt(*manager_, std::move(fields),
                             {.mode = ReplicaMode::kReplicable, .stream = named(producer)});
  std::vector<ResidencyAction> actions = {EnsureResident{first, kPinned}};
  for (const Handle& handle : handles) {
    actions.emplace_back(EnsureResident{handle, kPinned});
  }
  const std::uint64_t before = simcuda_calls("cudaEventRecord");
  const PlanReport report = manager_->execute(actions);
  EXPECT_LE(simcuda_calls("cudaEventRecord") - before, 10U);
  EXPECT_FALSE(report[1].device_elapsed_ns.has_value());
  gate.open();
  report.wait();
  std::int64_t elapsed_ns = 0;
  for (std::size_t i = 1; i < report.size(); ++i) {
    ASSERT_TRUE(report[i].device_elapsed_ns.has_value());
    EXPECT_EQ(*report[i].device_elapsed_ns, *report[1].device_elapsed_ns);
    elapsed_ns += *report[i].device_elapsed_ns;
  }
  EXPECT_GT(elapsed_ns, 0);
  for (int i = 0; i < kNumValues; ++i) {
    EXPECT_EQ(byte_of(handles[static_cast<std::size_t>(i)], kPinned), i);
  }
}

// Case 29.
TEST_F(DeviceTier, CaptureStaysValidAndUsesWhatIsThere) {
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const Handle there = value(kMiB, 3);
  const Handle elsewhere = value(kMiB, 4);
  for (const Handle& handle : {there, elsewhere}) {
    manager_->move(handle, kPinned).wait();
  }
  manager_->move(there, kDevice).wait();
  manager_->ensure(elsewhere, kHost).wait();
  const at::Tensor read = page_locked(kMiB);
  std::memset(read.mutable_data_ptr(), 0, kMiB);
  const Handle pageable = value(kMiB, 5);
  const Handle in_flight = value(kMiB, 6, Mutability::kMutable);
  const c10::cuda::CUDAStream other = c10::cuda::getStreamFromPool();
  manager_->ensure(in_flight, kDevice).wait();
  Gate gate(other);
  enqueue_read(in_flight, other,
               on_device(kMiB));  // what comes behind it is in flight until the gate opens
  manager_->acquire(one(in_flight), kDevice, {.access = Access::kWrite, .stream = named(other)})
      .release();
  manager_->drop(in_flight, kHost);
  manager_->ensure(in_flight, kPinned);
  const c10::cuda::CUDAStreamGuard guard(stream);
  Lease ended = manager_->acquire(one(there), kDevice);
  ended.release();
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);

  EXPECT_NO_THROW(ended.release(/*wait=*/true)) << "a second time does nothing";
  Lease lease = manager_->acquire(one(there), kDevice);
  ASSERT_EQ(cudaMemcpyAsync(read.mutable_data_ptr(), tensors(lease, there)["x"].const_data_ptr(),
                            kMiB, cudaMemcpyDeviceToHost, stream),
            cudaSuccess);
  EXPECT_THROW(manager_->ensure(elsewhere, kDevice), CaptureError);
  EXPECT_THROW(manager_->ensure(elsewhere, kOther), CaptureError);
  EXPECT_THROW(manager_->drop(elsewhere, kPinned), CaptureError);
  EXPECT_THROW(manager_->discard(elsewhere), CaptureError);
  EXPECT_THROW((void)take(*manager_, elsewhere), CaptureError);
  EXPECT_THROW(lease.release(), CaptureError) << "its use would become part of the graph";
  const std::uint64_t pinned = simulated() ? simcuda_pinned_bytes() : 0;
  EXPECT_THROW(manager_->ensure(pageable, kDevice), CaptureError) << "it locks buffers";
  EXPECT_THROW(manager_->ensure(there, kHost), CaptureError);
  EXPECT_THROW(manager_->ensure(elsewhere, kDevice, {.stream = named(stream)}), CaptureError)
      << "on the stream itself";
  EXPECT_THROW((void)manager_->acquire(one(in_flight), kPinned), CaptureError) << "it would wait";
  EXPECT_THROW(manager_->synchronize(), CaptureError);
  EXPECT_THROW(manager_->close({.force = true}), CaptureError);
  EXPECT_FALSE(layer_->trim());
  EXPECT_EQ(simulated() ? simcuda_pinned_bytes() : 0, pinned);
  // What others do meanwhile does not disturb it.
  std::thread([&] { manager_->ensure(elsewhere, kOther).wait(); }).join();

  gate.open();
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphExec_t replayed = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&replayed, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphLaunch(replayed, stream), cudaSuccess);
  lease.release();
  stream.synchronize();
  EXPECT_EQ(static_cast<const char*>(read.const_data_ptr())[kMiB - 1], 3);
  manager_->ensure(elsewhere, kDevice);
  EXPECT_EQ(byte_of(elsewhere, kDevice), 4);
  EXPECT_EQ(byte_of(elsewhere, kOther), 4);
  EXPECT_EQ(cudaGraphExecDestroy(replayed), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

// As the guide says: a hold for the addresses, and a lease around each replay.
TEST_F(DeviceTier, GraphReplayedWithinLeasesReadsWhatIsThereByThen) {
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const Handle handle = value(kMiB, 1, Mutability::kMutable);
  manager_->ensure(handle, kPinned).wait();
  manager_->ensure(handle, kDevice).wait();
  const at::Tensor read = page_locked(kMiB);
  const AcquireOptions on_stream{.stream = named(stream)};
  Hold hold = manager_->hold(one(handle), kDevice);
  Lease captured = manager_->acquire(one(handle), kDevice, on_stream);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  ASSERT_EQ(
      cudaMemcpyAsync(read.mutable_data_ptr(), tensors(captured, handle)["x"].const_data_ptr(),
                      kMiB, cudaMemcpyDeviceToHost, stream),
      cudaSuccess);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  captured.release();
  cudaGraphExec_t replayed = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&replayed, graph, 0), cudaSuccess);
  for (const int byte : {2, 3}) {
    {
      Lease writer = manager_->acquire(one(handle), kPinned, {.access = Access::kWrite});
      std::memset(tensors(writer, handle)["x"].mutable_data_ptr(), byte, kMiB);
      writer.release();
    }
    manager_->ensure(handle, kDevice);  // refreshed in place, behind the replay before
    Lease lease = manager_->acquire(one(handle), kDevice, on_stream);
    ASSERT_EQ(cudaGraphLaunch(replayed, stream), cudaSuccess);
    lease.release();
    stream.synchronize();
    EXPECT_EQ(static_cast<const char*>(read.const_data_ptr())[kMiB - 1], byte);
  }
  EXPECT_EQ(cudaGraphExecDestroy(replayed), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  hold.release();
}

// An easy mistake, of which neither the card nor the value must be the victim.
TEST_F(DeviceTier, StreamThatWasDestroyedTooEarlyHarmsNobody) {
  const Handle there = value(kMiB, 1);
  const Handle pageable = value(kMiB, 2);
  manager_->ensure(there, kDevice).wait();
  cudaStream_t own = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&own, cudaStreamNonBlocking), cudaSuccess);
  const Stream stream = named(c10::cuda::getStreamFromExternal(own, 0));
  Lease lease = manager_->acquire(one(there), kDevice, {.stream = stream});
  ASSERT_EQ(cudaStreamDestroy(own), cudaSuccess);
  EXPECT_NO_THROW(lease.release());
  manager_->drop(there, kDevice);
  EXPECT_THROW(manager_->ensure(pageable, kDevice, {.stream = stream}).wait(), Error);
  EXPECT_THROW(manager_->ensure(there, kDevice, {.stream = stream}).wait(), Error);
  EXPECT_FALSE(layer_->is_lost(kDevice));
  for (const Handle& handle : {there, pageable}) {
    manager_->ensure(handle, kDevice).wait();
  }
  EXPECT_EQ(byte_of(there, kDevice), 1);
  EXPECT_EQ(byte_of(pageable, kDevice), 2);
}

// Not the current one: nothing of ours may become part of the graph, nor end its capture.
TEST_F(DeviceTier, NothingIsCopiedOnAStreamThatIsCaptured) {
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const Handle pinned = value(kMiB, 3);
  const Handle pageable = value(kMiB, 4);
  const Handle there = value(kMiB, 5);
  manager_->move(pinned, kPinned).wait();
  manager_->move(there, kDevice).wait();
  manager_->ensure(pageable, kDevice).wait();  // the buffers are there
  manager_->drop(pageable, kDevice);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
  const ActionOptions on_stream{.stream = named(stream)};
  EXPECT_THROW(manager_->ensure(pinned, kDevice, on_stream), CaptureError);
  EXPECT_THROW(manager_->ensure(pageable, kDevice, on_stream), CaptureError);
  EXPECT_THROW(manager_->ensure(there, kHost, on_stream), CaptureError);
  // A worker may come to it only once the capture has begun.
  const auto block = layer_->allocate(
      TensorResident({{"x", at::empty({kMiB}, at::TensorOptions().dtype(at::kByte))}}).layout(),
      kDevice);
  DeviceLayer::Progress progress;
  const std::atomic<bool> abandon{false};
  EXPECT_THROW((void)layer_->copy_staged(*block.block, /*to_device=*/true,
                                         {[](const std::vector<iovec>&) {}}, named(stream),
                                         progress, {.abandon = abandon}),
               CaptureError);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  std::size_t num_nodes = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &num_nodes), cudaSuccess);
  EXPECT_EQ(num_nodes, 0U);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  for (const Handle& handle : {pinned, pageable}) {
    manager_->ensure(handle, kDevice, on_stream).wait();
  }
  EXPECT_EQ(byte_of(pinned, kDevice), 3);
  EXPECT_EQ(byte_of(pageable, kDevice), 4);
  EXPECT_EQ(byte_of(there, kDevice), 5);
}

// The other call may still be on its way, or fail.
TEST_F(DeviceTier, StreamThatIsAddedAgainWaitsAgain) {
  const Handle handle = value(kMiB, 7);
  manager_->move(handle, kPinned).wait();
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const std::string rate = simcuda_get("h2d");
  ASSERT_EQ(simcuda_set("h2d", "1MB/s"), 0) << simcuda_message();
  manager_->ensure(handle, kDevice);
  ASSERT_EQ(simcuda_set("h2d", rate.c_str()), 0) << simcuda_message();
  Lease lease = manager_->acquire(one(handle), kDevice);
  for (int i = 0; i < 2; ++i) {
    const std::uint64_t before = simcuda_calls("cudaStreamWaitEvent");
    lease.add_stream(named(stream));
    EXPECT_GT(simcuda_calls("cudaStreamWaitEvent"), before) << i;
  }
  // One that fails does not take the stream away from those that have added it.
  EXPECT_EQ(simcuda_fail("cudaStreamWaitEvent", 0, 1, cudaErrorInvalidValue), 0);
  EXPECT_THROW(lease.add_stream(named(stream)), UnavailableError);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const at::Tensor read = on_device(kMiB);
  Gate gate(stream);
  ASSERT_EQ(cudaMemcpyAsync(read.mutable_data_ptr(), tensors(lease, handle)[0].const_data_ptr(),
                            kMiB, cudaMemcpyDefault, stream),
            cudaSuccess);
  lease.release();
  manager_->drop(handle, kDevice);
  const Handle next = value(kMiB, 9);
  manager_->move(next, kPinned).wait();
  manager_->ensure(next, kDevice);
  gate.open();
  stream.synchronize();
  EXPECT_EQ(first_byte(read), 7);
}

// What was done on the stream before is not known while it is being captured.
TEST_F(DeviceTier, MemoryFreedDuringACaptureIsUsedAgainOnlyBehindItsUses) {
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const at::Tensor read = on_device(kMiB);
  const Handle anchor = value(kMiB, 1);  // the segment stays
  const Handle taken = value(kMiB, 3);
  for (const Handle& handle : {anchor, taken}) {
    manager_->move(handle, kDevice).wait();
  }
  const Handle next = value(kMiB, 4);
  manager_->move(next, kPinned).wait();
  std::optional<TensorResident> owned = take(*manager_, taken);
  const void* address = (*owned)["x"].const_data_ptr();
  {
    const Gate gate(stream);
    ASSERT_EQ(
        cudaMemcpyAsync(read.mutable_data_ptr(), address, kMiB, cudaMemcpyDeviceToDevice, stream),
        cudaSuccess);
    cudaGraph_t graph = nullptr;
    {
      const c10::cuda::CUDAStreamGuard guard(stream);
      ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
      owned.reset();
      ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    }
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    manager_->ensure(next, kDevice);
    Lease lease = manager_->acquire(one(next), kDevice);
    EXPECT_EQ(residency::tensors(lease, next)["x"].const_data_ptr(), address)
        << "the test needs the same memory";
    lease.release();
  }
  stream.synchronize();
  EXPECT_EQ(first_byte(read), 3);
  EXPECT_EQ(byte_of(next, kDevice), 4);
}

// Its use cannot be recorded then; nothing stays protected for that.
TEST_F(DeviceTier, LeaseDestroyedDuringACaptureEndsAfterIt) {
  set_warning_handler([](std::string_view) {});
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const Handle handle = value(kMiB, 3);
  manager_->ensure(handle, kDevice).wait();
  const c10::cuda::CUDAStreamGuard guard(stream);
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  { const Lease lease = manager_->acquire(one(handle), kDevice); }
  EXPECT_EQ(manager_->snapshot().num_leases, 1U);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  manager_->drop(handle, kDevice);
  EXPECT_EQ(manager_->snapshot().num_leases, 0U);
  set_warning_handler(nullptr);
}

/// What PyTorch's caching allocator hands out and takes back, summed from its trace.
class AllocatorTrace {
 public:
  static AllocatorTrace& instance() {
    static auto* const trace = new AllocatorTrace;  // a tracker cannot be detached
    return *trace;
  }
  void reset_peaks() {
    for (std::size_t i = 0; i < peak_.size(); ++i) {
      peak_[i] = allocated_[i].load();
    }
  }
  [[nodiscard]] Bytes allocated(Location at) const { return Bytes(allocated_[slot(at)]); }
  [[nodiscard]] Bytes peak(Location at) const { return Bytes(peak_[slot(at)]); }

 private:
  using Entry = c10::cuda::CUDACachingAllocator::TraceEntry;
  AllocatorTrace() {
    c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(
        [this](const Entry& entry) { note(entry); });
  }
  void note(const Entry& entry) {
    const auto i = static_cast<std::size_t>(entry.device_);
    if (entry.action_ == Entry::ALLOC) {
      allocated_[i] += static_cast<std::int64_t>(entry.size_);
      peak_[i] = std::max(peak_[i].load(), allocated_[i].load());
    } else if (entry.action_ == Entry::FREE_COMPLETED) {
      allocated_[i] -= static_cast<std::int64_t>(entry.size_);
    }
  }
  static std::size_t slot(Location at) { return static_cast<std::size_t>(at.cuda_index()); }

  std::array<std::atomic<std::int64_t>, 2> allocated_{};
  std::array<std::atomic<std::int64_t>, 2> peak_{};
};

// Case 30: live bytes against the arenas' own, segments against the allocator that they come from.
TEST_F(DeviceTier, PredictedPeaksAreMeasured) {
  const std::vector<Location> places = {kPinned, kDevice, kOther};
  AllocatorTrace& trace = AllocatorTrace::instance();
  std::mt19937 random(20261202);
  const auto below = [&](std::size_t limit) { return random() % limit; };
  std::vector<Handle> handles;
  for (int i = 0; i < 20; ++i) {
    const std::size_t most = i % 3 == 0 ? 12'000'000 : 300'000;
    at::Tensor tensor = at::empty({static_cast<std::int64_t>(1 + below(most))},
                                  at::TensorOptions().dtype(at::kByte));
    std::memset(tensor.mutable_data_ptr(), i, static_cast<std::size_t>(tensor.numel()));
    TensorResident fields({{"x", std::move(tensor)}});
    handles.push_back(
        adopt(*manager_, std::move(fields),
              {.mode = i % 4 == 0 ? ReplicaMode::kExclusive : ReplicaMode::kReplicable}));
    manager_->move(handles.back(), kPinned).wait();
  }
  int num_actions = 0;
  int num_grown = 0;
  for (int plan = 0; plan < 1000; ++plan) {
    std::vector<ResidencyAction> actions;
    for (std::size_t i = 1 + below(8); i-- > 0;) {
      const Handle handle = handles[below(handles.size())];
      const Location at = places[below(places.size())];
      switch (below(4)) {
        case 0: actions.emplace_back(EnsureResident{handle, at}); break;
        case 1: actions.emplace_back(DropResident{handle, at}); break;
        default: actions.emplace_back(MoveResident{handle, at, std::nullopt}); break;
      }
      if (!manager_->explain(actions).feasible) {
        actions.pop_back();
      }
    }
    layer_->reset_peaks();
    trace.reset_peaks();
    for (const c10::DeviceIndex device : {0, 1}) {
      c10::cuda::CUDACachingAllocator::resetPeakStats(device);
    }
    const Bytes before[] = {trace.allocated(kDevice), trace.allocated(kOther)};
    const std::uint64_t locked = simulated() ? simcuda_pinned_bytes() : 0;
    const Explanation explanation = manager_->explain(actions);
    manager_->execute(actions);
    num_actions += static_cast<int>(actions.size());
    for (const Location at : places) {
      SCOPED_TRACE(to_string(at) + ", plan " + std::to_string(plan));
      const DeviceLayer::Usage measured = layer_->usage(at);
      const PredictedLocation* predicted = explanation.find(at);
      if (predicted == nullptr) {
        ASSERT_EQ(measured.peak_live, measured.live);
        continue;
      }
      ASSERT_EQ(measured.peak_live, predicted->peak_used);
      ASSERT_EQ(measured.live, predicted->used_after);
      const SegmentBytes& segments = predicted->segments.value();
      ASSERT_EQ(segments.outside, Bytes());
      if (at.is_cuda()) {
        // The arena is the only one that allocates here.
        ASSERT_EQ(before[at.cuda_index()], segments.before);
        ASSERT_EQ(trace.peak(at), segments.peak);
        ASSERT_EQ(max_memory_allocated(at), segments.peak.count());
        ASSERT_EQ(trace.allocated(at), segments.after);
        num_grown += segments.peak > segments.before ? 1 : 0;
      } else if (simulated()) {
        ASSERT_EQ(simcuda_pinned_bytes() - locked,
                  static_cast<std::uint64_t>((segments.after - segments.before).count()));
        ASSERT_EQ(segments.peak, segments.after) << "slabs are kept";
      }
    }
  }
  EXPECT_GT(num_actions, 2000);
  EXPECT_GT(num_grown, 100);
  for (std::size_t i = 0; i < handles.size(); ++i) {
    manager_->move(handles[i], kHost).wait();
    EXPECT_EQ(byte_of(handles[i], kHost), static_cast<int>(i));
  }
}

TEST_F(DeviceTier, AdoptedMemoryIsOutsideOfThePredictionUnlessItIsRehomed) {
  c10::cuda::CUDACachingAllocator::emptyCache();
  const auto adopt_from_device = [&](bool rehome, int byte) {
    at::Tensor tensor = on_device(3 * kMiB);
    EXPECT_EQ(cudaMemsetAsync(tensor.mutable_data_ptr(), byte, 3 * kMiB, current(kDevice)),
              cudaSuccess);
    TensorResident fields({{"x", std::move(tensor)}});
    return adopt(*manager_, std::move(fields), {.rehome = rehome});
  };
  const Handle adopted = adopt_from_device(false, 5);
  EXPECT_EQ(layer_->usage(kDevice).live, Bytes());
  const Explanation outside =
      manager_->explain(std::vector<ResidencyAction>{MoveResident{adopted, kPinned}});
  EXPECT_EQ(outside.find(kDevice)->segments->outside, Bytes(3 * kMiB));
  EXPECT_EQ(outside.find(kDevice)->segments->peak, Bytes());
  manager_->move(adopted, kPinned).wait();
  manager_->synchronize();
  EXPECT_EQ(byte_of(adopted, kPinned), 5);

  Gate gate(current(kDevice));  // nothing waits for the copy
  const Handle rehomed = adopt_from_device(true, 6);
  EXPECT_EQ(layer_->usage(kDevice).live, Bytes(3 * kMiB));
  EXPECT_EQ(allocated_bytes(), 10 * kMiB) << "the caller's memory has gone";
  // Whoever gets it next on its stream comes behind the copy.
  const at::Tensor reused = on_device(3 * kMiB);
  EXPECT_EQ(cudaMemsetAsync(reused.mutable_data_ptr(), 7, 3 * kMiB, current(kDevice)), cudaSuccess);
  const std::vector<ResidencyAction> actions = {MoveResident{rehomed, kPinned}};
  const Explanation inside = manager_->explain(actions);
  EXPECT_EQ(inside.find(kDevice)->segments,
            (SegmentBytes{Bytes(10 * kMiB), Bytes(10 * kMiB), Bytes(), Bytes()}));
  manager_->execute(actions);
  gate.open();
  EXPECT_EQ(layer_->usage(kDevice).segments, Bytes());
  manager_->synchronize();
  EXPECT_EQ(byte_of(rehomed, kPinned), 6);
}

TEST_F(DeviceTier, RehomedHostMemoryIsTheCallersAgain) {
  for (const bool locked : {false, true}) {
    at::Tensor tensor = locked ? page_locked(kMiB) : at::empty({kMiB}, at::kByte);
    std::memset(tensor.mutable_data_ptr(), 4, kMiB);
    TensorResident fields({{"x", tensor}});
    const Handle handle = adopt(*manager_, std::move(fields), {.rehome = true});
    EXPECT_EQ(tensor.storage().use_count(), 1U);
    std::memset(tensor.mutable_data_ptr(), 9, kMiB);
    EXPECT_EQ(byte_of(handle, locked ? kPinned : kHost), 4);
    EXPECT_EQ(layer_->usage(kPinned).live, Bytes(locked ? kMiB : 0));
  }
}

TEST_F(DeviceTier, RehomingThatDoesNotFitIsRefusedBeforeAnythingIsTaken) {
  ManagerOptions options;
  options.budgets = {{kDevice, Bytes(kMiB)}, {kPinned, Bytes(kMiB)}, {kHost, Bytes(kMiB)}};
  manager_ = make(layer_, std::move(options));
  for (const Location at : {kDevice, kPinned, kHost}) {
    SCOPED_TRACE(to_string(at));
    const at::Tensor tensor = at.is_cuda()    ? on_device(2 * kMiB)
                              : at == kPinned ? page_locked(2 * kMiB)
                                              : at::empty({2 * kMiB}, at::kByte);
    const std::uint64_t version = manager_->state_version();
    layer_->reset_peaks();
    TensorResident fields({{"x", tensor}});
    EXPECT_THROW((void)adopt(*manager_, std::move(fields), {.rehome = true}), BudgetError);
    EXPECT_EQ(layer_->usage(at).peak_live, Bytes());
    EXPECT_EQ(layer_->usage(at).segments, Bytes());
    EXPECT_EQ(tensor.storage().use_count(), 1U);
    EXPECT_EQ(manager_->state_version(), version);
    EXPECT_TRUE(manager_->snapshot().values.empty());
    manager_->audit();
  }
}

TEST_F(DeviceTier, RehomingForWhichThereIsNoMemoryBooksNothing) {
  TensorResident fields({{"x", on_device(most_of_the_device())}});
  const std::uint64_t version = manager_->state_version();
  EXPECT_THROW((void)adopt(*manager_, std::move(fields), {.rehome = true}), c10::OutOfMemoryError);
  EXPECT_EQ(manager_->state_version(), version);
  EXPECT_TRUE(manager_->snapshot().values.empty());
  manager_->audit();
}

// As the device has it, and not as the thread that fills the buffers.
TEST_F(DeviceTier, TimeOfAStagedCopyIsTheDevices) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime's copies take a known time";
  }
  const std::string before = simcuda_get("h2d");
  ASSERT_EQ(simcuda_set("h2d", "1GB/s"), 0) << simcuda_message();
  const Handle handle = value(40 * kMiB, 1);
  const ActionReport report = manager_->ensure(handle, kDevice);
  report.wait();
  ASSERT_EQ(simcuda_set("h2d", before.c_str()), 0);
  EXPECT_EQ(report.record().path, TransferPath::kStaged);
  const auto elapsed_ns = static_cast<double>(report.record().device_elapsed_ns.value_or(0));
  EXPECT_GE(elapsed_ns, 40.0 * kMiB);  // 1 ns a byte
  EXPECT_LE(elapsed_ns, 1.1 * 40.0 * kMiB);
}

// Fields adopted from outside lie apart on the device, and share buffers and copies all the same.
TEST_F(DeviceTier, SmallFieldsOfOnesOwnAreStagedTogether) {
  constexpr int kNumFields = 1000;
  TensorResident::Fields fields;
  for (int i = 0; i < kNumFields; ++i) {
    const at::Tensor tensor = on_device(4000 + i % 7);
    ASSERT_EQ(cudaMemset(tensor.mutable_data_ptr(), i % 128, tensor.nbytes()), cudaSuccess);
    fields.emplace_back("x" + std::to_string(i), tensor);
  }
  const Handle handle =
      adopt(*manager_, TensorResident(std::move(fields)), {.mode = ReplicaMode::kReplicable});
  const std::uint64_t before = simulated() ? simcuda_calls("cudaMemcpyBatchAsync") : 0;
  const std::uint64_t single = simulated() ? simcuda_calls("cudaMemcpyAsync") : 0;
  manager_->ensure(handle, kHost).wait();
  if (simulated()) {
    EXPECT_LE(simcuda_calls("cudaMemcpyBatchAsync") - before, 2U);
    EXPECT_EQ(simcuda_calls("cudaMemcpyAsync") - single, 0U);
  }
  Lease lease = manager_->acquire(one(handle), kHost);
  const TensorResident& found = tensors(lease, handle);
  for (int i = 0; i < kNumFields; ++i) {
    const at::Tensor& tensor = found[static_cast<std::size_t>(i)];
    const auto* bytes = static_cast<const char*>(tensor.const_data_ptr());
    ASSERT_EQ(bytes[0], static_cast<char>(i % 128));
    ASSERT_EQ(bytes[tensor.nbytes() - 1], static_cast<char>(i % 128));
  }
  lease.release();
}

TEST_F(DeviceTier, BuffersOfStagedCopiesAreExplainedAndLocked) {
  const Handle handle = value(kMiB, 3);
  const std::vector<ResidencyAction> actions = {EnsureResident{handle, kDevice}};
  const Explanation explanation = manager_->explain(actions);
  ASSERT_EQ(explanation.reservations.size(), 1U);
  const MemoryReservation staging = explanation.reservations[0].reservation;
  EXPECT_EQ(staging, (MemoryReservation{kPinned, Bytes(16 * kMiB), "staging"}));
  EXPECT_EQ(explanation.find(kPinned)->segments,
            (SegmentBytes{Bytes(), staging.nbytes, staging.nbytes, Bytes()}));
  const std::uint64_t locked = simulated() ? simcuda_pinned_bytes() : 0;
  manager_->execute(actions).wait();
  if (simulated()) {
    EXPECT_EQ(Bytes(static_cast<std::int64_t>(simcuda_pinned_bytes() - locked)), staging.nbytes);
  }
  EXPECT_EQ(manager_->snapshot().find(kPinned)->reserved, staging.nbytes);
}

TEST_F(DeviceTier, AddressesAndPeaksDoNotDependOnWhenWorkCompletes) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime can be told to dawdle";
  }
  // Offsets, as where a segment lies is the caching allocator's affair.
  const auto run = [&](const char* jitter, const char* seed) {
    EXPECT_EQ(simcuda_set("jitter", jitter), 0) << simcuda_message();
    EXPECT_EQ(simcuda_set("seed", seed), 0) << simcuda_message();
    const std::shared_ptr<DeviceLayer> layer = make_cuda_layer();
    manager_ = make(layer);
    std::mt19937 random(7);
    std::vector<Handle> handles;
    for (int i = 0; i < 12; ++i) {
      handles.push_back(value(static_cast<std::int64_t>(1 + random() % 3'000'000), i));
      manager_->move(handles.back(), kPinned).wait();
    }
    const void* base = nullptr;
    std::vector<std::int64_t> seen;
    for (int step = 0; step < 300; ++step) {
      const Handle handle = handles[random() % handles.size()];
      const Location to = random() % 2 == 0 ? kDevice : kPinned;
      manager_->move(handle, to);
      if (to == kDevice) {
        Lease lease = manager_->acquire(one(handle), kDevice);
        const void* data = tensors(lease, handle)["x"].const_data_ptr();
        lease.release();
        base = base == nullptr ? data : base;
        const auto offset = static_cast<const char*>(data) - static_cast<const char*>(base);
        seen.push_back(layer->usage(kDevice).segments > Bytes(10 * kMiB) ? -1 : offset);
      }
      for (const Location at : {kDevice, kPinned}) {
        const DeviceLayer::Usage usage = layer->usage(at);
        for (const Bytes bytes : {usage.live, usage.peak_live, usage.segments}) {
          seen.push_back(bytes.count());
        }
      }
    }
    for (int i = 0; i < 12; ++i) {
      manager_->move(handles[static_cast<std::size_t>(i)], kPinned);
      EXPECT_EQ(byte_of(handles[static_cast<std::size_t>(i)], kPinned), i);
    }
    manager_->close();
    return seen;
  };
  const std::vector<std::int64_t> at_once = run("0", "1");
  EXPECT_EQ(run("300us", "1"), at_once);
  EXPECT_EQ(run("300us", "2"), at_once);
  EXPECT_EQ(simcuda_set("jitter", "0"), 0);
}

TEST_F(DeviceTier, LockedBytesAreHardlyMoreThanWhatIsBooked) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime counts";
  }
  for (const auto& [num, nbytes] :
       {std::pair(1000, std::int64_t{1000}), std::pair(1000, std::int64_t{70'000}),
        std::pair(1, std::int64_t{1'200'000'000}), std::pair(3, std::int64_t{17'000'000})}) {
    const std::shared_ptr<DeviceLayer> layer = make_cuda_layer();
    TensorResident fields({{"x", at::empty({nbytes}, at::TensorOptions().dtype(at::kByte))}});
    const std::uint64_t before = simcuda_pinned_bytes();
    std::vector<DeviceLayer::Room> rooms;
    Bytes booked;
    for (int i = 0; i < num; ++i) {
      rooms.push_back(layer->allocate(fields.layout(), kPinned));
      booked += layer->occupied_bytes(*fields.layout(), kPinned);
    }
    const auto locked = static_cast<double>(simcuda_pinned_bytes() - before);
    EXPECT_EQ(layer->usage(kPinned).live, booked);
    EXPECT_LE(locked, 1.02 * static_cast<double>(booked.count())) << num << " x " << nbytes;
    rooms.clear();
    (void)layer->trim();
    EXPECT_EQ(simcuda_pinned_bytes(), before);
  }
}

// Case 3.
TEST_F(DeviceTier, NothingIsLeftOfManagersThatHaveClosed) {
  c10::cuda::CUDACachingAllocator::emptyCache();
  const std::uint64_t locked = simulated() ? simcuda_pinned_bytes() : 0;  // by PyTorch's own cache
  const std::uint64_t taken = simulated() ? counters().device_bytes : 0;
  for (int i = 0; i < 20; ++i) {
    manager_ = make(make_cuda_layer());
    const Handle handle = value(16 * kMiB, i);
    manager_->move(handle, kPinned);
    manager_->ensure(handle, kDevice);
    manager_->ensure(handle, kOther);
    EXPECT_EQ(byte_of(handle, kOther), i);
    manager_->close();
  }
  c10::cuda::CUDACachingAllocator::emptyCache();
  if (simulated()) {
    EXPECT_EQ(simcuda_pinned_bytes(), locked);
    EXPECT_EQ(counters().device_bytes, taken);
  }
}

TEST_F(DeviceTier, BuffersForStagingStayUntilTheLastManagerThatBooksThemHasClosed) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime counts";
  }
  const std::uint64_t locked = simcuda_pinned_bytes();
  const std::uint64_t ring = static_cast<std::uint64_t>(layer_->staging_bytes().count());
  const auto other = make(layer_);
  const Handle mine = value(kMiB, 1);
  const Handle theirs = testing::value(*other, kMiB, 2, Mutability::kImmutable);
  manager_->ensure(mine, kDevice).wait();
  other->ensure(theirs, kDevice).wait();
  manager_->ensure(mine, kOther).wait();  // booked by this one alone
  EXPECT_EQ(simcuda_pinned_bytes(), locked + 2 * ring);
  manager_->close();
  EXPECT_EQ(simcuda_pinned_bytes(), locked + ring);
  EXPECT_EQ(other->snapshot().find(kPinned)->reserved, layer_->staging_bytes());
  EXPECT_EQ(testing::byte_of(*other, theirs, kDevice), 2);
  other->close();
  EXPECT_EQ(simcuda_pinned_bytes(), locked);
}

TEST_F(DeviceTier, EmptySegmentIsOnesThatOthersCanHave) {
  const Handle handle = value(64 * kMiB, 3);
  manager_->ensure(handle, kPinned).wait();
  manager_->ensure(handle, kDevice);
  EXPECT_EQ(layer_->usage(kDevice).segments, Bytes(64 * kMiB));
  manager_->drop(handle, kDevice);
  EXPECT_EQ(layer_->usage(kDevice).segments, Bytes());
  EXPECT_FALSE(runs_out_of_memory(most_of_the_device()));
}

// The worker that reads a value last frees it, and with it a segment that nobody else has.
TEST_F(DeviceTier, ReaderThatFreesWhatItHasReadDoesNotWaitForItself) {
  const Handle handle = value(kMiB, 1, Mutability::kMutable);
  manager_->move(handle, kDevice).wait();
  const c10::cuda::CUDAStream writer = c10::cuda::getStreamFromPool();
  Gate gate(writer);
  {
    Lease lease = manager_->acquire(one(handle), kDevice,
                                    {.access = Access::kWrite, .stream = named(writer)});
    ASSERT_EQ(cudaMemsetAsync(tensors(lease, handle)[0].mutable_data_ptr(), 2, kMiB, writer),
              cudaSuccess);
    lease.release();
  }
  manager_->ensure(handle, kOther);
  const ActionReport read = manager_->ensure(handle, kHost);
  const Location source = read.record().source.value();
  manager_->drop(handle, source);
  gate.open();
  read.wait();
  EXPECT_EQ(byte_of(handle, kHost), 2);
  EXPECT_EQ(layer_->usage(source).segments, Bytes()) << "it was the only one there";
}

TEST_F(DeviceTier, WriteComesBehindWhoeverStillReads) {
  const Handle handle = value(64, 1, Mutability::kMutable);
  manager_->move(handle, kDevice).wait();
  manager_->ensure(handle, kPinned).wait();  // the slab is there
  manager_->drop(handle, kPinned);
  const c10::cuda::CUDAStream reader = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStream writer = c10::cuda::getStreamFromPool();
  const at::Tensor result = on_device(64);
  Gate gate(reader);
  enqueue_read(handle, reader, result);
  {
    Lease lease =
        manager_->acquire(one(handle), kDevice,
                          {.access = Access::kWrite, .stream = named(writer), .may_block = false});
    const TensorResident& fields = tensors(lease, handle);
    ASSERT_EQ(cudaMemsetAsync(fields[0].mutable_data_ptr(), 2, 64, writer), cudaSuccess);
    lease.release();
  }
  gate.open();
  manager_->synchronize();
  EXPECT_EQ(first_byte(result), 1);
  EXPECT_EQ(byte_of(handle, kDevice), 2);
}

TEST_F(DeviceTier, WriteLeaseMakesTheOthersStaleAndTheyAreRefreshedInPlace) {
  const Handle handle = value(kMiB, 1, Mutability::kMutable);
  manager_->ensure(handle, kPinned).wait();
  manager_->ensure(handle, kDevice);
  {
    Lease lease = manager_->acquire(one(handle), kDevice, {.access = Access::kWrite});
    ASSERT_EQ(
        cudaMemsetAsync(tensors(lease, handle)["x"].mutable_data_ptr(), 9, kMiB, current(kDevice)),
        cudaSuccess);
    lease.release();
  }
  EXPECT_THROW((void)manager_->acquire(one(handle), kPinned), UnavailableError);
  manager_->ensure(handle, kPinned);
  EXPECT_EQ(byte_of(handle, kPinned), 9);
  EXPECT_EQ(byte_of(handle, kDevice), 9);
}

// Nothing of CUDA exists in a child, and whoever held a mutex of the layer neither.
TEST_F(DeviceTier, ForkWhileOtherThreadsTakeAndGiveBackMemoryLeavesAChildThatEnds) {
  TensorResident fields({{"x", at::empty({1000}, at::kByte)}});
  const std::shared_ptr<const TensorLayout> layout = fields.layout();
  const Handle shared = value(kMiB, 1);
  manager_->ensure(shared, kPinned).wait();
  manager_->ensure(shared, kDevice).wait();
  const Handle adopted = adopt(*manager_, TensorResident({{"x", on_device(kMiB)}}));
  Lease lease = manager_->acquire(one(shared), kDevice);
  std::atomic<bool> stop{false};
  std::vector<std::thread> busy;
  // Is in the arena's books for most of its time.
  const std::vector<MemoryStep> steps(1000, MemoryStep{.takes = true, .nbytes = Bytes(1000)});
  for (const Location at : {kPinned, kDevice}) {
    busy.emplace_back([&, at] {
      while (!stop) {
        (void)layer_->allocate(layout, at);
        (void)layer_->predict_segments(at, steps);
      }
    });
  }
  busy.emplace_back([&] {
    const Handle mine = value(kMiB, 2);
    while (!stop) {
      for (const Location to : {kDevice, kHost, kPinned, kDevice, kPinned}) {
        manager_->move(mine, to);
      }
    }
  });
  busy.emplace_back([&] {
    while (!stop) {
      (void)on_device(kMiB);
    }
  });
  const auto in_child = [&] {
    for (const Location at : {kPinned, kDevice, kOther}) {
      EXPECT_EQ(layer_->usage(at).live, Bytes());
    }
    layer_->reset_peaks();
    (void)manager_->snapshot();
    (void)manager_->trace();
    EXPECT_FALSE(manager_->explain(std::vector<ResidencyAction>{EnsureResident{shared, kOther}})
                     .actions.empty());
    EXPECT_THROW(manager_->ensure(shared, kOther), ForkError);
    EXPECT_THROW(manager_->move(adopted, kPinned), ForkError);
    EXPECT_THROW(manager_->move(adopted, kHost), ForkError);
    EXPECT_THROW((void)manager_->acquire(one(adopted), kDevice), ForkError);
    manager_->drop(shared, kPinned);
    manager_->discard(adopted);
    manager_->close({.force = true});
    lease.release();
    manager_.reset();
    (void)layer_->trim();
    layer_.reset();
  };
  for (int i = 0; i < 60 && !HasFailure(); ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);  // a hang ends the child, not the test run
      try {
        in_child();
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
      std::fflush(nullptr);
      ::_exit(HasFailure() ? 1 : 0);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "child " << i << ": " << status;
  }
  stop = true;
  for (std::thread& thread : busy) {
    thread.join();
  }
  lease.release();
}

TEST_F(DeviceTier, TakenDeviceMemoryIsTheCallersUntilItDies) {
  const Handle handle = value(kMiB, 4);
  manager_->move(handle, kDevice);
  at::Tensor taken = take(*manager_, handle, kDevice)["x"];
  EXPECT_EQ(layer_->usage(kDevice).live, Bytes(kMiB));
  manager_->close();
  taken.reset();
  EXPECT_EQ(layer_->usage(kDevice).live, Bytes());
}

}  // namespace
}  // namespace residency::testing
