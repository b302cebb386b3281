// One test for each event that the library waits for. ThreadSanitizer, where the program is built
// with it, must report nothing here, and with RESIDENCY_WITHOUT_EDGE in the environment, when the
// one event in question is kept from it (`without`), a data race in every test.
//
// On the virtual clock a copy takes a second, so that whatever is enqueued stays pending until the
// host waits for it or `time_passes`. Nothing here takes a second in real time.

#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "residency/aten/tensor_source.h"
#include "residency/core/errors.h"
#include "residency/cuda/cuda_layer.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/tier_fixture.h"

namespace residency::testing {
namespace {

constexpr const char* kStreamWait = "cudaStreamWaitEvent";
constexpr const char* kHostWait = "cudaEventSynchronize";
constexpr const char* kQuery = "cudaEventQuery";
constexpr std::uint64_t kAll = UINT64_MAX;

constexpr std::int64_t kSmall = 4096;      // shares an event with others
constexpr std::int64_t kLarge = 2 * kMiB;  // has its own

class OrderEdge : public CudaTest {
 protected:
  void SetUp() override {
    if (!simulated()) {
      GTEST_SKIP() << "only the simulated runtime keeps an event from a race checker";
    }
    set("copy_latency", "1s");
    for (const Location device : {kDevice, kOther}) {  // or empty segments would be given back
      manager_->ensure(anchor_, device).wait();
    }
    settle();
  }
  void TearDown() override {
    if (simulated()) {
      for (const char* entry_point : {kStreamWait, kHostWait, kQuery}) {
        EXPECT_EQ(simcuda_keep_order_secret(entry_point, 0, 0), 0);
      }
      settle();
      set("copy_latency", latency_.c_str());
    }
  }

  struct Edges {
    std::uint64_t count = 1;
    std::uint64_t skip = 0;
  };
  /// Takes the next edges of this kind out, where the run is to be without.
  static void without(const char* entry_point, Edges edges) {
    if (std::getenv("RESIDENCY_WITHOUT_EDGE") != nullptr) {
      ASSERT_EQ(simcuda_keep_order_secret(entry_point, edges.skip, edges.count), 0)
          << simcuda_message();
    }
  }
  static void without(const char* entry_point) { without(entry_point, Edges()); }
  static void set(const char* key, const char* value) {
    ASSERT_EQ(simcuda_set(key, value), 0) << simcuda_message();
  }
  static void time_passes() {
    const simcuda_work work{"host work", 0, 1e15, SIMCUDA_FP32};
    simcuda_host_work(&work);
  }
  void settle() {
    manager_->synchronize();
    for (const int device : {1, 0}) {
      ASSERT_EQ(cudaSetDevice(device), cudaSuccess);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
  }

  Handle in_host_memory(std::int64_t nbytes = kLarge) {
    return value(*manager_, nbytes, 1, Mutability::kMutable);
  }
  /// A value that is nowhere else, with nothing in flight.
  Handle only_at(Location place, std::int64_t nbytes = kLarge) {
    const Handle handle = in_host_memory(nbytes);
    manager_->move(handle, place).wait();
    settle();
    return handle;
  }
  Handle at_both(Location first, Location second, std::int64_t nbytes = kLarge) {
    const Handle handle = only_at(first, nbytes);
    manager_->ensure(handle, second).wait();
    settle();
    return handle;
  }
  Lease lease(const Handle& handle, const c10::cuda::CUDAStream& stream,
              Access access = Access::kRead) {
    return manager_->acquire(one(handle), Location::cuda(stream.device_index()),
                             {.access = access, .stream = named(stream)});
  }
  static void* data_of(const Lease& lease, const Handle& handle) {
    return const_cast<void*>(tensors(lease, handle)[0].const_data_ptr());
  }
  void enqueue_read(const void* from, const c10::cuda::CUDAStream& stream, std::int64_t nbytes) {
    scratch_.push_back(on_device(nbytes, stream.device_index()));
    ASSERT_EQ(cudaMemcpyAsync(scratch_.back().mutable_data_ptr(), from,
                              static_cast<std::size_t>(nbytes), cudaMemcpyDefault, stream),
              cudaSuccess);
  }
  void enqueue_write(void* to, const c10::cuda::CUDAStream& stream, std::int64_t nbytes) {
    ASSERT_EQ(cudaMemcpyAsync(to, bytes_.const_data_ptr(), static_cast<std::size_t>(nbytes),
                              cudaMemcpyDefault, stream),
              cudaSuccess);
  }
  /// A consumer's read, and where.
  const void* read(const Handle& handle, const c10::cuda::CUDAStream& stream,
                   std::int64_t nbytes = kLarge) {
    Lease lease = this->lease(handle, stream);
    const void* data = data_of(lease, handle);
    enqueue_read(data, stream, nbytes);
    lease.release();
    return data;
  }
  void write(const Handle& handle, const c10::cuda::CUDAStream& stream) {
    Lease lease = this->lease(handle, stream, Access::kWrite);
    enqueue_write(data_of(lease, handle), stream, kLarge);
    lease.release();
  }
  /// Has `copy` bring a value to where a consumer still reads another, and nothing but the wait for
  /// that consumer in between.
  template <class Copy>
  void expect_behind_a_consumer(Location at, const c10::cuda::CUDAStream& consumer, Location from,
                                const Copy& copy) {
    const Handle gone = at_both(kPinned, at);
    const Handle next = only_at(from);
    const void* place = read(gone, consumer);
    manager_->drop(gone, at);
    without(kStreamWait);
    copy(next);
    EXPECT_EQ(address(next, at), place);
  }
  const void* address(const Handle& handle, Location at) {
    Lease lease = manager_->acquire(one(handle), at);
    const void* data = data_of(lease, handle);
    lease.release();
    return data;
  }
  static int first_byte(const at::Tensor& tensor) {
    return static_cast<const std::uint8_t*>(tensor.const_data_ptr())[0];
  }

  const std::string latency_ = simulated() ? simcuda_get("copy_latency") : "";
  const std::shared_ptr<DeviceLayer> layer_ = make_cuda_layer();
  const std::shared_ptr<Manager> manager_ = create_manager({}, {.devices = layer_});
  const Handle anchor_ = value(*manager_, 64, 0, Mutability::kImmutable);
  const at::Tensor bytes_ = page_locked(kLarge);
  std::vector<at::Tensor> scratch_;
  const c10::cuda::CUDAStream stream_ = c10::cuda::getStreamFromPool(false, 0);
  const c10::cuda::CUDAStream second_ = c10::cuda::getStreamFromPool(false, 0);
  const c10::cuda::CUDAStream third_ = c10::cuda::getStreamFromPool(false, 0);
  const c10::cuda::CUDAStream remote_ = c10::cuda::getStreamFromPool(false, 1);
};

// --- A consumer's stream behind what the value needs

TEST_F(OrderEdge, LeaseOfWhatIsOnItsWay) {
  const Handle handle = only_at(kPinned);
  manager_->ensure(handle, kDevice);
  without(kStreamWait);
  read(handle, stream_);
}

TEST_F(OrderEdge, LeaseOfASmallCopyOnItsWay) {
  const Handle handle = only_at(kPinned, kSmall);
  manager_->ensure(handle, kDevice);
  without(kStreamWait);
  read(handle, stream_, kSmall);
}

TEST_F(OrderEdge, LeaseOfACopyAheadOfNeed) {
  const Handle handle = only_at(kPinned);
  (void)manager_->prefetch(one(handle), kDevice);
  without(kStreamWait);
  read(handle, stream_);
}

// Each chunk is one copy, so that time would have to pass before there is room for a third.
TEST_F(OrderEdge, LeaseOfACopyOfWhichChunksAreAheadOfNeed) {
  constexpr std::int64_t kThreeChunks = 33 * kMiB;
  const Handle handle = only_at(kPinned, kThreeChunks);
  const std::uint64_t before = simcuda_calls("cudaMemcpyAsync");
  (void)manager_->prefetch(one(handle), kDevice);
  eventually("two copies", [&] { return simcuda_calls("cudaMemcpyAsync") >= before + 2; });
  without(kStreamWait);
  read(handle, stream_, kThreeChunks);
}

TEST_F(OrderEdge, FurtherStreamOfALease) {
  const Handle handle = only_at(kPinned);
  manager_->ensure(handle, kDevice);
  Lease lease = this->lease(handle, stream_);
  without(kStreamWait);
  lease.add_stream(named(second_));
  enqueue_read(data_of(lease, handle), second_, kLarge);
  lease.release();
}

TEST_F(OrderEdge, WriteBehindAReader) {
  const Handle handle = only_at(kDevice);
  read(handle, stream_);
  without(kStreamWait);
  write(handle, second_);
}

TEST_F(OrderEdge, WriteBehindACopyThatReads) {
  const Handle handle = only_at(kDevice);
  manager_->ensure(handle, kPinned);
  without(kStreamWait);
  write(handle, stream_);
}

TEST_F(OrderEdge, ReadBehindAWriter) {
  const Handle handle = only_at(kDevice);
  write(handle, stream_);
  without(kStreamWait);
  read(handle, second_);
}

TEST_F(OrderEdge, ReadBehindTheSecondOfTwoWriters) {
  const Handle handle = only_at(kDevice);
  Lease lease = this->lease(handle, stream_, Access::kWrite);
  lease.add_stream(named(second_));
  enqueue_write(data_of(lease, handle), second_, kLarge);
  without(kStreamWait);  // one event says when both have written
  lease.release();
  read(handle, third_);
}

TEST_F(OrderEdge, ReadBehindAnUndeclaredWriteOnASecondStream) {
  const Handle handle = only_at(kDevice);
  Lease lease = this->lease(handle, stream_);
  lease.add_stream(named(second_));
  enqueue_write(data_of(lease, handle), second_, kLarge);
  tensors(lease, handle)[0].unsafeGetTensorImpl()->bump_version();
  without(kStreamWait);
  EXPECT_THROW(lease.release(), UndeclaredWriteError);
  read(handle, third_);
}

// --- A copy behind the bytes that it reads

TEST_F(OrderEdge, CopyBehindItsProducer) {
  at::Tensor made = on_device(kLarge);
  enqueue_write(made.mutable_data_ptr(), stream_, kLarge);
  const Handle handle = adopt(*manager_, TensorResident({{"x", std::move(made)}}),
                              {.mode = ReplicaMode::kReplicable, .stream = named(stream_)});
  without(kStreamWait);
  manager_->ensure(handle, kPinned);
}

TEST_F(OrderEdge, CopyOnACallersStreamBehindItsProducer) {
  const Handle handle = only_at(kDevice);
  write(handle, stream_);
  without(kStreamWait);
  manager_->ensure(handle, kPinned, {.stream = named(second_)});
}

TEST_F(OrderEdge, CopyBehindOneInTheOtherDirection) {
  const Handle handle = only_at(kDevice);
  manager_->ensure(handle, kPinned);
  without(kStreamWait);
  const ActionReport report = manager_->ensure(handle, kOther);
  EXPECT_EQ(report.record().source, kPinned);
}

// The source and the place are both behind the one event.
TEST_F(OrderEdge, CopyBehindAWriteBack) {
  const Handle handle = only_at(kDevice);
  manager_->move(handle, kPinned);
  without(kStreamWait, {.count = 2});
  manager_->ensure(handle, kDevice);
}

TEST_F(OrderEdge, CopyBehindOneOfTheSameExecute) {
  const Handle handle = only_at(kPinned, kSmall);
  without(kStreamWait);
  manager_->execute(std::vector<ResidencyAction>{EnsureResident{handle, kDevice},
                                                 DropResident{handle, kPinned},
                                                 EnsureResident{handle, kOther}});
}

TEST_F(OrderEdge, CopyAheadOfNeedBehindItsProducer) {
  const Handle handle = only_at(kDevice);
  write(handle, stream_);
  without(kStreamWait);
  manager_->prefetch(one(handle), kPinned).wait();
}

TEST_F(OrderEdge, CopyBetweenDevicesBehindItsProducer) {
  const Handle handle = only_at(kDevice);
  write(handle, stream_);
  without(kStreamWait);
  manager_->ensure(handle, kOther);
}

TEST_F(OrderEdge, CopyBetweenDevicesTheOtherWayBehindItsProducer) {
  const Handle handle = only_at(kOther);
  write(handle, remote_);
  without(kStreamWait);
  manager_->ensure(handle, kDevice);
}

TEST_F(OrderEdge, WriteBehindACopyBetweenDevices) {
  const Handle handle = only_at(kDevice);
  manager_->ensure(handle, kOther);
  without(kStreamWait);
  write(handle, stream_);
}

TEST_F(OrderEdge, WriteBehindACopyBetweenDevicesTheOtherWay) {
  const Handle handle = only_at(kOther);
  manager_->ensure(handle, kDevice);
  without(kStreamWait);
  write(handle, remote_);
}

// --- A copy behind the last uses of the place that it writes to

TEST_F(OrderEdge, CopyToWhereAConsumerReads) {
  expect_behind_a_consumer(kDevice, stream_, kPinned,
                           [&](const Handle& next) { manager_->ensure(next, kDevice); });
}

TEST_F(OrderEdge, CopyOnACallersStreamToWhereAConsumerReads) {
  expect_behind_a_consumer(kDevice, stream_, kPinned, [&](const Handle& next) {
    manager_->ensure(next, kDevice, {.stream = named(second_)});
  });
}

TEST_F(OrderEdge, CopyToWhereACopyReadsPageLockedMemory) {
  const Handle gone = only_at(kPinned);
  const Handle next = only_at(kDevice);
  const void* place = address(gone, kPinned);
  manager_->move(gone, kDevice);
  without(kStreamWait);
  manager_->ensure(next, kPinned);
  EXPECT_EQ(address(next, kPinned), place);
}

TEST_F(OrderEdge, CopyBetweenDevicesToWhereAConsumerReads) {
  expect_behind_a_consumer(kOther, remote_, kDevice,
                           [&](const Handle& next) { manager_->ensure(next, kOther); });
}

TEST_F(OrderEdge, CopyToWhereTakenTensorsWere) {
  const Handle gone = only_at(kDevice);
  const Handle next = only_at(kPinned);
  const void* place = address(gone, kDevice);
  settle();
  {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    TensorResident taken = take(*manager_, gone, kDevice);
    enqueue_write(taken[0].mutable_data_ptr(), stream_, kLarge);
  }
  without(kStreamWait);
  manager_->ensure(next, kDevice);
  EXPECT_EQ(address(next, kDevice), place);
}

TEST_F(OrderEdge, CopyToWhereTakenPageLockedTensorsWere) {
  const Handle gone = only_at(kPinned);
  const Handle next = only_at(kDevice);
  const void* place = address(gone, kPinned);
  {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    const TensorResident taken = take(*manager_, gone, kPinned);
    enqueue_read(taken[0].const_data_ptr(), stream_, kLarge);
  }
  without(kStreamWait);
  manager_->ensure(next, kPinned);
  EXPECT_EQ(address(next, kPinned), place);
}

TEST_F(OrderEdge, RefreshBehindAReader) {
  const Handle handle = at_both(kPinned, kDevice);
  read(handle, stream_);
  manager_->acquire(one(handle), kPinned, {.access = Access::kWrite}).release();
  without(kStreamWait);
  manager_->ensure(handle, kDevice);
}

TEST_F(OrderEdge, RefreshOfPageLockedMemoryBehindACopyThatReads) {
  const Handle handle = at_both(kPinned, kDevice);
  manager_->ensure(handle, kOther);
  write(handle, stream_);
  without(kStreamWait);  // the first is on the copy
  manager_->ensure(handle, kPinned);
}

TEST_F(OrderEdge, CopyAheadOfNeedToWhereAConsumerReads) {
  expect_behind_a_consumer(kDevice, stream_, kPinned, [&](const Handle& next) {
    manager_->prefetch(one(next), kDevice).wait();
  });
}

TEST_F(OrderEdge, CopyToWhereOneAheadOfNeedGoes) {
  const Handle gone = only_at(kPinned);
  const Handle next = only_at(kPinned);
  const std::uint64_t before = simcuda_calls("cudaMemcpyAsync");
  (void)manager_->prefetch(one(gone), kDevice);
  eventually("a copy, on the stream for such copies",
             [&] { return simcuda_calls("cudaMemcpyAsync") != before; });
  manager_->drop(gone, kDevice);
  without(kStreamWait);
  manager_->ensure(next, kDevice);
}

TEST_F(OrderEdge, CopyAheadOfNeedToWhereOneIsFoundToBeOver) {
  const Handle gone = only_at(kPinned);
  const Handle next = only_at(kPinned);
  manager_->ensure(gone, kDevice);
  manager_->drop(gone, kDevice);
  without(kQuery, {.count = kAll});
  const std::uint64_t before = simcuda_calls("cudaMemcpyAsync");
  const PlanReport report = manager_->prefetch(one(next), kDevice);
  time_passes();
  eventually("a copy", [&] { return simcuda_calls("cudaMemcpyAsync") != before; });
  report.wait();
}

class OrderEdgeOfSegments : public OrderEdge {
 protected:
  static constexpr std::int64_t kSegment = 16 * kMiB;

  /// A reader's segment is given back, and taken again for another value.
  void take_again(const Handle& next, const std::function<void()>& before_give_back,
                  const std::function<void()>& before_copy) {
    const Handle gone = at_both(kPinned, kDevice, kSegment);
    const void* place = read(gone, stream_, kSegment);
    before_give_back();
    manager_->drop(gone, kDevice);
    ASSERT_LT(layer_->usage(kDevice).segments, Bytes(kSegment));
    before_copy();
    manager_->ensure(next, kDevice);
    EXPECT_EQ(address(next, kDevice), place);
  }
};

TEST_F(OrderEdgeOfSegments, ArenaBehindWhoeverUsedWhatIsGivenBack) {
  take_again(
      only_at(kPinned, kSegment), [] { without(kStreamWait); }, [] {});
}

TEST_F(OrderEdgeOfSegments, CopyBehindTheArena) {
  take_again(
      only_at(kPinned, kSegment), [] {}, [] { without(kStreamWait); });
}

TEST_F(OrderEdgeOfSegments, StagedCopyBehindTheArena) {
  take_again(
      in_host_memory(kSegment), [] {}, [] { without(kHostWait); });
}

// --- The host behind the device

TEST_F(OrderEdge, HostReadsWhatIsOnItsWay) {
  const Handle handle = only_at(kDevice);
  manager_->ensure(handle, kPinned);
  without(kHostWait);
  Lease lease = manager_->acquire(one(handle), kPinned);
  EXPECT_EQ(first_byte(tensors(lease, handle)[0]), 1);
  lease.release();
}

TEST_F(OrderEdge, HostReadsASmallCopyOnItsWay) {
  const Handle handle = only_at(kDevice, kSmall);
  manager_->ensure(handle, kPinned);
  without(kHostWait);
  Lease lease = manager_->acquire(one(handle), kPinned);
  EXPECT_EQ(first_byte(tensors(lease, handle)[0]), 1);
  lease.release();
}

TEST_F(OrderEdge, HostReadsACopyAheadOfNeed) {
  const Handle handle = only_at(kDevice);
  (void)manager_->prefetch(one(handle), kPinned);
  without(kHostWait);
  Lease lease = manager_->acquire(one(handle), kPinned);
  EXPECT_EQ(first_byte(tensors(lease, handle)[0]), 1);
  lease.release();
}

TEST_F(OrderEdge, HostReadsWhatHasArrived) {
  const Handle handle = only_at(kDevice);
  manager_->ensure(handle, kPinned);
  time_passes();
  without(kQuery, {.count = kAll});
  Lease lease = manager_->acquire(one(handle), kPinned, {.may_block = false});
  EXPECT_EQ(first_byte(tensors(lease, handle)[0]), 1);
  lease.release();
}

TEST_F(OrderEdge, HostWritesBehindACopyThatReads) {
  const Handle handle = only_at(kPinned);
  manager_->ensure(handle, kDevice);
  without(kHostWait);
  Lease lease = manager_->acquire(one(handle), kPinned, {.access = Access::kWrite});
  std::memset(data_of(lease, handle), 2, kLarge);
  lease.release();
}

TEST_F(OrderEdge, HostReadsWhatATakenValueHolds) {
  const Handle handle = only_at(kDevice);
  manager_->ensure(handle, kPinned);
  without(kHostWait);
  EXPECT_EQ(first_byte(take(*manager_, handle, kPinned)[0]), 1);
}

TEST_F(OrderEdge, HostReadsWhatAConsumerMadeOnceTheLeaseIsReleased) {
  const Handle handle = only_at(kDevice);
  const at::Tensor made = page_locked(kLarge);
  Lease lease = this->lease(handle, stream_);
  ASSERT_EQ(cudaMemcpyAsync(made.mutable_data_ptr(), data_of(lease, handle), kLarge,
                            cudaMemcpyDefault, stream_),
            cudaSuccess);
  without(kHostWait);
  lease.release(/*wait=*/true);
  EXPECT_EQ(first_byte(made), 1);
}

TEST_F(OrderEdge, HostOverwritesWhatWasCopiedOnceTheReportIsWaitedFor) {
  const at::Tensor shared = page_locked(kLarge);
  const Handle handle =
      adopt(*manager_, TensorResident({{"x", shared}}), {.mode = ReplicaMode::kReplicable});
  const ActionReport report = manager_->ensure(handle, kDevice);
  without(kHostWait);
  report.wait();
  std::memset(shared.mutable_data_ptr(), 2, kLarge);
}

TEST_F(OrderEdge, HostOverwritesWhatWasCopiedOnceTheManagerIsSynchronized) {
  const at::Tensor shared = page_locked(kLarge);
  const Handle handle =
      adopt(*manager_, TensorResident({{"x", shared}}), {.mode = ReplicaMode::kReplicable});
  manager_->ensure(handle, kDevice);
  without(kHostWait);
  manager_->synchronize();
  std::memset(shared.mutable_data_ptr(), 2, kLarge);
}

TEST_F(OrderEdge, CopyToAPlaceThatIsFoundFree) {
  const Handle gone = at_both(kPinned, kDevice);
  const Handle next = only_at(kPinned);
  const void* place = read(gone, stream_);
  time_passes();
  without(kQuery, {.count = kAll});
  manager_->drop(gone, kDevice);
  manager_->ensure(next, kDevice);
  EXPECT_EQ(address(next, kDevice), place);
}

TEST_F(OrderEdge, AdoptedMemoryIsFreedBehindTheCopyThatReads) {
  at::Tensor made = on_device(kLarge);
  const void* place = made.const_data_ptr();
  const Handle handle = adopt(*manager_, TensorResident({{"x", std::move(made)}}));
  manager_->move(handle, kPinned);
  time_passes();
  without(kQuery, {.count = kAll});
  manager_->ensure(anchor_, kPinned);  // an occasion to look what has completed
  at::Tensor next = on_device(kLarge);
  ASSERT_EQ(next.const_data_ptr(), place);
  enqueue_write(next.mutable_data_ptr(), current(kDevice), kLarge);
}

TEST_F(OrderEdge, ReadBehindASourceThatWorksOnADevice) {
  const auto source = std::make_shared<CallbackSource>([&] {
    at::Tensor made = on_device(kLarge);
    enqueue_write(made.mutable_data_ptr(), current(kDevice), kLarge);
    return TensorResident({{"x", std::move(made)}});
  });
  const Handle handle = register_source(
      *manager_, source, TensorResident({{"x", on_device(kLarge)}}).layout(), {.at = kDevice});
  const c10::cuda::CUDAStreamGuard guard(stream_);
  without(kHostWait);
  manager_->ensure(handle, kDevice);
  read(handle, second_);
}

// --- A worker behind the device

TEST_F(OrderEdge, StagingBufferIsFilledBehindItsCopy) {
  const Handle handle = in_host_memory(5 * 4 * kMiB);  // one more than there are buffers
  without(kHostWait);
  manager_->ensure(handle, kDevice).wait();
}

TEST_F(OrderEdge, StagedCopyHasArrivedBehindItsLastBuffer) {
  const Handle handle = in_host_memory(kSmall);
  without(kHostWait);
  manager_->ensure(handle, kDevice);
  read(handle, stream_, kSmall);
}

TEST_F(OrderEdge, StagingBufferIsReadBehindItsCopy) {
  const Handle handle = only_at(kDevice, kSmall);
  without(kHostWait);
  manager_->ensure(handle, kHost).wait();
}

TEST_F(OrderEdge, StagedCopyBehindItsProducer) {
  const Handle handle = only_at(kDevice);
  write(handle, stream_);
  without(kHostWait);
  manager_->ensure(handle, kHost).wait();
}

TEST_F(OrderEdge, StagedCopyToWhereAConsumerReads) {
  const Handle gone = at_both(kPinned, kDevice);
  const Handle next = in_host_memory();
  const void* place = read(gone, stream_);
  manager_->drop(gone, kDevice);
  without(kHostWait);
  manager_->ensure(next, kDevice).wait();
  EXPECT_EQ(address(next, kDevice), place);
}

TEST_F(OrderEdge, WorkerWritesToWhereACopyReadsPageLockedMemory) {
  const Handle gone = only_at(kPinned);
  const Handle next = in_host_memory();
  const void* place = address(gone, kPinned);
  manager_->move(gone, kDevice);
  without(kHostWait);
  manager_->ensure(next, kPinned).wait();
  EXPECT_EQ(address(next, kPinned), place);
}

TEST_F(OrderEdge, WorkerReadsPageLockedMemoryBehindItsCopy) {
  const Handle handle = only_at(kDevice);
  manager_->ensure(handle, kPinned);
  without(kHostWait);
  const ActionReport report = manager_->ensure(handle, kHost);
  EXPECT_EQ(report.record().source, kPinned);
  report.wait();
}

}  // namespace
}  // namespace residency::testing
