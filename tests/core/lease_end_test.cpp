// Section I beyond lease_test.cpp: how leases and holds end, what is left pending, and what a
// borrow protects on the way.

#include <string>
#include <thread>

#include "fixture.h"

namespace residency::test {
namespace {

using LeaseArgumentTest = ManagerTest;
using LeaseEndTest = ManagerTest;
using PendingUseTest = ManagerTest;
using HoldEndTest = ManagerTest;
using BorrowOnTheWayTest = ManagerTest;

TEST_F(LeaseArgumentTest, NothingIsReadInPlaceOnADiskOrWhereNothingExists) {
  start();
  const Handle a = adopt(kPageable, 100);
  manager->ensure(a, kDisk);
  backend->complete_all();
  const Handle handles[] = {a};
  refused<std::invalid_argument>([&] { manager->acquire(handles, kDisk).release(); });
  refused<std::invalid_argument>([&] { manager->borrow(handles, kDisk).release(); });
  const Location missing = Location::cuda(9);
  refused<UnavailableError>([&] { manager->acquire(handles, missing).release(); });
  refused<UnavailableError>([&] { manager->borrow(handles, missing).release(); });
  refused<UnavailableError>([&] { manager->hold(handles, missing).release(); });
}

TEST_F(LeaseArgumentTest, ErrorsNameTheCall) {
  start();
  const Handle a = adopt(kPageable, 100);
  const Handle handles[] = {a};
  const std::pair<Location, AcquireOptions> wrong[] = {
      {kDisk, {}},
      {kPageable, {.stream = Stream{kCuda0, 0}}},
      {kCuda0, {.stream = Stream{kCuda1, 0}}},
      {kPageable, {.access = Access::kWrite}},
  };
  for (const auto& [at, given] : wrong) {
    const auto acquired =
        refused<std::invalid_argument>([&] { manager->acquire(handles, at, given).release(); });
    const auto borrowed =
        refused<std::invalid_argument>([&] { manager->borrow(handles, at, given).release(); });
    EXPECT_EQ(std::string(acquired->what()).substr(0, 9), "acquire: ");
    EXPECT_EQ(std::string(borrowed->what()).substr(0, 8), "borrow: ");
  }
  const auto empty =
      refused<std::invalid_argument>([&] { manager->borrow({}, kPinned).release(); });
  EXPECT_EQ(std::string(empty->what()).substr(0, 8), "borrow: ");
  const Handle written = adopt(kPageable, 100, kReplicable, kMutable);
  const Handle one[] = {written};
  Lease reader = acquire(written, kPageable);
  const auto in_use = refused<InUseError>(
      [&] { manager->borrow(one, kPageable, {.access = Access::kWrite}).release(); });
  EXPECT_EQ(std::string(in_use->what()).substr(0, 8), "borrow: ");
  reader.release();
}

TEST_F(LeaseArgumentTest, AcquireThatFailsInTheMiddleChangesNothing) {
  start();
  const Handle a = adopt(kPageable, 100);
  const Handle b = adopt(kPageable, 100);
  const Handle handles[] = {a, b};
  backend->fail(Call::kBeginAccess, 2);
  refused<fake::InjectedFault>([&] { manager->acquire(handles, kPageable).release(); });
  EXPECT_EQ(backend->num_calls(Call::kEndAccess), 1U) << "what was begun is ended";
  manager->acquire(handles, kPageable).release();
}

TEST_F(LeaseEndTest, EveryLookupAfterReleaseSaysSo) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle other = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  Lease lease = acquire(a, kCuda0);
  lease.release();
  EXPECT_THROW((void)lease.view(a), LifetimeClosedError);
  EXPECT_THROW((void)lease.view(other), LifetimeClosedError);
  EXPECT_THROW(lease.add_stream({kCuda0, 5}), LifetimeClosedError);
  EXPECT_EQ(lease.access(), Access::kRead);
}

TEST_F(LeaseEndTest, AfterAForcedCloseLookupsAreRefusedAndReleaseDoesNothing) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  {
    Lease lease = acquire(a, kCuda0);
    EXPECT_EQ(refused<InUseError>([&] { manager->close(); })->protection.num_leases, 1U);
    manager->close({.force = true});
    EXPECT_FALSE(lease.active());
    EXPECT_THROW((void)lease.view(a), ClosedError);
    EXPECT_THROW(lease.add_stream({kCuda0, 5}), ClosedError);
    EXPECT_NO_THROW(lease.release(true));
    EXPECT_EQ(lease.handles()[0], a);
  }
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(LeaseEndTest, BeginningAndEndingRaiseTheVersion) {
  start();
  const Handle a = adopt(kPinned, 100);
  const auto before = manager->state_version();
  Lease lease = acquire(a, kPinned);
  const auto during = manager->state_version();
  EXPECT_GT(during, before);
  lease.release();
  EXPECT_GT(manager->state_version(), during);
}

TEST_F(LeaseEndTest, MovedOneIsReleasedOnce) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  Lease lease = [&] {
    Lease inner = acquire(a, kPinned);
    return inner;
  }();
  Lease other = std::move(lease);
  EXPECT_TRUE(other.active());
  EXPECT_EQ(at(a, kPinned).num_leases, 1U);
  other.release();
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(LeaseEndTest, ProtectionLastsUntilTheLastOfSeveralHasEnded) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kPageable);
  Lease first = acquire(a, kPageable);
  Lease second = acquire(a, kPageable);
  Lease elsewhere = acquire(a, kPinned);
  EXPECT_EQ(refused<InUseError>([&] { manager->drop(a, kPageable); })->protection,
            (Protection{2, 0, 0}));
  first.release();
  EXPECT_EQ(refused<InUseError>([&] { manager->drop(a, kPageable); })->protection,
            (Protection{1, 0, 0}));
  second.release();
  manager->drop(a, kPageable);  // protection is per materialization
  elsewhere.release();
}

TEST_F(LeaseEndTest, UseThatCannotBeRecordedKeepsTheLeaseUntilItIsReleasedAgain) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  Lease lease = acquire(a, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, a), seeds[a]);
  backend->fail(Call::kRecordUse, 1);
  EXPECT_THROW(lease.release(), fake::InjectedFault);
  EXPECT_TRUE(lease.active());
  // A drop now could not be ordered behind the kernel.
  refused<InUseError>([&] { manager->drop(a, kCuda0); });
  lease.release();
  EXPECT_EQ(manager->snapshot().num_leases, 0U);
  manager->drop(a, kCuda0);
  backend->complete_all();
}

TEST_F(LeaseEndTest, OtherFailureAtReleaseIsToldAfterTheLeaseHasEnded) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kPageable);
  Lease lease = acquire(a, kPageable);
  backend->fail(Call::kEndAccess, 1);
  EXPECT_THROW(lease.release(), fake::InjectedFault);
  EXPECT_FALSE(lease.active());
  EXPECT_EQ(manager->snapshot().num_leases, 0U);
  manager->drop(a, kPageable);
}

TEST_F(LeaseEndTest, WriteLeaseThatIsDestroyedStillMakesTheOthersStale) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100, kReplicable, kMutable);
  manager->ensure(a, kPageable);
  {
    const Lease writer = acquire(a, kPinned, Access::kWrite);
    EXPECT_TRUE(manager->snapshot().find(a)->write_leased);
    block(writer, a).write(seeds[a] = 600);
  }
  EXPECT_EQ(warnings.texts().size(), 1U);
  EXPECT_FALSE(manager->snapshot().find(a)->write_leased);
  EXPECT_TRUE(at(a, kPageable).stale);
  acquire(a, kPinned).release();
}

TEST_F(LeaseEndTest, ReadLeaseThatIsDestroyedAfterAnUndeclaredWriteWarnsOfIt) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kPageable);
  {
    const Lease lease = acquire(a, kPinned);
    block(lease, a).write(seeds[a] = 601);
  }
  ASSERT_EQ(warnings.texts().size(), 1U);
  EXPECT_NE(warnings.texts()[0].find("'data'"), std::string::npos) << warnings.texts()[0];
  EXPECT_TRUE(at(a, kPageable).stale);
}

TEST_F(LeaseEndTest, UndeclaredWriteByAKernelIsSeenOnceItHasRun) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  backend->complete_all();
  Lease lease = acquire(a, kCuda0);
  backend->launch_write({kCuda0, 0}, block(lease, a), seeds[a] = 602);
  EXPECT_THROW(lease.release(), UndeclaredWriteError);
  EXPECT_TRUE(at(a, kPinned).stale);
  EXPECT_FALSE(at(a, kCuda0).stale);
  manager->ensure(a, kPinned);
  EXPECT_TRUE(holds(a, kPinned)) << "with the bytes that the kernel wrote";
}

TEST_F(LeaseEndTest, UndeclaredWriteToOneOfSeveralNamesItAndEndsAll) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  manager->ensure(a, kPageable);
  manager->ensure(b, kPageable);
  const Handle handles[] = {a, b};
  Lease lease = manager->acquire(handles, kPinned);
  block(lease, b).write(seeds[b] = 603);
  try {
    lease.release();
    FAIL() << "nothing was thrown";
  } catch (const UndeclaredWriteError& error) {
    EXPECT_EQ(error.handle, b);
  }
  EXPECT_EQ(at(a, kPinned).num_leases, 0U);
  EXPECT_FALSE(at(a, kPageable).stale);
  EXPECT_TRUE(at(b, kPageable).stale);
}

// ------------------------------------------------------------------------------------------------

TEST_F(PendingUseTest, DeviceBytesAreFreeForLaterWorkAtOnce) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  Lease lease = acquire(a, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, a), seeds[a]);
  lease.release();
  backend->set_waits_block(true);  // a wait would hang the test
  manager->drop(a, kCuda0);
  EXPECT_EQ(used(kCuda0), Bytes());
  EXPECT_EQ(account(kCuda0).retiring, Bytes());
  EXPECT_GT(backend->num_queued(), 0U) << "the kernel has not run yet";
  backend->set_waits_block(false);
  backend->complete_all();
}

TEST_F(PendingUseTest, DoesNotBlockADiscard) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  Lease lease = acquire(a, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, a), seeds[a]);
  lease.release();
  manager->discard(a);
  EXPECT_GT(backend->num_queued(), 0U);
  backend->complete_all();
  EXPECT_EQ(backend->live_bytes(kCuda0), Bytes());
}

TEST_F(PendingUseTest, OfAWriterIsLeftToo) {
  start();
  const Handle a = adopt(kPinned, 100, kReplicable, kMutable);
  manager->ensure(a, kCuda0);
  backend->complete_all();
  Lease writer = acquire(a, kCuda0, Access::kWrite);
  backend->launch_write({kCuda0, 0}, block(writer, a), seeds[a] = 604);
  writer.release();
  EXPECT_EQ(at(a, kCuda0).num_pending, 1U);
  manager->move(a, kPageable, kCuda0);
  backend->complete_all();
  EXPECT_TRUE(holds(a, kPageable));
}

TEST_F(PendingUseTest, ReleaseThatWaitsLeavesNoneOnAnyStream) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  Lease lease = acquire(a, kCuda0);
  lease.add_stream({kCuda0, 1});
  lease.add_stream({kCuda0, 2});
  for (const std::int64_t stream : {0, 1, 2}) {
    backend->launch_read({kCuda0, stream}, block(lease, a), seeds[a]);
  }
  lease.release(true);
  EXPECT_EQ(at(a, kCuda0).num_pending, 0U);
  EXPECT_EQ(backend->num_queued(), 0U);
}

TEST_F(PendingUseTest, HostLeaseLeavesNone) {
  start();
  const Handle a = adopt(kPinned, 100);
  acquire(a, kPinned).release();
  EXPECT_EQ(at(a, kPinned).num_pending, 0U);
  EXPECT_EQ(backend->num_calls(Call::kRecordUse), 0U);
}

// ------------------------------------------------------------------------------------------------

TEST_F(HoldEndTest, IsAllOrNoneAndDuplicatesCollapse) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  const Handle missing = adopt(kPageable, 100);
  const Handle not_all[] = {a, missing};
  refused<UnavailableError>([&] { manager->hold(not_all, kPinned).release(); });
  const Handle handles[] = {a, b, a};
  Hold held = manager->hold(handles, kPinned);
  EXPECT_EQ(held.handles().size(), 2U);
  EXPECT_EQ(at(a, kPinned).num_holds, 1U);
  EXPECT_EQ(manager->snapshot().num_holds, 1U);
  held.release();
  EXPECT_EQ(at(b, kPinned).num_holds, 0U);
}

TEST_F(HoldEndTest, BlocksEveryWayOfRemoval) {
  start();
  const Handle a = adopt(kPinned, 100);
  Hold held = hold(a, kPinned);
  refused<InUseError>([&] { manager->move(a, kPageable); });
  refused<InUseError>([&] { manager->discard(a); });
  refused<InUseError>([&] { (void)manager->take(a); });
  EXPECT_EQ(refused<InUseError>([&] { manager->close(); })->protection.num_holds, 1U);
  held.release();
  manager->move(a, kPageable);
}

TEST_F(HoldEndTest, DoesNotKeepAWriterOut) {
  start();
  const Handle a = adopt(kPinned, 100, kReplicable, kMutable);
  Hold held = hold(a, kPinned);
  Lease writer = acquire(a, kPinned, Access::kWrite);
  writer.release();
  held.release();
}

TEST_F(HoldEndTest, OfAnArrivalThatMayFailWaitsForItsOutcome) {
  start();
  const Handle a = adopt(kPageable, 100);
  manager->ensure(a, kDisk);
  hold(a, kDisk).release();
  EXPECT_EQ(backend->num_queued(), 0U);
  const Handle b = adopt(kPageable, 100);
  backend->fail(Call::kTransfer, 1);
  manager->ensure(b, kDisk);
  EXPECT_THROW(hold(b, kDisk).release(), TransferError);
  EXPECT_EQ(manager->snapshot().num_holds, 0U);
}

TEST_F(HoldEndTest, OutlivesTheManager) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  Hold held = hold(a, kPinned);
  manager.reset();
  EXPECT_FALSE(held.active());
  EXPECT_EQ(held.handles()[0], a);
  EXPECT_NO_THROW(held.release());
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(HoldEndTest, BeginningAndEndingRaiseTheVersion) {
  start();
  const Handle a = adopt(kPinned, 100);
  const auto before = manager->state_version();
  Hold held = hold(a, kPinned);
  const auto during = manager->state_version();
  EXPECT_GT(during, before);
  held.release();
  EXPECT_GT(manager->state_version(), during);
}

// ------------------------------------------------------------------------------------------------

TEST_F(BorrowOnTheWayTest, ProtectsWhatHasArrivedWhileTheRestIsLoaded) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle there = adopt(kPinned, 100);
  manager->ensure(there, kCuda0);
  const Handle b = source(100);
  int num_refused = 0;
  sources[b]->before_load = [&] {
    std::thread([&] {
      for (const Handle& handle : {a, there}) {
        try {
          manager->drop(handle, kCuda0);
        } catch (const InUseError&) {
          ++num_refused;
        }
      }
    }).join();
  };
  const Handle handles[] = {a, there, b};
  Lease lease = manager->borrow(handles, kCuda0);
  EXPECT_EQ(num_refused, 2);
  lease.release();
  manager->drop(a, kCuda0);
}

TEST_F(BorrowOnTheWayTest, ReportsWhatWasThereAlreadyAsNoOp) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle handles[] = {a};
  Lease lease = manager->borrow(handles, kPinned);
  ASSERT_EQ(lease.transitions().size(), 1U);
  EXPECT_TRUE(lease.transitions()[0].no_op());
  lease.release();
  Lease acquired = acquire(a, kPinned);
  EXPECT_TRUE(acquired.transitions().empty());
  acquired.release();
}

TEST_F(BorrowOnTheWayTest, FailureUndoesWhatItBroughtAndKeepsWhatWasThere) {
  const Warnings warnings;
  start();
  const Handle there = adopt(kPinned, 100);
  manager->ensure(there, kCuda0);
  const Handle loaded = source(100);
  const Handle failing = source(100);
  sources[failing]->before_load = [] { throw std::domain_error("no load today"); };
  const Handle handles[] = {there, loaded, failing};
  EXPECT_THROW(manager->borrow(handles, kCuda0).release(), std::domain_error)
      << "the error of the source, unchanged";
  EXPECT_EQ(places(there), (std::vector{kPinned, kCuda0}));
  EXPECT_TRUE(places(loaded).empty());
  EXPECT_EQ(used(kCuda0), 512_B);
  EXPECT_EQ(manager->snapshot().num_leases, 0U);
  manager->drop(there, kCuda0);  // not protected any more
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(BorrowOnTheWayTest, ThatMayNotBlockIsRefusedInstead) {
  budget(kPageable, 128_B);
  start();
  const Handle a = adopt(kPageable, 128);
  manager->move(a, kDisk);
  const Handle b = adopt(kPinned, 128);
  const Handle handles[] = {b};
  const auto error = refused<BudgetError>(
      [&] { manager->borrow(handles, kPageable, {.may_block = false}).release(); });
  EXPECT_EQ(error->shortfall.retiring, 128_B);
  EXPECT_EQ(backend->num_queued(), 1U) << "nobody waited";
  Lease lease = manager->borrow(handles, kPageable);
  EXPECT_TRUE(lease.transitions()[0].waited);
  lease.release();
}

TEST_F(BorrowOnTheWayTest, ThatMayNotBlockRefusesACopyThatTheHostWouldWaitFor) {
  start();
  const auto make_paths = [&](const std::vector<std::pair<Location, Location>>& paths,
                              Access access, bool refuses) {
    for (const auto& [from, to] : paths) {
      SCOPED_TRACE(to_string(from) + " to " + to_string(to));
      const Handle a = adopt(from.is_disk() ? kPageable : from, 100, kReplicable, kMutable);
      if (from.is_disk()) {
        manager->move(a, from);
        backend->complete_all();
      }
      const Handle handles[] = {a};
      const AcquireOptions given{.access = access, .may_block = false};
      if (refuses) {
        const auto num_copies = backend->num_calls(Call::kCopy);
        refused<UnavailableError>([&] { manager->borrow(handles, to, given).release(); });
        EXPECT_EQ(backend->num_calls(Call::kCopy), num_copies) << "nothing was begun";
        EXPECT_EQ(places(a), std::vector{from});
      } else {
        manager->borrow(handles, to, given).release();
        EXPECT_GT(backend->num_queued(), 0U) << "nobody waited";
        backend->complete_all();
      }
    }
  };
  // The host reads where the lease is, or the copy can still fail.
  make_paths({{kPinned, kPageable},
              {kCuda0, kPinned},
              {kCuda0, kPageable},
              {kDisk, kPageable},
              {kDisk, kCuda0},
              {kPageable, kCuda0}},
             Access::kRead, true);
  make_paths({{kDisk, kCuda0}, {kPageable, kCuda0}}, Access::kWrite, true);
  make_paths({{kPinned, kCuda0}, {kCuda0, kCuda1}}, Access::kRead, false);
  make_paths({{kPinned, kCuda0}, {kCuda0, kCuda1}}, Access::kWrite, false);
}

TEST_F(BorrowOnTheWayTest, ThatMayNotBlockTakesWhatIsThereOnlyWhenItIsReady) {
  start();
  const Handle a = adopt(kCuda0, 100, kReplicable, kMutable);
  const Handle loaded = source(100);
  const Handle handles[] = {a, loaded};
  manager->ensure(a, kPinned);
  const AcquireOptions impatient{.may_block = false};
  const auto borrowed =
      refused<UnavailableError>([&] { manager->borrow(handles, kPinned, impatient).release(); });
  EXPECT_TRUE(places(loaded).empty()) << "nothing was loaded for nothing";
  const Handle one[] = {a};
  const auto acquired =
      refused<UnavailableError>([&] { manager->acquire(one, kPinned, impatient).release(); });
  EXPECT_EQ(std::string(acquired->what()).substr(0, 9), "acquire: ");
  EXPECT_EQ(backend->num_queued(), 1U) << "nobody waited";
  EXPECT_EQ(manager->snapshot().num_leases, 0U);
  backend->complete_all();
  manager->acquire(one, kPinned, impatient).release();

  Lease reader = manager->acquire(one, kCuda0);
  backend->launch_read({kCuda0, 0}, block(reader, a), seeds[a]);
  reader.release();
  // The stream can be made to wait for the kernel, but for no copy that a worker makes.
  const AcquireOptions writing{
      .access = Access::kWrite, .stream = Stream{kCuda0, 2}, .may_block = false};
  {
    Lease writer = manager->acquire(one, kCuda0, writing);
    backend->launch_write({kCuda0, 2}, block(writer, a), seeds[a] = 600);
    writer.release();
  }
  EXPECT_GT(backend->num_queued(), 0U) << "nobody waited";
  manager->ensure(a, kDisk);
  refused<UnavailableError>([&] { manager->acquire(one, kCuda0, writing).release(); });
  refused<UnavailableError>([&] { manager->borrow(one, kCuda0, writing).release(); });
  backend->complete_all();
  manager->borrow(one, kCuda0, writing).release();
  EXPECT_TRUE(holds(a, kCuda0));
}

TEST_F(BorrowOnTheWayTest, StreamAddedToAWriteWaitsForTheReadersToo) {
  start();
  const Handle a = adopt(kCuda0, 100, kReplicable, kMutable);
  const Handle one[] = {a};
  for (std::uint64_t round = 0; round < 30; ++round) {  // what is unordered runs in any order
    Lease reader = manager->acquire(one, kCuda0, {.stream = Stream{kCuda0, 1}});
    backend->launch_read({kCuda0, 1}, block(reader, a), seeds[a]);
    reader.release();
    Lease writer =
        manager->acquire(one, kCuda0, {.access = Access::kWrite, .stream = Stream{kCuda0, 2}});
    writer.add_stream({kCuda0, 3});
    backend->launch_write({kCuda0, 3}, block(writer, a), seeds[a] = 601 + round);
    writer.release();
    EXPECT_GT(backend->num_queued(), 0U) << "nobody waited";
    backend->complete_all();
    EXPECT_TRUE(holds(a, kCuda0));
  }
}

TEST_F(BorrowOnTheWayTest, RefreshesAStaleOneAndCanWrite) {
  start();
  const Handle a = adopt(kPinned, 100, kReplicable, kMutable);
  manager->ensure(a, kPageable);
  const Handle handles[] = {a};
  Lease writer = manager->borrow(handles, kPinned, {.access = Access::kWrite});
  block(writer, a).write(seeds[a] = 605);
  writer.release();
  Lease reader = manager->borrow(handles, kPageable);
  EXPECT_EQ(reader.transitions()[0].reason, Reason::kRefreshed);
  EXPECT_TRUE(block(reader, a).holds(605));
  reader.release();
}

}  // namespace
}  // namespace residency::test
