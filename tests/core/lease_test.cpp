// Section I: leases, holds, writes.

#include <string>
#include <thread>

#include "fixture.h"

namespace residency::test {
namespace {

using LeaseTest = ManagerTest;
using WriteTest = ManagerTest;
using HoldTest = ManagerTest;
using BorrowTest = ManagerTest;

TEST_F(LeaseTest, BorrowsWhatIsThereAndNeverLoadsOrCopies) {
  start();
  const Handle unloaded = source(100);
  const Handle elsewhere = adopt(kPageable, 100);
  refused<UnavailableError>([&] { acquire(unloaded, kPageable).release(); });
  refused<UnavailableError>([&] { acquire(elsewhere, kCuda0).release(); });
  EXPECT_EQ(sources[unloaded]->num_loads, 0);
  EXPECT_EQ(backend->num_calls(Call::kCopy), 0U);
}

TEST_F(LeaseTest, IsAllOrNone) {
  start();
  const Handle a = adopt(kPageable, 100);
  const Handle b = adopt(kPinned, 100);
  const Handle handles[] = {a, b};
  refused<UnavailableError>([&] { manager->acquire(handles, kPageable).release(); });
  manager->discard(b);
  refused<HandleError>([&] { manager->acquire(handles, kPageable).release(); });
  EXPECT_EQ(at(a, kPageable).num_leases, 0U);
}

TEST_F(LeaseTest, DuplicatesCollapseAndEmptyIsAnArgumentError) {
  start();
  const Handle a = adopt(kPageable, 100);
  const Handle b = adopt(kPageable, 100);
  const Handle handles[] = {a, b, a, a, b};
  Lease lease = manager->acquire(handles, kPageable);
  EXPECT_EQ(lease.handles().size(), 2U);
  EXPECT_EQ(lease.handles()[0], a);
  EXPECT_EQ(lease.handles()[1], b);
  EXPECT_EQ(at(a, kPageable).num_leases, 1U);
  lease.release();
  refused<std::invalid_argument>([&] { manager->acquire({}, kPageable).release(); });
  refused<std::invalid_argument>([&] { manager->borrow({}, kPageable).release(); });
  refused<std::invalid_argument>([&] { manager->hold({}, kPageable).release(); });
}

TEST_F(LeaseTest, RisesTheVersionAndShowsInTheSnapshot) {
  start();
  const Handle a = adopt(kPageable, 100);
  const auto version = manager->state_version();
  Lease lease = acquire(a, kPageable);
  EXPECT_GT(manager->state_version(), version);
  EXPECT_EQ(manager->snapshot().num_leases, 1U);
  lease.release();
  EXPECT_EQ(manager->snapshot().num_leases, 0U);
}

TEST_F(LeaseTest, ViewIsMadeOnceAndGoesWithTheLease) {
  start();
  const Handle a = adopt(kPageable, 100);
  const Handle b = adopt(kPageable, 100);
  Lease lease = acquire(a, kPageable);
  View& view = lease.view(a);
  EXPECT_EQ(&lease.view(a), &view);
  EXPECT_EQ(backend->num_calls(Call::kOpenView), 1U);
  EXPECT_TRUE(block(lease, a).holds(seeds[a]));
  EXPECT_THROW((void)lease.view(b), std::invalid_argument) << "a good handle, of another value";
  EXPECT_THROW((void)lease.view(Handle()), HandleError);
  lease.release();
  EXPECT_THROW((void)lease.view(a), LifetimeClosedError);
  EXPECT_EQ(lease.handles()[0], a);
  EXPECT_EQ(lease.location(), kPageable);
  EXPECT_FALSE(lease.active());
}

TEST_F(LeaseTest, ReleasingTwiceIsHarmlessAndWorksFromAnyThread) {
  start();
  const Handle a = adopt(kPageable, 100);
  Lease lease = acquire(a, kPageable);
  std::thread([&] { lease.release(); }).join();
  changes_nothing([&] { lease.release(); });
  EXPECT_THROW(lease.add_stream({kCuda0, 1}), std::exception);
}

TEST_F(LeaseTest, NothingLeasedIsMovedOrFreed) {
  start();
  const Handle a = adopt(kPageable, 100);
  Lease lease = acquire(a, kPageable);
  const auto address = block(lease, a).address_ranges();
  refused<InUseError>([&] { manager->move(a, kPinned); });
  refused<InUseError>([&] { manager->discard(a); });
  refused<InUseError>([&] { (void)manager->take(a); });
  EXPECT_EQ(block(lease, a).address_ranges(), address);
  lease.release();
}

TEST_F(LeaseTest, WhatStandsInTheWayOfACopyIsTheWriteLease) {
  start();
  const Handle a = adopt(kPinned, 100, kReplicable, kMutable);
  manager->ensure(a, kCuda0);
  backend->complete_all();
  Lease lease = acquire(a, kCuda0, Access::kWrite);
  for (const ResidencyAction& action : {ResidencyAction(EnsureResident{a, kPageable}),
                                        ResidencyAction(MoveResident{a, kPageable, kPinned})}) {
    try {
      manager->apply(action);
      ADD_FAILURE() << "it would copy what is being written";
    } catch (const InUseError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("at cuda:0 is protected: 1 lease(s)"), std::string::npos) << text;
    }
  }
  lease.release();
}

TEST_F(LeaseTest, HostLeaseReturnsWhenTheValueIsReady) {
  start();
  const Handle a = adopt(kCuda0, 100);
  manager->ensure(a, kPinned);
  manager->ensure(a, kPageable);
  EXPECT_GT(backend->num_queued(), 0U);
  for (const Location host : {kPinned, kPageable}) {
    Lease lease = acquire(a, host);
    EXPECT_TRUE(block(lease, a).holds(seeds[a]));
    lease.release();
  }
}

TEST_F(LeaseTest, DeviceLeaseMakesTheStreamWaitAndNotTheHost) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  backend->set_waits_block(true);
  Lease lease = acquire(a, kCuda0);
  EXPECT_EQ(backend->queued_transfers().size(), 1U);
  backend->launch_read({kCuda0, 0}, block(lease, a), seeds[a]);
  lease.release();
  EXPECT_EQ(backend->queued_transfers().size(), 1U);
  backend->set_waits_block(false);
  backend->complete_all();
}

TEST_F(LeaseTest, ConsumerStreamDefaultsToTheCallersCurrentOne) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  backend->set_current_stream(kCuda0, 42);
  Lease lease = acquire(a, kCuda0);
  // A kernel on stream 42 is ordered behind the copy by what the lease did.
  backend->launch_read({kCuda0, 42}, block(lease, a), seeds[a]);
  backend->complete_all();
  lease.release(true);
}

TEST_F(LeaseTest, MoreStreamsCanBeAddedWhileActive) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  const Handle handles[] = {a};
  Lease lease = manager->acquire(handles, kCuda0, {.stream = Stream{kCuda0, 1}});
  lease.add_stream({kCuda0, 2});
  lease.add_stream({kCuda0, 2});
  EXPECT_THROW(lease.add_stream({kCuda1, 2}), std::invalid_argument);
  backend->launch_read({kCuda0, 1}, block(lease, a), seeds[a]);
  backend->launch_read({kCuda0, 2}, block(lease, a), seeds[a]);
  lease.release();
  EXPECT_EQ(at(a, kCuda0).num_pending, 2U);
  manager->drop(a, kCuda0);
  backend->complete_all();
}

TEST_F(LeaseTest, StreamAtAHostLocationOrOfAnotherDeviceIsAnArgumentError) {
  start();
  const Handle a = adopt(kPageable, 100);
  manager->ensure(a, kCuda0);
  const Handle handles[] = {a};
  refused<std::invalid_argument>([&] {
    manager->acquire(handles, kPageable, {.stream = Stream{kCuda0, 0}}).release();
  });
  refused<std::invalid_argument>([&] {
    manager->acquire(handles, kCuda0, {.stream = Stream{kCuda1, 0}}).release();
  });
}

TEST_F(LeaseTest, ReleaseLeavesPendingUsesAndWaitLeavesNone) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  Lease lease = acquire(a, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, a), seeds[a]);
  lease.release();
  EXPECT_EQ(at(a, kCuda0).num_pending, 1U);
  const auto version = manager->state_version();
  backend->complete_all();
  EXPECT_EQ(at(a, kCuda0).num_pending, 0U);
  EXPECT_EQ(manager->state_version(), version);
  Lease second = acquire(a, kCuda0);
  backend->launch_read({kCuda0, 0}, block(second, a), seeds[a]);
  second.release(true);
  EXPECT_EQ(at(a, kCuda0).num_pending, 0U);
}

TEST_F(LeaseTest, PendingUsesOrderADropOrMoveInsteadOfRefusingIt) {
  start();
  const Handle a = adopt(kPinned, 1000);
  manager->move(a, kCuda0);
  Lease lease = acquire(a, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, a), seeds[a]);
  lease.release();
  backend->set_waits_block(true);
  manager->move(a, kPinned);  // direct: the host does not wait
  backend->set_waits_block(false);
  backend->complete_all();
  EXPECT_TRUE(holds(a, kPinned));
}

TEST_F(LeaseTest, DestroyedWhileActiveIsReleasedAndWarns) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  {
    const Lease lease = acquire(a, kCuda0);
    backend->launch_read({kCuda0, 0}, block(lease, a), seeds[a]);
    backend->set_waits_block(true);  // the destructor must not wait for the device
  }
  backend->set_waits_block(false);
  EXPECT_EQ(warnings.texts().size(), 1U);
  EXPECT_EQ(manager->snapshot().num_leases, 0U);
  manager->drop(a, kCuda0);
  backend->complete_all();
}

TEST_F(LeaseTest, UseThatCannotBeRecordedKeepsTheLeaseActive) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  Lease lease = acquire(a, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, a), seeds[a]);
  backend->fail(Call::kRecordUse, 1);
  // Freeing the memory could not be ordered behind the kernel.
  refused<fake::InjectedFault>([&] { lease.release(); });
  EXPECT_TRUE(lease.active());
  refused<InUseError>([&] { manager->drop(a, kCuda0); });
  lease.release();
  manager->drop(a, kCuda0);
  backend->complete_all();
}

TEST_F(LeaseTest, DestroyedWithoutARecordedUseStaysProtectedUntilItIsRecorded) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  {
    const Lease lease = acquire(a, kCuda0);
    backend->launch_read({kCuda0, 0}, block(lease, a), seeds[a]);
    backend->fail(Call::kRecordUse, 1);
  }
  EXPECT_EQ(warnings.texts().size(), 1U);
  backend->fail(Call::kRecordUse, 1);
  refused<InUseError>([&] { manager->drop(a, kCuda0); });
  manager->drop(a, kCuda0);
  EXPECT_EQ(manager->snapshot().num_leases, 0U);
  manager->audit();
  manager->close();
}

TEST_F(LeaseTest, DestroyedWithoutARecordedUseIsEndedByClosing) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  {
    const Lease lease = acquire(a, kCuda0);
    backend->fail(Call::kRecordUse, 1);
  }
  backend->fail(Call::kRecordUse, 1);
  manager->close({.force = true});
}

TEST_F(LeaseTest, MoveAssignmentReleasesWhatItReplaces) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPageable, 100);
  const Handle b = adopt(kPageable, 100);
  Lease lease = acquire(a, kPageable);
  {
    Lease other = acquire(b, kPageable);
    lease = std::move(other);
  }
  EXPECT_EQ(at(a, kPageable).num_leases, 0U);
  EXPECT_EQ(at(b, kPageable).num_leases, 1U);
  EXPECT_EQ(lease.handles()[0], b);
  lease.release();
}

TEST_F(LeaseTest, OutlivesTheManager) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPageable, 100);
  Lease lease = acquire(a, kPageable);
  (void)lease.view(a);
  backend->allow_views_to_outlive_blocks();
  manager.reset();
  EXPECT_FALSE(lease.active());
  EXPECT_EQ(lease.handles()[0], a);
  EXPECT_NO_THROW(lease.release());
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(LeaseTest, ManyHandlesAreFoundInAnyOrder) {
  start();
  std::vector<Handle> handles;
  for (int i = 0; i < 100; ++i) {
    handles.push_back(adopt(kPageable, 16));
  }
  Lease lease = manager->acquire(handles, kPageable);
  for (int stride : {1, 7, 99, 3}) {
    for (std::size_t i = 0; i < 100; ++i) {
      const Handle& handle = handles[i * static_cast<std::size_t>(stride) % 100];
      EXPECT_TRUE(block(lease, handle).holds(seeds[handle]));
    }
  }
  lease.release();
}

// ------------------------------------------------------------------------------------------------

TEST_F(WriteTest, NeedsAMutableValue) {
  start();
  const Handle fixed = adopt(kPageable, 100);
  refused<std::invalid_argument>([&] { acquire(fixed, kPageable, Access::kWrite).release(); });
  const Handle handles[] = {fixed};
  refused<std::invalid_argument>(
      [&] { manager->borrow(handles, kCuda0, {.access = Access::kWrite}).release(); });
}

TEST_F(WriteTest, IsExclusiveWithAnyOtherLeaseOnAnyMaterialization) {
  start();
  const Handle a = adopt(kPageable, 100, kReplicable, kMutable);
  manager->ensure(a, kPinned);
  Lease reader = acquire(a, kPinned);
  refused<InUseError>([&] { acquire(a, kPageable, Access::kWrite).release(); });
  refused<InUseError>([&] { acquire(a, kPinned, Access::kWrite).release(); });
  reader.release();
  Lease writer = acquire(a, kPageable, Access::kWrite);
  refused<InUseError>([&] { acquire(a, kPinned).release(); });
  refused<InUseError>([&] { acquire(a, kPageable).release(); });
  refused<InUseError>([&] { acquire(a, kPageable, Access::kWrite).release(); });
  const Handle handles[] = {a};
  refused<InUseError>([&] { manager->borrow(handles, kCuda0).release(); });
  writer.release();
  acquire(a, kPageable).release();
}

TEST_F(WriteTest, NoCopyIsMadeOfBytesThatAreBeingWritten) {
  start();
  const Handle a = adopt(kPageable, 100, kReplicable, kMutable);
  Lease writer = acquire(a, kPageable, Access::kWrite);
  refused<InUseError>([&] { manager->ensure(a, kPinned); });
  writer.release();
  manager->ensure(a, kPinned);
}

TEST_F(WriteTest, OthersAreStaleAfterwardsAndNeverRead) {
  start();
  const Handle a = adopt(kPageable, 100, kReplicable, kMutable);
  manager->ensure(a, kPinned);
  manager->ensure(a, kCuda0);
  Lease writer = acquire(a, kCuda0, Access::kWrite);
  backend->launch_write({kCuda0, 0}, block(writer, a), seeds[a] = 500);
  EXPECT_FALSE(at(a, kPinned).stale) << "until the write lease ends";
  writer.release();
  EXPECT_TRUE(at(a, kPinned).stale);
  EXPECT_TRUE(at(a, kPageable).stale);
  EXPECT_FALSE(at(a, kCuda0).stale);
  refused<UnavailableError>([&] { acquire(a, kPinned).release(); });
  refused<OwnershipError>([&] { manager->drop(a, kCuda0); });
  const auto record = manager->ensure(a, kCuda1).record();
  EXPECT_EQ(record.source, kCuda0) << "the only good one, though not the cheapest";
  EXPECT_TRUE(holds(a, kCuda1));
}

TEST_F(WriteTest, StaleOneIsRefreshedInPlaceWithoutAnotherCharge) {
  budget(kPinned, 100_B);
  start();
  const Handle a = adopt(kPageable, 100, kReplicable, kMutable);
  manager->ensure(a, kPinned);
  Lease before = acquire(a, kPinned);
  const auto address = block(before, a).address_ranges();
  before.release();
  Lease writer = acquire(a, kPageable, Access::kWrite);
  block(writer, a).write(seeds[a] = 501);
  writer.release();
  EXPECT_EQ(manager->ensure(a, kPinned).reason(), Reason::kRefreshed);
  EXPECT_EQ(used(kPinned), 100_B);
  Lease after = acquire(a, kPinned);
  EXPECT_EQ(block(after, a).address_ranges(), address);
  EXPECT_TRUE(block(after, a).holds(501));
  after.release();
}

TEST_F(WriteTest, RefreshWaitsForWhoeverStillReadsTheOldBytes) {
  start();
  const Handle a = adopt(kPinned, 100, kReplicable, kMutable);
  const std::uint64_t old = seeds[a];
  manager->ensure(a, kCuda0);
  backend->complete_all();
  Lease reader = acquire(a, kCuda0);
  backend->launch_read({kCuda0, 0}, block(reader, a), old);
  reader.release();
  Lease writer = acquire(a, kPinned, Access::kWrite);
  block(writer, a).write(seeds[a] = 502);
  writer.release();
  manager->ensure(a, kCuda0);  // overwrites what the kernel reads
  backend->complete_all();
  EXPECT_TRUE(holds(a, kCuda0));
}

TEST_F(WriteTest, MoveOntoAStaleOneRefreshesIt) {
  start();
  const Handle a = adopt(kPageable, 100, kReplicable, kMutable);
  manager->ensure(a, kPinned);
  Lease writer = acquire(a, kPageable, Access::kWrite);
  block(writer, a).write(seeds[a] = 503);
  writer.release();
  EXPECT_EQ(manager->move(a, kPinned).reason(), Reason::kRefreshed);
  EXPECT_EQ(places(a), std::vector{kPinned});
  EXPECT_TRUE(holds(a, kPinned));
}

TEST_F(WriteTest, NextReaderOnAnotherStreamSeesWhatWasWritten) {
  start();
  const Handle a = adopt(kPinned, 100, kReplicable, kMutable);
  manager->ensure(a, kCuda0);
  backend->complete_all();
  const Handle handles[] = {a};
  Lease writer =
      manager->acquire(handles, kCuda0, {.access = Access::kWrite, .stream = Stream{kCuda0, 1}});
  writer.add_stream({kCuda0, 2});
  backend->launch_write({kCuda0, 2}, block(writer, a), seeds[a] = 504);
  writer.release();
  Lease reader = manager->acquire(handles, kCuda0, {.stream = Stream{kCuda0, 3}});
  backend->launch_read({kCuda0, 3}, block(reader, a), 504);
  reader.release();
  manager->ensure(a, kCuda1);
  manager->ensure(a, kPageable);
  backend->complete_all();
  EXPECT_TRUE(holds(a, kCuda1));
  EXPECT_TRUE(holds(a, kPageable));
}

TEST_F(WriteTest, WriterWaitsForReadersOnOtherStreams) {
  start();
  const Handle a = adopt(kPinned, 100, kReplicable, kMutable);
  const std::uint64_t old = seeds[a];
  manager->ensure(a, kCuda0);
  const Handle handles[] = {a};
  Lease reader = manager->acquire(handles, kCuda0, {.stream = Stream{kCuda0, 1}});
  backend->launch_read({kCuda0, 1}, block(reader, a), old);
  reader.release();
  Lease writer =
      manager->acquire(handles, kCuda0, {.access = Access::kWrite, .stream = Stream{kCuda0, 2}});
  backend->launch_write({kCuda0, 2}, block(writer, a), seeds[a] = 505);
  while (backend->complete_one()) {
  }
  writer.release(true);
  EXPECT_TRUE(holds(a, kCuda0));
}

TEST_F(WriteTest, WrittenSourceBackedValueIsNotReloaded) {
  start();
  const Handle a = source(100, kPageable, kReplicable, kMutable);
  manager->ensure(a, kPinned);
  manager->ensure(a, kCuda0);
  Lease writer = acquire(a, kPinned, Access::kWrite);
  block(writer, a).write(seeds[a] = 506);
  writer.release();
  refused<OwnershipError>([&] { manager->drop(a, kPinned); });
  manager->ensure(a, kPageable);
  EXPECT_TRUE(holds(a, kPageable));
  EXPECT_EQ(sources[a]->num_loads, 1);
}

TEST_F(WriteTest, UndeclaredWriteIsReportedAtReleaseWhichEndsTheLeaseFirst) {
  start();
  const auto spec =
      make_spec({{"weight", 64}, {"bias", 16}}, 0, kReplicable, kMustPreserve, kImmutable);
  const Handle a = manager->adopt(backend->make_block(kPageable, spec, 1), spec);
  manager->ensure(a, kPinned);
  Lease lease = acquire(a, kPageable);
  block(lease, a).write(seeds[a] = 507, "bias");
  try {
    lease.release();
    FAIL();
  } catch (const UndeclaredWriteError& error) {
    EXPECT_EQ(error.handle, a);
    EXPECT_EQ(error.field, "bias");
  }
  EXPECT_FALSE(lease.active());
  EXPECT_EQ(manager->snapshot().num_leases, 0U);
  EXPECT_TRUE(at(a, kPinned).stale);
  EXPECT_FALSE(at(a, kPageable).stale);
  manager->ensure(a, kPinned);
  EXPECT_TRUE(holds(a, kPinned)) << "with the bytes as they are now";
  acquire(a, kPageable).release();  // told once
}

TEST_F(WriteTest, UndeclaredWriteOnOneOfTwoStreamsIsWaitedForByTheNextReaderAndNotByTheHost) {
  start();
  const Warnings warnings;
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  backend->complete_all();
  {
    const Handle handles[] = {a};
    Lease lease = manager->acquire(handles, kCuda0, {.stream = Stream{kCuda0, 1}});
    lease.add_stream({kCuda0, 2});
    backend->launch_write({kCuda0, 2}, block(lease, a), seeds[a] = 508);
  }  // the destructor must not wait for what is still queued
  ASSERT_EQ(warnings.texts().size(), 1U);
  EXPECT_GT(backend->num_queued(), 0U);
  const Handle handles[] = {a};
  Lease reader = manager->acquire(handles, kCuda0, {.stream = Stream{kCuda0, 3}});
  backend->launch_read({kCuda0, 3}, block(reader, a), 508);
  reader.release();
  backend->complete_all();
}

TEST_F(WriteTest, ChecksumsFindWritesThatNoCounterSees) {
  options.checksum_leases = true;
  start();
  const Handle a = adopt(kPageable, 100);
  Lease lease = acquire(a, kPageable);
  block(lease, a).write(seeds[a] = 508, "data", /*seen=*/false);
  EXPECT_THROW(lease.release(), UndeclaredWriteError);
}

// ------------------------------------------------------------------------------------------------

TEST_F(HoldTest, KeepsFromBeingRemovedAndExposesNothing) {
  start();
  const Handle a = adopt(kPageable, 100);
  manager->ensure(a, kPinned);
  Hold held = hold(a, kPinned);
  const auto error = refused<InUseError>([&] { manager->drop(a, kPinned); });
  EXPECT_EQ(error->protection.num_holds, 1U);
  EXPECT_EQ(error->protection.num_leases, 0U);
  EXPECT_EQ(held.location(), kPinned);
  EXPECT_EQ(held.handles().size(), 1U);
  acquire(a, kPinned).release();
  manager->ensure(a, kCuda0);
  held.release();
  changes_nothing([&] { held.release(); });
  EXPECT_FALSE(held.active());
  manager->drop(a, kPinned);
}

TEST_F(HoldTest, OfWhatIsNotThereIsUnavailable) {
  start();
  const Handle a = adopt(kPageable, 100);
  refused<UnavailableError>([&] { hold(a, kPinned).release(); });
}

TEST_F(HoldTest, AssignmentEndsTheOneBeforeAndAMovedFromOneIsHarmless) {
  start();
  const Handle a = adopt(kPageable, 100);
  const Handle b = adopt(kPageable, 100);
  Hold first = hold(a, kPageable);
  Hold second = hold(b, kPageable);
  const Warnings warnings;
  first = std::move(second);
  EXPECT_EQ(warnings.texts().size(), 1U) << "the hold of a was active";
  EXPECT_EQ(manager->snapshot().num_holds, 1U);
  EXPECT_FALSE(second.active());
  EXPECT_NO_THROW(second.release());
  first.release();
  Lease lease = acquire(a, kPageable);
  Lease moved = std::move(lease);
  EXPECT_NO_THROW(lease.release());
  EXPECT_TRUE(moved.active());
  moved.release();
}

TEST_F(HoldTest, OfAStaleOneIsUnavailable) {
  start();
  const Handle a = adopt(kPageable, 100, kReplicable, kMutable);
  manager->ensure(a, kPinned);
  Lease writer = acquire(a, kPageable, Access::kWrite);
  block(writer, a).write(seeds[a] = 600);
  writer.release();
  refused<UnavailableError>([&] { hold(a, kPinned).release(); });
  manager->ensure(a, kPinned);
  hold(a, kPinned).release();
}

TEST_F(HoldTest, AtADiskIsAllowed) {
  start();
  const Handle a = adopt(kPageable, 100);
  manager->ensure(a, kDisk);
  Hold held = hold(a, kDisk);
  refused<InUseError>([&] { manager->drop(a, kDisk); });
  held.release();
}

TEST_F(HoldTest, DestroyedWhileActiveIsReleasedAndWarns) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPageable, 100);
  { const Hold held = hold(a, kPageable); }
  EXPECT_EQ(warnings.texts().size(), 1U);
  EXPECT_EQ(at(a, kPageable).num_holds, 0U);
}

// ------------------------------------------------------------------------------------------------

TEST_F(BorrowTest, EnsuresAndAcquiresAsOneStep) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = source(100);
  const Handle handles[] = {a, b, a};
  Lease lease = manager->borrow(handles, kCuda0);
  EXPECT_EQ(lease.handles().size(), 2U);
  ASSERT_EQ(lease.transitions().size(), 2U);
  EXPECT_EQ(lease.transitions()[0].reason, Reason::kCopied);
  EXPECT_EQ(lease.transitions()[1].reason, Reason::kLoaded);
  EXPECT_EQ(at(a, kCuda0).num_leases, 1U);
  EXPECT_EQ(at(a, kCuda0).num_holds, 0U);
  refused<InUseError>([&] { manager->drop(b, kCuda0); });
  lease.release();
}

TEST_F(BorrowTest, ImpossibleOneChangesNothing) {
  budget(kCuda0, 600_B);
  start();
  const Handle a = adopt(kPinned, 512);
  const Handle b = adopt(kPinned, 512);
  const Handle handles[] = {a, b};
  refused<BudgetError>([&] { manager->borrow(handles, kCuda0).release(); });
  const Handle exclusive = adopt(kPinned, 10, kExclusive);
  const Handle mixed[] = {a, exclusive};
  refused<OwnershipError>([&] { manager->borrow(mixed, kCuda0).release(); });
}

TEST_F(BorrowTest, FailureInTheMiddleIsUndone) {
  start();
  const Handle a = adopt(kPinned, 512);
  const Handle b = adopt(kPinned, 512);
  const Handle handles[] = {a, b};
  for (const auto& [call, n] : {std::pair{Call::kCopy, 2}, std::pair{Call::kBeginAccess, 2},
                                std::pair{Call::kCurrentStream, 1}}) {
    const std::string before = fingerprint(manager->snapshot());
    const auto listed = manager->locations();
    backend->fail(call, static_cast<std::uint64_t>(n));
    EXPECT_THROW(manager->borrow(handles, kCuda0).release(), fake::InjectedFault);
    EXPECT_TRUE(backend->fault_happened());
    backend->complete_all();
    EXPECT_EQ(places(a), std::vector{kPinned});
    EXPECT_EQ(places(b), std::vector{kPinned});
    EXPECT_EQ(manager->snapshot().num_leases, 0U);
    EXPECT_EQ(manager->snapshot().num_holds, 0U);
    EXPECT_NO_THROW(manager->audit());
  }
  Lease lease = manager->borrow(handles, kCuda0);
  lease.release();
}

TEST_F(BorrowTest, WithAWriteLeaseInTheWayChangesNothing) {
  start();
  const Handle a = adopt(kPageable, 100, kReplicable, kMutable);
  const Handle b = adopt(kPageable, 100);
  Lease reader = acquire(a, kPageable);
  const Handle handles[] = {b, a};
  refused<std::invalid_argument>(
      [&] { manager->borrow(handles, kPinned, {.access = Access::kWrite}).release(); });
  const Handle only[] = {a};
  refused<InUseError>(
      [&] { manager->borrow(only, kPinned, {.access = Access::kWrite}).release(); });
  reader.release();
}

}  // namespace
}  // namespace residency::test
