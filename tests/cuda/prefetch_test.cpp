// Copies ahead of need: how much of them is outstanding, what passes them, and what promotes them.
// Only on the simulated runtime, whose streams stand still when they are told to.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <tuple>

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAStream.h>

#include "csrc/aten/storage_cursor.h"
#include "residency/aten/manager.h"
#include "residency/core/errors.h"
#include "tests/aten/fixture.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/tier_fixture.h"

namespace residency::testing {
namespace {

constexpr std::int64_t kChunk = 16 * kMiB;

class Prefetch : public DeviceTier {
 protected:
  static constexpr std::int64_t kNumChunks = 8;
  static constexpr std::uint64_t kChunkNs = kChunk * 1'000'000'000 / 16'000'000'000;

  void SetUp() override {
    if (!simulated()) {
      GTEST_SKIP() << "the simulated runtime tells what comes when";
    }
    ASSERT_EQ(simcuda_set("h2d", "16GB/s"), 0) << simcuda_message();
  }
  void TearDown() override {
    if (simulated()) {
      EXPECT_EQ(simcuda_set("h2d", before_.c_str()), 0) << simcuda_message();
    }
  }
  Handle in_page_locked(std::int64_t nbytes, int byte) {
    const Handle handle = value(nbytes, byte);
    manager_->ensure(handle, kPinned).wait();
    manager_->ensure(handle, kDevice).wait();  // the segment is there from then on
    manager_->drop(handle, kHost);
    return handle;
  }
  /// A value with fields of so many bytes, all of which are its number.
  Handle fields(int num_fields, std::int64_t nbytes, bool pinned) {
    TensorResident::Fields made;
    for (int i = 0; i < num_fields; ++i) {
      at::Tensor tensor =
          at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(pinned));
      std::memset(tensor.mutable_data_ptr(), i % 128, tensor.nbytes());
      made.emplace_back("x" + std::to_string(i), std::move(tensor));
    }
    return adopt(*manager_, TensorResident(std::move(made)), {.mode = ReplicaMode::kReplicable});
  }
  void expect_fields(const Handle& handle, Location at) {
    manager_->move(handle, at).wait();
    manager_->move(handle, kHost).wait();
    Lease lease = manager_->acquire(one(handle), kHost);
    const TensorResident& found = tensors(lease, handle);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const auto* bytes = static_cast<const char*>(found[i].const_data_ptr());
      ASSERT_EQ(bytes[0], static_cast<char>(i % 128));
      ASSERT_EQ(bytes[found[i].nbytes() - 1], static_cast<char>(i % 128));
    }
    lease.release();
  }
  /// The next value of this size comes at the device where the consumer still reads another.
  void occupy(std::int64_t nbytes, const c10::cuda::CUDAStream& consumer, const at::Tensor& into) {
    const Location device = named(consumer).device;
    const Handle anchor = value(64, 0);
    manager_->ensure(anchor, device).wait();  // keeps the segment
    const Handle gone = value(nbytes, 1);
    manager_->ensure(gone, device).wait();
    enqueue_read(gone, consumer, into);
    manager_->drop(gone, device);
  }
  static bool is_done(const PlanReport& report) {
    const std::vector<TransitionRecord> entries = report.entries();
    return std::all_of(entries.begin(), entries.end(), [](const TransitionRecord& each) {
      return each.device_elapsed_ns.has_value();
    });
  }
  /// Asks again and again, as to wait would change what it waits for.
  static void until_done(const PlanReport& report) {
    eventually("the end of all copies", [&] { return is_done(report); });
  }

  // What follows asks the layer itself, so that no worker goes on meanwhile.

  static std::shared_ptr<const TensorLayout> layout_of(std::int64_t nbytes) {
    return TensorResident({{"x", at::empty({nbytes}, at::TensorOptions().dtype(at::kByte))}})
        .layout();
  }
  std::shared_ptr<TensorBlock> block(std::int64_t nbytes, Location at) {
    return at == kHost ? TensorBlock::allocate(layout_of(nbytes))
                       : layer_->allocate(layout_of(nbytes), at).block;
  }
  CopyResult copy(const TensorBlock& source, Location to, bool ahead_of_need,
                  FencePtr source_ready = nullptr,
                  std::shared_ptr<TensorBlock> overwrite = nullptr) {
    CopyRequest request;
    request.from = source.location();
    request.to = to;
    request.source_ready = std::move(source_ready);
    request.ahead_of_need = ahead_of_need;
    return layer_->copy(request, source, std::move(overwrite));
  }
  /// From now on copies to a device stay pending until the host waits for them.
  static void slow_down() { ASSERT_EQ(simcuda_set("h2d", "1MB/s"), 0) << simcuda_message(); }
  static bool is_over(const CopyResult& copy) { return !is_pending(copy.ready); }
  /// Has all of it enqueued, without waiting on the host.
  void need(const CopyResult& copy, const c10::cuda::CUDAStream& consumer) {
    layer_->wait(named(consumer), copy.ready);
  }
  /// Has calls fail for as long as they are tried.
  static void expect_failure_behind_what_is_enqueued(const CopyResult& copy,
                                                     const char* entry_point) {
    EXPECT_EQ(simcuda_fail(entry_point, 0, 1'000'000'000, cudaErrorInvalidValue), 0);
    EXPECT_LT(simcuda_now(), simcuda_device_end(0));
    copy.ready->wait();
    EXPECT_EQ(simcuda_fail(entry_point, 0, 0, 0), 0);
    EXPECT_EQ(copy.ready->poll(), FenceStatus::kFailed);
    EXPECT_GE(simcuda_now(), simcuda_device_end(0)) << entry_point;
  }
  static constexpr int kNumInChain = 200'000;
  /// Copies ahead of need into the same memory, each behind the one before, the first behind
  /// `after`.
  std::vector<CopyResult> chain(const TensorBlock& source,
                                const std::shared_ptr<TensorBlock>& target, FencePtr after) {
    std::vector<CopyResult> made;
    made.reserve(kNumInChain);
    for (int i = 0; i < kNumInChain; ++i) {
      made.push_back(
          copy(source, target->location(), /*ahead_of_need=*/true, std::move(after), target));
      after = made.back().ready;
    }
    return made;
  }

  const std::string before_ = simulated() ? simcuda_get("h2d") : "";
};

TEST_F(Prefetch, NeededCopyComesAtMostTwoChunksLate) {
  const auto large = block(kNumChunks * kChunk, kPinned);
  const auto small = block(4096, kPinned);
  const auto anchor = block(4096, kDevice);
  const auto time_to_bring = [&] {
    const std::uint64_t begin = simcuda_now();
    copy(*small, kDevice, /*ahead_of_need=*/false).ready->wait();
    return simcuda_now() - begin;
  };
  const std::uint64_t alone = time_to_bring();
  const CopyResult ahead = copy(*large, kDevice, /*ahead_of_need=*/true);
  EXPECT_FALSE(layer_->pace(*ahead.ready, /*at_once=*/false));
  const std::uint64_t late = time_to_bring() - alone;
  EXPECT_GE(late, kChunkNs / 2) << "there is something to pass";
  EXPECT_LE(late, 2 * kChunkNs + kChunkNs / 10);
  EXPECT_TRUE(layer_->pace(*ahead.ready, /*at_once=*/true));
  ahead.ready->wait();
}

TEST_F(Prefetch, NoMoreThanTwoChunksAreOutstanding) {
  const auto large = block(kNumChunks * kChunk, kPinned);
  const auto other = block(kNumChunks * kChunk, kPinned);
  simcuda_reset_counters();
  const CopyResult first = copy(*large, kDevice, /*ahead_of_need=*/true);
  const CopyResult second = copy(*other, kDevice, /*ahead_of_need=*/true);
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(layer_->pace(*first.ready, /*at_once=*/false));
    EXPECT_FALSE(layer_->pace(*second.ready, /*at_once=*/false));
    EXPECT_EQ(counters().copies[SIMCUDA_H2D], 2U);
  }
  eventually("the end of the first", [&] {
    const bool has_ended = layer_->pace(*first.ready, /*at_once=*/false);
    EXPECT_TRUE(has_ended || !layer_->pace(*second.ready, /*at_once=*/false)) << "in their order";
    return has_ended;
  });
  eventually("the end of the second",
             [&] { return layer_->pace(*second.ready, /*at_once=*/false); });
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 2U * kNumChunks);
  second.ready->wait();
}

TEST_F(Prefetch, ChunksAreAsLargeAsTheLayerWasTold) {
  EXPECT_THROW((void)make_cuda_layer({.prefetch_chunk = Bytes()}), std::invalid_argument);
  layer_ = make_cuda_layer({.prefetch_chunk = Bytes(kMiB)});
  const auto large = block(8 * kMiB, kPinned);
  const auto anchor = block(4096, kDevice);
  slow_down();
  simcuda_reset_counters();
  const CopyResult ahead = copy(*large, kDevice, /*ahead_of_need=*/true);
  EXPECT_FALSE(layer_->pace(*ahead.ready, /*at_once=*/false));
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 2U);
  EXPECT_TRUE(layer_->pace(*ahead.ready, /*at_once=*/true));
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 8U);
  ahead.ready->wait();
}

// A glitch of a second is no loss, whoever waits.
TEST_F(Prefetch, WhatIsGivenUpWithAnotherIsNoSignOfALoss) {
  const auto source = block(4096, kPinned);
  const CopyResult first = copy(*source, kDevice, /*ahead_of_need=*/true);
  const auto block_of = [](const CopyResult& made) -> TensorBlock& {
    return dynamic_cast<TensorBlock&>(*made.block);
  };
  const CopyResult second = copy(block_of(first), kOther, /*ahead_of_need=*/true, first.ready);
  EXPECT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 1'000'000'000, cudaErrorInvalidValue), 0);
  second.ready->wait();
  EXPECT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 0, 0), 0);
  for (const CopyResult& each : {first, second}) {
    EXPECT_EQ(each.ready->poll(), FenceStatus::kFailed);
    EXPECT_THROW(std::rethrow_exception(each.ready->error()), UnavailableError);
    EXPECT_TRUE(layer_->pace(*each.ready, /*at_once=*/false));
  }
  const CopyResult behind = copy(block_of(second), kPinned, /*ahead_of_need=*/true, second.ready);
  behind.ready->wait();
  EXPECT_THROW(std::rethrow_exception(behind.ready->error()), UnavailableError);
  EXPECT_TRUE(layer_->pace(*behind.ready, /*at_once=*/false));
  for (const Location device : {kDevice, kOther}) {
    EXPECT_FALSE(layer_->is_lost(device));
    const CopyResult again = copy(*source, device, /*ahead_of_need=*/false);
    again.ready->wait();
    EXPECT_EQ(again.ready->poll(), FenceStatus::kDone);
  }
}

TEST_F(Prefetch, SmallValuesAreSentManyAtATime) {
  const auto anchor = block(4096, kDevice);
  slow_down();
  for (const auto& [nbytes, least, most] :
       {std::tuple(4096, 200, 512), std::tuple(1 << 20, 16, 32), std::tuple(10 << 20, 2, 3)}) {
    const auto source = block(nbytes, kPinned);
    std::vector<CopyResult> copies;
    int num_enqueued = 0;
    for (int i = 0; i < 1000 && num_enqueued == i; ++i) {
      copies.push_back(copy(*source, kDevice, /*ahead_of_need=*/true));
      num_enqueued += layer_->pace(*copies.back().ready, /*at_once=*/false) ? 1 : 0;
    }
    EXPECT_GE(num_enqueued, least) << nbytes;
    EXPECT_LE(num_enqueued, most) << nbytes;
    for (const CopyResult& each : copies) {
      each.ready->wait();
      EXPECT_TRUE(layer_->pace(*each.ready, /*at_once=*/false));
    }
  }
}

TEST_F(Prefetch, BoundIsThatOfADeviceAndDirection) {
  const auto large = block(kNumChunks * kChunk, kPinned);
  const auto there = block(kChunk, kDevice);
  const auto small = block(kChunk, kPinned);
  slow_down();
  const CopyResult slow = copy(*large, kDevice, /*ahead_of_need=*/true);
  EXPECT_FALSE(layer_->pace(*slow.ready, /*at_once=*/false));
  for (const CopyResult& other : {copy(*small, kOther, /*ahead_of_need=*/true),
                                  copy(*there, kPinned, /*ahead_of_need=*/true)}) {
    EXPECT_TRUE(layer_->pace(*other.ready, /*at_once=*/false));
    other.ready->wait();
  }
  EXPECT_TRUE(layer_->pace(*slow.ready, /*at_once=*/true));
  slow.ready->wait();
}

// Or it would stand in the way of whatever is enqueued there after it.
TEST_F(Prefetch, NothingIsEnqueuedOfWhatWouldBeStuck) {
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  const auto source = block(4096, kPinned);
  Gate gate(producer);
  simcuda_reset_counters();
  const CopyResult stuck =
      copy(*source, kDevice, /*ahead_of_need=*/true, layer_->record_use(named(producer)));
  const CopyResult next = copy(*source, kDevice, /*ahead_of_need=*/true);
  EXPECT_FALSE(layer_->pace(*stuck.ready, /*at_once=*/false));
  EXPECT_FALSE(layer_->pace(*next.ready, /*at_once=*/false)) << "in their order";
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 0U);
  gate.open();
  ASSERT_EQ(cudaStreamSynchronize(producer), cudaSuccess);
  EXPECT_TRUE(layer_->pace(*stuck.ready, /*at_once=*/false));
  EXPECT_TRUE(layer_->pace(*next.ready, /*at_once=*/false));
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 2U);
  next.ready->wait();
}

TEST_F(Prefetch, WhatIsNeededIsNotBehindOneThatIsStuck) {
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  for (const auto& [from, to] :
       {std::pair(kPinned, kDevice), std::pair(kDevice, kPinned), std::pair(kDevice, kOther)}) {
    const auto source = block(4096, from);
    Gate gate(producer);
    const CopyResult stuck =
        copy(*source, to, /*ahead_of_need=*/true, layer_->record_use(named(producer)));
    const CopyResult needed = copy(*source, to, /*ahead_of_need=*/true);
    EXPECT_FALSE(layer_->pace(*stuck.ready, /*at_once=*/false));
    EXPECT_FALSE(layer_->pace(*needed.ready, /*at_once=*/false));
    needed.ready->wait();  // for ever, if it were
    EXPECT_FALSE(is_over(stuck));
    gate.open();
    EXPECT_TRUE(layer_->pace(*stuck.ready, /*at_once=*/true));
    EXPECT_TRUE(layer_->pace(*needed.ready, /*at_once=*/false));
    stuck.ready->wait();
  }
}

TEST_F(Prefetch, CopiesThatShareAnEventAreNotBehindOneThatIsStuckAfterThem) {
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  const auto source = block(4096, kPinned);
  Gate gate(producer);
  const CopyResult shares = copy(*source, kDevice, /*ahead_of_need=*/false);
  const CopyResult stuck =
      copy(*source, kDevice, /*ahead_of_need=*/true, layer_->record_use(named(producer)));
  need(stuck, consumer);
  shares.ready->wait();  // for ever, if they were
  EXPECT_FALSE(is_over(stuck));
  gate.open();
  stuck.ready->wait();
}

TEST_F(Prefetch, RestOfOneThatIsNeededComesBehindItsChunks) {
  const auto source = block(3 * kChunk, kPinned);
  std::memset(source->pack_data(), 7, 3 * kChunk);
  slow_down();
  const CopyResult begun = copy(*source, kDevice, /*ahead_of_need=*/true);
  EXPECT_FALSE(layer_->pace(*begun.ready, /*at_once=*/false));
  begun.ready->wait();
  EXPECT_EQ(simcuda_device_end(0), simcuda_now()) << "the chunks are over";
  EXPECT_TRUE(layer_->pace(*begun.ready, /*at_once=*/false));
  EXPECT_GE(begun.ready->elapsed_ns().value_or(0), 3 * kChunk * 1000) << "at 1 MB/s";
}

TEST_F(Prefetch, LongChainIsEnqueuedAtOnceByWhoeverWaitsForItsEnd) {
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  const auto source = block(512, kPinned);
  const auto target = block(512, kDevice);
  Gate gate(producer);
  const std::vector<CopyResult> copies =
      chain(*source, target, layer_->record_use(named(producer)));
  for (const CopyResult& each : copies) {
    EXPECT_FALSE(layer_->pace(*each.ready, /*at_once=*/false));
  }
  simcuda_reset_counters();
  need(copies.back(), consumer);
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], static_cast<std::uint64_t>(kNumInChain));
  EXPECT_EQ(counters().busy_host_syncs, 0U);
  for (const CopyResult& each : copies) {
    EXPECT_TRUE(layer_->pace(*each.ready, /*at_once=*/false));
  }
  gate.open();
  copies.back().ready->wait();
}

TEST_F(Prefetch, LongChainIsLetGo) {
  const c10::cuda::CUDAStream producer = c10::cuda::getStreamFromPool();
  const auto source = block(512, kPinned);
  const auto target = block(512, kDevice);
  Gate gate(producer);
  simcuda_reset_counters();
  chain(*source, target, layer_->record_use(named(producer)));
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 0U);
}

TEST_F(Prefetch, OneThatIsNeededIsTriedAgainWhenACallFails) {
  const auto source = block(2 * kChunk + 4096, kPinned);
  slow_down();
  for (const char* entry_point : {"cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventQuery",
                                  "cudaStreamWaitEvent", "cudaMemcpyAsync"}) {
    std::uint64_t made = 0;
    for (std::uint64_t n = 0; n <= made; ++n) {
      SCOPED_TRACE(std::string(entry_point) + ", call " + std::to_string(n));
      std::memset(source->pack_data(), static_cast<int>(n), 2 * kChunk + 4096);
      const CopyResult begun = copy(*source, kDevice, /*ahead_of_need=*/true);
      EXPECT_FALSE(layer_->pace(*begun.ready, /*at_once=*/false));
      const std::uint64_t before = simcuda_calls(entry_point);
      ASSERT_EQ(simcuda_fail(entry_point, n, 1, cudaErrorInvalidValue), 0);
      begun.ready->wait();
      ASSERT_EQ(simcuda_fail(entry_point, 0, 0, 0), 0);
      made = std::max(made, simcuda_calls(entry_point) - before);
      ASSERT_EQ(begun.ready->poll(), FenceStatus::kDone);
      EXPECT_TRUE(layer_->pace(*begun.ready, /*at_once=*/false));
      auto& tensors = dynamic_cast<TensorBlock&>(*begun.block);
      for (const std::int64_t at : {std::int64_t{0}, kChunk, 2 * kChunk + 4095}) {
        std::uint8_t found = 255;
        ASSERT_EQ(cudaMemcpy(&found, static_cast<std::uint8_t*>(tensors.pack_data()) + at, 1,
                             cudaMemcpyDeviceToHost),
                  cudaSuccess);
        ASSERT_EQ(found, n);
      }
    }
  }
}

TEST_F(Prefetch, OneThatIsStuckKeepsNoOtherWaiting) {
  TemporaryDirectory directory;
  manager_ = make(layer_, with_disk(directory));
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  const at::Tensor result = on_device(64);
  const Handle large = in_page_locked(4 * kChunk, 1);
  manager_->drop(large, kDevice);
  const Handle elsewhere = in_page_locked(4096, 2);
  const Handle back = value(4096, 3);
  manager_->move(back, kDevice).wait();
  const Handle pageable = value(4096, 4);
  const Handle filed = value(4096, 5);
  manager_->move(filed, kDisk).wait();
  Gate gate(consumer);
  occupy(4 * kChunk, consumer, result);
  const PlanReport stuck = manager_->prefetch(one(large), kDevice);
  until_done(manager_->prefetch(one(elsewhere), kOther));
  until_done(manager_->prefetch(one(back), kPinned));
  until_done(manager_->prefetch(one(pageable), kDevice));
  until_done(manager_->prefetch(one(filed), kHost));
  EXPECT_FALSE(is_done(stuck));
  gate.open();
  stuck.wait();
  EXPECT_EQ(byte_of(large, kDevice), 1);
  EXPECT_EQ(byte_of(elsewhere, kOther), 2);
  EXPECT_EQ(byte_of(back, kPinned), 3);
  EXPECT_EQ(byte_of(pageable, kDevice), 4);
  EXPECT_EQ(byte_of(filed, kHost), 5);
}

TEST_F(Prefetch, OneOfPageableMemoryThatIsStuckKeepsNoOtherWaiting) {
  TemporaryDirectory directory;
  manager_ = make(layer_, with_disk(directory));
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  const at::Tensor result = on_device(64);
  const Handle first = value(4 * kMiB, 1);
  const Handle second = value(4096, 2);
  const Handle filed = value(4096, 3);
  manager_->move(filed, kDisk).wait();
  Gate gate(consumer);
  occupy(4 * kMiB, consumer, result);
  const PlanReport stuck = manager_->prefetch(one(first), kDevice);
  until_done(manager_->prefetch(one(second), kDevice));
  until_done(manager_->prefetch(one(filed), kHost));
  EXPECT_FALSE(is_done(stuck));
  gate.open();
  until_done(stuck);
  EXPECT_EQ(byte_of(first, kDevice), 1);
  EXPECT_EQ(byte_of(second, kDevice), 2);
  EXPECT_EQ(byte_of(filed, kHost), 3);
}

TEST_F(Prefetch, OfPageableMemoryIsNotBehindCopiesThatWaitOnTheDevice) {
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  const at::Tensor result = on_device(64);
  const Handle waiting = in_page_locked(4 * kMiB, 1);
  manager_->drop(waiting, kDevice);
  const Handle pageable = value(4096, 2);
  Gate gate(consumer);
  occupy(4 * kMiB, consumer, result);
  const ActionReport stuck = manager_->ensure(waiting, kDevice);
  until_done(manager_->prefetch(one(pageable), kDevice));
  EXPECT_FALSE(stuck.done());
  gate.open();
  EXPECT_EQ(byte_of(waiting, kDevice), 1);
  EXPECT_EQ(byte_of(pageable, kDevice), 2);
}

TEST_F(Prefetch, FieldsOfAdoptedTensorsAreSentInChunks) {
  const Handle handle = fields(600, 64 << 10, /*pinned=*/true);
  simcuda_reset_counters();
  until_done(manager_->prefetch(one(handle), kDevice));
  EXPECT_EQ(simcuda_calls("cudaMemcpyBatchAsync"), 3U) << "600 * 64 KiB in chunks of 16 MiB";
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 600U);
  expect_fields(handle, kDevice);
}

TEST_F(Prefetch, FieldsOfPageableMemoryArePutTogether) {
  const Handle handle = fields(1000, 1000, /*pinned=*/false);
  simcuda_reset_counters();
  until_done(manager_->prefetch(one(handle), kDevice));
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 1U);
  expect_fields(handle, kDevice);
}

TEST_F(Prefetch, FieldsOfPageableMemoryAreCutWhereAChunkEnds) {
  const Handle handle = fields(7, 5 * kMiB + 100, /*pinned=*/false);
  until_done(manager_->prefetch(one(handle), kDevice));
  expect_fields(handle, kDevice);
}

/// The host's end of a copy out of a block.
DeviceLayer::HostEnd host_end(const TensorBlock& block) {
  const auto cursor = std::make_shared<StorageCursor>(block.storages());
  return {[cursor](const std::vector<iovec>& buffers) { cursor->read(buffers); }};
}

TEST_F(Prefetch, OfPageableMemoryGoesOnToTheEndOnceItIsNeeded) {
  const auto source = block(4 * kChunk, kHost);
  const DeviceLayer::HostEnd from_source = host_end(*source);
  const auto target = block(4 * kChunk, kDevice);
  const std::atomic<bool> abandon{false};
  DeviceLayer::Progress done;
  EXPECT_FALSE(layer_->copy_staged(*target, true, from_source, std::nullopt, done,
                                   {.needed_now = false, .abandon = abandon}));
  EXPECT_EQ(done.done, Bytes(kChunk));
  EXPECT_TRUE(layer_->copy_staged(*target, true, from_source, std::nullopt, done,
                                  {.needed_now = true, .abandon = abandon}));
}

TEST_F(Prefetch, OfPageableMemoryGivesWayAndEndsWhenItIsAbandoned) {
  const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  const auto source = block(4096, kHost);
  const DeviceLayer::HostEnd from_source = host_end(*source);
  const auto target = block(4096, kDevice);
  const auto elsewhere = block(4096, kOther);
  const std::atomic<bool> abandon{false};
  Gate gate(stream);
  simcuda_reset_counters();
  std::thread needed([&] {
    const auto first = block(4096, kHost);
    const auto there = block(4096, kDevice);
    DeviceLayer::Progress done;
    EXPECT_TRUE(layer_->copy_staged(*there, true, host_end(*first), named(stream), done,
                                    {.needed_now = true, .abandon = abandon}));
  });
  eventually("the first copy", [] { return counters().copies[SIMCUDA_H2D] != 0; });
  DeviceLayer::Progress done;
  EXPECT_FALSE(layer_->copy_staged(*target, true, from_source, std::nullopt, done,
                                   {.needed_now = false, .abandon = abandon}));
  EXPECT_EQ(done.done, Bytes());
  const std::atomic<bool> abandoned{true};
  EXPECT_THROW((void)layer_->copy_staged(*target, true, from_source, std::nullopt, done,
                                         {.needed_now = false, .abandon = abandoned}),
               UnavailableError);
  EXPECT_TRUE(layer_->copy_staged(*elsewhere, true, from_source, std::nullopt, done,
                                  {.needed_now = false, .abandon = abandon}))
      << "another device has other buffers";
  gate.open();
  needed.join();
}

// It may be some time until a thread comes to it.
TEST_F(Prefetch, OfPageableMemoryGivesWayToOneThatIsOnlyAnnounced) {
  const auto source = block(2 * kChunk, kHost);
  const auto target = block(2 * kChunk, kDevice);
  const std::atomic<bool> abandon{false};
  const DeviceLayer::HostEnd end = host_end(*source);
  DeviceLayer::Progress progress;
  const auto go_on = [&] {
    return layer_->copy_staged(*target, true, end, std::nullopt, progress,
                               {.needed_now = false, .abandon = abandon});
  };
  EXPECT_FALSE(go_on());
  EXPECT_EQ(progress.done, Bytes(kChunk));
  std::shared_ptr<void> announced = layer_->announce_staged(kDevice);
  std::shared_ptr<void> again = layer_->announce_staged(kDevice);
  EXPECT_FALSE(go_on());
  announced.reset();
  EXPECT_FALSE(go_on());
  EXPECT_EQ(progress.done, Bytes(kChunk));
  const auto elsewhere = layer_->announce_staged(kOther);
  again.reset();
  EXPECT_TRUE(go_on()) << "another device has other buffers";
}

// Others, a worker among them, may wait for what comes behind it.
TEST_F(Prefetch, GoesOnByItselfOnceAFaultIsOver) {
  const Handle handle = in_page_locked(kChunk, 1);
  manager_->drop(handle, kDevice);
  EXPECT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 200, cudaErrorInvalidValue), 0);
  until_done(manager_->prefetch(one(handle), kDevice));
  EXPECT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 0, 0), 0);
  EXPECT_EQ(byte_of(handle, kDevice), 1);
}

TEST_F(Prefetch, OneThatIsNotEnqueuedIsNoCopyToRelyOn) {
  const Handle handle = in_page_locked(kChunk, 1);
  manager_->drop(handle, kDevice);
  using Call = std::function<void(Manager&)>;
  const std::vector<Call> calls = {
      [&](Manager& manager) { manager.drop(handle, kPinned); },
      [&](Manager& manager) { manager.move(handle, kDevice); },
      [&](Manager& manager) { (void)manager.acquire(one(handle), kDevice); },
      [&](Manager& manager) { (void)manager.hold(one(handle), kDevice); },
      [&](Manager& manager) { manager.ensure(handle, kDevice); },
      [&](Manager& manager) { (void)take(manager, handle); },
  };
  for (std::size_t i = 0; i < calls.size(); ++i) {
    SCOPED_TRACE(i);
    ASSERT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 1'000'000, cudaErrorInvalidValue), 0);
    ASSERT_EQ(manager_->prefetch(one(handle), kDevice).size(), 1U);
    try {
      calls[i](*manager_);
      ADD_FAILURE() << "it cannot be brought to the device";
    } catch (const TransferError& error) {
      EXPECT_EQ(error.handle, handle);
      EXPECT_NE(std::string(error.what()).find("cudaMemcpyAsync"), std::string::npos)
          << error.what();
    }
    EXPECT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 0, 0), 0);
    manager_->audit();
    EXPECT_EQ(byte_of(handle, kPinned), 1);
    EXPECT_THROW((void)manager_->acquire(one(handle), kDevice), UnavailableError);
  }
  manager_->ensure(handle, kDevice);
  EXPECT_EQ(byte_of(handle, kDevice), 1);
}

TEST_F(Prefetch, RefreshThatIsNotEnqueuedLeavesItStale) {
  const Handle handle = value(kChunk, 1, Mutability::kMutable);
  manager_->ensure(handle, kPinned).wait();
  manager_->ensure(handle, kDevice).wait();
  manager_->acquire(one(handle), kPinned, {.access = Access::kWrite}).release();
  ASSERT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 1'000'000, cudaErrorInvalidValue), 0);
  ASSERT_EQ(manager_->prefetch(one(handle), kDevice).size(), 1U);
  EXPECT_THROW(manager_->drop(handle, kPinned), TransferError);
  EXPECT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 0, 0), 0);
  EXPECT_THROW((void)manager_->acquire(one(handle), kDevice), UnavailableError);
  manager_->audit();
  EXPECT_EQ(byte_of(handle, kPinned), 1);
}

// For the second of two hints the first is settled.
TEST_F(Prefetch, RefreshBehindOneThatIsNotEnqueuedLosesNothing) {
  for (const bool fails_at_once : {true, false}) {
    const Handle large = in_page_locked(kNumChunks * kChunk, 1);
    const Handle handle = value(kChunk, 2, Mutability::kMutable);
    manager_->ensure(handle, kPinned).wait();
    manager_->drop(large, kDevice);
    slow_down();
    (void)manager_->prefetch(one(large), kDevice);
    (void)manager_->prefetch(one(handle), kDevice);
    if (fails_at_once) {
      ASSERT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 1'000'000, cudaErrorInvalidValue), 0);
    }
    manager_->acquire(one(handle), kHost, {.access = Access::kWrite}).release();
    try {
      (void)manager_->prefetch(one(handle), kDevice);
      EXPECT_FALSE(fails_at_once);
    } catch (const TransferError&) {  // of the first
      EXPECT_TRUE(fails_at_once);
    }
    ASSERT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 1'000'000, cudaErrorInvalidValue), 0);
    for (const Location at : {kPinned, kHost}) {
      try {
        manager_->drop(handle, at);
      } catch (const Error&) {
      }
      manager_->audit();
    }
    EXPECT_EQ(simcuda_fail("cudaMemcpyAsync", 0, 0, 0), 0);
    ASSERT_EQ(simcuda_set("h2d", "16GB/s"), 0);
    try {
      manager_->synchronize();
    } catch (const TransferError&) {
    }
    try {
      manager_->ensure(handle, kHost).wait();
    } catch (const TransferError&) {
      manager_->ensure(handle, kHost).wait();
    }
    EXPECT_EQ(byte_of(handle, kHost), 2);
    try {
      manager_->discard(large);
    } catch (const TransferError&) {  // it was tried for a second as well
      manager_->discard(large);
    }
    manager_->discard(handle);
  }
}

// The option is one of every action: what gives something up relies on what was put off.
TEST_F(Prefetch, MoveAheadOfNeedSettlesWhatItGivesUp) {
  const Handle handle = in_page_locked(kChunk, 1);
  manager_->drop(handle, kDevice);
  slow_down();
  for (int i = 0; i < 20; ++i) {
    (void)manager_->prefetch(one(handle), kDevice);
    manager_->apply(DropResident{handle, kDevice}, {.prefetch = true});
    manager_->audit();
  }
  ASSERT_EQ(simcuda_set("h2d", "16GB/s"), 0);
  manager_->synchronize();
  manager_->audit();
}

// It is enqueued for whoever relies on it, and nobody waits for the device.
TEST_F(Prefetch, OneThatIsReliedOnMakesNobodyWait) {
  const Handle handle = in_page_locked(kNumChunks * kChunk, 1);
  const Handle other = in_page_locked(kNumChunks * kChunk, 2);
  manager_->drop(handle, kDevice);
  manager_->drop(other, kDevice);
  slow_down();
  simcuda_reset_counters();
  ASSERT_EQ(manager_->prefetch(std::vector{handle, other}, kDevice).size(), 2U);
  EXPECT_FALSE(manager_->drop(other, kPinned).record().waited);
  Lease lease = manager_->acquire(one(handle), kDevice, {.may_block = false});
  manager_->ensure(other, kDevice, {.may_block = false});
  lease.release();
  EXPECT_EQ(counters().busy_host_syncs, 0U);
  ASSERT_EQ(simcuda_set("h2d", "16GB/s"), 0);
  EXPECT_EQ(byte_of(handle, kDevice), 1);
  EXPECT_EQ(byte_of(other, kDevice), 2);
}

// Or its memory would be used again under the chunks.
TEST_F(Prefetch, FailureIsToldBehindTheChunksThatAreInFlight) {
  const auto source = block(4 * kChunk, kPinned);
  slow_down();
  for (const char* entry_point : {"cudaMemcpyAsync", "cudaStreamWaitEvent"}) {
    const CopyResult fails = copy(*source, kDevice, /*ahead_of_need=*/true);
    EXPECT_FALSE(layer_->pace(*fails.ready, /*at_once=*/false));
    expect_failure_behind_what_is_enqueued(fails, entry_point);
    EXPECT_TRUE(layer_->pace(*fails.ready, /*at_once=*/false));
  }
}

// Or its memory would be used again under whoever still uses it.
TEST_F(Prefetch, FailureIsToldBehindWhatItComesAfter) {
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  const at::Tensor result = on_device(kMiB);
  const auto source = block(kMiB, kPinned);
  slow_down();
  for (const char* entry_point : {"cudaMemcpyAsync", "cudaStreamWaitEvent"}) {
    ASSERT_EQ(cudaMemcpyAsync(result.mutable_data_ptr(), source->pack_data(), kMiB,
                              cudaMemcpyDefault, consumer),
              cudaSuccess);
    const CopyResult fails =
        copy(*source, kDevice, /*ahead_of_need=*/true, layer_->record_use(named(consumer)));
    expect_failure_behind_what_is_enqueued(fails, entry_point);
  }
}

TEST_F(Prefetch, BringsValuesInTheirOrder) {
  const Handle large = in_page_locked(kNumChunks * kChunk, 1);
  const Handle other = in_page_locked(kNumChunks * kChunk, 2);
  manager_->drop(large, kDevice);
  manager_->drop(other, kDevice);
  simcuda_reset_counters();
  const PlanReport report = manager_->prefetch(std::vector{large, other}, kDevice);
  ASSERT_EQ(report.size(), 2U);
  EXPECT_EQ(counters().busy_host_syncs, 0U);
  eventually("the end of the last",
             [&] { return report.entries().back().device_elapsed_ns.has_value(); });
  EXPECT_TRUE(is_done(report));
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 2U * kNumChunks);
  EXPECT_EQ(byte_of(large, kDevice), 1);
  EXPECT_EQ(byte_of(other, kDevice), 2);
}

TEST_F(Prefetch, WhoeverWaitsHasTheRestEnqueuedAtOnce) {
  const Handle large = in_page_locked(kNumChunks * kChunk, 1);
  manager_->drop(large, kDevice);
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  simcuda_reset_counters();
  (void)manager_->prefetch(one(large), kDevice);
  Lease lease =
      manager_->acquire(one(large), kDevice, {.stream = named(consumer), .may_block = false});
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], static_cast<std::uint64_t>(kNumChunks));
  EXPECT_EQ(counters().busy_host_syncs, 0U);
  std::uint8_t last = 0;
  const at::Tensor& tensor = tensors(lease, large)[0];
  ASSERT_EQ(
      cudaMemcpyAsync(
          &last, static_cast<const std::uint8_t*>(tensor.const_data_ptr()) + tensor.numel() - 1, 1,
          cudaMemcpyDeviceToHost, consumer),
      cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(consumer), cudaSuccess);
  EXPECT_EQ(last, 1);
  lease.release();
}

TEST_F(Prefetch, ComesBehindWhoeverStillUsesTheMemory) {
  const Handle anchor = value(64, 0);
  manager_->ensure(anchor, kDevice).wait();  // keeps the segment
  const Handle gone = in_page_locked(4 * kMiB, 1);
  const Handle next = value(4 * kMiB, 2);
  manager_->ensure(next, kPinned).wait();
  const c10::cuda::CUDAStream consumer = c10::cuda::getStreamFromPool();
  const at::Tensor result = on_device(64);
  Gate gate(consumer);
  enqueue_read(gone, consumer, result);
  manager_->drop(gone, kDevice);
  const PlanReport report = manager_->prefetch(one(next), kDevice);
  gate.open();
  report.wait();
  EXPECT_GT(report.entries().front().device_elapsed_ns.value_or(0), 0);
  manager_->synchronize();
  EXPECT_EQ(first_byte(result), 1);
  EXPECT_EQ(byte_of(next, kDevice), 2);
}

TEST_F(Prefetch, OfPageableMemoryLetsOthersPass) {
  const Handle large = value(16 * kChunk, 1);
  const Handle needed = value(kChunk, 2);
  simcuda_reset_counters();
  const PlanReport report = manager_->prefetch(one(large), kDevice);
  eventually("the first copy", [] { return counters().copies[SIMCUDA_H2D] != 0; });
  const ActionReport demanded = manager_->ensure(needed, kDevice);
  // Not before the call: the other goes on as long as nobody has asked.
  const std::uint64_t before = counters().copied_bytes[SIMCUDA_H2D];
  demanded.wait();
  // Its own, the chunk that was under way, and what the other does by the time that this thread is
  // woken. Without giving way it would be all.
  EXPECT_LT(counters().copied_bytes[SIMCUDA_H2D] - before, 10U * kChunk);
  report.wait();
  EXPECT_EQ(byte_of(large, kDevice), 1);
  EXPECT_EQ(byte_of(needed, kDevice), 2);
}

TEST_F(Prefetch, ClosingTakesItAlong) {
  const Handle large = in_page_locked(kNumChunks * kChunk, 1);
  manager_->drop(large, kDevice);
  simcuda_reset_counters();
  (void)manager_->prefetch(one(large), kDevice);
  manager_->close({.wait = false, .force = true});
  eventually("all chunks, of which none is left behind",
             [] { return counters().copies[SIMCUDA_H2D] >= kNumChunks; });
}

// The rest of an earlier copy ahead of need must not come after one that was demanded since.
TEST_F(Prefetch, ComesBehindOneThatIsNotEnqueuedYet) {
  const Handle anchor = value(64, 0);
  manager_->ensure(anchor, kDevice).wait();  // keeps the segment
  const Handle first = value(4 * kMiB, 1);
  const Handle second = value(4 * kMiB, 2);
  const Handle large = in_page_locked(kNumChunks * kChunk, 3);
  manager_->drop(large, kDevice);
  for (const Handle& handle : {first, second}) {
    manager_->ensure(handle, kPinned).wait();
    manager_->drop(handle, kHost);
  }
  // The worker is busy with the large one, so that this is not enqueued.
  (void)manager_->prefetch(std::vector<Handle>{large, first}, kDevice);
  manager_->drop(first, kDevice);
  (void)manager_->prefetch(one(second), kDevice);  // comes where the first was to come
  manager_->acquire(one(second), kDevice).release();
  manager_->synchronize();
  EXPECT_EQ(byte_of(second, kDevice), 2);
  EXPECT_EQ(byte_of(large, kDevice), 3);
}

TEST_F(Prefetch, OfOldBytesDoesNotOverwriteNewOnes) {
  const Handle value = this->value(4 * kMiB, 1, Mutability::kMutable);
  const Handle large = in_page_locked(kNumChunks * kChunk, 3);
  manager_->drop(large, kDevice);
  manager_->ensure(value, kPinned).wait();
  manager_->ensure(value, kOther).wait();
  (void)manager_->prefetch(std::vector<Handle>{large, value}, kDevice);
  {
    const c10::cuda::CUDAStream writer = c10::cuda::getStreamFromPool(false, 1);
    Lease lease =
        manager_->acquire(one(value), kOther, {.access = Access::kWrite, .stream = named(writer)});
    ASSERT_EQ(cudaMemsetAsync(tensors(lease, value)[0].mutable_data_ptr(), 2, 4 * kMiB, writer),
              cudaSuccess);
    lease.release();
  }
  (void)manager_->prefetch(one(value), kDevice);  // refreshes what is stale
  manager_->acquire(one(value), kDevice).release();
  manager_->synchronize();
  EXPECT_EQ(byte_of(value, kDevice), 2);
}

}  // namespace
}  // namespace residency::testing
