// Section M: the dry run.

#include <string>
#include <vector>

#include "fixture.h"

namespace residency::test {
namespace {

class ExplainTest : public ManagerTest {
 protected:
  /// What a dry run must not touch, beyond state and version.
  std::string untouched() {
    std::string text = fingerprint(manager->snapshot());
    text += std::to_string(manager->trace().size());
    text += " " + std::to_string(backend->num_calls_that_can_fail());
    text += " " + std::to_string(backend->num_calls(Call::kRelease));
    text += " " + std::to_string(backend->num_queued());
    for (const auto& [handle, source] : sources) {
      text += " " + std::to_string(source->num_loads);
    }
    for (const Location at : manager->locations()) {
      const auto each = account(at);
      text += " " + to_string(at) + " " + to_string(each.peak_used) + " " +
              to_string(each.peak_charged) + " " + to_string(backend->live_bytes(at));
    }
    return text;
  }
  Verdict verdict(const ResidencyAction& action) {
    return manager->explain({&action, 1}).actions.at(0).verdict;
  }
  void expect_equal(const Explanation& explanation, const PlanReport& report) {
    ASSERT_EQ(explanation.actions.size(), report.size());
    EXPECT_EQ(explanation.moved_bytes(), report.moved_bytes());
    for (std::size_t i = 0; i < report.size(); ++i) {
      SCOPED_TRACE(to_string(explanation.actions[i].action));
      const Verdict& predicted = explanation.actions[i].verdict;
      const TransitionRecord done = report[i];
      EXPECT_EQ(explanation.actions[i].phase, done.phase);
      EXPECT_EQ(predicted.reason, done.reason);
      EXPECT_EQ(predicted.no_op(), done.no_op());
      EXPECT_EQ(predicted.source, done.source);
      EXPECT_EQ(predicted.destination, done.destination);
      EXPECT_EQ(predicted.bytes, done.bytes);
      EXPECT_EQ(predicted.waits, done.waited);
    }
  }
  void expect_measured(const Explanation& explanation) {
    for (const PredictedLocation& each : explanation.locations) {
      SCOPED_TRACE(to_string(each.location));
      const LocationSnapshot measured = account(each.location);
      EXPECT_EQ(each.peak_used, measured.peak_used);
      EXPECT_EQ(each.peak_charged, measured.peak_charged);
      EXPECT_EQ(each.used_after, measured.used);
      EXPECT_EQ(each.budget, measured.budget);
    }
  }
};

TEST_F(ExplainTest, ChangesNothing) {
  budget(kCuda0, 1_MiB);
  start();
  const Handle a = adopt(kPageable, 100);
  const Handle b = source(100);
  const Handle c = adopt(kPinned, 100, kExclusive);
  manager->ensure(a, kPinned);
  const ResidencyPlan plan(
      {.name = "p",
       .reclaim = {DropResident{a, kPinned}},
       .reservations = {{kCuda0, 100_B, "r"}},
       .enter = {EnsureResident{a, kCuda0}, EnsureResident{b, kCuda1}, MoveResident{c, kDisk}},
       .exit = {DiscardValue{a}, DropResident{b, kCuda1}}});
  const std::string before = untouched();
  changes_nothing([&] { EXPECT_TRUE(manager->explain(plan).feasible); });
  EXPECT_EQ(untouched(), before);
  EXPECT_EQ(manager->locations(), (std::vector{kCuda0, kPageable, kPinned}))
      << "locations that a plan would use are not listed for that";
}

TEST_F(ExplainTest, SaysWhatEachActionWouldDo) {
  start();
  const Handle a = adopt(kPageable, 100);
  manager->ensure(a, kPinned);
  const Handle b = source(100, kPinned);
  const Verdict copied = verdict(EnsureResident{a, kCuda0});
  EXPECT_TRUE(copied.feasible());
  EXPECT_FALSE(copied.no_op());
  EXPECT_EQ(copied.reason, Reason::kCopied);
  EXPECT_EQ(copied.source, kPinned);
  EXPECT_EQ(copied.destination, kCuda0);
  EXPECT_EQ(copied.bytes, 512_B) << "as the destination rounds";
  const Verdict loaded = verdict(EnsureResident{b, kCuda0});
  EXPECT_EQ(loaded.reason, Reason::kLoaded);
  EXPECT_EQ(loaded.source, kPinned);
  EXPECT_EQ(loaded.bytes, 512_B);
  const Verdict nothing = verdict(EnsureResident{a, kPageable});
  EXPECT_TRUE(nothing.feasible());
  EXPECT_TRUE(nothing.no_op());
  EXPECT_EQ(nothing.reason, Reason::kAlreadyResident);
  EXPECT_EQ(nothing.bytes, Bytes());
  const Verdict dropped = verdict(DropResident{a, kPageable});
  EXPECT_EQ(dropped.reason, Reason::kReleased);
  EXPECT_EQ(dropped.source, kPageable);
  EXPECT_EQ(dropped.bytes, Bytes()) << "nothing travels";
  EXPECT_EQ(verdict(DropResident{b, kCuda0}).reason, Reason::kAlreadyAbsent);
  EXPECT_EQ(verdict(DiscardValue{a}).reason, Reason::kDiscarded);
}

TEST_F(ExplainTest, RefusalSaysWhoProtectsAndWhatIsLacking) {
  budget(kPinned, 120_B);
  start();
  const Handle a = adopt(kPageable, 100);
  manager->ensure(a, kPinned);
  Lease lease = acquire(a, kPinned);
  Hold held = hold(a, kPinned);
  const Verdict in_the_way = verdict(DropResident{a, kPinned});
  EXPECT_FALSE(in_the_way.feasible());
  EXPECT_EQ(in_the_way.reason, Reason::kProtected);
  EXPECT_EQ(in_the_way.protection, (Protection{1, 1, 0}));
  const Handle b = adopt(kPageable, 50);
  const Verdict too_big = verdict(EnsureResident{b, kPinned});
  EXPECT_EQ(too_big.reason, Reason::kOverBudget);
  EXPECT_EQ(too_big.shortfall, (Shortfall{kPinned, 120_B, 100_B, Bytes(), Bytes(), 50_B}));
  EXPECT_EQ(too_big.bytes, Bytes());
  lease.release();
  held.release();
}

TEST_F(ExplainTest, LaterActionsSeeTheEffectsOfEarlierOnes) {
  budget(kCuda0, 512_B);
  start();
  const Handle a = adopt(kPinned, 512);
  const Handle b = adopt(kPinned, 512);
  const Handle c = source(512, kCuda1);
  const ActionList actions = {
      EnsureResident{a, kCuda0},   // fills it
      EnsureResident{a, kCuda0},   // is there by then
      DropResident{a, kPinned},    // is not the last any more
      MoveResident{a, kPageable},  // makes room
      EnsureResident{b, kCuda0},   // fits
      EnsureResident{c, kCuda1},   // loads
      EnsureResident{c, kPinned},  // copies what was loaded
      DiscardValue{b},
  };
  const Reason reasons[] = {Reason::kCopied, Reason::kAlreadyResident, Reason::kReleased,
                            Reason::kCopied, Reason::kCopied,          Reason::kLoaded,
                            Reason::kCopied, Reason::kDiscarded};
  const auto explanation = manager->explain(actions);
  EXPECT_TRUE(explanation.feasible) << explanation.infeasible_because;
  ASSERT_EQ(explanation.actions.size(), 8U);
  for (std::size_t i = 0; i < 8; ++i) {
    EXPECT_EQ(explanation.actions[i].verdict.reason, reasons[i]) << i;
  }
  EXPECT_EQ(explanation.actions[6].verdict.source, kCuda1);
  const ActionList afterwards = {DiscardValue{b}, EnsureResident{b, kCuda0}};
  EXPECT_EQ(manager->explain(afterwards).actions.at(1).verdict.reason, Reason::kDiscardedHandle);
}

TEST_F(ExplainTest, OrderIsThatOfAScope) {
  budget(kCuda0, 1536_B);
  start();
  const Handle old = adopt(kPinned, 1024);
  manager->ensure(old, kCuda0);
  const Handle a = adopt(kPinned, 512);
  const ResidencyPlan plan({.name = "order",
                            .reclaim = {DropResident{old, kCuda0}},
                            .reservations = {{kCuda0, 1000_B, "first"}, {kCuda0, 24_B, "second"}},
                            .enter = {EnsureResident{a, kCuda0}},
                            .exit = {DropResident{a, kCuda0}, EnsureResident{old, kPageable}}});
  const auto explanation = manager->explain(plan);
  EXPECT_TRUE(explanation.feasible) << explanation.infeasible_because;
  EXPECT_EQ(explanation.plan, "order");
  EXPECT_EQ(explanation.state_version, manager->state_version());
  EXPECT_TRUE(explanation.infeasible_because.empty());
  ASSERT_EQ(explanation.actions.size(), 4U);
  const std::pair<Phase, std::uint32_t> expected[] = {
      {Phase::kReclaim, 0}, {Phase::kEnter, 0}, {Phase::kExit, 0}, {Phase::kExit, 1}};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(std::pair(explanation.actions[i].phase, explanation.actions[i].index), expected[i]);
  }
  EXPECT_EQ(explanation.actions[1].action, plan.enter()[0]);
  ASSERT_EQ(explanation.reservations.size(), 2U);
  EXPECT_TRUE(explanation.reservations[0].feasible);
  EXPECT_EQ(explanation.reservations[1].reservation.label, "second");
}

TEST_F(ExplainTest, EndsWithTheFirstFailureAndItsReason) {
  budget(kCuda0, 1024_B);
  start();
  const Handle a = adopt(kPinned, 512);
  const Handle big = adopt(kPinned, 4096);
  const ActionList actions = {EnsureResident{a, kCuda0}, EnsureResident{big, kCuda0},
                              DropResident{a, kPinned}, DropResident{big, kPinned}};
  const auto explanation = manager->explain(actions);
  EXPECT_FALSE(explanation.feasible);
  ASSERT_EQ(explanation.actions.size(), 2U);
  EXPECT_TRUE(explanation.actions[0].verdict.feasible());
  EXPECT_EQ(explanation.actions[1].verdict.reason, Reason::kOverBudget);
  EXPECT_NE(explanation.infeasible_because.find(to_string(actions[1])), std::string::npos)
      << explanation.infeasible_because;
  EXPECT_EQ(explanation.moved_bytes(), 512_B) << "what is refused moves nothing";
}

TEST_F(ExplainTest, ReservationThatDoesNotFitEndsItToo) {
  budget(kCuda0, 1000_B);
  start();
  const Handle a = adopt(kPinned, 100);
  const ResidencyPlan plan(
      {.name = "p",
       .reclaim = {EnsureResident{a, kPinned}},
       .reservations = {{kCuda0, 600_B, "first"}, {kCuda0, 401_B, "second"}, {kCuda0, 1_B, "x"}},
       .enter = {EnsureResident{a, kCuda0}}});
  const auto explanation = manager->explain(plan);
  EXPECT_FALSE(explanation.feasible);
  EXPECT_EQ(explanation.actions.size(), 1U) << "of reclaim; enter is not reached";
  ASSERT_EQ(explanation.reservations.size(), 2U);
  EXPECT_TRUE(explanation.reservations[0].feasible);
  EXPECT_FALSE(explanation.reservations[1].feasible);
  EXPECT_EQ(explanation.reservations[1].reason, Reason::kOverBudget);
  EXPECT_EQ(explanation.reservations[1].shortfall,
            (Shortfall{kCuda0, 1000_B, Bytes(), 600_B, Bytes(), 401_B}));
  EXPECT_NE(explanation.infeasible_because.find("second"), std::string::npos);
}

TEST_F(ExplainTest, BuffersOfStagedCopiesAreReservedOnce) {
  fake_options.staging = 100_B;
  budget(kPinned, 160_B);
  start();
  const Handle a = adopt(kPageable, 512);
  const Handle b = adopt(kPageable, 512);
  const Handle c = adopt(kPinned, 60);
  const std::vector<ResidencyAction> actions = {
      EnsureResident{c, kCuda0}, EnsureResident{a, kCuda0}, EnsureResident{b, kCuda0}};
  const auto explanation = manager->explain(actions);
  ASSERT_TRUE(explanation.feasible) << explanation.infeasible_because;
  EXPECT_EQ(explanation.actions[0].verdict.staging, Bytes()) << "it is not staged";
  EXPECT_EQ(explanation.actions[1].verdict.staging, 100_B);
  EXPECT_EQ(explanation.actions[2].verdict.staging, Bytes());
  ASSERT_EQ(explanation.reservations.size(), 1U);
  EXPECT_EQ(explanation.reservations[0].reservation,
            (MemoryReservation{kPinned, 100_B, "staging"}));
  EXPECT_EQ(explanation.find(kPinned)->peak_charged, 160_B);
  EXPECT_EQ(account(kPinned).reserved, Bytes()) << "nothing has been done yet";

  const PlanReport report = manager->execute(actions);
  expect_measured(explanation);
  report.wait();
  EXPECT_EQ(account(kPinned).reserved, 100_B);
  const Snapshot snapshot = manager->snapshot();
  ASSERT_EQ(snapshot.reservations.size(), 1U);
  EXPECT_EQ(snapshot.reservations[0].reservation.label, "staging");
  const auto later =
      manager->explain(std::vector<ResidencyAction>{EnsureResident{adopt(kPageable, 8), kCuda0}});
  EXPECT_TRUE(later.reservations.empty()) << "they are there";
  const auto elsewhere =
      manager->explain(std::vector<ResidencyAction>{EnsureResident{adopt(kPageable, 8), kCuda1}});
  EXPECT_FALSE(elsewhere.feasible) << "each device has its own";
  manager->audit();
}

TEST_F(ExplainTest, StagedCopyWhoseBuffersDoNotFitIsRefused) {
  fake_options.staging = 100_B;
  budget(kPinned, 160_B);
  start();
  const Handle a = adopt(kPageable, 512);
  const Handle in_the_way = adopt(kPinned, 61);
  const auto before = untouched();
  EXPECT_EQ(verdict(EnsureResident{a, kCuda0}).shortfall,
            (Shortfall{kPinned, 160_B, 61_B, Bytes(), Bytes(), 100_B}));
  const auto error = refused<BudgetError>([&] { manager->ensure(a, kCuda0); });
  ASSERT_TRUE(error);
  EXPECT_EQ(error->shortfall.location, kPinned);
  EXPECT_EQ(untouched(), before);
  manager->discard(in_the_way);
  manager->ensure(a, kCuda0).wait();
}

TEST_F(ExplainTest, StagedCopyThatFailsAtOnceReservesNothing) {
  fake_options.staging = 100_B;
  start();
  const Handle a = adopt(kPageable, 512);
  const auto before = fingerprint(manager->snapshot());
  const auto locations = manager->locations();
  backend->fail(Call::kCopy, 1);
  EXPECT_THROW(manager->ensure(a, kCuda0), fake::InjectedFault);
  EXPECT_EQ(fingerprint(manager->snapshot()), before);
  EXPECT_EQ(manager->locations(), locations);
  manager->ensure(a, kCuda0).wait();
  backend->fail(Call::kCopy, 1);
  EXPECT_THROW(manager->ensure(adopt(kPageable, 8), kCuda0), fake::InjectedFault);
  EXPECT_EQ(account(kPinned).reserved, 100_B) << "the first goes through them";
  manager->audit();
}

TEST_F(ExplainTest, LimitOfTheSystemCountsBuffersAndNoOtherReservation) {
  fake_options.staging = 100_B;
  start();
  const Handle a = adopt(kPageable, 50);
  const Handle b = adopt(kPageable, 512);
  const auto reserved = manager->reserve({kPinned, 1000_B, "accounting"});
  const std::vector<ResidencyAction> actions = {EnsureResident{a, kPinned},
                                                EnsureResident{b, kCuda0}};
  backend->set_spare_bytes(kPinned, SpareBytes{.in_system = 149_B});
  const auto refused = manager->explain(actions);
  ASSERT_FALSE(refused.feasible);
  EXPECT_EQ(refused.actions.back().verdict.shortfall,
            (Shortfall{kPinned, 149_B, 50_B, Bytes(), Bytes(), 100_B, /*of_system=*/true}));
  backend->set_spare_bytes(kPinned, SpareBytes{.in_system = 150_B});
  manager->execute(actions).wait();
}

TEST_F(ExplainTest, FreeMemoryInSegmentsServesValuesAndNoBuffers) {
  fake_options.staging = 100_B;
  start();
  const Handle a = adopt(kPageable, 50);
  const Handle b = adopt(kPageable, 512);
  const std::vector<ResidencyAction> actions = {EnsureResident{a, kPinned},
                                                EnsureResident{b, kCuda0}};
  backend->set_spare_bytes(kPinned, SpareBytes{.in_segments = 300_B, .in_system = 99_B});
  const auto refused = manager->explain(actions);
  ASSERT_FALSE(refused.feasible);
  EXPECT_EQ(refused.actions.back().verdict.shortfall,
            (Shortfall{kPinned, 149_B, 50_B, Bytes(), Bytes(), 100_B, /*of_system=*/true}));
  backend->set_spare_bytes(kPinned, SpareBytes{.in_segments = 20_B, .in_system = 129_B});
  EXPECT_FALSE(manager->explain(actions).feasible);
  backend->set_spare_bytes(kPinned, SpareBytes{.in_segments = 20_B, .in_system = 130_B});
  EXPECT_TRUE(manager->explain(actions).feasible);
  backend->set_spare_bytes(kPinned, SpareBytes{.in_segments = 50_B, .in_system = 100_B});
  manager->execute(actions).wait();
}

TEST_F(ExplainTest, WhatAValueHasLeftServesNoBuffers) {
  fake_options.staging = 100_B;
  start();
  const Handle a = adopt(kPageable, 50);
  const Handle b = adopt(kPageable, 512);
  const Handle c = adopt(kPageable, 50);
  const std::vector<ResidencyAction> actions = {
      EnsureResident{a, kPinned}, DropResident{a, kPinned}, EnsureResident{c, kPinned},
      DropResident{c, kPinned}, EnsureResident{b, kCuda0}};
  // A thread may still read the one when the other is made: there is memory for both from then on.
  backend->set_spare_bytes(kPinned, SpareBytes{.in_system = 199_B});
  const auto refused = manager->explain(actions);
  ASSERT_FALSE(refused.feasible);
  EXPECT_EQ(refused.actions.size(), actions.size()) << refused.infeasible_because;
  backend->set_spare_bytes(kPinned, SpareBytes{.in_system = 200_B});
  EXPECT_TRUE(manager->explain(actions).feasible);
}

TEST_F(ExplainTest, BadHandlesAndMissingLocationsAreVerdicts) {
  start();
  auto other_backend = std::make_shared<FakeBackend>();
  auto other = Manager::create({}, other_backend);
  const auto spec = make_spec(8);
  const Handle foreign = other->adopt(other_backend->make_block(kPageable, spec, 1), spec);
  const Handle a = adopt(kPageable, 8);
  const Handle gone = adopt(kPageable, 8);
  manager->discard(gone);
  EXPECT_EQ(verdict(EnsureResident{foreign, kCuda0}).reason, Reason::kForeignHandle);
  EXPECT_EQ(verdict(MoveResident{Handle(a.id() + 1000), kCuda0}).reason, Reason::kUnknownHandle);
  EXPECT_EQ(verdict(DropResident{Handle(), kCuda0}).reason, Reason::kUnknownHandle);
  EXPECT_EQ(verdict(DiscardValue{Handle(a.id(), ValueType("another"))}).reason,
            Reason::kUnknownHandle);
  EXPECT_EQ(verdict(DiscardValue{gone}).reason, Reason::kDiscardedHandle);
  for (const Location missing : {Location::cuda(9), Location::disk("none")}) {
    for (const ResidencyAction& action :
         {ResidencyAction(EnsureResident{a, missing}), ResidencyAction(MoveResident{a, missing}),
          ResidencyAction(MoveResident{a, kPageable, missing}),
          ResidencyAction(DropResident{a, missing})}) {
      SCOPED_TRACE(to_string(action));
      const Verdict refused = verdict(action);
      EXPECT_EQ(refused.reason, Reason::kLocationUnavailable);
      EXPECT_NE(describe(refused).find(to_string(missing)), std::string::npos) << describe(refused);
    }
    const auto explanation =
        manager->explain(ResidencyPlan({.name = "p", .reservations = {{missing, 1_B, "r"}}}));
    EXPECT_FALSE(explanation.feasible);
    EXPECT_EQ(explanation.reservations.at(0).reason, Reason::kLocationUnavailable);
  }
}

TEST_F(ExplainTest, StaleVersionAndClosedManagerAreExceptions) {
  start();
  const Handle a = adopt(kPinned, 100);
  const ResidencyPlan plan({.name = "p", .enter = {EnsureResident{a, kCuda0}}});
  const auto version = manager->state_version();
  EXPECT_TRUE(manager->explain(plan, version).feasible);
  manager->ensure(a, kPageable);
  const auto error = refused<StaleStateError>([&] { (void)manager->explain(plan, version); });
  EXPECT_EQ(error->expected, version);
  EXPECT_EQ(error->actual, manager->state_version());
  const ActionList actions = {EnsureResident{a, kCuda0}};
  refused<StaleStateError>([&] { (void)manager->explain(actions, version); });
  manager->close();
  EXPECT_THROW((void)manager->explain(plan), ClosedError);
  EXPECT_THROW((void)manager->explain(actions), ClosedError);
}

TEST_F(ExplainTest, PredictedPeaksAndStepsAreTheMeasuredOnes) {
  budget(kCuda0, 1_MiB);
  start();
  const Handle moved = adopt(kPinned, 1000, kExclusive);
  const Handle copied = adopt(kPageable, 3000);
  const Handle loaded = source(5000);
  const Handle loaded_in_place = source(700, kPinned);
  const Handle replica = adopt(kPinned, 2000);
  const Handle ended = adopt(kCuda1, 900);
  manager->ensure(replica, kCuda1);
  backend->complete_all();
  Reservation standing = manager->reserve({kCuda0, 300_B, "standing"});
  const ActionList actions = {
      MoveResident{moved, kCuda0},     // both ends at once
      EnsureResident{copied, kCuda0},  // staged
      EnsureResident{loaded, kCuda0},  // and its temporary at the source's location
      EnsureResident{loaded_in_place, kPinned},
      MoveResident{loaded_in_place, kCuda1},
      DropResident{replica, kPinned},
      MoveResident{replica, kPinned},
      DiscardValue{ended},
      MoveResident{moved, kPageable},
      EnsureResident{moved, kPageable},
  };
  manager->reset_peaks();
  const auto explanation = manager->explain(actions);
  ASSERT_TRUE(explanation.feasible) << explanation.infeasible_because;
  const PlanReport report = manager->execute(actions);
  expect_equal(explanation, report);
  expect_measured(explanation);
  // Spot checks against numbers made by hand.
  ASSERT_NE(explanation.find(kCuda0), nullptr);
  EXPECT_EQ(explanation.find(kCuda0)->peak_used, Bytes(1024 + 3072 + 5120));
  EXPECT_EQ(explanation.find(kCuda0)->peak_charged, Bytes(1024 + 3072 + 5120 + 300));
  EXPECT_EQ(explanation.find(kCuda0)->used_before, Bytes());
  EXPECT_EQ(explanation.find(kCuda0)->used_after, Bytes(3072 + 5120));
  EXPECT_EQ(explanation.find(kPageable)->peak_used, Bytes(3008 + 5056));
  EXPECT_EQ(explanation.find(kPinned)->peak_used, 3000_B) << "the present is the peak";
  EXPECT_EQ(explanation.find(kDisk), nullptr) << "the plan does not touch it";
  standing.release();
}

TEST_F(ExplainTest, PeaksOfAScopeIncludeItsReservations) {
  budget(kCuda0, 4096_B);
  start();
  const Handle old = adopt(kPinned, 1024);
  manager->ensure(old, kCuda0);
  const Handle a = adopt(kPinned, 512);
  backend->complete_all();
  const ResidencyPlan plan(
      {.name = "p",
       .reclaim = {DropResident{old, kCuda0}},
       .reservations = {{kCuda0, 2000_B, "r"}},
       .enter = {EnsureResident{a, kCuda0}},
       .exit = {MoveResident{a, kCuda1, kCuda0}, EnsureResident{old, kCuda0}}});
  manager->reset_peaks();
  const auto explanation = manager->explain(plan);
  ASSERT_TRUE(explanation.feasible) << explanation.infeasible_because;
  Scope scope = manager->scope(plan);
  scope.enter();
  scope.close();
  expect_equal(explanation, scope.report());
  expect_measured(explanation);
  EXPECT_EQ(explanation.find(kCuda0)->peak_used, 1024_B);
  EXPECT_EQ(explanation.find(kCuda0)->peak_charged, Bytes(1024 + 2000))
      << "at the end, when the old one is back";
}

TEST_F(ExplainTest, PeaksStartFromThePresentAndNotFromThePast) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle past = adopt(kCuda0, 1 << 20);
  manager->discard(past);
  EXPECT_EQ(account(kCuda0).peak_used, 1_MiB);
  const ActionList actions = {EnsureResident{a, kCuda0}};
  EXPECT_EQ(manager->explain(actions).find(kCuda0)->peak_used, 512_B);
}

TEST_F(ExplainTest, LoadInPlaceIsChargedOnceAndElsewhereTwice) {
  start();
  const Handle a = source(100, kPinned);
  const ActionList here = {EnsureResident{a, kPinned}};
  EXPECT_EQ(manager->explain(here).find(kPinned)->peak_used, 100_B);
  EXPECT_EQ(manager->explain(here).find(kPinned)->used_after, 100_B);
  const ActionList there = {EnsureResident{a, kCuda0}};
  const auto explanation = manager->explain(there);
  EXPECT_EQ(explanation.find(kPinned)->peak_used, 100_B);
  EXPECT_EQ(explanation.find(kPinned)->used_after, Bytes()) << "the temporary has gone";
  EXPECT_EQ(explanation.find(kCuda0)->used_after, 512_B);
}

TEST_F(ExplainTest, NamesTheActionThatWaitsForRetiringBytes) {
  budget(kPageable, 128_B);
  start();
  const Handle a = adopt(kPageable, 128);
  const Handle b = adopt(kPinned, 128);
  const ActionList actions = {MoveResident{a, kDisk}, EnsureResident{b, kPageable}};
  const auto explanation = manager->explain(actions);
  ASSERT_TRUE(explanation.feasible) << explanation.infeasible_because;
  EXPECT_FALSE(explanation.actions[0].verdict.waits);
  EXPECT_TRUE(explanation.actions[1].verdict.waits) << "for bytes that the first one retires";
  expect_equal(explanation, manager->execute(actions));
}

TEST_F(ExplainTest, NamesTheActionThatWaitsForAnArrival) {
  start();
  const Handle a = adopt(kPageable, 128, kExclusive);
  const ActionList actions = {MoveResident{a, kDisk}, MoveResident{a, kPinned}};
  const auto explanation = manager->explain(actions);
  EXPECT_FALSE(explanation.actions[0].verdict.waits);
  EXPECT_TRUE(explanation.actions[1].verdict.waits) << "a file that may still fail to be written";
  expect_equal(explanation, manager->execute(actions));
  const Handle b = adopt(kPinned, 128, kExclusive);
  const ActionList direct = {MoveResident{b, kCuda0}, MoveResident{b, kCuda1}};
  EXPECT_FALSE(manager->explain(direct).actions[1].verdict.waits) << "ordered on the device";
}

TEST_F(ExplainTest, NoOpsBelongToThePredictionToo) {
  start();
  const Handle a = adopt(kPinned, 100);
  const ActionList actions = {EnsureResident{a, kPinned}};
  const auto explanation = manager->explain(actions);
  ASSERT_NE(explanation.find(kPinned), nullptr);
  EXPECT_EQ(explanation.find(kPinned)->peak_used, 100_B);
  EXPECT_EQ(explanation.find(kPinned)->used_after, 100_B);
  EXPECT_EQ(explanation.moved_bytes(), Bytes());
}

TEST_F(ExplainTest, TextShowsTheActionsAndTheLocations) {
  budget(kCuda0, 1024_B);
  start();
  const Handle a = adopt(kPinned, 512);
  const Handle big = adopt(kPinned, 4096);
  const ResidencyPlan plan({.name = "for people",
                            .reservations = {{kCuda0, 77_B, "head room"}},
                            .enter = {EnsureResident{a, kCuda0}, EnsureResident{a, kPinned}}});
  const std::string good = to_string(manager->explain(plan));
  for (const std::string& part :
       {std::string("plan 'for people'"), std::string("feasible"), std::string("enter"),
        to_string(plan.enter()[0]), std::string("ok: "), std::string("no-op: "),
        std::string("head room"), std::string("77"), std::string("cuda:0"), std::string("1024"),
        std::string("pinned-host"), std::string("peak charged B")}) {
    EXPECT_NE(good.find(part), std::string::npos) << part << " is not in\n" << good;
  }
  EXPECT_EQ(good.find("infeasible"), std::string::npos);
  const ActionList actions = {EnsureResident{big, kCuda0}};
  const auto refused = manager->explain(actions);
  const std::string bad = to_string(refused);
  EXPECT_NE(bad.find("infeasible: " + refused.infeasible_because), std::string::npos) << bad;
  EXPECT_NE(bad.find("refused: "), std::string::npos) << bad;
}

}  // namespace
}  // namespace residency::test
