// Section N: what snapshots, traces and the state version say; peaks (rule 34).

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "fixture.h"

namespace residency::test {
namespace {

using Json = nlohmann::json;

class SnapshotTest : public ManagerTest {
 protected:
  [[nodiscard]] std::vector<Handle> listed() const {
    std::vector<Handle> handles;
    for (const auto& value : manager->snapshot().values) {
      handles.push_back(value.handle);
    }
    return handles;
  }
};

class TraceTest : public ManagerTest {
 protected:
  [[nodiscard]] std::vector<std::uint64_t> sequences(
      std::optional<std::size_t> limit = std::nullopt) const {
    std::vector<std::uint64_t> found;
    for (const auto& record : manager->trace(limit)) {
      found.push_back(record.sequence);
    }
    return found;
  }
};

class VersionTest : public ManagerTest {
 protected:
  /// By how much the call raises the version.
  template <class Function>
  std::uint64_t rise(const Function& call) {
    const auto before = manager->state_version();
    call();
    return manager->state_version() - before;
  }
};

using PeakTest = ManagerTest;

// --- Peaks

TEST_F(PeakTest, NeverFallUntilTheyAreReset) {
  start();
  const Handle handle = adopt(kPinned, 100);
  Reservation reservation = manager->reserve({kPinned, 50_B, "headroom"});
  reservation.release();
  manager->move(handle, kCuda0);
  EXPECT_EQ(used(kPinned), Bytes());
  EXPECT_EQ(account(kPinned).peak_used, 100_B);
  EXPECT_EQ(account(kPinned).peak_charged, 150_B);
  manager->reset_peaks();
  EXPECT_EQ(account(kPinned).peak_used, Bytes());
  EXPECT_EQ(account(kPinned).peak_charged, Bytes());
  EXPECT_EQ(account(kCuda0).peak_used, 512_B) << "a reset starts from what is there";
}

TEST_F(PeakTest, OfUseDoesNotCountReservations) {
  start();
  Reservation reservation = manager->reserve({kPinned, 50_B, "headroom"});
  EXPECT_EQ(account(kPinned).peak_used, Bytes());
  EXPECT_EQ(account(kPinned).peak_charged, 50_B);
  reservation.release();
}

TEST_F(PeakTest, ResetChangesNeitherStateNorVersion) {
  start();
  adopt(kPinned, 100);
  changes_nothing([&] { manager->reset_peaks(); });
}

// --- Snapshot

TEST_F(SnapshotTest, SaysWhatIsKnownOfAValue) {
  start();
  const auto spec =
      make_spec({{"weight", 100}, {"tied", 60}}, 60, kReplicable, kMustPreserve, kMutable);
  const Handle handle = manager->adopt(backend->make_block(kPageable, spec, 1), spec);
  const Snapshot snapshot = manager->snapshot();
  EXPECT_EQ(snapshot.manager, manager->id());
  EXPECT_EQ(snapshot.state_version, manager->state_version());
  const ValueSnapshot* value = snapshot.find(handle);
  ASSERT_NE(value, nullptr);
  EXPECT_EQ(value->spec.logical_bytes, 160_B);
  EXPECT_EQ(value->spec.storage_bytes, 100_B);
  EXPECT_EQ(value->spec.mode, kReplicable);
  EXPECT_EQ(value->spec.mutability, kMutable);
  EXPECT_FALSE(value->has_source);
  EXPECT_EQ(value->source_location, std::nullopt);
  ASSERT_EQ(value->materializations.size(), 1U);
  EXPECT_EQ(value->materializations[0].charged_bytes, 128_B);
}

TEST_F(SnapshotTest, NamesTheSourceOfAValueThatIsNotLoaded) {
  start();
  const Handle handle = source(100, kPinned);
  const Snapshot snapshot = manager->snapshot();
  EXPECT_TRUE(snapshot.find(handle)->has_source);
  EXPECT_EQ(snapshot.find(handle)->source_location, kPinned);
  EXPECT_TRUE(snapshot.find(handle)->materializations.empty());
  EXPECT_EQ(sources[handle]->num_loads, 0);
}

TEST_F(SnapshotTest, ListsValuesInTheOrderOfRegistrationAlsoInSlotsThatWereUsedBefore) {
  start();
  std::vector<Handle> order;
  for (int i = 0; i < 6; ++i) {
    order.push_back(source(8));
  }
  manager->discard(order[1]);
  manager->discard(order[4]);
  manager->forget_discarded();
  order.erase(order.begin() + 4);
  order.erase(order.begin() + 1);
  order.push_back(source(8));
  order.push_back(source(8));
  order.push_back(source(8));
  EXPECT_EQ(listed(), order);
}

TEST_F(SnapshotTest, ShowsDiscardedValuesWithoutMaterializationsUntilTheyAreForgotten) {
  start();
  const Handle first = adopt(kPageable, 100);
  const Handle discarded = adopt(kPageable, 100);
  const Handle last = adopt(kPageable, 100);
  manager->ensure(discarded, kPinned);
  manager->discard(discarded);
  EXPECT_EQ(listed(), (std::vector{first, discarded, last}));
  const Snapshot before = manager->snapshot();
  EXPECT_TRUE(before.find(discarded)->discarded);
  EXPECT_TRUE(before.find(discarded)->materializations.empty());
  EXPECT_EQ(before.find(discarded)->spec.storage_bytes, 100_B);
  manager->forget_discarded();
  EXPECT_EQ(listed(), (std::vector{first, last}));
  EXPECT_EQ(manager->snapshot().find(discarded), nullptr);
}

TEST_F(SnapshotTest, CountsUsesHoldsAndPendingOfEachMaterialization) {
  start();
  const Handle handle = adopt(kPinned, 100);
  manager->ensure(handle, kCuda0);
  Lease first = acquire(handle, kCuda0);
  Lease second = acquire(handle, kCuda0);
  Hold held = hold(handle, kPinned);
  EXPECT_EQ(at(handle, kCuda0).num_leases, 2U);
  EXPECT_EQ(at(handle, kCuda0).num_holds, 0U);
  EXPECT_EQ(at(handle, kPinned).num_leases, 0U);
  EXPECT_EQ(at(handle, kPinned).num_holds, 1U);
  EXPECT_EQ(manager->snapshot().num_leases, 2U);
  EXPECT_EQ(manager->snapshot().num_holds, 1U);
  backend->launch_read({kCuda0, 0}, block(first, handle), seeds[handle]);
  first.release();
  EXPECT_EQ(at(handle, kCuda0).num_leases, 1U);
  EXPECT_EQ(at(handle, kCuda0).num_pending, 1U);
  second.release();
  held.release();
  backend->complete_all();
  EXPECT_EQ(at(handle, kCuda0).num_pending, 0U);
}

TEST_F(SnapshotTest, MarksTheCopiesThatAWriteLeftBehindAsStale) {
  start();
  const Handle handle = adopt(kPageable, 100, kReplicable, kMutable);
  manager->ensure(handle, kPinned);
  Lease lease = acquire(handle, kPinned, Access::kWrite);
  EXPECT_TRUE(manager->snapshot().find(handle)->write_leased);
  block(lease, handle).write(seeds[handle] = 9);
  lease.release();
  EXPECT_FALSE(manager->snapshot().find(handle)->write_leased);
  EXPECT_TRUE(at(handle, kPageable).stale);
  EXPECT_FALSE(at(handle, kPinned).stale);
}

TEST_F(SnapshotTest, CountsArrivingBytesAsAPartOfUsed) {
  start();
  const Handle handle = adopt(kPinned, 100);
  manager->ensure(handle, kCuda0);
  EXPECT_EQ(at(handle, kCuda0).state, MaterializationState::kArriving);
  EXPECT_EQ(account(kCuda0).arriving, 512_B);
  EXPECT_EQ(account(kCuda0).used, 512_B);
  backend->complete_all();
  EXPECT_EQ(at(handle, kCuda0).state, MaterializationState::kReady);
  EXPECT_EQ(account(kCuda0).arriving, Bytes());
  EXPECT_EQ(account(kCuda0).used, 512_B);
}

TEST_F(SnapshotTest, CountsRetiringBytesBesideUsed) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->move(handle, kCuda0);
  EXPECT_EQ(account(kPageable).retiring, 128_B);
  EXPECT_EQ(account(kPageable).used, Bytes());
  backend->complete_all();
  EXPECT_EQ(account(kPageable).retiring, Bytes());
}

TEST_F(SnapshotTest, NamesEscapedBytesUntilTheirMemoryIsGone) {
  start();
  const auto spec = make_spec(100);
  auto first_block = backend->make_block(kPageable, spec, 1);
  auto second_block = backend->make_block(kPinned, spec, 2);
  auto first_tensor = first_block->share();
  auto second_tensor = second_block->share();
  const Handle first = manager->adopt(std::move(first_block), spec);
  const Handle second = manager->adopt(std::move(second_block), spec);
  manager->move(second, kCuda0);
  backend->complete_all();
  manager->discard(first);
  const std::vector<EscapedSnapshot> expected = {{second, kPinned, 100_B},
                                                 {first, kPageable, 128_B}};
  EXPECT_EQ(manager->snapshot().escaped, expected) << "in the order of escape";
  EXPECT_EQ(account(kPageable).escaped, 128_B);
  EXPECT_EQ(account(kPageable).used, 128_B) << "a part of used";
  second_tensor.reset();
  EXPECT_EQ(manager->snapshot().escaped, (std::vector{EscapedSnapshot{first, kPageable, 128_B}}));
  EXPECT_EQ(account(kPinned).used, Bytes());
  first_tensor.reset();
  EXPECT_TRUE(manager->snapshot().escaped.empty());
}

TEST_F(SnapshotTest, ListsReservationsInTheOrderOfCreation) {
  fake_options.physical_headroom = {kCuda0};
  start();
  Reservation first = manager->reserve({kCuda0, 30_B, "z"});
  Reservation second = manager->reserve({kPageable, 10_B, "a"});
  Reservation third = manager->reserve({kCuda0, 20_B, "m"});
  second.release();
  Reservation fourth = manager->reserve({kPageable, 10_B, "b"});
  const Snapshot snapshot = manager->snapshot();
  std::vector<std::string> labels;
  for (const auto& each : snapshot.reservations) {
    labels.push_back(each.reservation.label);
  }
  EXPECT_EQ(labels, (std::vector<std::string>{"z", "m", "b"}));
  EXPECT_TRUE(snapshot.reservations[0].physical);
  EXPECT_FALSE(snapshot.reservations[2].physical);
  EXPECT_EQ(account(kCuda0).reserved, 50_B);
  first.release();
  third.release();
  fourth.release();
}

TEST_F(SnapshotTest, CountsOpenScopes) {
  start();
  Scope scope = manager->scope(ResidencyPlan({.name = "a plan"}));
  EXPECT_EQ(manager->snapshot().num_scopes, 0U) << "making one does nothing";
  scope.enter();
  EXPECT_EQ(manager->snapshot().num_scopes, 1U);
  scope.close();
  EXPECT_EQ(manager->snapshot().num_scopes, 0U);
}

TEST_F(SnapshotTest, KeepsNothingAlive) {
  start();
  const Handle handle = adopt(kPageable, 100);
  const Snapshot kept = manager->snapshot();
  manager->discard(handle);
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  EXPECT_FALSE(kept.find(handle)->discarded) << "it shows what was";
}

TEST_F(SnapshotTest, TimeDoesNotRunBackwards) {
  start();
  const auto first = manager->snapshot().time_ns;
  EXPECT_LE(first, manager->snapshot().time_ns);
}

TEST_F(SnapshotTest, TextNamesValuesAndPlaces) {
  start();
  const Handle handle = adopt(kPageable, 100);
  const Handle unloaded = source(64);
  const std::string text = to_string(manager->snapshot());
  EXPECT_NE(text.find(to_string(handle)), std::string::npos);
  EXPECT_NE(text.find(to_string(unloaded)), std::string::npos);
  EXPECT_NE(text.find("not loaded"), std::string::npos);
  EXPECT_NE(text.find("pageable-host (ready)"), std::string::npos);
}

// --- Version

TEST_F(VersionTest, RisesOnEachKindOfChange) {
  start();
  Handle handle;
  EXPECT_GT(rise([&] { handle = adopt(kPageable, 100, kReplicable, kMutable); }), 0U) << "adopt";
  Handle loaded;
  EXPECT_GT(rise([&] { loaded = source(100); }), 0U) << "register_source";
  EXPECT_GT(rise([&] { manager->ensure(loaded, kPageable); }), 0U) << "load";
  EXPECT_GT(rise([&] { manager->ensure(handle, kPinned); }), 0U) << "ensure";
  EXPECT_GT(rise([&] { manager->move(handle, kCuda0); }), 0U) << "move";
  EXPECT_GT(rise([&] { manager->drop(handle, kPageable); }), 0U) << "drop";
  std::optional<Lease> lease;
  EXPECT_GT(rise([&] { lease.emplace(acquire(handle, kCuda0, Access::kWrite)); }), 0U) << "acquire";
  EXPECT_GT(rise([&] { lease->release(); }), 0U) << "release";
  manager->ensure(handle, kPinned);
  EXPECT_GT(rise([&] { lease.emplace(acquire(handle, kPinned, Access::kWrite)); }), 0U);
  EXPECT_GT(rise([&] { lease->release(); }), 0U) << "a write that makes another stale";
  EXPECT_GT(rise([&] { manager->ensure(handle, kCuda0); }), 0U) << "refresh";
  std::optional<Hold> held;
  EXPECT_GT(rise([&] { held.emplace(hold(handle, kPinned)); }), 0U) << "hold";
  EXPECT_GT(rise([&] { held->release(); }), 0U) << "end of a hold";
  std::optional<Reservation> reservation;
  EXPECT_GT(rise([&] { reservation.emplace(manager->reserve({kCuda0, 1_B, "r"})); }), 0U);
  EXPECT_GT(rise([&] { reservation->release(); }), 0U) << "end of a reservation";
  EXPECT_GT(rise([&] { manager->set_budget(kCuda0, 4_KiB); }), 0U) << "set_budget";
  EXPECT_GT(rise([&] { manager->set_budget(kCuda0, std::nullopt); }), 0U) << "no budget any more";
  EXPECT_GT(rise([&] { (void)manager->take(handle, kPinned); }), 0U) << "take";
  EXPECT_GT(rise([&] { manager->discard(loaded); }), 0U) << "discard";
  EXPECT_GT(rise([&] { manager->forget_discarded(); }), 0U) << "forget_discarded";
}

TEST_F(VersionTest, DoesNotRiseOnNoOps) {
  start();
  const Handle handle = adopt(kPageable, 100);
  Reservation reservation = manager->reserve({kCuda0, 1_B, "r"});
  Lease lease = acquire(handle, kPageable);
  lease.release();
  reservation.release();
  manager->set_budget(kCuda0, 4_KiB);
  changes_nothing([&] {
    EXPECT_TRUE(manager->ensure(handle, kPageable).no_op());
    EXPECT_TRUE(manager->move(handle, kPageable).no_op());
    EXPECT_TRUE(manager->drop(handle, kCuda0).no_op());
    manager->set_budget(kCuda0, 4_KiB);
    EXPECT_EQ(manager->forget_discarded(), 0U);
    lease.release();
    reservation.release();
    manager->execute({});
    manager->synchronize();
  });
}

TEST_F(VersionTest, DoesNotRiseOnReading) {
  start();
  const Handle handle = adopt(kPageable, 100);
  const ActionList actions = {EnsureResident{handle, kCuda0}};
  changes_nothing([&] {
    (void)manager->snapshot();
    (void)manager->trace();
    (void)manager->locations();
    (void)manager->state_version();
    (void)manager->explain(actions);
    (void)manager->explain(ResidencyPlan({.name = "plan", .enter = actions}));
    (void)manager->scope(ResidencyPlan({.name = "plan", .enter = actions}));
    manager->audit();
    manager->reset_peaks();
  });
}

TEST_F(VersionTest, DoesNotRiseWhenFencesComplete) {
  start();
  const Handle staged = adopt(kPageable, 100);
  const Handle direct = adopt(kPinned, 100);
  manager->ensure(direct, kCuda0);
  Lease lease = acquire(direct, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, direct), seeds[direct]);
  lease.release();
  manager->move(staged, kCuda1);
  const auto version = manager->state_version();
  backend->complete_all();
  EXPECT_EQ(account(kPageable).retiring, Bytes()) << "it was noticed";
  manager->synchronize();
  EXPECT_EQ(manager->state_version(), version);
}

TEST_F(VersionTest, RisesWhenAFailedTransferPutsTheSourceBack) {
  start();
  const Handle handle = adopt(kPageable, 100);
  backend->fail(Call::kTransfer, 1);
  manager->move(handle, kCuda0);
  const auto before = manager->state_version();
  backend->complete_all();
  EXPECT_GT(manager->state_version(), before) << "the planner sees something else now";
  EXPECT_EQ(places(handle), std::vector{kPageable});
}

TEST_F(VersionTest, DoesNotRiseOnRefusalsAndFailedAttempts) {
  budget(kCuda0, 10_B);
  start();
  const Handle handle = adopt(kPageable, 100);
  const auto version = manager->state_version();
  EXPECT_THROW(manager->ensure(handle, kCuda0), BudgetError);
  EXPECT_THROW(manager->drop(handle, kPageable), OwnershipError);
  backend->fail(Call::kCopy, 1);
  EXPECT_THROW(manager->ensure(handle, kPinned), fake::InjectedFault);
  EXPECT_EQ(manager->state_version(), version);
}

// --- Trace

TEST_F(TraceTest, HoldsEveryTransitionOldestFirst) {
  start();
  const Handle handle = adopt(kPinned, 100);
  manager->ensure(handle, kPageable);
  manager->ensure(handle, kPageable);
  manager->move(handle, kCuda0, kPageable);
  manager->drop(handle, kPinned);
  manager->discard(handle);
  const auto trace = manager->trace();
  ASSERT_EQ(trace.size(), 5U);
  EXPECT_EQ(sequences(), (std::vector<std::uint64_t>{1, 2, 3, 4, 5}));
  const auto expect = [&](std::size_t i, ActionKind action, Reason reason, TransferPath path,
                          std::int64_t bytes) {
    EXPECT_EQ(trace[i].action, action) << i;
    EXPECT_EQ(trace[i].reason, reason) << i;
    EXPECT_EQ(trace[i].path, path) << i;
    EXPECT_EQ(trace[i].bytes, Bytes(bytes)) << i;
    EXPECT_EQ(trace[i].handle, handle) << i;
    EXPECT_FALSE(trace[i].failed) << i;
    EXPECT_EQ(trace[i].plan, "") << i;
    EXPECT_LE(trace[i].host_start_ns, trace[i].host_end_ns) << i;
  };
  expect(0, ActionKind::kEnsure, Reason::kCopied, TransferPath::kDirect, 128);
  expect(1, ActionKind::kEnsure, Reason::kAlreadyResident, TransferPath::kNone, 0);
  expect(2, ActionKind::kMove, Reason::kCopied, TransferPath::kStaged, 512);
  expect(3, ActionKind::kDrop, Reason::kReleased, TransferPath::kNone, 0);
  expect(4, ActionKind::kDiscard, Reason::kDiscarded, TransferPath::kNone, 0);
  EXPECT_TRUE(trace[1].no_op());
  EXPECT_FALSE(trace[2].no_op());
  EXPECT_EQ(trace[2].source, kPageable);
  EXPECT_EQ(trace[2].destination, kCuda0);
  EXPECT_EQ(trace[3].source, kPinned);
}

TEST_F(TraceTest, KnowsTheDeviceTimeOnceTheTransferHasEnded) {
  start();
  const Handle handle = adopt(kPinned, 100);
  manager->ensure(handle, kCuda0);
  EXPECT_EQ(manager->trace()[0].device_elapsed_ns, std::nullopt);
  backend->complete_all();
  EXPECT_EQ(manager->trace()[0].device_elapsed_ns, 1000);
}

TEST_F(TraceTest, KeepsNoMoreThanItsCapacity) {
  options.trace_capacity = 3;
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kPageable);
  manager->ensure(handle, kPageable);
  EXPECT_EQ(sequences(), (std::vector<std::uint64_t>{1, 2}));
  for (int i = 0; i < 5; ++i) {
    manager->ensure(handle, kPageable);
  }
  EXPECT_EQ(sequences(), (std::vector<std::uint64_t>{5, 6, 7})) << "the newest, oldest first";
}

TEST_F(TraceTest, KeepsFourThousandByDefault) {
  start();
  const Handle handle = adopt(kPageable, 100);
  for (int i = 0; i < 4100; ++i) {
    manager->ensure(handle, kPageable);
  }
  const auto all = sequences();
  ASSERT_EQ(all.size(), 4096U);
  EXPECT_EQ(all.front(), 5U);
  EXPECT_EQ(all.back(), 4100U);
}

TEST_F(TraceTest, OfCapacityZeroKeepsNothing) {
  options.trace_capacity = 0;
  start();
  const Handle handle = adopt(kPageable, 100);
  const auto report = manager->ensure(handle, kPinned);
  EXPECT_TRUE(manager->trace().empty());
  EXPECT_EQ(report.record().bytes, 100_B) << "reports are made all the same";
}

TEST_F(TraceTest, LimitTakesTheNewestOldestFirst) {
  options.trace_capacity = 4;
  start();
  const Handle handle = adopt(kPageable, 100);
  for (int i = 0; i < 6; ++i) {
    manager->ensure(handle, kPageable);
  }
  EXPECT_EQ(sequences(2), (std::vector<std::uint64_t>{5, 6}));
  EXPECT_EQ(sequences(0), std::vector<std::uint64_t>());
  EXPECT_EQ(sequences(100), (std::vector<std::uint64_t>{3, 4, 5, 6}));
}

TEST_F(TraceTest, HoldsAttemptsThatTheBackendFailedWithTheReason) {
  start();
  const Handle adopted = adopt(kPageable, 100);
  const Handle loaded = source(100);
  backend->fail(Call::kCopy, 1);
  EXPECT_THROW(manager->move(adopted, kPinned), fake::InjectedFault);
  sources[loaded]->before_load = [] { throw std::runtime_error("no such file"); };
  EXPECT_THROW(manager->ensure(loaded, kPageable), std::runtime_error);
  const auto trace = manager->trace();
  ASSERT_EQ(trace.size(), 2U);
  EXPECT_TRUE(trace[0].failed);
  EXPECT_EQ(trace[0].action, ActionKind::kMove);
  EXPECT_NE(trace[0].failure.find("injected fault in copy"), std::string::npos);
  EXPECT_TRUE(trace[1].failed);
  EXPECT_NE(trace[1].failure.find("no such file"), std::string::npos);
}

TEST_F(TraceTest, HoldsNoRefusals) {
  budget(kCuda0, 10_B);
  start();
  const Handle handle = adopt(kPageable, 100);
  EXPECT_THROW(manager->ensure(handle, kCuda0), BudgetError);
  EXPECT_THROW(manager->ensure(handle, Location::cuda(9)), UnavailableError);
  EXPECT_THROW(manager->drop(handle, kPageable), OwnershipError);
  EXPECT_THROW(manager->move(handle, kPinned, kDisk), UnavailableError);
  EXPECT_THROW(manager->ensure(handle, kPinned, {.stream = Stream{kCuda1, 0}}),
               std::invalid_argument);
  const ActionList infeasible = {EnsureResident{handle, kPinned}, EnsureResident{handle, kCuda0}};
  EXPECT_THROW(manager->execute(infeasible), PlanError);
  EXPECT_TRUE(manager->trace().empty());
}

TEST_F(TraceTest, MarksATransferThatFailedLater) {
  start();
  const Handle handle = adopt(kPageable, 100);
  backend->fail(Call::kTransfer, 1);
  manager->ensure(handle, kCuda0);
  EXPECT_FALSE(manager->trace()[0].failed);
  backend->complete_all();
  const auto trace = manager->trace();
  ASSERT_EQ(trace.size(), 1U) << "it is the same transition";
  EXPECT_TRUE(trace[0].failed);
  EXPECT_NE(trace[0].failure.find("injected fault in a transfer"), std::string::npos);
}

TEST_F(TraceTest, NamesPlanAndPhase) {
  start();
  const Handle handle = adopt(kPageable, 100);
  const ActionList actions = {EnsureResident{handle, kPinned}};
  manager->execute(actions, {.name = "warm up"});
  manager->with(ResidencyPlan({.name = "layer 3",
                               .reclaim = {DropResident{handle, kPinned}},
                               .enter = {EnsureResident{handle, kCuda0}},
                               .exit = {DropResident{handle, kCuda0}}}),
                [](Scope&) {});
  manager->ensure(handle, kPageable);
  std::vector<std::pair<std::string, Phase>> found;
  for (const auto& record : manager->trace()) {
    found.emplace_back(record.plan, record.phase);
  }
  const std::vector<std::pair<std::string, Phase>> expected = {{"warm up", Phase::kExecute},
                                                               {"layer 3", Phase::kReclaim},
                                                               {"layer 3", Phase::kEnter},
                                                               {"layer 3", Phase::kExit},
                                                               {"", Phase::kExecute}};
  EXPECT_EQ(found, expected);
}

TEST_F(TraceTest, OfATransferKeepsNoMemoryAlive) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->move(handle, kDisk);
  backend->complete_all();
  (void)manager->snapshot();
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  manager->discard(handle);
  EXPECT_EQ(backend->live_bytes(kDisk), Bytes());
}

TEST_F(TraceTest, ReadingItChangesNothing) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kPinned);
  changes_nothing([&] { (void)manager->trace(); });
  EXPECT_EQ(sequences(), sequences());
}

TEST_F(TraceTest, IsReadableAfterClose) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kPinned);
  manager->close();
  EXPECT_EQ(sequences(), std::vector<std::uint64_t>{1});
}

TEST_F(TraceTest, JsonLinesHoldOneObjectPerTransition) {
  start();
  const auto spec = make_spec(100);
  const Handle handle =
      manager->adopt(backend->make_block(kPageable, spec, 1), spec, ValueType("kv \"cache\""));
  const ActionList actions = {EnsureResident{handle, kCuda0}};
  manager->execute(actions, {.name = "quoted \"name\"\nand a line"});
  backend->complete_all();
  EXPECT_TRUE(manager->drop(handle, kPinned).no_op());
  backend->fail(Call::kCopy, 1);
  EXPECT_THROW(manager->ensure(handle, kPinned), fake::InjectedFault);
  std::istringstream lines(to_json_lines(manager->trace()));
  std::vector<Json> parsed;
  for (std::string line; std::getline(lines, line);) {
    parsed.push_back(Json::parse(line));
  }
  ASSERT_EQ(parsed.size(), 3U);
  EXPECT_EQ(parsed[0].at("sequence"), 1);
  EXPECT_EQ(parsed[0].at("action"), "ensure");
  EXPECT_EQ(parsed[0].at("handle"), handle.id());
  EXPECT_EQ(parsed[0].at("type"), "kv \"cache\"");
  EXPECT_EQ(parsed[0].at("source"), "pageable-host");
  EXPECT_EQ(parsed[0].at("destination"), "cuda:0");
  EXPECT_EQ(parsed[0].at("bytes"), 512);
  EXPECT_EQ(parsed[0].at("path"), to_string(TransferPath::kStaged));
  EXPECT_EQ(parsed[0].at("device_elapsed_ns"), 1000);
  EXPECT_EQ(parsed[0].at("plan"), "quoted \"name\"\nand a line");
  EXPECT_EQ(parsed[0].at("no_op"), false);
  EXPECT_FALSE(parsed[0].contains("failure"));
  EXPECT_EQ(parsed[1].at("no_op"), true);
  EXPECT_FALSE(parsed[1].contains("plan"));
  EXPECT_FALSE(parsed[1].contains("device_elapsed_ns"));
  EXPECT_EQ(parsed[2].at("failed"), true);
  EXPECT_NE(parsed[2].at("failure").get<std::string>().find("injected"), std::string::npos);
}

TEST_F(TraceTest, ExportsOfNothingAreEmpty) {
  EXPECT_EQ(to_json_lines({}), "");
  EXPECT_EQ(Json::parse(to_chrome_trace({})).at("traceEvents"), Json::array());
}

TEST_F(TraceTest, ExportsSurviveTextThatIsNotUtf8) {
  TransitionRecord record;
  record.plan = "\xff\xfe";
  record.failed = true;
  record.failure = "\xc3";
  EXPECT_TRUE(Json::parse(to_json_lines({record})).is_object());
  EXPECT_TRUE(Json::parse(to_chrome_trace({record})).is_object());
}

TEST_F(TraceTest, ChromeTraceHasACompleteEventPerTransitionInARowPerDestination) {
  start();
  const Handle handle = adopt(kPinned, 100);
  manager->ensure(handle, kCuda0);
  manager->ensure(handle, kCuda1);
  manager->drop(handle, kPinned);
  const auto records = manager->trace();
  const Json parsed = Json::parse(to_chrome_trace(records));
  const Json& events = parsed.at("traceEvents");
  ASSERT_EQ(events.size(), 3U);
  for (std::size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(events[i].at("ph"), "X");
    EXPECT_DOUBLE_EQ(events[i].at("ts").get<double>(),
                     static_cast<double>(records[i].host_start_ns) / 1000.0);
    EXPECT_DOUBLE_EQ(
        events[i].at("dur").get<double>(),
        static_cast<double>(records[i].host_end_ns - records[i].host_start_ns) / 1000.0);
    EXPECT_NE(events[i].at("name").get<std::string>().find(to_string(handle)), std::string::npos);
    EXPECT_EQ(events[i].at("args").at("sequence"), i + 1);
  }
  EXPECT_EQ(events[0].at("tid"), "cuda:0");
  EXPECT_EQ(events[1].at("tid"), "cuda:1");
  EXPECT_NE(events[2].at("tid"), events[0].at("tid"));
}

}  // namespace
}  // namespace residency::test
