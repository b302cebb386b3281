// Sections K and L: execute, scopes, rollback.

#include <exception>
#include <functional>
#include <string>
#include <thread>
#include <type_traits>

#include "fixture.h"

namespace residency::test {
namespace {

/// Runs `call`, which must throw a `PlanExecutionError`.
template <class Function>
PlanExecutionError failure_of(const Function& call) {
  try {
    call();
  } catch (const PlanExecutionError& error) {
    EXPECT_EQ(error.code(), ErrorCode::kPlanExecution);
    return error;
  }
  throw std::runtime_error("no PlanExecutionError was thrown");
}

template <class Cause>
testing::AssertionResult is_caused_by(const PlanExecutionError& error) {
  try {
    std::rethrow_exception(error.cause);
  } catch (const Cause&) {
    return testing::AssertionSuccess();
  } catch (const std::exception& other) {
    return testing::AssertionFailure() << "the cause is " << other.what();
  }
}

bool mentions(const std::exception& error, const std::string& text) {
  return std::string(error.what()).find(text) != std::string::npos;
}

class PlanRunTest : public ManagerTest {
 protected:
  /// What must be equal after a rollback: all that a snapshot says, and what really is allocated.
  std::string state() {
    backend->complete_all();
    std::string text = fingerprint(manager->snapshot());
    for (const Location at : {kPageable, kPinned, kCuda0, kCuda1, kDisk}) {
      text += "\n" + to_string(at) + " " + to_string(backend->live_bytes(at)) + " " +
              to_string(backend->headroom_bytes(at));
    }
    return text;
  }
  /// Lists every location from the start, because one that was used once stays listed.
  void list_all() {
    for (const Location at : {kPageable, kPinned, kCuda0, kCuda1}) {
      budget(at, std::nullopt);
    }
    options.disks = {{.name = "nvme", .directory = "/nowhere", .budget = 1_GiB}};
  }
  std::vector<Phase> phases(const PlanReport& report) {
    std::vector<Phase> found;
    for (const auto& entry : report.entries()) {
      found.push_back(entry.phase);
    }
    return found;
  }
};
using ExecuteTest = PlanRunTest;
using PlanRollbackTest = PlanRunTest;
using ScopeTest = PlanRunTest;

// --- execute

TEST_F(ExecuteTest, GivesOneEntryPerActionInOrderNoOpsIncluded) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = source(100);
  const ActionList actions = {EnsureResident{a, kCuda0}, EnsureResident{a, kCuda0},
                              MoveResident{b, kCuda1}, DropResident{a, kCuda0}, DiscardValue{a}};
  const PlanReport report = manager->execute(actions, {.name = "mine"});
  EXPECT_EQ(report.plan(), "mine");
  ASSERT_EQ(report.size(), 5U);
  const Reason reasons[] = {Reason::kCopied, Reason::kAlreadyResident, Reason::kLoaded,
                            Reason::kReleased, Reason::kDiscarded};
  const auto trace = manager->trace();
  ASSERT_EQ(trace.size(), 5U);
  for (std::size_t i = 0; i < 5; ++i) {
    EXPECT_EQ(report[i].action, kind_of(actions[i])) << i;
    EXPECT_EQ(report[i].handle, handle_of(actions[i])) << i;
    EXPECT_EQ(report[i].reason, reasons[i]) << i;
    EXPECT_EQ(report[i].phase, Phase::kExecute) << i;
    EXPECT_EQ(report[i].plan, "mine") << i;
    EXPECT_EQ(trace[i].plan, "mine") << i;
    EXPECT_EQ(trace[i].reason, reasons[i]) << i;
  }
  EXPECT_EQ(report.moved_bytes(), 1024_B);
  EXPECT_THROW((void)report[5], std::out_of_range);
}

TEST_F(ExecuteTest, EmptySequenceChangesNothingAndEmptyNameIsAnArgumentError) {
  start();
  changes_nothing([&] { EXPECT_TRUE(manager->execute({}).empty()); });
  refused<std::invalid_argument>([&] { manager->execute({}, {.name = ""}); });
}

// Case 2.
TEST_F(ExecuteTest, LimitOfTheSystemRefusesThePlanBeforehandAndIsNamed) {
  start();
  const Handle a = adopt(kPageable, 100);
  const Handle b = adopt(kPageable, 100);
  manager->ensure(a, kPinned);
  backend->complete_all();
  backend->set_spare_bytes(kPinned, SpareBytes{.in_system = 99_B});
  const ActionList actions = {EnsureResident{b, kPinned}};
  const auto error = refused<PlanError>([&] { manager->execute(actions); });
  EXPECT_EQ(error->verdict.reason, Reason::kOverBudget);
  EXPECT_EQ(error->verdict.shortfall,
            (Shortfall{kPinned, 199_B, 100_B, Bytes(), Bytes(), 100_B, true}));
  EXPECT_TRUE(mentions(*error, "ulimit -l")) << error->what();
  const Explanation explanation = manager->explain(actions);
  EXPECT_FALSE(explanation.feasible);
  EXPECT_EQ(explanation.actions.size(), 1U);
  EXPECT_NE(explanation.infeasible_because.find("199 B"), std::string::npos)
      << explanation.infeasible_because;
  Scope scope = manager->scope(ResidencyPlan({.name = "limited", .enter = actions}));
  refused<PlanError>([&] { scope.enter(); });
  // What makes room first fits, and a lower budget is the one that is named.
  manager->execute(ActionList{DropResident{a, kPinned}, EnsureResident{b, kPinned}});
  backend->set_spare_bytes(kPinned, std::nullopt);
  EXPECT_TRUE(manager->explain(ActionList{EnsureResident{a, kPinned}}).feasible);
  backend->set_spare_bytes(kPinned, SpareBytes{.in_system = 99_B});
  manager->set_budget(kPinned, 150_B);
  const auto budget = refused<PlanError>([&] {
    manager->execute(ActionList{EnsureResident{a, kPinned}});
  });
  EXPECT_FALSE(budget->verdict.shortfall.of_system);
}

using PrefetchTest = ManagerTest;

TEST_F(PrefetchTest, BringsInOrderWhatFitsAndStopsThere) {
  budget(kCuda0, 1024_B);
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  const Handle c = adopt(kPinned, 100);
  const Handle handles[] = {a, a, b, c};
  const PlanReport report = manager->prefetch(handles, kCuda0);
  ASSERT_EQ(report.size(), 3U);
  EXPECT_EQ(report[0].reason, Reason::kCopied);
  EXPECT_TRUE(report[1].no_op());
  EXPECT_EQ(report[2].handle, b);
  EXPECT_EQ(places(c), std::vector{kPinned}) << "nothing was given up for it";
  EXPECT_EQ(backend->num_queued(), 2U) << "nobody waited";
}

TEST_F(PrefetchTest, LoadsNothing) {
  start();
  const Handle loaded = source(100);
  const Handle a = adopt(kPinned, 100);
  const Handle handles[] = {loaded, a};
  EXPECT_TRUE(manager->prefetch(handles, kCuda0).empty());
  EXPECT_TRUE(places(loaded).empty());
}

TEST_F(PrefetchTest, StopsAtACopyThatCannotBeMadeAndSaysSoInTheTrace) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  const Handle handles[] = {a, b};
  backend->fail(Call::kCopy, backend->num_calls(Call::kCopy) + 2);
  EXPECT_EQ(manager->prefetch(handles, kCuda0).size(), 1U);
  EXPECT_TRUE(manager->trace(1).front().failed);
  EXPECT_EQ(places(b), std::vector{kPinned});
}

TEST_F(PrefetchTest, TellsOfHandlesThatAreNotGoodAndOfTransfersThatFailedBefore) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle discarded = adopt(kPinned, 100);
  manager->discard(discarded);
  const Handle bad[] = {a, discarded};
  EXPECT_THROW(manager->prefetch(bad, kCuda0), HandleError);
  EXPECT_EQ(places(a), (std::vector{kPinned, kCuda0})) << "those before it are on their way";
  backend->fail(Call::kTransfer, backend->num_calls(Call::kTransfer) + 1);
  manager->ensure(a, kDisk);
  backend->complete_all();
  const Handle owed[] = {a};
  EXPECT_THROW(manager->prefetch(owed, kCuda1), TransferError);
  EXPECT_EQ(manager->prefetch(owed, kCuda1).size(), 1U) << "told once";
}

TEST_F(ExecuteTest, LaterActionsCountOnTheRoomThatEarlierOnesMake) {
  budget(kCuda0, 512_B);
  start();
  const Handle a = adopt(kPinned, 512);
  const Handle b = adopt(kPinned, 512);
  manager->ensure(a, kCuda0);
  const ActionList right = {DropResident{a, kCuda0}, EnsureResident{b, kCuda0}};
  const ActionList wrong = {EnsureResident{a, kCuda0}, EnsureResident{b, kCuda0},
                            DropResident{a, kCuda0}};
  const auto error = refused<PlanError>([&] { manager->execute(wrong, {.name = "wrong"}); });
  EXPECT_EQ(error->index, 1U);
  manager->execute(right);
  EXPECT_TRUE(holds(b, kCuda0));
}

TEST_F(ExecuteTest, InfeasibleSequenceNamesItsFirstFailureAndChangesNothing) {
  budget(kCuda0, 1024_B);
  start();
  const Handle a = adopt(kPinned, 512);
  const Handle b = source(1024);
  const Handle c = adopt(kPinned, 8);
  const ActionList actions = {EnsureResident{a, kCuda0}, EnsureResident{b, kCuda0},
                              DropResident{c, kPinned}};
  const auto error = refused<PlanError>([&] { manager->execute(actions, {.name = "too much"}); });
  EXPECT_EQ(error->plan, "too much");
  EXPECT_EQ(error->phase, Phase::kExecute);
  EXPECT_EQ(error->index, 1U);
  EXPECT_EQ(error->verdict.reason, Reason::kOverBudget);
  EXPECT_EQ(error->verdict.shortfall, (Shortfall{kCuda0, 1024_B, 512_B, Bytes(), Bytes(), 1024_B}));
  EXPECT_TRUE(mentions(*error, to_string(actions[1]))) << error->what();
  EXPECT_EQ(sources[b]->num_loads, 0);
  EXPECT_EQ(backend->num_calls(Call::kCopy), 0U);
}

TEST_F(ExecuteTest, SameFaultInADirectCallHasItsOwnClass) {
  budget(kCuda0, 64_B);
  start();
  const Handle a = adopt(kPageable, 512);
  const Handle only = adopt(kPinned, 512, kExclusive);
  const Handle held = adopt(kPinned, 512);
  const Handle gone = adopt(kPinned, 512);
  manager->discard(gone);
  Hold guard = hold(held, kPinned);
  const std::tuple<ResidencyAction, Reason, ErrorCode> faults[] = {
      {EnsureResident{a, kCuda0}, Reason::kOverBudget, ErrorCode::kBudget},
      {EnsureResident{only, kPageable}, Reason::kExclusiveElsewhere, ErrorCode::kOwnership},
      {DropResident{a, kPageable}, Reason::kLastMaterialization, ErrorCode::kOwnership},
      {MoveResident{held, kPageable}, Reason::kProtected, ErrorCode::kInUse},
      {MoveResident{a, kPinned, kDisk}, Reason::kFromLocationAbsent, ErrorCode::kUnavailable},
      {EnsureResident{a, Location::cuda(9)}, Reason::kLocationUnavailable, ErrorCode::kUnavailable},
      {EnsureResident{gone, kPinned}, Reason::kDiscardedHandle, ErrorCode::kHandle},
      {EnsureResident{Handle(), kPinned}, Reason::kUnknownHandle, ErrorCode::kHandle},
  };
  for (const auto& [action, reason, code] : faults) {
    SCOPED_TRACE(to_string(action));
    const auto planned = refused<PlanError>([&] { manager->execute({&action, 1}); });
    ASSERT_TRUE(planned);
    EXPECT_EQ(planned->code(), ErrorCode::kPlan);
    EXPECT_EQ(planned->verdict.reason, reason);
    const auto direct = refused<Error>([&] { manager->apply(action); });
    ASSERT_TRUE(direct);
    EXPECT_EQ(direct->code(), code);
  }
  guard.release();
}

TEST_F(ExecuteTest, FailureAfterTheBeginningKeepsWhatWasCompleted) {
  static_assert(!std::is_base_of_v<PlanError, PlanExecutionError>);
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  const Handle c = adopt(kPinned, 100);
  const ActionList actions = {EnsureResident{a, kCuda0}, EnsureResident{b, kCuda0},
                              EnsureResident{c, kCuda0}};
  backend->fail(Call::kCopy, 2);
  const auto error = failure_of([&] { manager->execute(actions, {.name = "half"}); });
  EXPECT_EQ(error.plan, "half");
  EXPECT_EQ(error.phase, Phase::kExecute);
  EXPECT_EQ(error.index, 1U);
  EXPECT_EQ(error.failed, to_string(actions[1]));
  ASSERT_EQ(error.completed.size(), 1U);
  EXPECT_EQ(error.completed[0].handle, a);
  EXPECT_TRUE(is_caused_by<fake::InjectedFault>(error));
  EXPECT_FALSE(error.state_restored);
  EXPECT_TRUE(holds(a, kCuda0));
  EXPECT_EQ(places(b), std::vector{kPinned});
  EXPECT_EQ(places(c), std::vector{kPinned}) << "nothing is tried after the failure";
}

TEST_F(ExecuteTest, FailureBeforeAnythingChangedSaysSo) {
  start();
  const Handle a = adopt(kPinned, 100);
  const ActionList actions = {EnsureResident{a, kPinned}, EnsureResident{a, kCuda0}};
  const std::string before = state();
  backend->fail(Call::kCopy, 1);
  const auto error = failure_of([&] { manager->execute(actions); });
  EXPECT_EQ(error.index, 1U);
  EXPECT_TRUE(error.state_restored);
  EXPECT_EQ(state(), before);
}

TEST_F(ExecuteTest, ExpectedVersionIsCheckedBeforeAnythingElse) {
  start();
  const Handle a = adopt(kPinned, 100);
  const auto planned_for = manager->state_version();
  manager->ensure(a, kCuda0);
  const ActionList impossible = {DropResident{a, kPinned}, DropResident{a, kCuda0}};
  const auto error = refused<StaleStateError>([&] {
    manager->execute(impossible, {.name = "old", .expected_state_version = planned_for});
  });
  EXPECT_EQ(error->expected, planned_for);
  EXPECT_EQ(error->actual, manager->state_version());
  EXPECT_EQ(error->plan, "old");
  EXPECT_EQ(error->code(), ErrorCode::kStaleState);
  const ActionList possible = {DropResident{a, kPinned}};
  manager->execute(possible, {.expected_state_version = manager->state_version()});
  EXPECT_EQ(places(a), std::vector{kCuda0});
}

TEST_F(ExecuteTest, TransferStreamOfTheDestinationIsUsed) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  const auto mine = backend->make_block(kCuda0, make_spec(8), 9);
  backend->launch_read({kCuda0, 7}, *mine, 9);
  const ActionList actions = {EnsureResident{a, kCuda0}, EnsureResident{b, kCuda1}};
  manager->execute(actions, {.streams = {{kCuda0, 7}}});
  EXPECT_FALSE(backend->complete(a, kCuda0)) << "it is behind the kernel on stream 7";
  EXPECT_TRUE(backend->complete(b, kCuda1));
  backend->complete_all();
  refused<std::invalid_argument>([&] {
    manager->execute(actions, {.streams = {{kCuda0, 7}, {kCuda0, 8}}});
  });
}

TEST_F(ExecuteTest, ThatMayNotBlockIsRefusedBeforeAnythingIsDone) {
  start();
  const Handle a = adopt(kPinned, 128);
  const Handle b = adopt(kPageable, 128, kExclusive);
  const ActionList actions = {EnsureResident{a, kCuda0}, MoveResident{b, kDisk},
                              MoveResident{b, kPinned}};
  const auto error = refused<PlanError>([&] { manager->execute(actions, {.may_block = false}); });
  EXPECT_EQ(error->index, 2U) << "it needs the file, which may still fail to be written";
  EXPECT_EQ(error->verdict.reason, Reason::kWouldBlock);
  EXPECT_EQ(backend->num_calls(Call::kCopy), 0U);
  EXPECT_TRUE(manager->execute(actions)[2].waited);
}

// --- rollback

TEST_F(PlanRollbackTest, UndoesEveryKindOfActionAndLosesNoBytes) {
  struct Case {
    const char* name;
    std::function<std::pair<Handle, ResidencyAction>()> prepare;
  };
  list_all();
  start();
  const auto stale = [&](Location written, Location old) {
    const Handle a = adopt(written, 100, kReplicable, kMutable);
    manager->ensure(a, old);
    backend->complete_all();
    Lease writer = acquire(a, written, Access::kWrite);
    block(writer, a).write(seeds[a] = next_seed++);
    writer.release();
    return a;
  };
  const auto both = [&](const Handle& a, Location second) {
    manager->ensure(a, second);
    return a;
  };
  const auto with = [](const Handle& a, const ResidencyAction& action) {
    return std::pair<Handle, ResidencyAction>(a, action);
  };
  const Case cases[] = {
      {"ensure by a copy",
       [&] {
         const Handle a = adopt(kPinned, 100);
         return with(a, EnsureResident{a, kCuda0});
       }},
      {"ensure by a staged copy",
       [&] {
         const Handle a = adopt(kPageable, 100);
         return with(a, EnsureResident{a, kCuda0});
       }},
      {"ensure by a load",
       [&] {
         const Handle a = source(100);
         return with(a, EnsureResident{a, kCuda0});
       }},
      {"ensure by a load in place",
       [&] {
         const Handle a = source(100);
         return with(a, EnsureResident{a, kPageable});
       }},
      {"ensure of a stale one",
       [&] {
         const Handle a = stale(kPinned, kCuda0);
         return with(a, EnsureResident{a, kCuda0});
       }},
      {"move of an exclusive one",
       [&] {
         const Handle a = adopt(kPinned, 100, kExclusive);
         return with(a, MoveResident{a, kCuda0});
       }},
      {"move of an exclusive one to a file",
       [&] {
         const Handle a = adopt(kPageable, 100, kExclusive);
         return with(a, MoveResident{a, kDisk});
       }},
      {"move by a load",
       [&] {
         const Handle a = source(100);
         return with(a, MoveResident{a, kCuda0});
       }},
      {"move from a given place",
       [&] {
         const Handle a = both(adopt(kPinned, 100), kCuda1);
         return with(a, MoveResident{a, kCuda0, kCuda1});
       }},
      {"move to where it is",
       [&] {
         const Handle a = both(adopt(kPinned, 100), kCuda0);
         return with(a, MoveResident{a, kCuda0});
       }},
      {"move onto a stale one",
       [&] {
         const Handle a = stale(kPinned, kCuda0);
         return with(a, MoveResident{a, kCuda0});
       }},
      {"drop of a replica",
       [&] {
         const Handle a = both(adopt(kPinned, 100), kCuda0);
         return with(a, DropResident{a, kCuda0});
       }},
      {"drop of what the source can make again",
       [&] {
         const Handle a = source(100);
         manager->ensure(a, kCuda0);
         return with(a, DropResident{a, kCuda0});
       }},
      {"nothing",
       [&] {
         const Handle a = adopt(kPinned, 100);
         return with(a, EnsureResident{a, kPinned});
       }},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name);
    const auto [handle, action] = each.prepare();
    const Handle failing = adopt(kPinned, 100);
    const std::string before = state();
    const ActionList actions = {action, EnsureResident{failing, kCuda1}};
    // Its own copy, if it makes one, is counted before the one that must fail.
    const auto copies = manager->explain(actions).actions[0].verdict.transitions;
    std::uint64_t nth = 1;
    for (const Transition& transition : copies) {
      nth += transition.charge != Bytes() && transition.kind == TransitionKind::kCopy ? 1U : 0U;
      nth += transition.kind == TransitionKind::kRefresh ? 1U : 0U;
    }
    backend->fail(Call::kCopy, nth);
    const auto error =
        failure_of([&] { manager->execute(actions, {.on_failure = OnFailure::kRollback}); });
    EXPECT_EQ(error.index, 1U);
    EXPECT_TRUE(error.state_restored);
    EXPECT_EQ(state(), before);
    EXPECT_NO_THROW(manager->audit());
    for (const Location place : places(handle)) {
      if (!place.is_disk() && !at(handle, place).stale) {
        EXPECT_TRUE(holds(handle, place));
      }
    }
    manager->execute(actions);
  }
}

TEST_F(PlanRollbackTest, GoesBackwards) {
  list_all();
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  const Handle c = adopt(kPinned, 100);
  const ActionList actions = {EnsureResident{a, kCuda0}, MoveResident{b, kCuda0},
                              EnsureResident{c, kCuda0}};
  backend->fail(Call::kCopy, 3);
  failure_of(
      [&] { manager->execute(actions, {.name = "back", .on_failure = OnFailure::kRollback}); });
  const auto trace = manager->trace();
  ASSERT_EQ(trace.size(), 5U);
  EXPECT_TRUE(trace[2].failed);
  EXPECT_EQ(trace[3].handle, b);
  EXPECT_EQ(trace[3].destination, kPinned);
  EXPECT_EQ(trace[4].handle, a);
  EXPECT_EQ(trace[4].action, ActionKind::kDrop);
  EXPECT_EQ(trace[4].plan, "back");
}

TEST_F(PlanRollbackTest, DiscardCannotBeUndoneAndTheErrorSaysSo) {
  list_all();
  start();
  const Handle ended = adopt(kPinned, 100);
  const Handle a = adopt(kPinned, 100);
  const Handle failing = adopt(kPinned, 100);
  const ActionList actions = {DiscardValue{ended}, MoveResident{a, kCuda0},
                              EnsureResident{failing, kCuda1}};
  backend->fail(Call::kCopy, 2);
  const auto error =
      failure_of([&] { manager->execute(actions, {.on_failure = OnFailure::kRollback}); });
  EXPECT_FALSE(error.state_restored);
  EXPECT_EQ(error.completed.size(), 2U);
  EXPECT_TRUE(manager->snapshot().find(ended)->discarded);
  EXPECT_EQ(places(a), std::vector{kPinned}) << "what came after it is undone";
  EXPECT_TRUE(holds(a, kPinned));
}

TEST_F(PlanRollbackTest, TakesNothingAwayThatSomebodyProtectsMeanwhile) {
  const Warnings warnings;
  list_all();
  start();
  const Handle a = adopt(kPinned, 100, kExclusive);
  const Handle failing = source(100);
  std::optional<Hold> guard;
  sources[failing]->before_load = [&] {
    std::thread([&] { guard.emplace(hold(a, kCuda0)); }).join();
    throw std::runtime_error("no load today");
  };
  const ActionList actions = {MoveResident{a, kCuda0}, EnsureResident{failing, kPinned}};
  const auto error =
      failure_of([&] { manager->execute(actions, {.on_failure = OnFailure::kRollback}); });
  EXPECT_FALSE(error.state_restored);
  EXPECT_TRUE(is_caused_by<std::runtime_error>(error));
  EXPECT_EQ(warnings.texts().size(), 1U);
  EXPECT_EQ(places(a), std::vector{kCuda0});
  EXPECT_TRUE(holds(a, kCuda0));
  guard->release();
}

TEST_F(PlanRollbackTest, TransferThatFailsOnTheWayHasPutEverythingBack) {
  list_all();
  start();
  const Handle a = adopt(kPageable, 128, kExclusive);
  const Handle failing = adopt(kPinned, 100);
  const std::string before = state();
  const ActionList actions = {MoveResident{a, kDisk}, EnsureResident{failing, kCuda1}};
  backend->fail(Call::kTransfer, 1);
  backend->fail(Call::kCopy, 2);
  const auto error =
      failure_of([&] { manager->execute(actions, {.on_failure = OnFailure::kRollback}); });
  EXPECT_TRUE(error.state_restored);
  EXPECT_EQ(state(), before);
  EXPECT_TRUE(holds(a, kPageable));
}

/// Ten enter actions of all kinds, of which the seventh cannot allocate.
class SeventhOfTenTest : public PlanRunTest {
 protected:
  ActionList actions;
  std::vector<Handle> values;
  std::shared_ptr<FakeBlock> hog;

  void prepare() {
    list_all();
    fake_options.capacity[kCuda0] = 8_KiB;
    start();
    const Handle copied = adopt(kPinned, 1000);
    const Handle moved = adopt(kPageable, 1000, kExclusive);
    const Handle loaded = source(1000);
    const Handle loaded_here = source(1000);
    const Handle replica = adopt(kPinned, 1000);
    manager->ensure(replica, kCuda1);
    const Handle failing = adopt(kPinned, 4096);
    const Handle later = adopt(kPinned, 100);
    values = {copied, moved, loaded, loaded_here, replica, failing, later};
    actions = {
        EnsureResident{copied, kCuda0},  MoveResident{moved, kCuda0},
        EnsureResident{loaded, kCuda0},  MoveResident{loaded_here, kPageable},
        DropResident{replica, kPinned},  EnsureResident{copied, kPinned},
        EnsureResident{failing, kCuda0}, EnsureResident{later, kCuda1},
        DropResident{copied, kPinned},   DiscardValue{later},
    };
    backend->complete_all();
    hog = backend->make_block(kCuda0, make_spec(4096), 99);
  }
  void expect_named(const PlanExecutionError& error) {
    EXPECT_EQ(error.phase, Phase::kEnter);
    EXPECT_EQ(error.index, 6U);
    EXPECT_EQ(error.failed, to_string(actions[6]));
    EXPECT_TRUE(mentions(error, to_string(values[5]))) << error.what();
    EXPECT_TRUE(mentions(error, to_string(4096_B))) << error.what();
    EXPECT_TRUE(is_caused_by<fake::OutOfMemory>(error));
    ASSERT_EQ(error.completed.size(), 6U);
    for (std::size_t i = 0; i < 6; ++i) {
      EXPECT_EQ(error.completed[i].handle, handle_of(actions[i]));
    }
  }
  void expect_bytes() {
    for (const Handle& handle : values) {
      for (const Location place : places(handle)) {
        EXPECT_TRUE(holds(handle, place));
      }
    }
  }
};

TEST_F(SeventhOfTenTest, WithRollbackEverythingEqualsTheStartAndASecondTrySucceeds) {
  prepare();
  const std::string before = state();
  const auto listed = manager->locations();
  const ResidencyPlan plan(
      {.name = "ten", .reservations = {{kCuda1, 100_B, "room"}}, .enter = actions});
  {
    Scope scope = manager->scope(plan, {.on_failure = OnFailure::kRollback});
    const auto error = failure_of([&] { scope.enter(); });
    expect_named(error);
    EXPECT_TRUE(error.state_restored);
    EXPECT_FALSE(scope.entered());
  }
  EXPECT_EQ(state(), before);
  EXPECT_EQ(manager->locations(), listed);
  EXPECT_NO_THROW(manager->audit());
  expect_bytes();
  hog.reset();
  Scope again = manager->scope(plan, {.on_failure = OnFailure::kRollback});
  again.enter();
  EXPECT_EQ(again.report().size(), 10U);
  EXPECT_TRUE(holds(values[5], kCuda0));
  again.close();
}

TEST_F(SeventhOfTenTest, WithoutRollbackTheReportListsTheSix) {
  prepare();
  const std::string before = state();
  Scope scope = manager->scope(
      ResidencyPlan({.name = "ten", .reservations = {{kCuda1, 100_B, "room"}}, .enter = actions}));
  const auto error = failure_of([&] { scope.enter(); });
  expect_named(error);
  EXPECT_FALSE(error.state_restored);
  EXPECT_NE(state(), before);
  EXPECT_EQ(places(values[0]), (std::vector{kPinned, kCuda0}));
  EXPECT_EQ(places(values[4]), std::vector{kCuda1});
  EXPECT_EQ(account(kCuda1).reserved, Bytes());
  expect_bytes();
  hog.reset();
}

// --- scopes

TEST_F(ScopeTest, MakingOneDoesNothing) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  const ResidencyPlan plan({.name = "p",
                            .reservations = {{kCuda0, 100_B, "r"}},
                            .enter = {EnsureResident{a, kCuda0}},
                            .exit = {DropResident{a, kCuda0}}});
  changes_nothing([&] {
    const Scope scope = manager->scope(plan);
    EXPECT_EQ(scope.plan(), plan);
    EXPECT_FALSE(scope.entered());
    EXPECT_FALSE(scope.closed());
  });
  EXPECT_TRUE(manager->trace().empty());
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(ScopeTest, RunsReclaimReservationsEnterAndAtTheCloseExit) {
  budget(kCuda0, 1536_B);
  start();
  const Handle old = adopt(kPinned, 1024);
  manager->ensure(old, kCuda0);
  const Handle a = adopt(kPinned, 512);
  // Each needs the room that the part before it makes, and only that.
  Scope scope = manager->scope(
      ResidencyPlan({.name = "order",
                     .reclaim = {DropResident{old, kCuda0}},
                     .reservations = {{kCuda0, 1000_B, "first"}, {kCuda0, 24_B, "second"}},
                     .enter = {EnsureResident{a, kCuda0}},
                     .exit = {DropResident{a, kCuda0}, EnsureResident{old, kPinned}}}));
  scope.enter();
  EXPECT_TRUE(scope.entered());
  const Snapshot inside = manager->snapshot();
  EXPECT_EQ(inside.num_scopes, 1U);
  ASSERT_EQ(inside.reservations.size(), 2U);
  EXPECT_EQ(inside.reservations[0].reservation.label, "first");
  EXPECT_EQ(inside.reservations[1].reservation.label, "second");
  EXPECT_EQ(account(kCuda0).reserved, 1024_B);
  EXPECT_EQ(used(kCuda0), 512_B);
  EXPECT_EQ(phases(scope.report()), (std::vector{Phase::kReclaim, Phase::kEnter}));
  scope.close();
  EXPECT_TRUE(scope.closed());
  EXPECT_EQ(phases(scope.report()),
            (std::vector{Phase::kReclaim, Phase::kEnter, Phase::kExit, Phase::kExit}));
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
  EXPECT_EQ(used(kCuda0), Bytes());
  EXPECT_EQ(manager->snapshot().num_scopes, 0U);
  EXPECT_TRUE(manager->snapshot().reservations.empty());
  EXPECT_EQ(scope.report().plan(), "order");
}

TEST_F(ScopeTest, EmptyPlanIsLegal) {
  start();
  Scope scope = manager->scope(ResidencyPlan({.name = "empty"}));
  scope.enter();
  scope.close();
  EXPECT_TRUE(scope.report().empty());
}

TEST_F(ScopeTest, WhatIsImpossibleInAnyPhaseBlocksTheEntry) {
  budget(kCuda0, 1024_B);
  start();
  const Handle a = adopt(kPinned, 512);
  const Handle big = adopt(kPinned, 4096);
  const ResidencyAction good = EnsureResident{a, kCuda0};
  const ResidencyAction bad = EnsureResident{big, kCuda0};
  const ResidencyAction last = DropResident{big, kPinned};
  const std::tuple<ResidencyPlan, Phase, Reason> plans[] = {
      {ResidencyPlan({.name = "p", .reclaim = {good, bad}}), Phase::kReclaim, Reason::kOverBudget},
      {ResidencyPlan({.name = "p",
                      .reservations = {{kCuda0, 100_B, "a"}, {kCuda0, 925_B, "b"}},
                      .enter = {good}}),
       Phase::kReserve, Reason::kOverBudget},
      {ResidencyPlan({.name = "p",
                      .reservations = {{kCuda0, 1_B, "a"}, {Location::cuda(9), 1_B, "b"}},
                      .enter = {good}}),
       Phase::kReserve, Reason::kLocationUnavailable},
      {ResidencyPlan({.name = "p", .enter = {good, bad}}), Phase::kEnter, Reason::kOverBudget},
      {ResidencyPlan({.name = "p", .enter = {good}, .exit = {DropResident{a, kCuda0}, last}}),
       Phase::kExit, Reason::kLastMaterialization},
  };
  for (const auto& [plan, phase, reason] : plans) {
    SCOPED_TRACE(to_string(phase));
    Scope scope = manager->scope(plan);
    const auto error = refused<PlanError>([&] { scope.enter(); });
    ASSERT_TRUE(error);
    EXPECT_EQ(error->plan, "p");
    EXPECT_EQ(error->phase, phase);
    EXPECT_EQ(error->index, 1U);
    EXPECT_EQ(error->verdict.reason, reason);
    EXPECT_FALSE(scope.entered());
  }
}

TEST_F(ScopeTest, EnterActionsMustFitBesideTheReservations) {
  budget(kCuda0, 1024_B);
  start();
  const Handle a = adopt(kPinned, 512);
  Scope scope = manager->scope(ResidencyPlan({.name = "p",
                                              .reservations = {{kCuda0, 513_B, "room"}},
                                              .enter = {EnsureResident{a, kCuda0}}}));
  const auto error = refused<PlanError>([&] { scope.enter(); });
  EXPECT_EQ(error->phase, Phase::kEnter);
  EXPECT_EQ(error->verdict.shortfall.reserved, 513_B);
  Scope fits = manager->scope(ResidencyPlan({.name = "p",
                                             .reservations = {{kCuda0, 512_B, "room"}},
                                             .enter = {EnsureResident{a, kCuda0}}}));
  fits.enter();
  fits.close();
}

TEST_F(ScopeTest, ExpectedVersionIsCheckedFirst) {
  start();
  const Handle a = adopt(kPinned, 100);
  const auto version = manager->state_version();
  manager->ensure(a, kCuda0);
  Scope scope = manager->scope(
      ResidencyPlan(
          {.name = "p", .enter = {DropResident{a, kDisk}, EnsureResident{Handle(), kDisk}}}),
      {.expected_state_version = version});
  const auto error = refused<StaleStateError>([&] { scope.enter(); });
  EXPECT_EQ(error->expected, version);
  EXPECT_EQ(error->actual, manager->state_version());
  Scope fresh = manager->scope(ResidencyPlan({.name = "p"}),
                               {.expected_state_version = manager->state_version()});
  fresh.enter();
  fresh.close();
}

TEST_F(ScopeTest, IsForOneUse) {
  start();
  const Handle a = adopt(kPinned, 100);
  Scope scope = manager->scope(ResidencyPlan({.name = "p", .enter = {EnsureResident{a, kCuda0}}}));
  scope.enter();
  refused<LifetimeClosedError>([&] { scope.enter(); });
  scope.close();
  refused<LifetimeClosedError>([&] { scope.enter(); });
}

TEST_F(ScopeTest, IsForOneUseEvenAfterAFailedFirstTime) {
  start();
  const Handle a = adopt(kPinned, 100);
  Scope infeasible =
      manager->scope(ResidencyPlan({.name = "p", .reclaim = {DropResident{a, kPinned}}}));
  refused<PlanError>([&] { infeasible.enter(); });
  manager->ensure(a, kCuda0);  // now it would be possible
  refused<LifetimeClosedError>([&] { infeasible.enter(); });
  Scope stale = manager->scope(ResidencyPlan({.name = "p"}), {.expected_state_version = 0});
  refused<StaleStateError>([&] { stale.enter(); });
  refused<LifetimeClosedError>([&] { stale.enter(); });
  Scope failed = manager->scope(ResidencyPlan({.name = "p", .enter = {EnsureResident{a, kCuda1}}}));
  backend->fail(Call::kCopy, 1);
  failure_of([&] { failed.enter(); });
  refused<LifetimeClosedError>([&] { failed.enter(); });
}

TEST_F(ScopeTest, ClosingTwiceOrWithoutHavingEnteredDoesNothing) {
  start();
  const Handle a = adopt(kPinned, 100);
  const ResidencyPlan plan(
      {.name = "p", .enter = {EnsureResident{a, kCuda0}}, .exit = {DropResident{a, kCuda0}}});
  Scope never = manager->scope(plan);
  changes_nothing([&] { never.close(); });
  Scope scope = manager->scope(plan);
  scope.enter();
  scope.close();
  manager->ensure(a, kCuda0);
  changes_nothing([&] { scope.close(); });
  EXPECT_EQ(scope.report().size(), 2U);
  Scope failed = manager->scope(ResidencyPlan(
      {.name = "p", .enter = {EnsureResident{a, kCuda1}}, .exit = {DropResident{a, kCuda0}}}));
  backend->fail(Call::kCopy, 1);
  failure_of([&] { failed.enter(); });
  changes_nothing([&] { failed.close(); });
}

TEST_F(ScopeTest, FailedEntryReleasesReservationsKeepsTransitionsAndRunsNoExit) {
  fake_options.physical_headroom = {kCuda0};
  start();
  const Handle old = adopt(kPinned, 100);
  manager->ensure(old, kCuda0);
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  Scope scope =
      manager->scope(ResidencyPlan({.name = "p",
                                    .reclaim = {DropResident{old, kCuda0}},
                                    .reservations = {{kCuda0, 100_B, "r"}},
                                    .enter = {EnsureResident{a, kCuda0}, EnsureResident{b, kCuda0}},
                                    .exit = {DropResident{a, kCuda0}}}));
  backend->fail(Call::kCopy, 2);
  const auto error = failure_of([&] { scope.enter(); });
  EXPECT_EQ(error.phase, Phase::kEnter);
  EXPECT_EQ(error.index, 1U) << "in its phase";
  EXPECT_EQ(phases(error.completed), (std::vector{Phase::kReclaim, Phase::kEnter}));
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
  EXPECT_EQ(backend->headroom_bytes(kCuda0), Bytes());
  EXPECT_EQ(places(a), (std::vector{kPinned, kCuda0})) << "no exit action was run";
  EXPECT_EQ(places(old), std::vector{kPinned});
  EXPECT_EQ(manager->snapshot().num_scopes, 0U);
}

TEST_F(ScopeTest, FailedReclaimReservesNothing) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  Scope scope = manager->scope(
      ResidencyPlan({.name = "p",
                     .reclaim = {MoveResident{a, kPageable}, MoveResident{b, kCuda1}},
                     .reservations = {{kCuda0, 100_B, "r"}}}));
  backend->fail(Call::kCopy, 2);
  const auto error = failure_of([&] { scope.enter(); });
  EXPECT_EQ(error.phase, Phase::kReclaim);
  EXPECT_EQ(error.index, 1U);
  EXPECT_EQ(error.completed.size(), 1U);
  EXPECT_EQ(backend->num_calls(Call::kMakeHeadroom), 0U);
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
}

TEST_F(ScopeTest, FailedReservationNamesItReleasesTheOthersAndEntersNothing) {
  for (const bool rolls_back : {false, true}) {
    fake_options.physical_headroom = {kCuda0};
    list_all();
    start();
    const Handle old = adopt(kPinned, 100);
    manager->ensure(old, kCuda0);
    const Handle a = adopt(kPinned, 100);
    const std::string before = state();
    Scope scope = manager->scope(
        ResidencyPlan({.name = "p",
                       .reclaim = {DropResident{old, kCuda0}},
                       .reservations = {{kCuda0, 100_B, "good"}, {kCuda0, 200_B, "bad"}},
                       .enter = {EnsureResident{a, kCuda0}}}),
        {.on_failure = rolls_back ? OnFailure::kRollback : OnFailure::kKeep});
    backend->fail(Call::kMakeHeadroom, 2);
    const auto error = failure_of([&] { scope.enter(); });
    EXPECT_EQ(error.phase, Phase::kReserve);
    EXPECT_EQ(error.index, 1U);
    EXPECT_NE(error.failed.find("bad"), std::string::npos) << error.failed;
    EXPECT_NE(error.failed.find("200 B"), std::string::npos) << error.failed;
    EXPECT_EQ(error.completed.size(), 1U);
    EXPECT_TRUE(is_caused_by<fake::InjectedFault>(error));
    EXPECT_EQ(error.state_restored, rolls_back);
    EXPECT_EQ(account(kCuda0).reserved, Bytes());
    EXPECT_EQ(backend->headroom_bytes(kCuda0), Bytes());
    EXPECT_EQ(places(a), std::vector{kPinned});
    EXPECT_EQ(state() == before, rolls_back);
    manager->close();
    options.budgets.clear();
  }
}

TEST_F(ScopeTest, RollbackOfTheReclaimHasTheRoomOfTheReservations) {
  const Warnings warnings;
  budget(kCuda0, 512_B);
  start();
  const Handle old = adopt(kPinned, 512);
  manager->ensure(old, kCuda0);
  const Handle failing = adopt(kPinned, 100);
  manager->ensure(failing, kCuda1);
  manager->drop(failing, kCuda1);
  const std::string before = state();
  Scope scope = manager->scope(ResidencyPlan({.name = "p",
                                              .reclaim = {DropResident{old, kCuda0}},
                                              .reservations = {{kCuda0, 512_B, "all of it"}},
                                              .enter = {EnsureResident{failing, kCuda1}}}),
                               {.on_failure = OnFailure::kRollback});
  backend->fail(Call::kCopy, 1);
  const auto error = failure_of([&] { scope.enter(); });
  EXPECT_TRUE(error.state_restored);
  EXPECT_EQ(state(), before);
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(ScopeTest, FailingExitActionStopsTheRestAndReleasesTheReservations) {
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  Scope scope = manager->scope(
      ResidencyPlan({.name = "p",
                     .reservations = {{kCuda0, 100_B, "r"}},
                     .enter = {EnsureResident{a, kCuda0}},
                     .exit = {EnsureResident{a, kPageable}, EnsureResident{b, kPageable},
                              DropResident{a, kCuda0}}}));
  scope.enter();
  backend->fail(Call::kCopy, 2);
  const auto error = failure_of([&] { scope.close(); });
  EXPECT_EQ(error.plan, "p");
  EXPECT_EQ(error.phase, Phase::kExit);
  EXPECT_EQ(error.index, 1U);
  EXPECT_EQ(phases(error.completed), (std::vector{Phase::kEnter, Phase::kExit}));
  EXPECT_FALSE(error.state_restored);
  EXPECT_EQ(places(a), (std::vector{kPageable, kPinned, kCuda0})) << "the rest was not run";
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
  EXPECT_TRUE(scope.closed());
  EXPECT_EQ(manager->snapshot().num_scopes, 0U);
  changes_nothing([&] { scope.close(); });
}

TEST_F(ScopeTest, RollbackOfAFailedExitUndoesTheExitOnly) {
  list_all();
  start();
  const Handle a = adopt(kPinned, 100);
  const Handle b = adopt(kPinned, 100);
  Scope scope = manager->scope(
      ResidencyPlan({.name = "p",
                     .enter = {EnsureResident{a, kCuda0}},
                     .exit = {DropResident{a, kCuda0}, EnsureResident{b, kPageable}}}),
      {.on_failure = OnFailure::kRollback});
  scope.enter();
  const std::vector<Location> inside = places(a);
  backend->fail(Call::kCopy, 1);
  // The first copy is that of `b`; the one that brings `a` back comes after it.
  const auto error = failure_of([&] { scope.close(); });
  EXPECT_EQ(error.phase, Phase::kExit);
  EXPECT_TRUE(error.state_restored);
  EXPECT_EQ(places(a), inside);
  EXPECT_TRUE(holds(a, kCuda0));
}

TEST_F(ScopeTest, ExitRunsAgainstTheStateThatTheBodyLeft) {
  start();
  const Handle a = adopt(kPinned, 100);
  const ResidencyPlan plan(
      {.name = "p", .enter = {EnsureResident{a, kCuda0}}, .exit = {DropResident{a, kCuda0}}});
  Scope gentle = manager->scope(plan);
  gentle.enter();
  manager->drop(a, kCuda0);
  gentle.close();
  EXPECT_EQ(gentle.report()[1].reason, Reason::kAlreadyAbsent);
  Scope hindered = manager->scope(plan);
  hindered.enter();
  Hold guard = hold(a, kCuda0);
  const auto error = failure_of([&] { hindered.close(); });
  EXPECT_TRUE(is_caused_by<InUseError>(error));
  guard.release();
}

TEST_F(ScopeTest, TransferThatFailsDuringTheBodyIsToldByTheExit) {
  start();
  const Handle a = adopt(kPageable, 100);
  Scope scope = manager->scope(ResidencyPlan({.name = "p",
                                              .reservations = {{kCuda0, 100_B, "r"}},
                                              .enter = {EnsureResident{a, kCuda0}},
                                              .exit = {DropResident{a, kCuda0}}}));
  backend->fail(Call::kTransfer, 1);
  scope.enter();
  backend->complete_all();
  const auto error = failure_of([&] { scope.close(); });
  EXPECT_TRUE(is_caused_by<TransferError>(error));
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
  EXPECT_TRUE(holds(a, kPageable));
}

TEST_F(ScopeTest, NestAndTheirReservationsAddUp) {
  budget(kCuda0, 1000_B);
  start();
  Scope outer =
      manager->scope(ResidencyPlan({.name = "outer", .reservations = {{kCuda0, 600_B, "o"}}}));
  outer.enter();
  Scope too_much =
      manager->scope(ResidencyPlan({.name = "inner", .reservations = {{kCuda0, 401_B, "i"}}}));
  const auto error = refused<PlanError>([&] { too_much.enter(); });
  EXPECT_EQ(error->phase, Phase::kReserve);
  EXPECT_EQ(error->verdict.shortfall.reserved, 600_B);
  Scope inner =
      manager->scope(ResidencyPlan({.name = "inner", .reservations = {{kCuda0, 400_B, "i"}}}));
  inner.enter();
  EXPECT_EQ(account(kCuda0).reserved, 1000_B);
  EXPECT_EQ(manager->snapshot().num_scopes, 2U);
  outer.close();  // in any order
  EXPECT_EQ(account(kCuda0).reserved, 400_B);
  inner.close();
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
}

TEST_F(ScopeTest, ReportSaysWhatBecameOfEachReservation) {
  fake_options.physical_headroom = {kCuda0};
  start();
  Scope scope = manager->scope(ResidencyPlan(
      {.name = "p", .reservations = {{kCuda0, 100_B, "device"}, {kPageable, 50_B, "host"}}}));
  scope.enter();
  scope.close();
  const auto& uses = scope.report().reservations();
  ASSERT_EQ(uses.size(), 2U);
  EXPECT_EQ(uses[0].reservation, (MemoryReservation{kCuda0, 100_B, "device"}));
  EXPECT_TRUE(uses[0].physical);
  EXPECT_EQ(uses[1].reservation, (MemoryReservation{kPageable, 50_B, "host"}));
  EXPECT_FALSE(uses[1].physical);
}

TEST_F(ScopeTest, RequirePhysicalRefusesWhatCanOnlyBeAccounted) {
  fake_options.physical_headroom = {kCuda0};
  start();
  const ResidencyPlan plan(
      {.name = "p", .reservations = {{kCuda0, 100_B, "device"}, {kPageable, 50_B, "host"}}});
  Scope scope = manager->scope(plan, {.require_physical = true});
  const auto error = failure_of([&] { scope.enter(); });
  EXPECT_EQ(error.phase, Phase::kReserve);
  EXPECT_EQ(error.index, 1U);
  EXPECT_TRUE(is_caused_by<HeadroomError>(error));
  EXPECT_TRUE(error.state_restored);
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
  EXPECT_EQ(backend->headroom_bytes(kCuda0), Bytes());
  Scope device =
      manager->scope(ResidencyPlan({.name = "p", .reservations = {{kCuda0, 100_B, "device"}}}),
                     {.require_physical = true});
  device.enter();
  EXPECT_EQ(backend->headroom_bytes(kCuda0), 100_B);
  device.close();
  EXPECT_EQ(backend->headroom_bytes(kCuda0), Bytes());
}

TEST_F(ScopeTest, DestroyedWithoutCloseReleasesItsReservationsWarnsAndRunsNoExit) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  {
    Scope scope = manager->scope(ResidencyPlan({.name = "forgotten plan",
                                                .reservations = {{kCuda0, 1_B, "r"}},
                                                .enter = {EnsureResident{a, kCuda0}},
                                                .exit = {DropResident{a, kCuda0}}}));
    scope.enter();
    backend->set_waits_block(true);  // the destructor must not wait for the device
  }
  backend->set_waits_block(false);
  ASSERT_EQ(warnings.texts().size(), 1U);
  EXPECT_NE(warnings.texts()[0].find("forgotten plan"), std::string::npos);
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
  EXPECT_EQ(places(a), (std::vector{kPinned, kCuda0}));
  EXPECT_EQ(manager->snapshot().num_scopes, 0U);
}

TEST_F(ScopeTest, MovedOneGoesOnWhereItIs) {
  const Warnings warnings;
  start();
  Scope scope = [&] {
    Scope inner =
        manager->scope(ResidencyPlan({.name = "p", .reservations = {{kCuda0, 10_B, "r"}}}));
    inner.enter();
    return inner;
  }();
  Scope other = std::move(scope);
  EXPECT_TRUE(other.entered());
  EXPECT_EQ(account(kCuda0).reserved, 10_B);
  other.close();
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(ScopeTest, OpenOneBlocksCloseAndOutlivesAForcedOne) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  Scope scope = manager->scope(ResidencyPlan({.name = "p",
                                              .reservations = {{kCuda0, 10_B, "r"}},
                                              .enter = {EnsureResident{a, kCuda0}},
                                              .exit = {DropResident{a, kCuda0}}}));
  Scope unused = manager->scope(ResidencyPlan({.name = "p"}));
  scope.enter();
  const auto error = refused<InUseError>([&] { manager->close(); });
  EXPECT_EQ(error->num_scopes, 1U);
  EXPECT_EQ(error->num_reservations, 1U);
  manager->close({.force = true});
  EXPECT_NO_THROW(scope.close());
  EXPECT_EQ(scope.report().size(), 1U) << "no exit action was run";
  EXPECT_THROW(unused.enter(), ClosedError);
  EXPECT_TRUE(warnings.texts().empty());
}

// --- with

TEST_F(ScopeTest, WithRunsTheBodyBetweenEnterAndExit) {
  start();
  const Handle a = adopt(kPinned, 100);
  const ResidencyPlan plan(
      {.name = "p", .enter = {EnsureResident{a, kCuda0}}, .exit = {DropResident{a, kCuda0}}});
  const PlanReport report = manager->with(plan, [&](Scope& scope) {
    EXPECT_TRUE(scope.entered());
    EXPECT_TRUE(holds(a, kCuda0));
  });
  EXPECT_EQ(phases(report), (std::vector{Phase::kEnter, Phase::kExit}));
  EXPECT_EQ(places(a), std::vector{kPinned});
}

TEST_F(ScopeTest, WithoutABodyNothingIsEntered) {
  start();
  const Handle a = adopt(kPageable, 100);
  const ResidencyPlan plan({.name = "p", .enter = {EnsureResident{a, kPinned}}});
  refused<std::invalid_argument>([&] { manager->with(plan, nullptr); });
}

TEST_F(ScopeTest, WithRunsNoBodyWhenTheEntryFails) {
  start();
  const Handle a = adopt(kPinned, 100);
  bool ran = false;
  refused<PlanError>([&] {
    manager->with(ResidencyPlan({.name = "p", .enter = {DropResident{a, kPinned}}}),
                  [&](Scope&) { ran = true; });
  });
  backend->fail(Call::kCopy, 1);
  failure_of([&] {
    manager->with(ResidencyPlan({.name = "p", .enter = {EnsureResident{a, kCuda0}}}),
                  [&](Scope&) { ran = true; });
  });
  EXPECT_FALSE(ran);
}

TEST_F(ScopeTest, BodyThatFailsStillGetsItsExit) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  const ResidencyPlan plan({.name = "p",
                            .reservations = {{kCuda0, 10_B, "r"}},
                            .enter = {EnsureResident{a, kCuda0}},
                            .exit = {DropResident{a, kCuda0}}});
  std::exception_ptr exit_error;
  EXPECT_THROW(manager->with(
                   plan, [](Scope&) { throw std::domain_error("body"); }, {}, &exit_error),
               std::domain_error);
  EXPECT_EQ(exit_error, nullptr);
  EXPECT_EQ(places(a), std::vector{kPinned});
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(ScopeTest, ExitErrorIsKeptBesideThatOfTheBody) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 100);
  const ResidencyPlan plan({.name = "both fail",
                            .reservations = {{kCuda0, 10_B, "r"}},
                            .exit = {EnsureResident{a, kCuda0}}});
  const auto body = [&](Scope&) {
    backend->fail(Call::kCopy, 1);
    throw std::domain_error("body");
  };
  std::exception_ptr exit_error;
  EXPECT_THROW(manager->with(plan, body, {}, &exit_error), std::domain_error);
  ASSERT_NE(exit_error, nullptr);
  const auto kept = failure_of([&] { std::rethrow_exception(exit_error); });
  EXPECT_EQ(kept.phase, Phase::kExit);
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
  EXPECT_TRUE(warnings.texts().empty());
  EXPECT_THROW(manager->with(plan, body), std::domain_error);
  ASSERT_EQ(warnings.texts().size(), 1U) << "nowhere to keep it";
  EXPECT_NE(warnings.texts()[0].find("both fail"), std::string::npos);
}

TEST_F(ScopeTest, ExitErrorAloneIsThrown) {
  start();
  const Handle a = adopt(kPinned, 100);
  std::exception_ptr exit_error;
  const auto error = failure_of([&] {
    manager->with(
        ResidencyPlan({.name = "p", .exit = {EnsureResident{a, kCuda0}}}),
        [&](Scope&) { backend->fail(Call::kCopy, 1); }, {}, &exit_error);
  });
  EXPECT_EQ(error.phase, Phase::kExit);
  EXPECT_EQ(exit_error, nullptr);
}

}  // namespace
}  // namespace residency::test
