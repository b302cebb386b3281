// Sections G and H: budgets, charges, waiting for retiring bytes, reservations.

#include <string>

#include "fixture.h"

namespace residency::test {
namespace {

using BudgetTest = ManagerTest;
using ReservationTest = ManagerTest;
using EscapeTest = ManagerTest;

TEST_F(BudgetTest, ExactFitPassesAndOneByteOverDoesNot) {
  budget(kPinned, 100_B);
  start();
  const Handle a = adopt(kPinned, 60);
  const Handle b = adopt(kPageable, 40);
  const Handle c = adopt(kPageable, 41);
  const auto error = refused<BudgetError>([&] { manager->ensure(c, kPinned); });
  EXPECT_EQ(error->shortfall.location, kPinned);
  EXPECT_EQ(error->shortfall.budget, 100_B);
  EXPECT_EQ(error->shortfall.used, 60_B);
  EXPECT_EQ(error->shortfall.reserved, Bytes());
  EXPECT_EQ(error->shortfall.retiring, Bytes());
  EXPECT_EQ(error->shortfall.requested, 41_B);
  EXPECT_EQ(error->code(), ErrorCode::kBudget);
  manager->ensure(b, kPinned);
  EXPECT_EQ(used(kPinned), 100_B);
  (void)a;
}

TEST_F(BudgetTest, ZeroAdmitsZero) {
  budget(kPinned, 0_B);
  start();
  const Handle empty = adopt(kPageable, 0);
  const Handle one = adopt(kPageable, 1);
  manager->ensure(empty, kPinned);
  refused<BudgetError>([&] { manager->ensure(one, kPinned); });
  manager->reserve({kPinned, 0_B, "nothing"}).release();
  refused<BudgetError>([&] { manager->reserve({kPinned, 1_B, "one"}).release(); });
}

TEST_F(BudgetTest, ValueLargerThanTheWholeBudgetIsRefused) {
  budget(kCuda0, 1_MiB);
  start();
  const Handle big = adopt(kPageable, 2 << 20);
  refused<BudgetError>([&] { manager->ensure(big, kCuda0); });
}

TEST_F(BudgetTest, UnbudgetedLocationsAreAccountedAndNeverLimited) {
  start();
  const Handle huge = adopt(kPageable, std::int64_t{1} << 40);
  manager->ensure(huge, kCuda0);
  EXPECT_EQ(used(kCuda0), Bytes(std::int64_t{1} << 40));
  EXPECT_FALSE(account(kCuda0).budget);
}

TEST_F(BudgetTest, SumThatWouldOverflowIsRefusedAndNotWrapped) {
  budget(kPinned, Bytes::max());
  start();
  const Handle a = adopt(kPinned, std::numeric_limits<std::int64_t>::max() - 10);
  const auto spec = make_spec(100);
  const Handle b = manager->adopt(backend->make_block(kPageable, spec, 1), spec);
  refused<BudgetError>([&] { manager->ensure(b, kPinned); });
  refused<BudgetError>([&] { manager->reserve({kPinned, Bytes::max(), "r"}).release(); });
  (void)a;
}

TEST_F(BudgetTest, RaisingAlwaysWorksAndLoweringBelowUseChangesNothing) {
  budget(kPinned, 100_B);
  start();
  const Handle handle = adopt(kPinned, 60);
  Reservation reservation = manager->reserve({kPinned, 20_B, "r"});
  const auto error = refused<BudgetError>([&] { manager->set_budget(kPinned, 79_B); });
  EXPECT_EQ(error->shortfall.used, 60_B);
  EXPECT_EQ(error->shortfall.reserved, 20_B);
  EXPECT_EQ(account(kPinned).budget, 100_B) << "the old budget stays in force";
  const auto version = manager->state_version();
  manager->set_budget(kPinned, 80_B);
  EXPECT_GT(manager->state_version(), version);
  manager->set_budget(kPinned, 1_GiB);
  manager->set_budget(kPinned, std::nullopt);
  EXPECT_FALSE(account(kPinned).budget);
  reservation.release();
  (void)handle;
}

TEST_F(BudgetTest, LoweringBelowTheBuffersOfStagedCopiesNamesThem) {
  fake_options.staging = 100_B;
  start();
  manager->move(adopt(kPageable, 10), kCuda0).wait();
  const auto error = refused<BudgetError>([&] { manager->set_budget(kPinned, 99_B); });
  EXPECT_EQ(error->shortfall.reserved, 100_B);
  EXPECT_NE(std::string(error->what()).find("100 B for staging"), std::string::npos)
      << error->what();
  EXPECT_FALSE(account(kPinned).budget);
  manager->set_budget(kPinned, 100_B);
}

TEST_F(BudgetTest, SettingTheSameBudgetChangesNothing) {
  budget(kPinned, 100_B);
  start();
  changes_nothing([&] { manager->set_budget(kPinned, 100_B); });
}

TEST_F(BudgetTest, LackOfRetiringBytesAloneIsWaitedFor) {
  budget(kPageable, 128_B);
  start();
  const Handle a = adopt(kPageable, 128);
  manager->move(a, kDisk);  // the pageable bytes stay until the file is complete
  EXPECT_EQ(account(kPageable).retiring, 128_B);
  const Handle b = adopt(kPinned, 128);
  const ActionList actions = {EnsureResident{b, kPageable}};
  const auto explanation = manager->explain(actions);
  EXPECT_TRUE(explanation.feasible);
  EXPECT_TRUE(explanation.actions[0].verdict.waits);
  const auto error =
      refused<BudgetError>([&] { manager->ensure(b, kPageable, {.may_block = false}); });
  EXPECT_EQ(error->shortfall.retiring, 128_B);
  const auto report = manager->ensure(b, kPageable);
  EXPECT_TRUE(report.record().waited);
  EXPECT_TRUE(holds(b, kPageable));
  EXPECT_EQ(account(kPageable).retiring, Bytes());
}

TEST_F(BudgetTest, RetiringBytesCountAgainstWhatWaitingCannotHelp) {
  budget(kPageable, 256_B);
  start();
  const Handle a = adopt(kPageable, 128);
  const Handle b = adopt(kPageable, 64);
  manager->move(a, kDisk);
  const Handle c = adopt(kPinned, 256);
  const auto error = refused<BudgetError>([&] { manager->ensure(c, kPageable); });
  EXPECT_EQ(error->shortfall.retiring, 128_B);
  EXPECT_EQ(error->shortfall.used, 64_B);
  (void)b;
}

TEST_F(BudgetTest, RetiredBytesThatHaveGoneNeedNoWaiting) {
  budget(kPageable, 256_B);
  start();
  // Several at once, of which a later one completes first.
  const Handle a = adopt(kPageable, 128);
  const Handle b = adopt(kPageable, 128);
  const Handle c = adopt(kPinned, 128);
  manager->move(a, kDisk);
  manager->move(b, kDisk);
  ASSERT_TRUE(backend->complete(b, kDisk));
  const auto report = manager->ensure(c, kPageable, {.may_block = false});
  EXPECT_FALSE(report.record().waited);
  EXPECT_TRUE(holds(c, kPageable));
}

TEST_F(BudgetTest, AdoptWaitsForRetiringBytesToo) {
  budget(kPageable, 128_B);
  start();
  const Handle a = adopt(kPageable, 128);
  manager->move(a, kDisk);
  const Handle b = adopt(kPageable, 128);
  EXPECT_EQ(backend->num_queued(), 0U);
  EXPECT_TRUE(holds(b, kPageable));
}

TEST_F(BudgetTest, RetiringNeverLeaks) {
  start();
  std::vector<Handle> handles;
  for (int round = 0; round < 20; ++round) {
    const Handle handle = adopt(kPageable, 100, kReplicable, kMutable);
    manager->ensure(handle, kDisk);
    manager->ensure(handle, kCuda0);
    if (round % 3 == 0) {
      manager->discard(handle);
    } else if (round % 3 == 1) {
      (void)manager->take(handle);
    } else {
      handles.push_back(handle);
      manager->move(handle, kCuda1, kPageable);
      manager->drop(handle, kDisk);
    }
  }
  backend->complete_all();
  for (const Location location : {kPageable, kPinned, kCuda0, kCuda1, kDisk}) {
    EXPECT_EQ(account(location).retiring, Bytes()) << to_string(location);
    EXPECT_EQ(account(location).arriving, Bytes()) << to_string(location);
    EXPECT_EQ(used(location), backend->live_bytes(location)) << to_string(location);
  }
}

TEST_F(BudgetTest, PeaksNeverFallUntilReset) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kPinned);
  Reservation reservation = manager->reserve({kPinned, 50_B, "r"});
  EXPECT_EQ(account(kPinned).peak_used, 100_B);
  EXPECT_EQ(account(kPinned).peak_charged, 150_B);
  reservation.release();
  manager->drop(handle, kPinned);
  EXPECT_EQ(account(kPinned).peak_used, 100_B);
  EXPECT_EQ(account(kPinned).peak_charged, 150_B);
  manager->reset_peaks();
  EXPECT_EQ(account(kPinned).peak_used, Bytes());
  EXPECT_EQ(account(kPinned).peak_charged, Bytes());
  EXPECT_EQ(account(kPageable).peak_used, 128_B) << "from the present on";
}

TEST_F(BudgetTest, ManagerEvictsNothingByItself) {
  budget(kCuda0, 512_B);
  start();
  const Handle a = adopt(kPageable, 512);
  manager->ensure(a, kCuda0);
  const Handle b = adopt(kPageable, 512);
  refused<BudgetError>([&] { manager->ensure(b, kCuda0); });
  EXPECT_EQ(places(a), (std::vector{kPageable, kCuda0}));
}

TEST_F(BudgetTest, BackendOutOfMemoryReachesTheCallerAndChangesNothing) {
  fake_options.capacity[kCuda0] = 1000_B;
  start();
  const Handle handle = adopt(kPageable, 1000);
  const auto version = manager->state_version();
  EXPECT_THROW(manager->ensure(handle, kCuda0), fake::OutOfMemory);
  EXPECT_EQ(used(kCuda0), Bytes());
  EXPECT_EQ(manager->state_version(), version);
}

// ------------------------------------------------------------------------------------------------

TEST_F(ReservationTest, IsChargedUnderTheBudgetAndListedInOrder) {
  budget(kCuda0, 1000_B);
  start();
  Reservation first = manager->reserve({kCuda0, 600_B, "first"});
  Reservation second = manager->reserve({kCuda0, 400_B, "second"});
  const auto error = refused<BudgetError>([&] {
    manager->reserve({kCuda0, 1_B, "third"}).release();
  });
  EXPECT_EQ(error->shortfall.reserved, 1000_B);
  const Snapshot snapshot = manager->snapshot();
  ASSERT_EQ(snapshot.reservations.size(), 2U);
  EXPECT_EQ(snapshot.reservations[0].reservation.label, "first");
  EXPECT_EQ(snapshot.reservations[1].reservation.label, "second");
  EXPECT_EQ(account(kCuda0).used, Bytes()) << "it places nothing";
  first.release();
  EXPECT_EQ(account(kCuda0).reserved, 400_B);
  second.release();
}

TEST_F(ReservationTest, ManagedAdmissionsCannotTakeIt) {
  budget(kCuda0, 1024_B);
  start();
  Reservation reservation = manager->reserve({kCuda0, 600_B, "mine"});
  const Handle handle = adopt(kPageable, 512);
  refused<BudgetError>([&] { manager->ensure(handle, kCuda0); });
  reservation.release();
  manager->ensure(handle, kCuda0);
}

TEST_F(ReservationTest, ReleasingTwiceIsHarmlessAndFieldsStayReadable) {
  start();
  Reservation reservation = manager->reserve({kCuda0, 600_B, "mine"});
  EXPECT_TRUE(reservation.active());
  reservation.release();
  EXPECT_FALSE(reservation.active());
  changes_nothing([&] { reservation.release(); });
  EXPECT_EQ(reservation.fields(), (MemoryReservation{kCuda0, 600_B, "mine"}));
}

TEST_F(ReservationTest, EmptyLabelIsAnArgumentError) {
  start();
  refused<std::invalid_argument>([&] { manager->reserve({kCuda0, 1_B, ""}).release(); });
}

TEST_F(ReservationTest, WhereNothingIsPhysicalItIsAccountingOnly) {
  start();
  Reservation reservation = manager->reserve({kPageable, 100_B, "host"});
  EXPECT_FALSE(reservation.physical());
  EXPECT_FALSE(manager->snapshot().reservations[0].physical);
  reservation.release();
  const auto error = refused<HeadroomError>([&] {
    manager->reserve({kPageable, 100_B, "host"}, /*require_physical=*/true).release();
  });
  EXPECT_EQ(error->location, kPageable);
  EXPECT_EQ(error->requested, 100_B);
  EXPECT_EQ(account(kPageable).reserved, Bytes());
}

TEST_F(ReservationTest, PhysicalHeadroomIsHeldUntilRelease) {
  fake_options.physical_headroom = {kCuda0};
  start();
  Reservation reservation = manager->reserve({kCuda0, 100_B, "r"}, true);
  EXPECT_TRUE(reservation.physical());
  EXPECT_TRUE(manager->snapshot().reservations[0].physical);
  EXPECT_EQ(backend->headroom_bytes(kCuda0), 100_B);
  reservation.release();
  EXPECT_EQ(backend->headroom_bytes(kCuda0), Bytes());
}

TEST_F(ReservationTest, HeadroomThatCannotBeMadeUndoesTheCharge) {
  fake_options.physical_headroom = {kCuda0};
  start();
  backend->fail(Call::kMakeHeadroom, 1);
  refused<fake::InjectedFault>([&] { manager->reserve({kCuda0, 100_B, "r"}).release(); });
  EXPECT_EQ(backend->headroom_bytes(kCuda0), Bytes());
}

TEST_F(ReservationTest, DestroyedWhileActiveIsReleasedAndWarnsWithItsLabel) {
  const Warnings warnings;
  start();
  {
    const Reservation reservation = manager->reserve({kCuda0, 100_B, "forgotten one"});
    EXPECT_EQ(account(kCuda0).reserved, 100_B);
  }
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
  ASSERT_EQ(warnings.texts().size(), 1U);
  EXPECT_NE(warnings.texts()[0].find("forgotten one"), std::string::npos);
}

TEST_F(ReservationTest, MovedFromOneSaysNothing) {
  const Warnings warnings;
  start();
  Reservation outer = [&] {
    Reservation inner = manager->reserve({kCuda0, 100_B, "moved"});
    return inner;
  }();
  Reservation second = std::move(outer);
  EXPECT_TRUE(second.active());
  second.release();
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(ReservationTest, AssignmentReleasesWhatItReplaces) {
  const Warnings warnings;
  start();
  Reservation a = manager->reserve({kCuda0, 100_B, "a"});
  {
    Reservation b = manager->reserve({kCuda0, 50_B, "b"});
    a = std::move(b);
  }
  EXPECT_EQ(account(kCuda0).reserved, 50_B);
  EXPECT_EQ(a.fields().label, "b");
  EXPECT_TRUE(a.active());
  a.release();
}

TEST_F(ReservationTest, WaitsForRetiringBytes) {
  budget(kPageable, 128_B);
  start();
  const Handle handle = adopt(kPageable, 128);
  manager->move(handle, kDisk);
  Reservation reservation = manager->reserve({kPageable, 128_B, "r"});
  EXPECT_EQ(account(kPageable).retiring, Bytes());
  reservation.release();
}

// ------------------------------------------------------------------------------------------------

TEST_F(EscapeTest, SharedMemoryStaysInUsedUntilItDies) {
  budget(kPinned, 100_B);
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kPinned);
  Lease lease = acquire(handle, kPinned);
  std::shared_ptr<void> alias = block(lease, handle).share();
  lease.release();
  const ActionList actions = {DropResident{handle, kPinned}};
  const auto explanation = manager->explain(actions);
  ASSERT_NE(explanation.find(kPinned), nullptr);
  EXPECT_EQ(explanation.find(kPinned)->escaped_after, 100_B);
  EXPECT_EQ(explanation.find(kPinned)->used_after, 100_B);
  manager->drop(handle, kPinned);
  EXPECT_EQ(account(kPinned).escaped, 100_B);
  EXPECT_EQ(used(kPinned), 100_B);
  EXPECT_EQ(backend->live_bytes(kPinned), 100_B);
  const Handle other = adopt(kPageable, 100);
  refused<BudgetError>([&] { manager->ensure(other, kPinned); });
  alias.reset();
  EXPECT_EQ(account(kPinned).escaped, Bytes());
  EXPECT_EQ(used(kPinned), Bytes());
  manager->ensure(other, kPinned);
}

TEST_F(EscapeTest, AliasOfAnAdoptedTensorEscapesWithAMove) {
  start();
  const auto spec = make_spec(100);
  auto mine = backend->make_block(kPageable, spec, 5);
  std::shared_ptr<void> alias = mine->share();
  const Handle handle = manager->adopt(std::move(mine), spec);
  seeds[handle] = 5;
  manager->move(handle, kPinned);
  EXPECT_EQ(account(kPageable).escaped, 128_B);
  EXPECT_TRUE(holds(handle, kPinned));
  alias.reset();
  EXPECT_EQ(used(kPageable), Bytes());
}

TEST_F(EscapeTest, WhatHasGoneByNowCountsForNeitherABudgetNorAPeak) {
  start();
  const Handle value = adopt(kPinned, 100, kExclusive);
  auto alias = [&] {
    Lease lease = acquire(value, kPinned);
    return block(lease, value).share();
  }();
  manager->move(value, kPageable).wait();
  ASSERT_EQ(account(kPinned).escaped, 100_B);
  alias.reset();
  manager->reset_peaks();
  EXPECT_EQ(account(kPinned).peak_used, Bytes());
  const Handle other = adopt(kPinned, 100, kExclusive);
  alias = [&] {
    Lease lease = acquire(other, kPinned);
    return block(lease, other).share();
  }();
  manager->move(other, kPageable).wait();
  ASSERT_EQ(account(kPinned).escaped, 100_B);
  alias.reset();
  manager->set_budget(kPinned, Bytes());
  EXPECT_EQ(account(kPinned).used, Bytes());
}

TEST_F(EscapeTest, StrictAliasesRefuseBeforehand) {
  options.strict_aliases = true;
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kPinned);
  Lease lease = acquire(handle, kPinned);
  std::shared_ptr<void> alias = block(lease, handle).share();
  lease.release();
  refused<InUseError>([&] { manager->drop(handle, kPinned); });
  refused<InUseError>([&] { manager->move(handle, kCuda0, kPinned); });
  refused<InUseError>([&] { manager->discard(handle); });
  alias.reset();
  manager->drop(handle, kPinned);
}

TEST_F(EscapeTest, FailedTransferTakesTheEscapeBack) {
  start();
  const auto spec = make_spec(128);
  auto mine = backend->make_block(kPageable, spec, 5);
  std::shared_ptr<void> alias = mine->share();
  const Handle handle = manager->adopt(std::move(mine), spec);
  seeds[handle] = 5;
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->move(handle, kDisk);
  EXPECT_THROW(report.wait(), TransferError);
  EXPECT_EQ(used(kPageable), 128_B);
  EXPECT_EQ(account(kPageable).escaped, Bytes());
  EXPECT_TRUE(holds(handle, kPageable));
  alias.reset();
  EXPECT_EQ(used(kPageable), 128_B);
  EXPECT_TRUE(holds(handle, kPageable));
}

TEST_F(EscapeTest, MemoryThatComesBackIsChargedOnce) {
  budget(kPageable, 128_B);
  start();
  const auto spec = make_spec(128);
  auto mine = backend->make_block(kPageable, spec, 5);
  std::shared_ptr<FakeBlock> again = backend->make_overlapping_block(*mine, 0, spec);
  std::shared_ptr<void> alias = mine->share();
  const Handle first = manager->adopt(std::move(mine), spec);
  manager->move(first, kPinned);
  EXPECT_EQ(account(kPageable).escaped, 128_B);
  const Handle second = manager->adopt(std::move(again), spec);  // there is no room for both
  EXPECT_EQ(used(kPageable), 128_B);
  EXPECT_EQ(account(kPageable).escaped, Bytes());
  EXPECT_EQ(account(kPageable).peak_used, 128_B);
  EXPECT_TRUE(manager->snapshot().escaped.empty());
  EXPECT_NO_THROW(manager->audit());
  alias.reset();  // the end of what has escaped no more
  EXPECT_EQ(used(kPageable), 128_B);
  manager->discard(second);
  EXPECT_EQ(used(kPageable), Bytes());
}

TEST_F(EscapeTest, MemoryThatComesBackAfterATransferThatCouldFailIsChargedOnce) {
  budget(kPageable, 128_B);
  start();
  const auto spec = make_spec(128);
  auto mine = backend->make_block(kPageable, spec, 5);
  std::shared_ptr<FakeBlock> again = backend->make_overlapping_block(*mine, 0, spec);
  std::shared_ptr<void> alias = mine->share();
  const Handle first = manager->adopt(std::move(mine), spec);
  manager->move(first, kDisk);
  refused<OwnershipError>([&] { (void)manager->adopt(again, spec); });  // it may come back
  backend->complete_all();
  (void)manager->adopt(std::exchange(again, nullptr), spec);
  EXPECT_EQ(used(kPageable), 128_B);
  EXPECT_EQ(account(kPageable).escaped, Bytes());
  alias.reset();
}

TEST_F(EscapeTest, APartThatComesBackIsChargedBesideTheWhole) {
  start();
  const auto spec = make_spec(128);
  auto mine = backend->make_block(kPageable, spec, 5);
  auto part = backend->make_overlapping_block(*mine, 0, make_spec(64));
  std::shared_ptr<void> alias = mine->share();
  const Handle handle = manager->adopt(std::move(mine), spec);
  manager->move(handle, kPinned);
  (void)manager->adopt(std::move(part), make_spec(64));
  EXPECT_EQ(used(kPageable), 192_B);
  EXPECT_EQ(account(kPageable).escaped, 128_B);
  alias.reset();
  EXPECT_EQ(used(kPageable), 64_B);
}

TEST_F(EscapeTest, CloseDoesNotWaitForAliases) {
  start();
  const auto spec = make_spec(128);
  auto mine = backend->make_block(kPageable, spec, 5);
  std::shared_ptr<void> alias = mine->share();
  const Handle handle = manager->adopt(std::move(mine), spec);
  manager->move(handle, kPinned);
  manager->synchronize();
  manager->close();
  EXPECT_EQ(backend->live_bytes(kPageable), 128_B);
  alias.reset();
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
}

}  // namespace
}  // namespace residency::test
