// Sections D and E: ensure and move, on every kind of path, at once and late.

#include <functional>
#include <string>

#include "fixture.h"

namespace residency::test {
namespace {

using EnsureTest = ManagerTest;
using MoveTest = ManagerTest;
using LateFailureTest = ManagerTest;
using WatchEscapeTest = ManagerTest;

TEST_F(EnsureTest, AddsAMaterializationAndKeepsTheOthers) {
  start();
  const Handle handle = adopt(kPageable, 100);
  const auto report = manager->ensure(handle, kPinned);
  EXPECT_FALSE(report.no_op());
  const auto record = report.record();
  EXPECT_EQ(record.action, ActionKind::kEnsure);
  EXPECT_EQ(record.reason, Reason::kCopied);
  EXPECT_EQ(record.source, kPageable);
  EXPECT_EQ(record.destination, kPinned);
  EXPECT_EQ(record.bytes, 100_B);
  EXPECT_EQ(record.path, TransferPath::kDirect);
  EXPECT_LE(record.host_start_ns, record.host_end_ns);
  EXPECT_EQ(places(handle), (std::vector{kPageable, kPinned}));
  EXPECT_TRUE(holds(handle, kPageable));
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(EnsureTest, OfWhatIsThereIsANoOpWithItsReason) {
  start();
  const Handle handle = source(100);
  manager->ensure(handle, kCuda0);
  backend->complete_all();
  changes_nothing([&] {
    const auto report = manager->ensure(handle, kCuda0);
    EXPECT_TRUE(report.no_op());
    EXPECT_EQ(report.reason(), Reason::kAlreadyResident);
    EXPECT_TRUE(report.done());
  });
  EXPECT_EQ(sources[handle]->num_loads, 1);
}

TEST_F(EnsureTest, OfAnExclusiveValueElsewherePointsToMove) {
  start();
  const Handle handle = adopt(kPageable, 100, kExclusive);
  const auto error = refused<OwnershipError>([&] { manager->ensure(handle, kCuda0); });
  EXPECT_NE(std::string(error->what()).find("move"), std::string::npos);
  EXPECT_TRUE(manager->ensure(handle, kPageable).no_op());
}

TEST_F(EnsureTest, OfAnUnloadedExclusiveSourceBackedValueLoads) {
  start();
  const Handle handle = source(100, kPageable, kExclusive);
  EXPECT_EQ(manager->ensure(handle, kCuda0).reason(), Reason::kLoaded);
  EXPECT_EQ(places(handle), std::vector{kCuda0});
  EXPECT_EQ(used(kPageable), Bytes());
  EXPECT_TRUE(holds(handle, kCuda0));
  refused<OwnershipError>([&] { manager->ensure(handle, kPageable); });
}

TEST_F(EnsureTest, ReadsTheCheapestCopyByTheLinkOrder) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kDisk);
  manager->ensure(handle, kCuda1);
  backend->complete_all();
  EXPECT_EQ(manager->ensure(handle, kCuda0).record().source, kPageable);
  manager->drop(handle, kCuda0);
  manager->ensure(handle, kPinned);
  EXPECT_EQ(manager->ensure(handle, kCuda0).record().source, kPinned);
  manager->drop(handle, kCuda0);
  manager->drop(handle, kPinned);
  manager->drop(handle, kPageable);
  EXPECT_EQ(manager->ensure(handle, kCuda0).record().source, kCuda1);
  manager->drop(handle, kCuda0);
  manager->drop(handle, kCuda1);
  EXPECT_EQ(manager->ensure(handle, kCuda0).record().source, kDisk);
  EXPECT_TRUE(holds(handle, kCuda0));
}

TEST_F(EnsureTest, LinkOrderIsAnOption) {
  options.link_order = {LocationKind::kDisk, LocationKind::kCuda};
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kPinned);
  manager->ensure(handle, kCuda1);
  manager->ensure(handle, kDisk);
  backend->complete_all();
  EXPECT_EQ(manager->ensure(handle, kCuda0).record().source, kDisk);
  manager->drop(handle, kCuda0);
  manager->drop(handle, kDisk);
  EXPECT_EQ(manager->ensure(handle, kCuda0).record().source, kCuda1);
  manager->drop(handle, kCuda0);
  manager->drop(handle, kCuda1);
  // Kinds that are not listed come last, in canonical order.
  EXPECT_EQ(manager->ensure(handle, kCuda0).record().source, kPageable);
}

TEST_F(EnsureTest, AmongDevicesTheLowerIndexComesFirst) {
  fake_options.num_devices = 4;
  start();
  const Handle handle = adopt(Location::cuda(3), 100);
  manager->ensure(handle, Location::cuda(1));
  EXPECT_EQ(manager->ensure(handle, kCuda0).record().source, kCuda1);
}

TEST_F(EnsureTest, UsesTheSourceOnlyWhenThereIsNoMaterialization) {
  start();
  const Handle handle = source(100);
  manager->ensure(handle, kCuda0);
  manager->ensure(handle, kCuda1);
  EXPECT_EQ(sources[handle]->num_loads, 1);
}

TEST_F(EnsureTest, WithNothingToCopyIsUnavailable) {
  start();
  const Handle handle = source(100, kPageable, kReplicable, kMutable);
  manager->ensure(handle, kPinned);
  Lease lease = acquire(handle, kPinned, Access::kWrite);
  block(lease, handle).write(seeds[handle] = 99);
  lease.release();
  // The only copy of what was written: the source could not make it again.
  refused<OwnershipError>([&] { manager->drop(handle, kPinned); });
}

TEST_F(EnsureTest, ReadingFromALeasedOrHeldMaterializationIsAllowedAndSharesNothing) {
  start();
  const Handle handle = adopt(kPageable, 100, kReplicable, kMutable);
  Lease lease = acquire(handle, kPageable);
  Hold held = hold(handle, kPageable);
  manager->ensure(handle, kPinned);
  Lease other = acquire(handle, kPinned);
  const auto here = *block(lease, handle).address_ranges().begin();
  const auto there = *block(other, handle).address_ranges().begin();
  EXPECT_TRUE(here.end <= there.begin || there.end <= here.begin);
  other.release();
  lease.release();
  held.release();
}

TEST_F(EnsureTest, CopyThatFailsAtOnceLeavesEverythingAndOneFailedTraceEntry) {
  start();
  const Handle handle = adopt(kPageable, 100);
  const std::string before = fingerprint(manager->snapshot());
  const auto version = manager->state_version();
  backend->fail(Call::kCopy, 1);
  EXPECT_THROW(manager->ensure(handle, kCuda0), fake::InjectedFault);
  EXPECT_EQ(fingerprint(manager->snapshot()), before);
  EXPECT_EQ(manager->state_version(), version);
  const auto trace = manager->trace();
  ASSERT_EQ(trace.size(), 1U);
  EXPECT_TRUE(trace[0].failed);
  EXPECT_NE(trace[0].failure.find("injected"), std::string::npos);
  EXPECT_EQ(trace[0].handle, handle);
  EXPECT_EQ(trace[0].destination, kCuda0);
  manager->ensure(handle, kCuda0);
  EXPECT_TRUE(holds(handle, kCuda0));
}

TEST_F(EnsureTest, TemporaryLoadIsChargedWhileItLastsHoweverItEnds) {
  budget(kPageable, 128_B);
  start();
  const Handle handle = source(100);
  manager->reset_peaks();
  manager->ensure(handle, kCuda0);
  backend->complete_all();
  EXPECT_EQ(used(kPageable), Bytes());
  EXPECT_EQ(account(kPageable).retiring, Bytes());
  EXPECT_EQ(account(kPageable).peak_used, 128_B);
  manager->drop(handle, kCuda0);
  backend->fail(Call::kCopy, 1);
  EXPECT_THROW(manager->ensure(handle, kCuda0), fake::InjectedFault);
  EXPECT_EQ(used(kPageable), Bytes());
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  manager->set_budget(kPageable, 127_B);
  const auto error = refused<BudgetError>([&] { manager->ensure(handle, kCuda0); });
  EXPECT_EQ(error->shortfall.location, kPageable);
}

TEST_F(EnsureTest, LoadAtTheDestinationIsChargedOnce) {
  budget(kPageable, 128_B);
  start();
  const Handle handle = source(100);
  const auto report = manager->ensure(handle, kPageable);
  EXPECT_EQ(report.record().path, TransferPath::kSource);
  EXPECT_EQ(account(kPageable).peak_used, 128_B);
  EXPECT_EQ(backend->peak_bytes(kPageable), 128_B);
}

TEST_F(EnsureTest, ArrivingMaterializationIsThereAlready) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kCuda0);
  EXPECT_EQ(at(handle, kCuda0).state, MaterializationState::kArriving);
  EXPECT_EQ(account(kCuda0).arriving, 512_B);
  EXPECT_TRUE(manager->ensure(handle, kCuda0).no_op());
  const auto version = manager->state_version();
  backend->complete_all();
  EXPECT_EQ(at(handle, kCuda0).state, MaterializationState::kReady);
  EXPECT_EQ(account(kCuda0).arriving, Bytes());
  EXPECT_EQ(manager->state_version(), version) << "a fence completing changes no version";
}

TEST_F(EnsureTest, ReportIsCompletedByTheFence) {
  start();
  const Handle handle = adopt(kPinned, 100);
  const auto report = manager->ensure(handle, kCuda0);
  EXPECT_FALSE(report.done());
  EXPECT_FALSE(report.record().device_elapsed_ns);
  report.wait();
  EXPECT_TRUE(report.done());
  EXPECT_EQ(report.record().device_elapsed_ns, 1000);
}

TEST_F(EnsureTest, NeverBlocksOnDirectPathsHoweverLongTheChain) {
  start();
  const Handle handle = adopt(kPinned, 100);
  backend->set_waits_block(true);  // a wait would hang the test
  manager->move(handle, kCuda0);
  manager->move(handle, kCuda1);
  manager->move(handle, kPinned);
  manager->move(handle, kCuda0);
  EXPECT_EQ(backend->queued_transfers().size(), 4U);
  Lease lease = acquire(handle, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, handle), seeds[handle]);
  lease.release();
  manager->move(handle, kPinned);
  backend->set_waits_block(false);
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(EnsureTest, TransferStreamMustBelongToTheDestination) {
  start();
  const Handle handle = adopt(kPinned, 100);
  manager->ensure(handle, kCuda0, {.stream = Stream{kCuda0, 5}});
  refused<std::invalid_argument>([&] {
    manager->ensure(handle, kCuda1, {.stream = Stream{Location::cuda(7), 1}});
  });
  // From a device to the host the stream is the source's.
  manager->drop(handle, kPinned);
  manager->ensure(handle, kPinned, {.stream = Stream{kCuda0, 5}});
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(EnsureTest, PathsAreReported) {
  start();
  const Handle handle = adopt(kPageable, 100);
  EXPECT_EQ(manager->ensure(handle, kCuda0).record().path, TransferPath::kStaged);
  EXPECT_EQ(manager->ensure(handle, kDisk).record().path, TransferPath::kFile);
  EXPECT_EQ(manager->ensure(handle, kPinned).record().path, TransferPath::kDirect);
  backend->complete_all();
  manager->drop(handle, kPageable);
  manager->drop(handle, kPinned);
  EXPECT_EQ(manager->ensure(handle, kCuda1).record().path, TransferPath::kPeer);
}

// ------------------------------------------------------------------------------------------------

TEST_F(MoveTest, GivesUpExactlyOneSource) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kPinned);
  manager->ensure(handle, kCuda1);
  backend->complete_all();
  const auto record = manager->move(handle, kCuda0).record();
  EXPECT_EQ(record.source, kPinned);
  EXPECT_EQ(places(handle), (std::vector{kPageable, kCuda0, kCuda1}));
  EXPECT_TRUE(holds(handle, kCuda0));
}

TEST_F(MoveTest, GivenFromLocationMustExist) {
  start();
  const Handle handle = source(100);
  refused<UnavailableError>([&] { manager->move(handle, kCuda0, kPinned); });
  EXPECT_EQ(sources[handle]->num_loads, 0);
  const Handle other = adopt(kPageable, 100);
  refused<UnavailableError>([&] { manager->move(other, kCuda0, kPinned); });
  manager->ensure(other, kPinned);
  EXPECT_EQ(manager->move(other, kCuda0, kPageable).record().source, kPageable);
  EXPECT_EQ(places(other), (std::vector{kPinned, kCuda0}));
}

TEST_F(MoveTest, ToWhereItIsAloneIsANoOp) {
  start();
  const Handle handle = adopt(kPageable, 100, kExclusive);
  changes_nothing([&] {
    EXPECT_EQ(manager->move(handle, kPageable).reason(), Reason::kAlreadyResident);
    EXPECT_EQ(manager->move(handle, kPageable, kPageable).reason(), Reason::kSameLocation);
  });
}

TEST_F(MoveTest, ToWhereItIsWithAnotherElsewhereReleasesTheOtherAndIsNoNoOp) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kCuda0);
  backend->complete_all();
  const auto copies = backend->num_calls(Call::kCopy);
  const auto version = manager->state_version();
  const auto report = manager->move(handle, kCuda0);
  EXPECT_FALSE(report.no_op());
  EXPECT_EQ(report.reason(), Reason::kReleased);
  EXPECT_EQ(report.record().source, kPageable);
  EXPECT_EQ(report.record().bytes, Bytes());
  EXPECT_EQ(backend->num_calls(Call::kCopy), copies);
  EXPECT_GT(manager->state_version(), version);
  EXPECT_EQ(places(handle), std::vector{kCuda0});
}

TEST_F(MoveTest, OfAnUnloadedValueLoadsItAndKeepsItOnlyAtTheTarget) {
  start();
  const Handle handle = source(100);
  EXPECT_EQ(manager->move(handle, kCuda0).reason(), Reason::kLoaded);
  EXPECT_EQ(places(handle), std::vector{kCuda0});
  const Handle same = source(100);
  EXPECT_EQ(manager->move(same, kPageable).reason(), Reason::kLoaded);
  EXPECT_EQ(places(same), std::vector{kPageable});
}

TEST_F(MoveTest, ProtectedSourceIsInUseBeforeAnyCopy) {
  start();
  const Handle handle = adopt(kPageable, 100);
  Lease lease = acquire(handle, kPageable);
  const auto copies = backend->num_calls(Call::kCopy);
  const auto error = refused<InUseError>([&] { manager->move(handle, kCuda0); });
  EXPECT_EQ(error->protection.num_leases, 1U);
  EXPECT_EQ(backend->num_calls(Call::kCopy), copies);
  lease.release();
}

TEST_F(MoveTest, TargetNeedsFullRoomFirst) {
  budget(kCuda0, 1024_B);
  start();
  const Handle a = adopt(kCuda0, 512);
  const Handle b = adopt(kPinned, 1024);
  // Moving `a` away would make room, but this action does not do that.
  const auto error = refused<BudgetError>([&] { manager->move(b, kCuda0); });
  EXPECT_EQ(error->shortfall.requested, 1024_B);
  EXPECT_EQ(error->shortfall.used, 512_B);
  manager->move(a, kPinned);
  manager->move(b, kCuda0);
  EXPECT_TRUE(holds(b, kCuda0));
}

TEST_F(MoveTest, BothEndsAreChargedDuringTheAction) {
  start();
  const Handle handle = adopt(kPinned, 1000);
  manager->reset_peaks();
  manager->move(handle, kCuda0);
  EXPECT_EQ(account(kPinned).peak_used, 1000_B);
  EXPECT_EQ(account(kCuda0).peak_used, 1024_B);
  EXPECT_EQ(used(kPinned), Bytes()) << "given back at commit on a direct path";
  EXPECT_EQ(account(kPinned).retiring, Bytes()) << "page-locked memory is reused in device order";
}

TEST_F(MoveTest, NobodySeesAnExclusiveValueTwice) {
  start();
  const Handle handle = adopt(kPageable, 100, kExclusive);
  manager->move(handle, kDisk);
  EXPECT_EQ(places(handle), std::vector{kDisk});
  backend->complete_all();
  manager->move(handle, kCuda0);
  EXPECT_EQ(places(handle), std::vector{kCuda0});
  manager->move(handle, kPageable);
  EXPECT_EQ(places(handle), std::vector{kPageable});
  EXPECT_TRUE(holds(handle, kPageable));
}

TEST_F(MoveTest, PageableBytesRetireUntilTheirReaderHasFinished) {
  start();
  const Handle handle = adopt(kPageable, 128);
  manager->ensure(handle, kDisk);  // reads the pageable bytes
  manager->ensure(handle, kPinned);
  const auto reading = backend->num_queued();
  EXPECT_EQ(reading, 1U);
  manager->move(handle, kPinned, kPageable);
  EXPECT_EQ(used(kPageable), Bytes());
  // Either the wait for the reader came first, or the bytes are retiring.
  EXPECT_EQ(account(kPageable).retiring, backend->live_bytes(kPageable));
  backend->complete_all();
  EXPECT_EQ(account(kPageable).retiring, Bytes());
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(MoveTest, WriteBackStillInFlightIsEnteredAgainByAnEventEdge) {
  start();
  const Handle handle = adopt(kCuda0, 1000);
  backend->set_waits_block(true);
  manager->move(handle, kPinned);
  manager->move(handle, kCuda0);
  backend->set_waits_block(false);
  EXPECT_EQ(backend->queued_transfers().size(), 2U);
  EXPECT_TRUE(holds(handle, kCuda0));
}

TEST_F(MoveTest, ConsumerStillRunningReadsTheRightBytes) {
  start();
  const Handle handle = adopt(kPinned, 1000);
  manager->ensure(handle, kCuda0);
  Lease lease = acquire(handle, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, handle), seeds[handle]);
  lease.release();
  EXPECT_EQ(at(handle, kCuda0).num_pending, 1U);
  manager->drop(handle, kCuda0);  // ordered after the use on the device, not refused
  const Handle other = adopt(kPinned, 1000);
  manager->ensure(other, kCuda0);
  backend->complete_all();
  EXPECT_TRUE(holds(other, kCuda0));
}

// ------------------------------------------------------------------------------------------------

TEST_F(LateFailureTest, SourceChargeAndBytesAreKeptUntilTheFenceSucceeds) {
  start();
  const Handle handle = adopt(kPageable, 128);
  manager->move(handle, kDisk);
  EXPECT_EQ(backend->live_bytes(kPageable), 128_B);
  EXPECT_EQ(used(kPageable) + account(kPageable).retiring, 128_B);
  EXPECT_EQ(places(handle), std::vector{kDisk});
  backend->complete_all();
  EXPECT_EQ(used(kPageable) + account(kPageable).retiring, Bytes());
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  manager->move(handle, kPageable);
  EXPECT_TRUE(holds(handle, kPageable));
}

TEST_F(LateFailureTest, SourceIsWhatItWasAndTheErrorIsRaisedOnce) {
  start();
  const Handle handle = adopt(kPageable, 128, kExclusive);
  using Touch = std::function<void(const ActionReport&)>;
  const Handle handles[] = {handle};
  const std::pair<const char*, Touch> touches[] = {
      {"wait", [](const ActionReport& report) { report.wait(); }},
      {"ensure", [&](const ActionReport&) { manager->ensure(handle, kPageable); }},
      {"move", [&](const ActionReport&) { manager->move(handle, kPinned); }},
      {"drop", [&](const ActionReport&) { manager->drop(handle, kCuda0); }},
      {"discard", [&](const ActionReport&) { manager->discard(handle); }},
      {"take", [&](const ActionReport&) { (void)manager->take(handle); }},
      {"acquire", [&](const ActionReport&) { manager->acquire(handles, kPageable).release(); }},
      {"borrow", [&](const ActionReport&) { manager->borrow(handles, kPageable).release(); }},
      {"hold", [&](const ActionReport&) { manager->hold(handles, kPageable).release(); }},
  };
  for (const Location to : {kDisk, kCuda0}) {
    for (const auto& [name, touch] : touches) {
      SCOPED_TRACE(name);
      backend->fail(Call::kTransfer, 1);
      const auto report = manager->move(handle, to);
      backend->complete_all();
      ASSERT_TRUE(backend->fault_happened());
      try {
        touch(report);
        ADD_FAILURE() << "the failure was not raised";
      } catch (const TransferError& error) {
        EXPECT_EQ(error.handle, handle);
        EXPECT_TRUE(can_fail_later(error.path));
        EXPECT_THROW(std::rethrow_exception(error.cause), fake::InjectedFault);
      }
      EXPECT_EQ(places(handle), std::vector{kPageable});
      EXPECT_EQ(used(to), Bytes());
      EXPECT_EQ(backend->live_bytes(to), Bytes());
      EXPECT_EQ(account(kPageable).retiring, Bytes());
      report.wait();  // told once
      EXPECT_TRUE(holds(handle, kPageable));
      bool failed = false;
      for (const auto& record : manager->trace()) {
        failed = failed || (record.failed && record.destination == to && !record.failure.empty());
      }
      EXPECT_TRUE(failed) << "the failure is in the trace";
      EXPECT_NO_THROW(manager->audit());
    }
  }
}

TEST_F(LateFailureTest, ReportSaysThatItFailed) {
  start();
  const Handle handle = adopt(kPageable, 128);
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->ensure(handle, kDisk);
  EXPECT_FALSE(report.record().failed);
  backend->complete_all();
  EXPECT_TRUE(report.done());
  EXPECT_TRUE(report.record().failed);
  EXPECT_NE(report.record().failure.find("injected"), std::string::npos);
  EXPECT_THROW(report.wait(), TransferError);
  EXPECT_NO_THROW(report.wait());
}

TEST_F(LateFailureTest, PlanMeetsAnUnreportedFailureAsARefusal) {
  start();
  const Handle handle = adopt(kPageable, 128);
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->move(handle, kDisk);
  backend->complete_all();
  const ActionList actions = {EnsureResident{handle, kCuda0}};
  const auto explanation = manager->explain(actions);
  EXPECT_FALSE(explanation.feasible);
  EXPECT_EQ(explanation.actions.at(0).verdict.reason, Reason::kTransferFailed);
  EXPECT_THROW(manager->execute(actions), Error);
  try {
    manager->ensure(handle, kCuda0);
  } catch (const TransferError&) {
  }
  EXPECT_NO_THROW(manager->execute(actions));
  EXPECT_TRUE(holds(handle, kCuda0));
}

TEST_F(LateFailureTest, UseOfAnArrivalThatMayFailWaitsForIt) {
  start();
  const Handle handle = adopt(kPageable, 128, kExclusive);
  manager->move(handle, kDisk);
  ASSERT_EQ(backend->num_queued(), 1U);
  const auto report = manager->move(handle, kPinned);
  EXPECT_TRUE(report.record().waited);
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(LateFailureTest, MakesAVersionThatWasReadBeforeItStale) {
  start();
  const Handle handle = adopt(kPageable, 128, kExclusive);
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->move(handle, kDisk);
  const std::uint64_t before = manager->state_version();
  const std::vector<ResidencyAction> actions = {EnsureResident{handle, kPinned}};
  backend->complete_all();
  EXPECT_THROW((void)manager->explain(actions, before), StaleStateError);
  EXPECT_THROW(manager->execute(actions, {.expected_state_version = before}), StaleStateError);
  ScopeOptions options;
  options.expected_state_version = before;
  Scope scope = manager->scope(
      ResidencyPlan({.name = "late", .exit = {EnsureResident{handle, kPinned}}}), options);
  EXPECT_THROW(scope.enter(), StaleStateError);
  EXPECT_GT(manager->state_version(), before);
  EXPECT_THROW(report.wait(), TransferError);
}

TEST_F(LateFailureTest, ActionThatMayNotBlockIsRefusedInstead) {
  start();
  const Handle handle = adopt(kPageable, 128, kExclusive);
  manager->move(handle, kDisk);
  refused<UnavailableError>(
      [&] { manager->move(handle, kPinned, std::nullopt, {.may_block = false}); });
  EXPECT_EQ(backend->num_queued(), 1U);
  backend->complete_all();
  manager->move(handle, kPinned, std::nullopt, {.may_block = false});
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(LateFailureTest, FailureFoundWhileWaitingIsThatOfTheAction) {
  start();
  const Handle handle = adopt(kPageable, 128, kExclusive);
  backend->fail(Call::kTransfer, 1);
  manager->move(handle, kDisk);
  EXPECT_THROW(manager->move(handle, kPinned), TransferError);
  EXPECT_EQ(places(handle), std::vector{kPageable});
  manager->move(handle, kPinned);
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(LateFailureTest, DropOfTheOtherCopyWaitsForTheArrival) {
  start();
  const Handle handle = adopt(kPageable, 128);
  backend->fail(Call::kTransfer, 1);
  manager->ensure(handle, kDisk);
  // Until the file is complete the pageable copy is the only one to rely on.
  EXPECT_THROW(manager->drop(handle, kPageable), Error);
  EXPECT_TRUE(holds(handle, kPageable));
  refused<OwnershipError>([&] { manager->drop(handle, kPageable); });
}

TEST_F(LateFailureTest, FailedRefreshLeavesTheOldOneStale) {
  start();
  const Handle handle = adopt(kPageable, 128, kReplicable, kMutable);
  manager->ensure(handle, kCuda0);
  backend->complete_all();
  Lease lease = acquire(handle, kPageable, Access::kWrite);
  block(lease, handle).write(seeds[handle] = 77);
  lease.release();
  EXPECT_TRUE(at(handle, kCuda0).stale);
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->ensure(handle, kCuda0);
  EXPECT_EQ(report.reason(), Reason::kRefreshed);
  EXPECT_THROW(report.wait(), TransferError);
  EXPECT_TRUE(at(handle, kCuda0).stale);
  EXPECT_TRUE(holds(handle, kPageable));
  manager->ensure(handle, kCuda0);
  EXPECT_TRUE(holds(handle, kCuda0));
}

TEST_F(LateFailureTest, DestinationIsUsableAgain) {
  budget(kDisk, 4096_B);
  options.budgets.clear();
  options.disks = {{.name = "nvme", .directory = "/nowhere", .budget = 4096_B}};
  start();
  const Handle a = adopt(kPageable, 128);
  const Handle b = adopt(kPageable, 128);
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->move(a, kDisk);
  backend->complete_all();
  manager->move(b, kDisk);  // the failed arrival takes no room
  EXPECT_THROW(report.wait(), TransferError);
  EXPECT_TRUE(holds(a, kPageable));
}

TEST_F(LateFailureTest, PeaksCoverASourceThatCameBack) {
  start();
  const Handle handle = adopt(kPageable, 128);
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->move(handle, kDisk);
  manager->reset_peaks();
  EXPECT_THROW(report.wait(), TransferError);
  EXPECT_GE(account(kPageable).peak_used, used(kPageable));
  EXPECT_NO_THROW(manager->audit());
}

TEST_F(LateFailureTest, ConsumerOfTheSourceKeepsItsBytesThroughAStagedMove) {
  start();
  const Handle handle = adopt(kPinned, 1000);
  manager->move(handle, kCuda0);
  Lease lease = acquire(handle, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, handle), seeds[handle]);
  lease.release();
  manager->move(handle, kPageable);  // staged: its source goes when the transfer has succeeded
  while (backend->complete(handle, kPageable)) {
  }
  backend->complete_all();
  EXPECT_TRUE(holds(handle, kPageable));
}

TEST_F(LateFailureTest, DiscardWhileATransferIsUnderWay) {
  start();
  const Handle handle = adopt(kPageable, 128);
  manager->ensure(handle, kDisk);
  manager->discard(handle);
  backend->complete_all();
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  EXPECT_EQ(backend->live_bytes(kDisk), Bytes());
}

TEST_F(LateFailureTest, CloseWithTransfersUnderWay) {
  start();
  for (int i = 0; i < 4; ++i) {
    const Handle handle = adopt(kPageable, 128);
    manager->move(handle, i % 2 == 0 ? kDisk : kCuda0);
  }
  manager->close({.force = true});
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  EXPECT_EQ(backend->live_bytes(kDisk), Bytes());
}

TEST_F(LateFailureTest, OfTwoTransfersOfOneValueIsToldByTheReportOfEach) {
  start();
  const Handle handle = adopt(kPageable, 128);
  backend->fail(Call::kTransfer, 1);
  const auto staged = manager->ensure(handle, kCuda0);
  backend->fail(Call::kTransfer, 1);
  const auto to_file = manager->ensure(handle, kDisk);
  backend->complete_all();
  const auto failure_told_by = [](const ActionReport& report) {
    try {
      report.wait();
    } catch (const TransferError& error) {
      EXPECT_THROW(std::rethrow_exception(error.cause), fake::InjectedFault);
      return error.path;
    }
    return TransferPath::kNone;
  };
  EXPECT_EQ(failure_told_by(to_file), TransferPath::kFile) << "the one that failed later";
  EXPECT_EQ(failure_told_by(to_file), TransferPath::kNone) << "told once";
  EXPECT_EQ(failure_told_by(staged), TransferPath::kStaged);
  EXPECT_EQ(failure_told_by(staged), TransferPath::kNone);
  EXPECT_EQ(places(handle), std::vector{kPageable});
  EXPECT_EQ(used(kCuda0), Bytes());
  EXPECT_EQ(used(kDisk), Bytes());
  EXPECT_TRUE(holds(handle, kPageable));
  manager->ensure(handle, kCuda0);
  EXPECT_TRUE(holds(handle, kCuda0));
}

TEST_F(LateFailureTest, OfTwoTransfersOfOneValueIsToldByTheNextTwoTouches) {
  start();
  const Handle handle = adopt(kPageable, 128);
  manager->ensure(handle, kPinned);
  backend->fail(Call::kTransfer, 1);
  manager->ensure(handle, kDisk);
  backend->fail(Call::kTransfer, 1);
  manager->move(handle, kCuda0, kPageable);
  backend->complete_all();
  EXPECT_THROW(manager->drop(handle, kCuda1), TransferError);
  EXPECT_THROW(manager->drop(handle, kCuda1), TransferError);
  EXPECT_TRUE(manager->drop(handle, kCuda1).no_op());
  EXPECT_EQ(places(handle), (std::vector{kPageable, kPinned}));
  EXPECT_TRUE(holds(handle, kPageable));
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(LateFailureTest, DuringCloseFreesTheMemoryIsInTheTraceAndDestroysNoBytes) {
  start();
  const auto spec = make_spec(128);
  auto mine = backend->make_block(kPageable, spec, 5);
  const Handle handle = manager->adopt(mine, spec);
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->move(handle, kCuda0);
  ASSERT_EQ(backend->num_queued(), 1U) << "it fails while close waits for it";
  manager->close();
  EXPECT_EQ(backend->num_queued(), 0U);
  EXPECT_EQ(backend->live_bytes(kCuda0), Bytes());
  EXPECT_TRUE(report.record().failed);
  EXPECT_NE(report.record().failure.find("injected"), std::string::npos);
  ASSERT_EQ(manager->trace().size(), 1U);
  EXPECT_TRUE(manager->trace()[0].failed);
  EXPECT_NE(manager->trace()[0].failure.find("injected"), std::string::npos);
  EXPECT_TRUE(mine->holds(5));
  EXPECT_EQ(backend->live_bytes(kPageable), 128_B) << "the test has it";
  mine.reset();
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes()) << "and nobody else";
}

TEST_F(LateFailureTest, DuringCloseIsOwedToNobody) {
  start();
  const Handle handle = adopt(kPageable, 128);
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->move(handle, kDisk);
  manager->close({.force = true});
  EXPECT_TRUE(report.done());
  EXPECT_NO_THROW(report.wait()) << "everything has ended: nobody is owed the failure";
  EXPECT_THROW(manager->ensure(handle, kPageable), ClosedError);
}

TEST_F(LateFailureTest, AfterACloseThatDidNotWaitFreesTheMemoryThoughTheReportLivesOn) {
  start();
  const Handle handle = adopt(kPageable, 128);
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->move(handle, kCuda0);
  manager->close({.wait = false});
  EXPECT_EQ(backend->live_bytes(kPageable), 128_B) << "the transfer reads it";
  backend->complete_all();
  EXPECT_TRUE(report.record().failed);
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  EXPECT_EQ(backend->live_bytes(kCuda0), Bytes());
}

TEST_F(LateFailureTest, RefreshOfAStaleOneThatStillArrivesWaitsForIt) {
  start();
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails ? "it fails" : "it arrives");
    const Handle handle = adopt(kCuda0, 512, kReplicable, kMutable);
    manager->ensure(handle, kCuda1);
    backend->complete_all();
    if (fails) {
      backend->fail(Call::kTransfer, 1);
    }
    manager->ensure(handle, kPageable);  // reads the copy at cuda:0
    Lease lease = acquire(handle, kCuda1, Access::kWrite);
    backend->launch_write({kCuda1, 0}, block(lease, handle), seeds[handle] = 77);
    lease.release();
    ASSERT_TRUE(at(handle, kPageable).stale);
    ASSERT_EQ(at(handle, kPageable).state, MaterializationState::kArriving);
    refused<UnavailableError>([&] { manager->ensure(handle, kPageable, {.may_block = false}); });
    if (fails) {
      EXPECT_THROW(manager->ensure(handle, kPageable), TransferError);
      EXPECT_EQ(places(handle), (std::vector{kCuda0, kCuda1}));
      EXPECT_EQ(used(kPageable), 512_B) << "of the first value";
    }
    const auto report = manager->ensure(handle, kPageable);
    EXPECT_EQ(report.reason(), fails ? Reason::kCopied : Reason::kRefreshed);
    EXPECT_EQ(report.record().waited, !fails);
    EXPECT_TRUE(holds(handle, kPageable));
    EXPECT_NO_THROW(manager->audit());
  }
}

TEST_F(LateFailureTest, CopyBackToWhatIsDepartingWaitsForTheOutcome) {
  start();
  for (const bool fails : {false, true}) {
    SCOPED_TRACE(fails ? "it fails" : "it arrives");
    const Handle handle = adopt(kPageable, 128);
    manager->ensure(handle, kPinned);
    if (fails) {
      backend->fail(Call::kTransfer, 1);
    }
    manager->move(handle, kDisk, kPageable);
    ASSERT_EQ(backend->num_queued(), 1U);
    // The copy would not read the file: what it must wait for is that its target may come back.
    const auto back = [&] { return manager->ensure(handle, kPageable); };
    refused<UnavailableError>([&] { manager->ensure(handle, kPageable, {.may_block = false}); });
    if (fails) {
      EXPECT_THROW(back(), TransferError);
      EXPECT_EQ(places(handle), (std::vector{kPageable, kPinned}));
      EXPECT_TRUE(back().no_op());
    } else {
      EXPECT_TRUE(back().record().waited);
      EXPECT_EQ(places(handle), (std::vector{kPageable, kPinned, kDisk}));
    }
    EXPECT_TRUE(holds(handle, kPageable));
    EXPECT_NO_THROW(manager->audit());
  }
}

TEST_F(WatchEscapeTest, ThatFailsLeavesEveryActionUndoneBeforeAnythingIsCopied) {
  start();
  const Handle handle = adopt(kPageable, 128);
  manager->ensure(handle, kPinned);
  const std::pair<const char*, std::function<void()>> calls[] = {
      {"move", [&] { manager->move(handle, kCuda0, kPinned); }},
      {"drop", [&] { manager->drop(handle, kPinned); }},
      {"discard", [&] { manager->discard(handle); }},
      {"take", [&] { (void)manager->take(handle); }},
  };
  for (const auto& [name, call] : calls) {
    for (const std::uint64_t n : {1U, 2U}) {
      SCOPED_TRACE(name);
      const std::string before = fingerprint(manager->snapshot());
      const auto version = manager->state_version();
      const auto num_copies = backend->num_calls(Call::kCopy);
      const auto num_entries = manager->trace().size();
      backend->fail(Call::kWatchEscape, n);
      try {
        call();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const fake::InjectedFault&) {
      }
      EXPECT_EQ(fingerprint(manager->snapshot()), before);
      EXPECT_EQ(manager->state_version(), version);
      EXPECT_EQ(backend->num_calls(Call::kCopy), num_copies);
      EXPECT_EQ(backend->live_bytes(kCuda0), Bytes());
      ASSERT_EQ(manager->trace().size(), num_entries + 1) << "the attempt reached the backend";
      EXPECT_TRUE(manager->trace().back().failed);
      EXPECT_NE(manager->trace().back().failure.find("watch_escape"), std::string::npos);
      EXPECT_NO_THROW(manager->audit());
      if (std::string(name) == "move" || std::string(name) == "drop") {
        break;  // they give up one
      }
    }
  }
  EXPECT_TRUE(holds(handle, kPageable));
  EXPECT_TRUE(holds(handle, kPinned));
  EXPECT_NO_THROW(manager->discard(handle));
}

}  // namespace
}  // namespace residency::test
