// Sections G and H beyond admission: reservations that wait, end late or name no place here, and
// budgets that change under them. (The first half is in budget_test.cpp.)

#include <string>
#include <thread>

#include "fixture.h"

namespace residency::test {
namespace {

using ReservationLifeTest = ManagerTest;
using BudgetChangeTest = ManagerTest;

TEST_F(ReservationLifeTest, WaitsForRetiringBytesOnlyWhenItMayBlock) {
  budget(kPageable, 128_B);
  start();
  const Handle a = adopt(kPageable, 128);
  manager->move(a, kDisk);
  const ResidencyPlan plan({.name = "p", .reservations = {{kPageable, 1_B, "r"}}});
  const auto explanation = manager->explain(plan);
  EXPECT_TRUE(explanation.feasible) << "it only lacks bytes that are on their way out";
  Scope impatient = manager->scope(plan, {.may_block = false});
  const auto error = refused<PlanError>([&] { impatient.enter(); });
  EXPECT_EQ(error->phase, Phase::kReserve);
  EXPECT_EQ(error->verdict.reason, Reason::kOverBudget);
  EXPECT_EQ(error->verdict.shortfall, (Shortfall{kPageable, 128_B, Bytes(), Bytes(), 128_B, 1_B}));
  EXPECT_EQ(backend->num_queued(), 1U) << "nobody waited";
  EXPECT_EQ(account(kPageable).reserved, Bytes());
  Scope patient = manager->scope(plan);
  patient.enter();
  EXPECT_EQ(backend->num_queued(), 0U);
  EXPECT_EQ(account(kPageable).reserved, 1_B);
  patient.close();
}

TEST_F(ReservationLifeTest, DoesNotWaitWhereThereIsRoomBesideRetiringBytes) {
  budget(kPageable, 256_B);
  start();
  const Handle a = adopt(kPageable, 128);
  manager->move(a, kDisk);
  backend->set_waits_block(true);  // a wait would hang the test
  Reservation exact = manager->reserve({kPageable, 128_B, "r"});
  backend->set_waits_block(false);
  EXPECT_EQ(account(kPageable).retiring, 128_B);
  exact.release();
}

TEST_F(ReservationLifeTest, EntersAndLeavesTheVersionAndTheListOfLocations) {
  budget(kCuda1, 10_B);
  start();
  const auto version = manager->state_version();
  refused<BudgetError>([&] { manager->reserve({kCuda1, 11_B, "r"}).release(); });
  refused<UnavailableError>([&] { manager->reserve({Location::cuda(9), 1_B, "r"}).release(); });
  refused<HeadroomError>([&] { manager->reserve({kCuda0, 1_B, "r"}, true).release(); });
  EXPECT_EQ(manager->locations(), std::vector{kCuda1}) << "what failed lists no location";
  Reservation reservation = manager->reserve({kCuda0, 1_B, "r"});
  const auto reserved = manager->state_version();
  EXPECT_GT(reserved, version);
  EXPECT_EQ(manager->locations(), (std::vector{kCuda1, kCuda0}));
  reservation.release();
  EXPECT_GT(manager->state_version(), reserved);
  EXPECT_EQ(manager->locations(), (std::vector{kCuda1, kCuda0})) << "a listed one stays listed";
}

TEST_F(ReservationLifeTest, OfNothingIsOneAllTheSameEvenWhereItIsFull) {
  budget(kPinned, 100_B);
  start();
  const Handle full = adopt(kPinned, 100);
  Reservation nothing = manager->reserve({kPinned, 0_B, "nothing"});
  const Snapshot snapshot = manager->snapshot();
  ASSERT_EQ(snapshot.reservations.size(), 1U);
  EXPECT_EQ(snapshot.reservations[0].reservation.nbytes, Bytes());
  refused<BudgetError>([&] { manager->reserve({kPinned, 1_B, "something"}).release(); });
  nothing.release();
  (void)full;
}

TEST_F(ReservationLifeTest, EqualOnesAreDistinct) {
  start();
  Reservation a = manager->reserve({kCuda0, 100_B, "same"});
  Reservation b = manager->reserve({kCuda0, 100_B, "same"});
  EXPECT_EQ(account(kCuda0).reserved, 200_B);
  a.release();
  EXPECT_TRUE(b.active());
  EXPECT_EQ(manager->snapshot().reservations.size(), 1U);
  b.release();
}

TEST_F(ReservationLifeTest, AtADiskIsAccounting) {
  options.disks = {{.name = "nvme", .directory = "/nowhere", .budget = 4096_B}};
  start();
  Reservation reservation = manager->reserve({kDisk, 4096_B, "spill"});
  EXPECT_FALSE(reservation.physical());
  const Handle a = adopt(kPageable, 8);
  refused<BudgetError>([&] { manager->ensure(a, kDisk); });
  reservation.release();
  manager->ensure(a, kDisk);
}

TEST_F(ReservationLifeTest, IsReleasedFromAnyThread) {
  start();
  Reservation reservation = manager->reserve({kCuda0, 100_B, "r"});
  std::thread([&] { reservation.release(); }).join();
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
}

TEST_F(ReservationLifeTest, BlocksCloseAndEndsWithAForcedOneWithoutAWord) {
  const Warnings warnings;
  fake_options.physical_headroom = {kCuda0};
  start();
  {
    Reservation reservation = manager->reserve({kCuda0, 100_B, "r"});
    const auto error = refused<InUseError>([&] { manager->close(); });
    EXPECT_EQ(error->num_reservations, 1U);
    EXPECT_EQ(backend->headroom_bytes(kCuda0), 100_B);
    manager->close({.force = true});
    EXPECT_EQ(backend->headroom_bytes(kCuda0), Bytes());
    EXPECT_FALSE(reservation.active());
    EXPECT_TRUE(reservation.physical()) << "fields stay readable";
    EXPECT_EQ(reservation.fields().label, "r");
  }
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(ReservationLifeTest, OutlivesTheManager) {
  const Warnings warnings;
  start();
  Reservation reservation = manager->reserve({kCuda0, 100_B, "r"});
  manager.reset();
  EXPECT_FALSE(reservation.active());
  EXPECT_NO_THROW(reservation.release());
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(ReservationLifeTest, HeadroomIsMadeAndGivenBackWithTheMutexOpen) {
  fake_options.physical_headroom = {kCuda0};
  start();
  backend->probe_lock(manager);
  manager->reserve({kCuda0, 100_B, "r"}).release();  // a violation would end the test
  backend->probe_lock(nullptr);
  EXPECT_TRUE(backend->violations().empty());
}

TEST_F(ReservationLifeTest, IsPartOfThePeakOfChargesButNotOfUse) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->reserve({kPinned, 50_B, "r"}).release();
  manager->drop(a, kCuda0);
  EXPECT_EQ(account(kPinned).peak_used, 100_B);
  EXPECT_EQ(account(kPinned).peak_charged, 150_B);
  Reservation standing = manager->reserve({kPinned, 20_B, "r"});
  manager->reset_peaks();
  EXPECT_EQ(account(kPinned).peak_charged, 120_B) << "from the present on";
  standing.release();
}

// ------------------------------------------------------------------------------------------------

TEST_F(BudgetChangeTest, LoweringIsNotBlockedByRetiringBytes) {
  budget(kPageable, 128_B);
  start();
  const Handle a = adopt(kPageable, 128);
  manager->move(a, kDisk);
  EXPECT_EQ(account(kPageable).retiring, 128_B);
  manager->set_budget(kPageable, 64_B);
  const Handle b = adopt(kPinned, 64);
  EXPECT_TRUE(manager->ensure(b, kPageable).record().waited);
  EXPECT_EQ(used(kPageable), 64_B);
}

TEST_F(BudgetChangeTest, LoweredUnderASourceThatThenComesBackAdmitsNothingUntilThereIsRoom) {
  budget(kPageable, 128_B);
  start();
  const Handle a = adopt(kPageable, 128);
  backend->fail(Call::kTransfer, 1);
  const auto report = manager->move(a, kDisk);
  manager->set_budget(kPageable, 64_B);
  EXPECT_THROW(report.wait(), TransferError);
  EXPECT_EQ(used(kPageable), 128_B) << "no bytes are lost for a budget";
  EXPECT_TRUE(holds(a, kPageable));
  const Handle b = adopt(kPinned, 64);
  const auto error = refused<BudgetError>([&] { manager->ensure(b, kPageable); });
  EXPECT_EQ(error->shortfall.budget, 64_B);
  EXPECT_EQ(error->shortfall.used, 128_B);
  refused<BudgetError>([&] { manager->set_budget(kPageable, 127_B); });
  manager->set_budget(kPageable, 128_B);
  manager->set_budget(kPageable, std::nullopt);
  manager->move(a, kPinned);
  manager->set_budget(kPageable, 64_B);
  manager->ensure(b, kPageable);
}

TEST_F(BudgetChangeTest, LimitsAPlaceThatHadNoBudgetAndListsIt) {
  start();
  EXPECT_TRUE(manager->locations().empty());
  const auto version = manager->state_version();
  manager->set_budget(kCuda0, 511_B);
  EXPECT_GT(manager->state_version(), version);
  EXPECT_EQ(manager->locations(), std::vector{kCuda0});
  const Handle a = adopt(kPinned, 100);
  refused<BudgetError>([&] { manager->ensure(a, kCuda0); });
  manager->set_budget(kCuda0, 512_B);
  manager->ensure(a, kCuda0);
}

TEST_F(BudgetChangeTest, OfAPlaceThatDoesNotExistIsUnavailable) {
  start();
  refused<UnavailableError>([&] { manager->set_budget(Location::cuda(9), 1_B); });
  refused<UnavailableError>([&] { manager->set_budget(Location::disk("none"), std::nullopt); });
}

TEST_F(BudgetChangeTest, ThatFailsOnReservedBytesLeavesTheOldOneInForce) {
  budget(kCuda0, 1024_B);
  start();
  Reservation reservation = manager->reserve({kCuda0, 600_B, "r"});
  const auto error = refused<BudgetError>([&] { manager->set_budget(kCuda0, 599_B); });
  EXPECT_EQ(error->shortfall.budget, 599_B) << "the one that was asked for";
  EXPECT_EQ(error->shortfall.reserved, 600_B);
  manager->reserve({kCuda0, 424_B, "fits under the old one"}).release();
  reservation.release();
  manager->set_budget(kCuda0, 0_B);
}

}  // namespace
}  // namespace residency::test
