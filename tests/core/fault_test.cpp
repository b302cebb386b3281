// Case 12: each call of a scenario that uses everything fails once, N = 1...all, at once and (for
// transfers) at completion. Every failure is a typed error, nothing is lost, the ledger is right,
// and the call works when it is made again.

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "failing_new.h"
#include "fixture.h"

namespace residency::test {
namespace {

constexpr auto kInjectable = {Call::kOpen,      Call::kCopy,        Call::kReconstruct,
                              Call::kLoad,      Call::kWatchEscape, Call::kBeginAccess,
                              Call::kEndAccess, Call::kOpenView,    Call::kCurrentStream,
                              Call::kRecordUse, Call::kMakeHeadroom};

struct Value {
  Handle handle;
  std::uint64_t seed = 0;
  bool ended = false;
};

/// A world, and steps that can each be made again after they failed.
class Scenario {
 public:
  Scenario(fake::Completion completion, std::uint64_t seed, OnFailure on_failure)
      : on_failure_(on_failure) {
    fake::FakeOptions options;
    options.seed = seed;
    options.completion = completion;
    options.physical_headroom = {kCuda0};
    backend = std::make_shared<FakeBackend>(options);
    add_steps();
  }

  std::shared_ptr<FakeBackend> backend;
  std::shared_ptr<Manager> manager;
  std::vector<std::pair<std::string, std::function<void()>>> steps;

  /// What must hold at any time between calls: all bytes of all values that must be preserved.
  void check() {
    const AllocationsPass pass;
    if (!manager || manager->closed()) {
      return;
    }
    ASSERT_NO_THROW(manager->audit());
    const Snapshot snapshot = manager->snapshot();
    for (const Value* value : all_) {
      if (value->handle.id() == 0 || value->ended) {
        continue;
      }
      const auto* found = snapshot.find(value->handle);
      ASSERT_NE(found, nullptr);
      bool good = found->has_source;
      for (const auto& each : found->materializations) {
        good = good || !each.stale;
      }
      EXPECT_TRUE(good) << to_string(value->handle) << " was lost";
      EXPECT_FALSE(found->discarded);
    }
  }

  /// Tells the manager's user of every late failure that nobody was told of.
  void hear_of_late_failures() {
    const AllocationsPass pass;
    for (const Value* value : all_) {
      if (value->handle.id() != 0 && !value->ended) {
        try {
          manager->drop(value->handle, Location::disk("empty"));
        } catch (const TransferError&) {
        }
      }
    }
  }

  /// Every value's bytes, wherever it is, moved or copied to pageable memory.
  void check_bytes() {
    for (Value* value : all_) {
      if (value->handle.id() == 0 || value->ended) {
        continue;
      }
      const Snapshot snapshot = manager->snapshot();
      if (snapshot.find(value->handle)->spec.mode == kExclusive) {
        manager->move(value->handle, kPageable);
      } else {
        manager->ensure(value->handle, kPageable);
      }
      const Handle handles[] = {value->handle};
      Lease lease = manager->acquire(handles, kPageable);
      EXPECT_TRUE(dynamic_cast<FakeView&>(lease.view(value->handle)).holds(value->seed))
          << to_string(value->handle);
      lease.release();
      // Also every other copy that counts as good.
      const Snapshot after = manager->snapshot();
      for (const auto& each : after.find(value->handle)->materializations) {
        if (each.location.is_cuda() && !each.stale) {
          Lease device = manager->acquire(handles, each.location);
          backend->launch_read({each.location, 0}, block(device, value->handle), value->seed);
          device.release(true);
        }
      }
    }
  }

 private:
  static FakeBlock& block(const Lease& lease, const Handle& handle) {
    return dynamic_cast<FakeView&>(lease.view(handle)).block();
  }

  void step(std::string name, std::function<void()> run) {
    steps.emplace_back(std::move(name), std::move(run));
  }

  void adopt(Value& value, Location at, ReplicaMode mode, Mutability mutability = kImmutable) {
    if (value.handle.id() == 0) {
      const auto spec = make_spec(700, mode, kMustPreserve, mutability);
      value.seed = next_seed_++;
      value.handle = manager->adopt(backend->make_block(at, spec, value.seed), spec);
    }
  }
  void add_source(Value& value, Location at, ReplicaMode mode) {
    const auto spec = make_spec(500, mode, kReconstructible);
    value.seed = next_seed_++;
    value.handle = manager->register_source(
        std::make_shared<FakeSource>(backend, at, spec, value.seed), spec, at);
  }

  Lease acquire(const Value& value, Location at, Access access = Access::kRead) {
    const Handle handles[] = {value.handle};
    return manager->acquire(handles, at, {.access = access});
  }

  void release(std::optional<Lease>& lease, bool wait = false) {
    lease->release(wait);
    EXPECT_FALSE(lease->active());
  }

  ExecuteOptions execute_options() const {
    ExecuteOptions options;
    options.on_failure = on_failure_;
    return options;
  }

  void add_steps() {
    step("create", [this] {
      ManagerOptions options;
      options.budgets = {{kCuda0, 64_KiB}, {kCuda1, 64_KiB}};
      options.disks = {{.name = "nvme", .directory = "/nowhere"},
                       {.name = "empty", .directory = "/nowhere"}};
      manager = Manager::create(options, backend);
    });
    step("adopt and register", [this] {
      adopt(a_, kPageable, kReplicable);
      adopt(b_, kPinned, kExclusive);
      adopt(c_, kCuda0, kReplicable, kMutable);
      adopt(d_, kPageable, kReplicable);
      adopt(t_, kPageable, kReplicable);
      adopt(e_, kPinned, kReplicable);
      adopt(f_, kPinned, kReplicable);
      adopt(g_, kPinned, kReplicable);
      add_source(s_, kPageable, kReplicable);
      add_source(x_, kPinned, kExclusive);
    });
    step("ensure staged", [this] { manager->ensure(a_.handle, kCuda0); });
    step("ensure to a file", [this] { manager->ensure(a_.handle, kDisk); });
    step("load and copy", [this] { manager->ensure(s_.handle, kCuda1); });
    step("load in place", [this] { manager->ensure(x_.handle, kPinned); });
    step("move directly", [this] { manager->move(b_.handle, kCuda1); });
    step("move to a file", [this] { manager->move(b_.handle, kDisk); });
    step("move from a file", [this] { manager->move(b_.handle, kPageable); });
    step("peer copy", [this] { manager->ensure(c_.handle, kCuda1); });
    step("execute", [this] {
      const ActionList actions = {
          EnsureResident{a_.handle, kPinned}, MoveResident{x_.handle, kCuda0},
          DropResident{a_.handle, kCuda0},    EnsureResident{c_.handle, kPinned},
          MoveResident{d_.handle, kDisk},     EnsureResident{s_.handle, kCuda0},
          DropResident{s_.handle, kCuda1},    MoveResident{x_.handle, kDisk}};
      manager->execute(actions, execute_options());
    });
    step("copy together", [this] {
      const ActionList actions = {EnsureResident{e_.handle, kCuda0},
                                  EnsureResident{f_.handle, kCuda0},
                                  EnsureResident{g_.handle, kCuda0}};
      manager->execute(actions, execute_options());
    });
    step("copy between devices and drop together", [this] {
      const ActionList actions = {
          EnsureResident{f_.handle, kCuda1}, EnsureResident{g_.handle, kCuda1},
          DropResident{e_.handle, kCuda0},   DropResident{f_.handle, kCuda0},
          DropResident{g_.handle, kCuda0},   MoveResident{f_.handle, kCuda0},
          MoveResident{g_.handle, kCuda0}};
      manager->execute(actions, execute_options());
    });
    step("execute and discard", [this] {
      const ActionList actions = {EnsureResident{a_.handle, kCuda1},
                                  EnsureResident{s_.handle, kPinned}, DiscardValue{d_.handle}};
      manager->execute(actions, execute_options());
      d_.ended = true;
    });
    step("reserve", [this] {
      reservation_.emplace(manager->reserve({kCuda0, 1_KiB, "scenario"}));
    });
    step("acquire", [this] { read_.emplace(acquire(a_, kCuda1)); });
    step("view", [this] { (void)read_->view(a_.handle); });
    step("use", [this] { backend->launch_read({kCuda1, 0}, block(*read_, a_.handle), a_.seed); });
    step("add stream", [this] { read_->add_stream({kCuda1, 3}); });
    step("use on the other stream", [this] {
      backend->launch_read({kCuda1, 3}, block(*read_, a_.handle), a_.seed);
    });
    step("release", [this] { release(read_); });
    step("drop behind the use", [this] { manager->drop(a_.handle, kCuda1); });
    step("write on the device", [this] {
      if (!write_ || !write_->active()) {
        write_.emplace(acquire(c_, kCuda0, Access::kWrite));
      }
      c_.seed = next_seed_++;
      FakeBlock& written = block(*write_, c_.handle);
      backend->launch_write({kCuda0, 0}, written, c_.seed);
    });
    step("release the write lease", [this] { release(write_); });
    step("refresh", [this] { manager->ensure(c_.handle, kPinned); });
    step("write on the host", [this] {
      if (!write_ || !write_->active()) {
        write_.emplace(acquire(c_, kPinned, Access::kWrite));
      }
      FakeBlock& written = block(*write_, c_.handle);
      written.write(c_.seed = next_seed_++);
    });
    step("release that too", [this] { release(write_, true); });
    step("refresh by a plan", [this] {
      const ActionList actions = {EnsureResident{c_.handle, kCuda0},
                                  MoveResident{c_.handle, kCuda1, kCuda0}};
      manager->execute(actions, execute_options());
    });
    step("hold", [this] {
      const Handle handles[] = {a_.handle, e_.handle};
      hold_.emplace(manager->hold(handles, kPinned));
    });
    step("release the hold", [this] { hold_->release(); });
    step("borrow", [this] {
      const Handle handles[] = {a_.handle, s_.handle, e_.handle};
      borrowed_.emplace(manager->borrow(handles, kCuda1));
    });
    step("use what was borrowed", [this] {
      for (const Value* value : {&a_, &s_, &e_}) {
        backend->launch_read({kCuda1, 0}, block(*borrowed_, value->handle), value->seed);
      }
    });
    step("release what was borrowed", [this] { release(borrowed_); });
    step("share", [this] {
      Lease lease = acquire(e_, kPinned);
      if (!alias_) {
        alias_ = block(lease, e_.handle).share();
      }
      lease.release();
    });
    step("give up what is shared", [this] { manager->move(e_.handle, kPageable, kPinned); });
    step("forget the alias", [this] { alias_.reset(); });
    step("scope", [this] {
      const ResidencyPlan plan(
          {.name = "scenario",
           .reclaim = {MoveResident{e_.handle, kDisk}, DropResident{s_.handle, kCuda1}},
           .reservations = {{kCuda0, 2_KiB, "first"}, {kPageable, 100_B, "second"}},
           .enter = {EnsureResident{a_.handle, kCuda0}, MoveResident{b_.handle, kCuda0}},
           .exit = {MoveResident{b_.handle, kPinned}, DropResident{a_.handle, kCuda0}}});
      ScopeOptions options;
      options.on_failure = on_failure_;
      manager->with(
          plan,
          [this](Scope&) {
            Lease lease = acquire(a_, kCuda0);
            backend->launch_read({kCuda0, 0}, block(lease, a_.handle), a_.seed);
            lease.release();
          },
          options);
    });
    step("take", [this] {
      manager->ensure(t_.handle, kCuda0);
      manager->ensure(t_.handle, kDisk);
      const BlockPtr taken = manager->take(t_.handle, kPageable);
      t_.ended = true;
      EXPECT_TRUE(dynamic_cast<FakeBlock&>(*taken).holds(t_.seed));
    });
    step("discard what is loaded", [this] {
      manager->move(x_.handle, kDisk);
      manager->discard(x_.handle);
      x_.ended = true;
    });
    step("release the reservation", [this] { reservation_->release(); });
    step("forget and synchronize", [this] {
      manager->forget_discarded();
      manager->synchronize();
    });
  }

  OnFailure on_failure_;
  std::uint64_t next_seed_ = 1;
  Value a_, b_, c_, d_, t_, e_, f_, g_, s_, x_;
  std::vector<Value*> all_ = {&a_, &b_, &c_, &d_, &t_, &e_, &f_, &g_, &s_, &x_};
  std::optional<Reservation> reservation_;
  std::optional<Lease> read_;
  std::optional<Lease> write_;
  std::optional<Lease> borrowed_;
  std::optional<Hold> hold_;
  std::shared_ptr<void> alias_;
};

bool is_injected(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const fake::InjectedFault&) {
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const TransferError& transfer) {
    return is_injected(transfer.cause);
  } catch (const PlanExecutionError& plan) {
    return is_injected(plan.cause);
  } catch (...) {
    return false;
  }
}

struct Case {
  fake::Completion completion;
  OnFailure on_failure;
  const char* name;
};

class FaultTest : public testing::TestWithParam<Case> {
 protected:
  Warnings warnings;  // rollbacks and bodies that fail may say something
  std::uint64_t seed = 1;
  std::uint64_t allocation_to_fail = 0;  // once the manager is there

  /// Runs the scenario with one fault ordered by `order`. Returns whether the fault happened.
  bool run(const std::function<void(FakeBackend&)>& order, std::string* where = nullptr,
           std::map<Call, std::uint64_t>* counts = nullptr) {
    Scenario scenario(GetParam().completion, seed, GetParam().on_failure);
    order(*scenario.backend);
    int num_errors = 0;
    for (const auto& [name, step] : scenario.steps) {
      SCOPED_TRACE("step: " + name);
      for (int attempt = 0;; ++attempt) {
        try {
          step();
          break;
        } catch (...) {
          ++num_errors;
          const std::exception_ptr error = std::current_exception();
          if (where != nullptr) {
            *where = name;
          }
          EXPECT_LT(attempt, 2) << "it fails again: " << describe(error);
          EXPECT_TRUE(scenario.backend->fault_happened() || allocation_has_failed())
              << describe(error);
          bool expected = is_injected(error);
          try {
            std::rethrow_exception(error);
          } catch (const PlanError& plan) {
            // A late failure of which nobody was told yet stands in a plan's way.
            expected = plan.verdict.reason == Reason::kTransferFailed;
            scenario.hear_of_late_failures();
          } catch (...) {
          }
          EXPECT_TRUE(expected) << "not the injected fault: " << describe(error);
          scenario.check();
          if (attempt >= 2 || testing::Test::HasFatalFailure()) {
            return false;
          }
        }
      }
      if (allocation_to_fail != 0) {
        fail_allocation(std::exchange(allocation_to_fail, 0));
      }
      scenario.check();
    }
    const bool happened = scenario.backend->fault_happened() || allocation_has_failed();
    scenario.backend->clear_faults();
    fail_allocation(0);
    EXPECT_LE(num_errors, 2) << "one fault is told once";
    if (counts != nullptr) {
      for (const Call call : kInjectable) {
        (*counts)[call] = scenario.backend->num_calls(call);
      }
      (*counts)[Call::kTransfer] = scenario.backend->num_calls(Call::kTransfer);
    }
    scenario.hear_of_late_failures();
    scenario.check_bytes();
    scenario.check();
    EXPECT_EQ(scenario.manager->snapshot().num_leases, 0U);
    EXPECT_EQ(scenario.manager->snapshot().num_holds, 0U);
    EXPECT_EQ(scenario.manager->snapshot().num_scopes, 0U);
    EXPECT_TRUE(scenario.manager->snapshot().reservations.empty());
    EXPECT_EQ(scenario.backend->headroom_bytes(kCuda0), Bytes());
    scenario.manager->close({.force = true});
    for (const Location at : {kPageable, kPinned, kCuda0, kCuda1, kDisk}) {
      EXPECT_EQ(scenario.backend->live_bytes(at), Bytes()) << to_string(at);
    }
    EXPECT_TRUE(scenario.backend->violations().empty());
    return happened;
  }

  /// Fails N = 1... until nothing fails any more; returns the first N that did not happen.
  std::uint64_t enumerate(const std::function<void(FakeBackend&, std::uint64_t)>& order) {
    for (std::uint64_t n = 1;; ++n) {
      SCOPED_TRACE("N = " + std::to_string(n) + ", seed " + std::to_string(seed));
      std::string where = "(no error)";
      const bool happened = run([&](FakeBackend& backend) { order(backend, n); }, &where);
      if (HasFailure()) {
        ADD_FAILURE() << "stopped at the first failure, in step: " << where;
        return n;
      }
      if (!happened) {
        return n;
      }
    }
  }
};

TEST_P(FaultTest, ScenarioUsesEveryCall) {
  std::map<Call, std::uint64_t> counts;
  EXPECT_FALSE(run([](FakeBackend&) {}, nullptr, &counts));
  for (const auto& [call, count] : counts) {
    EXPECT_GT(count, 0U) << to_string(call);
  }
}

TEST_P(FaultTest, EveryCallFailsOnceAtOnce) {
  std::uint64_t counted = 0;
  {
    std::map<Call, std::uint64_t> counts;
    run([](FakeBackend&) {}, nullptr, &counts);
    for (const auto& [call, count] : counts) {
      counted += call == Call::kTransfer ? 0 : count;
    }
  }
  ASSERT_GT(counted, 50U);
  EXPECT_EQ(enumerate([](FakeBackend& backend, std::uint64_t n) { backend.fail_any(n); }),
            counted + 1);
}

TEST_P(FaultTest, EveryCallOfEachKindFailsOnce) {
  std::map<Call, std::uint64_t> counts;
  run([](FakeBackend&) {}, nullptr, &counts);
  for (const auto& [call, count] : counts) {
    if (call == Call::kTransfer) {
      continue;
    }
    SCOPED_TRACE(to_string(call));
    const auto ordered = [kind = call](FakeBackend& backend, std::uint64_t n) {
      backend.fail(kind, n);
    };
    EXPECT_EQ(enumerate(ordered), count + 1);
  }
}

TEST_P(FaultTest, EveryTransferFailsOnceAtItsCompletion) {
  // Several seeds, because the moment of completion decides who is told.
  for (seed = 1; seed <= (GetParam().completion == fake::Completion::kRandom ? 5U : 1U); ++seed) {
    std::map<Call, std::uint64_t> counts;
    run([](FakeBackend&) {}, nullptr, &counts);
    ASSERT_GT(counts[Call::kTransfer], 8U);
    EXPECT_EQ(
        enumerate([](FakeBackend& backend, std::uint64_t n) { backend.fail(Call::kTransfer, n); }),
        counts[Call::kTransfer] + 1);
    if (HasFailure()) {
      return;
    }
  }
}

TEST_P(FaultTest, EveryAllocationFailsOnce) {
  EXPECT_GT(enumerate([this](FakeBackend&, std::uint64_t n) { allocation_to_fail = n; }), 400U);
}

// Through a lease that outlives it.
TEST_P(FaultTest, EveryAllocationFailsOnceWhileTheManagerIsDestroyed) {
  bool has_failed = true;
  for (std::uint64_t n = 1; has_failed; ++n) {
    SCOPED_TRACE(n);
    fake::FakeOptions options;
    options.completion = GetParam().completion;
    const auto backend = std::make_shared<FakeBackend>(options);
    auto manager = Manager::create({}, backend);
    std::vector<Handle> handles;
    for (int i = 0; i < 3; ++i) {
      const auto spec = make_spec(700, kReplicable, kMustPreserve, kImmutable);
      handles.push_back(manager->adopt(backend->make_block(kPinned, spec, 1), spec));
      manager->ensure(handles.back(), kCuda0);
    }
    std::optional<Lease> lease = manager->acquire(handles, kCuda0);
    lease->add_stream({kCuda0, 3});
    fail_allocation(n);
    manager.reset();
    has_failed = allocation_has_failed();
    fail_allocation(0);
    EXPECT_NO_THROW(lease->release());
    lease.reset();
    EXPECT_TRUE(backend->violations().empty());
    if (!has_failed) {
      backend->complete_all();
      EXPECT_EQ(backend->live_bytes(kCuda0), Bytes());
    }
  }
}

TEST_P(FaultTest, NothingIsCalledWithTheMutexHeld) {
  Scenario scenario(GetParam().completion, seed, GetParam().on_failure);
  for (const auto& [name, step] : scenario.steps) {
    SCOPED_TRACE(name);
    step();
    if (name == "create") {
      scenario.backend->probe_lock(scenario.manager);
    }
  }
  scenario.manager->close({.force = true});
  scenario.backend->probe_lock(nullptr);
}

INSTANTIATE_TEST_SUITE_P(
    Worlds, FaultTest,
    testing::Values(Case{fake::Completion::kManual, OnFailure::kKeep, "ManualKeep"},
                    Case{fake::Completion::kManual, OnFailure::kRollback, "ManualRollback"},
                    Case{fake::Completion::kImmediate, OnFailure::kKeep, "ImmediateKeep"},
                    Case{fake::Completion::kImmediate, OnFailure::kRollback, "ImmediateRollback"},
                    Case{fake::Completion::kRandom, OnFailure::kKeep, "RandomKeep"},
                    Case{fake::Completion::kRandom, OnFailure::kRollback, "RandomRollback"}),
    [](const auto& info) { return std::string(info.param.name); });

// ------------------------------------------------------------------------------------------------

using RollbackTest = ManagerTest;

TEST_F(RollbackTest, SeventhOfTenCannotAllocateAndASecondTrySucceeds) {
  fake_options.capacity[kCuda0] = 3072_B;
  start();
  std::vector<Handle> handles;
  ActionList enter;
  for (int i = 0; i < 10; ++i) {
    handles.push_back(adopt(i % 2 == 0 ? kPageable : kPinned, 512));
    enter.push_back(i % 3 == 0 ? ResidencyAction(MoveResident{handles.back(), kCuda0})
                               : ResidencyAction(EnsureResident{handles.back(), kCuda0}));
  }
  const std::string before = fingerprint(manager->snapshot());
  std::map<Location, Bytes> live;
  for (const Location at : {kPageable, kPinned, kCuda0}) {
    live[at] = backend->live_bytes(at);
  }
  for (const auto on_failure : {OnFailure::kRollback, OnFailure::kKeep}) {
    Scope scope =
        manager->scope(ResidencyPlan({.name = "ten", .enter = enter}), {.on_failure = on_failure});
    try {
      scope.enter();
      FAIL();
    } catch (const PlanExecutionError& error) {
      EXPECT_EQ(error.plan, "ten");
      EXPECT_EQ(error.phase, Phase::kEnter);
      EXPECT_EQ(error.index, 6U);
      EXPECT_EQ(error.completed.size(), 6U);
      EXPECT_NE(error.failed.find(to_string(handles[6])), std::string::npos) << error.failed;
      EXPECT_THROW(std::rethrow_exception(error.cause), fake::OutOfMemory);
      EXPECT_EQ(error.state_restored, on_failure == OnFailure::kRollback);
      for (std::size_t i = 0; i < 6; ++i) {
        EXPECT_EQ(error.completed[i].handle, handles[i]);
      }
    }
    backend->complete_all();
    if (on_failure == OnFailure::kRollback) {
      // cuda:0 was listed by what was completed before; it stays listed, with nothing in it.
      const std::string after = fingerprint(manager->snapshot());
      EXPECT_EQ(used(kCuda0), Bytes());
      EXPECT_EQ(after.substr(0, after.find("pageable-host - ")),
                before.substr(0, before.find("pageable-host - ")));
      for (const auto& [at, bytes] : live) {
        EXPECT_EQ(backend->live_bytes(at), bytes) << to_string(at);
      }
      for (std::size_t i = 0; i < handles.size(); ++i) {
        EXPECT_TRUE(holds(handles[i], i % 2 == 0 ? kPageable : kPinned));
      }
    } else {
      for (std::size_t i = 0; i < 6; ++i) {
        EXPECT_TRUE(holds(handles[i], kCuda0));
      }
    }
  }
  // With memory available the same plan goes through.
  for (std::size_t i = 0; i < 6; ++i) {
    manager->move(handles[i], i % 2 == 0 ? kPageable : kPinned);
  }
  backend->complete_all();
}

// They are made together, with some that have nothing to do in between.
TEST_F(RollbackTest, CopiesBeforeTheOneThatCannotAllocateAreMade) {
  fake_options.capacity[kCuda0] = 3072_B;
  start();
  std::vector<Handle> handles;
  ActionList actions;
  for (int i = 0; i < 10; ++i) {
    handles.push_back(adopt(kPinned, 512));
    actions.push_back(i == 2   ? ResidencyAction(EnsureResident{handles.back(), kPinned})
                      : i == 4 ? ResidencyAction(MoveResident{handles.back(), kCuda0})
                               : ResidencyAction(EnsureResident{handles.back(), kCuda0}));
  }
  for (const auto on_failure : {OnFailure::kRollback, OnFailure::kKeep}) {
    ExecuteOptions options;
    options.on_failure = on_failure;
    try {
      manager->execute(actions, options);
      FAIL();
    } catch (const PlanExecutionError& error) {
      EXPECT_EQ(error.index, 7U);
      EXPECT_EQ(error.completed.size(), 7U);
      EXPECT_THROW(std::rethrow_exception(error.cause), fake::OutOfMemory);
      EXPECT_EQ(error.state_restored, on_failure == OnFailure::kRollback);
    }
    backend->complete_all();
    EXPECT_EQ(used(kCuda0), on_failure == OnFailure::kRollback ? 0_B : 3072_B);
    EXPECT_EQ(backend->live_bytes(kCuda0), used(kCuda0));
    for (std::size_t i = 0; i < handles.size(); ++i) {
      const bool there = on_failure == OnFailure::kKeep && i < 7 && i != 2;
      EXPECT_TRUE(holds(handles[i], there ? kCuda0 : kPinned)) << i;
    }
    manager->audit();
  }
  const auto trace = manager->trace();
  EXPECT_EQ(std::ranges::count_if(trace, &TransitionRecord::failed), 2);
}

// What is asked for twice in one call is there the second time.
TEST_F(RollbackTest, OneValueTwiceAmongCopiesThatAreMadeTogether) {
  start();
  const Handle first = adopt(kPinned, 512);
  const Handle second = adopt(kPinned, 512);
  const PlanReport report =
      manager->execute(ActionList{EnsureResident{first, kCuda0}, EnsureResident{second, kCuda0},
                                  EnsureResident{first, kCuda0}, MoveResident{second, kCuda0}});
  ASSERT_EQ(report.size(), 4U);
  EXPECT_EQ(report[1].reason, Reason::kCopied);
  EXPECT_EQ(report[2].reason, Reason::kAlreadyResident);
  EXPECT_EQ(report[3].reason, Reason::kReleased);
  backend->complete_all();
  EXPECT_TRUE(holds(first, kCuda0));
  EXPECT_TRUE(holds(second, kCuda0));
  EXPECT_EQ(used(kPinned), 512_B);
  manager->audit();
}

TEST_F(RollbackTest, WhatCannotBeUndoneIsSaid) {
  const Warnings warnings;
  start();
  const Handle a = adopt(kPinned, 512);
  const Handle gone = adopt(kPinned, 512);
  const ActionList actions = {MoveResident{a, kCuda0}, DiscardValue{gone},
                              EnsureResident{a, kCuda1}};
  backend->fail(Call::kCopy, 2);
  ExecuteOptions execute;
  execute.on_failure = OnFailure::kRollback;
  try {
    manager->execute(actions, execute);
    FAIL();
  } catch (const PlanExecutionError& error) {
    EXPECT_FALSE(error.state_restored);
    EXPECT_EQ(error.index, 2U);
  }
  EXPECT_EQ(places(a).size(), 1U);
  EXPECT_TRUE(holds(a, places(a)[0]));
}

TEST_F(RollbackTest, EscapedBytesAreNotRestored) {
  start();
  const auto spec = make_spec(512);
  auto mine = backend->make_block(kPinned, spec, 9);
  std::shared_ptr<void> alias = mine->share();
  const Handle shared = manager->adopt(std::move(mine), spec);
  seeds[shared] = 9;
  const ActionList actions = {MoveResident{shared, kCuda0}, EnsureResident{shared, kCuda1}};
  backend->fail(Call::kCopy, 2);
  ExecuteOptions execute;
  execute.on_failure = OnFailure::kRollback;
  try {
    manager->execute(actions, execute);
    FAIL();
  } catch (const PlanExecutionError& error) {
    EXPECT_FALSE(error.state_restored) << "the alias keeps bytes that were not there before";
  }
  EXPECT_TRUE(holds(shared, kPinned));
  EXPECT_EQ(account(kPinned).escaped, 512_B);
  alias.reset();
  EXPECT_EQ(used(kPinned), 512_B);
}

}  // namespace
}  // namespace residency::test
