// Section O: threads, calls from inside a source, closing, forks and the end of the process.

#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <latch>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "fixture.h"

namespace residency::test {
namespace {

/// Makes one call on a thread of its own, and can tell when that call waits for something.
class Calling {
 public:
  explicit Calling(std::function<void()> call)
      : thread_([this, call = std::move(call)] {
          id_.store(gettid());
          try {
            call();
          } catch (...) {
            error_ = std::current_exception();
          }
          ended_.store(true);
        }) {}
  Calling(const Calling&) = delete;
  Calling& operator=(const Calling&) = delete;
  ~Calling() {
    if (thread_.joinable()) {
      thread_.join();
    }
  }

  /// Returns when the thread sleeps and goes on sleeping. The mutexes that it takes on its way are
  /// free by then, so what it sleeps on is somebody else's turn, a fence or the test.
  void wait_until_blocked() {
    for (int num_asleep = 0; num_asleep < 5;) {
      if (ended_.load()) {
        ADD_FAILURE() << "the call did not wait";
        return;
      }
      num_asleep = is_asleep() ? num_asleep + 1 : 0;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  [[nodiscard]] bool ended() const { return ended_.load(); }
  /// Waits for the call, and throws what it threw.
  void finish() {
    thread_.join();
    if (error_) {
      std::rethrow_exception(error_);
    }
  }

 private:
  [[nodiscard]] bool is_asleep() const {
    const pid_t id = id_.load();
    if (id == 0) {
      return false;
    }
    std::ifstream file("/proc/self/task/" + std::to_string(id) + "/stat");
    std::string text;
    std::getline(file, text);
    const auto after_name = text.rfind(')');
    return after_name != std::string::npos && text.compare(after_name, 3, ") S") == 0;
  }

  std::atomic<pid_t> id_{0};
  std::atomic<bool> ended_{false};
  std::exception_ptr error_;
  std::thread thread_;  // the last: it uses the others
};

/// A load that waits for the test.
struct Gate {
  std::latch entered{1};
  std::latch open{1};
  void pass() {
    entered.count_down();
    open.wait();
  }
};

class ThreadsTest : public ManagerTest {
 protected:
  /// Every call that a manager offers, each of them legal on `handle`, a value in pageable memory.
  using Calls = std::vector<std::pair<std::string, std::function<void()>>>;
  Calls all_calls(const Handle& handle) {
    Manager& m = *manager;
    const ResidencyPlan plan({.name = "plan", .enter = {EnsureResident{handle, kPinned}}});
    const auto one = std::vector{handle};
    return {
        {"register_source",
         [&m, this] {
           const auto spec = make_spec(8, kReplicable, kReconstructible);
           (void)m.register_source(std::make_shared<FakeSource>(backend, kPageable, spec, 1), spec);
         }},
        {"adopt",
         [&m, this] {
           (void)m.adopt(backend->make_block(kPageable, make_spec(8), 1), make_spec(8));
         }},
        {"take", [&m, handle] { (void)m.take(handle); }},
        {"ensure", [&m, handle] { m.ensure(handle, kPinned); }},
        {"move", [&m, handle] { m.move(handle, kPinned); }},
        {"drop", [&m, handle] { m.drop(handle, kPinned); }},
        {"discard", [&m, handle] { m.discard(handle); }},
        {"apply",
         [&m, handle] {
           m.apply(EnsureResident{handle, kPinned});
         }},
        {"execute", [&m, plan] { m.execute(plan.enter()); }},
        {"explain a plan", [&m, plan] { (void)m.explain(plan); }},
        {"explain actions", [&m, plan] { (void)m.explain(plan.enter()); }},
        {"scope", [&m, plan] { (void)m.scope(plan); }},
        {"with", [&m, plan] { m.with(plan, [](Scope&) {}); }},
        {"acquire", [&m, one] { m.acquire(one, kPageable).release(); }},
        {"borrow", [&m, one] { m.borrow(one, kPinned).release(); }},
        {"hold", [&m, one] { m.hold(one, kPageable).release(); }},
        {"reserve",
         [&m] {
           m.reserve({kPageable, 1_B, "label"}).release();
         }},
        {"set_budget", [&m] { m.set_budget(kCuda1, 1_B); }},
        {"reset_peaks", [&m] { m.reset_peaks(); }},
        {"forget_discarded", [&m] { (void)m.forget_discarded(); }},
        {"locations", [&m] { (void)m.locations(); }},
        {"snapshot", [&m] { (void)m.snapshot(); }},
        {"state_version", [&m] { (void)m.state_version(); }},
        {"synchronize", [&m] { m.synchronize(); }},
    };
  }

  /// The calls that did not end in the expected error, with what they did instead.
  template <class Expected>
  static std::vector<std::string> not_refused(const Calls& calls) {
    std::vector<std::string> wrong;
    for (const auto& [name, call] : calls) {
      try {
        call();
        wrong.push_back(name + " was served");
      } catch (const Expected&) {
        continue;
      } catch (const std::exception& error) {
        wrong.push_back(name + " threw " + error.what());
      }
    }
    return wrong;
  }
};

using ReentrancyTest = ThreadsTest;
using CloseTest = ThreadsTest;
using ForkTest = ThreadsTest;

// --- Calls from inside a load

TEST_F(ReentrancyTest, EveryCallOnTheSameThreadIsRefusedAndTheLoadGoesOn) {
  start();
  const Handle loading = source(100);
  const Handle other = adopt(kPageable, 100);
  std::vector<std::string> wrong;
  sources[loading]->before_load = [&] {
    Calls calls = all_calls(other);
    calls.emplace_back("close", [this] { manager->close({.force = true}); });
    wrong = not_refused<ReentrancyError>(calls);
  };
  manager->ensure(loading, kCuda0);
  EXPECT_EQ(wrong, std::vector<std::string>());
  EXPECT_TRUE(holds(loading, kCuda0));
  EXPECT_EQ(places(other), std::vector{kPageable});
}

TEST_F(ReentrancyTest, IsNoticedHoweverTheLoadWasReached) {
  start();
  const Handle loading = source(100);
  sources[loading]->before_load = [&] { (void)manager->snapshot(); };
  const std::array handles = {loading};
  EXPECT_THROW(manager->ensure(loading, kPageable), ReentrancyError);
  EXPECT_THROW(manager->move(loading, kCuda0), ReentrancyError);
  EXPECT_THROW((void)manager->borrow(handles, kCuda0), ReentrancyError);
  const ActionList actions = {EnsureResident{loading, kPinned}};
  EXPECT_THROW(manager->execute(actions), PlanExecutionError);
  EXPECT_EQ(places(loading), std::vector<Location>());
}

TEST_F(ReentrancyTest, GuardsAreRefusedTooAndStayWhatTheyWere) {
  start();
  const Handle loading = source(100);
  const Handle other = adopt(kPinned, 100);
  Lease lease = acquire(other, kPinned);
  Hold held = hold(other, kPinned);
  Reservation reservation = manager->reserve({kCuda0, 10_B, "headroom"});
  Reservation released = manager->reserve({kCuda0, 10_B, "headroom"});
  released.release();
  const auto num_begun = backend->num_calls(Call::kEndAccess);
  sources[loading]->before_load = [&] {
    EXPECT_THROW((void)lease.view(other), ReentrancyError);
    EXPECT_THROW(lease.release(), ReentrancyError);
    EXPECT_THROW(held.release(), ReentrancyError);
    EXPECT_THROW(reservation.release(), ReentrancyError);
    EXPECT_NO_THROW(released.release()) << "twice is harmless, and touches nothing";
    EXPECT_EQ(lease.handles()[0], other);
  };
  manager->ensure(loading, kPageable);
  EXPECT_EQ(backend->num_calls(Call::kEndAccess), num_begun);
  EXPECT_TRUE(lease.active());
  EXPECT_TRUE(held.active());
  EXPECT_TRUE(reservation.active());
  EXPECT_TRUE(block(lease, other).holds(seeds[other]));
  lease.release();
  held.release();
  reservation.release();
}

TEST_F(ReentrancyTest, GuardsThatDieInTheLoadAreReleased) {
  const Warnings warnings;
  start();
  const Handle loading = source(100);
  const Handle other = adopt(kPinned, 100);
  auto lease = std::make_unique<Lease>(acquire(other, kPinned));
  auto held = std::make_unique<Hold>(hold(other, kPinned));
  auto reservation = std::make_unique<Reservation>(manager->reserve({kCuda0, 10_B, "headroom"}));
  auto scope = std::make_unique<Scope>(manager->scope(
      ResidencyPlan({.name = "a plan", .reservations = {{kPinned, 5_B, "of the plan"}}})));
  scope->enter();
  sources[loading]->before_load = [&] {
    lease.reset();
    held.reset();
    reservation.reset();
    scope.reset();
  };
  manager->ensure(loading, kPageable);
  EXPECT_EQ(warnings.texts().size(), 4U) << "one of each, and no other";
  EXPECT_FALSE(at(other, kPinned).num_leases + at(other, kPinned).num_holds);
  EXPECT_EQ(account(kCuda0).reserved, Bytes());
  EXPECT_EQ(account(kPinned).reserved, Bytes());
  EXPECT_NO_THROW(manager->close());
}

TEST_F(ReentrancyTest, SurvivesAnErrorThatTheSourceSwallows) {
  start();
  const Handle loading = source(100);
  sources[loading]->before_load = [&] {
    EXPECT_THROW(manager->ensure(loading, kCuda0), ReentrancyError);
    throw std::runtime_error("the load failed");
  };
  EXPECT_THROW(manager->ensure(loading, kPageable), std::runtime_error);
  // The thread is not taken for one that is still loading.
  sources[loading]->before_load = nullptr;
  EXPECT_NO_THROW(manager->ensure(loading, kPageable));
}

TEST_F(ReentrancyTest, AnotherThreadIsServedDuringTheLoad) {
  start();
  const Handle loading = source(100);
  const Handle other = adopt(kPageable, 100);
  std::vector<Location> seen = {kDisk};
  sources[loading]->before_load = [&] {
    Calling([&] {
      seen = places(loading);
      manager->ensure(other, kPinned);
    }).finish();
  };
  manager->ensure(loading, kCuda0);
  EXPECT_EQ(seen, std::vector<Location>());
  EXPECT_EQ(places(other), (std::vector{kPageable, kPinned}));
}

TEST_F(ReentrancyTest, AnotherManagerIsServedOnTheSameThread) {
  start();
  const auto other_backend = std::make_shared<FakeBackend>();
  const auto other = Manager::create({}, other_backend);
  const auto spec = make_spec(64, kReplicable, kReconstructible);
  const auto inner = std::make_shared<FakeSource>(other_backend, kPageable, spec, 7);
  const Handle needed = other->register_source(inner, spec);
  const Handle loading = source(100);
  bool refused_two_deep = false;
  inner->before_load = [&] {
    try {
      (void)manager->snapshot();
    } catch (const ReentrancyError&) {
      refused_two_deep = true;
    }
  };
  sources[loading]->before_load = [&] { other->ensure(needed, kPageable); };
  manager->ensure(loading, kCuda0);
  EXPECT_EQ(inner->num_loads, 1);
  EXPECT_TRUE(refused_two_deep) << "the outer manager is still loading on this thread";
  other->close();
}

// --- Threads

TEST_F(ThreadsTest, SixteenThreadsEnsureTheSameValueAndOneCopyIsMade) {
  start();
  const Handle handle = source(100);
  std::barrier together(16);
  std::atomic<int> num_changes{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      together.arrive_and_wait();
      const auto report = manager->ensure(handle, kCuda0);
      report.wait();
      num_changes += report.no_op() ? 0 : 1;
      EXPECT_TRUE(holds(handle, kCuda0));
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(num_changes, 1);
  EXPECT_EQ(sources[handle]->num_loads, 1);
  EXPECT_EQ(backend->num_calls(Call::kCopy), 1U);
  EXPECT_EQ(places(handle), std::vector{kCuda0});
}

TEST_F(ThreadsTest, SixteenThreadsBorrowTheSameValueAndOneCopyIsMade) {
  start();
  const Handle handle = adopt(kPinned, 100);
  std::barrier together(16);
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      together.arrive_and_wait();
      const std::array handles = {handle};
      Lease lease = manager->borrow(handles, kPageable);
      EXPECT_TRUE(block(lease, handle).holds(seeds.at(handle)));
      lease.release();
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(backend->num_calls(Call::kCopy), 1U);
}

TEST_F(ThreadsTest, SlowLoadOfOneValueBlocksNoCallOnAnother) {
  start();
  const Handle slow = source(100);
  const Handle other = adopt(kPageable, 100);
  Gate gate;
  sources[slow]->before_load = [&] { gate.pass(); };
  Calling loading([&] { manager->ensure(slow, kCuda0); });
  gate.entered.wait();
  for (const auto& [name, call] : all_calls(other)) {
    if (name == "synchronize" || name == "take" || name == "discard" || name == "move" ||
        name == "set_budget") {
      continue;  // the first waits for everything by intent, the others end or change the value
    }
    EXPECT_NO_THROW(call()) << name;
  }
  manager->move(other, kCuda1);
  manager->discard(other);
  EXPECT_FALSE(loading.ended());
  gate.open.count_down();
  loading.finish();
  EXPECT_TRUE(holds(slow, kCuda0));
}

TEST_F(ThreadsTest, SlowLoadIsChargedWhileItLasts) {
  budget(kPageable, 128_B);
  start();
  const Handle slow = source(100);
  const Handle other = source(100);
  Gate gate;
  sources[slow]->before_load = [&] { gate.pass(); };
  Calling loading([&] { manager->ensure(slow, kPageable); });
  gate.entered.wait();
  EXPECT_EQ(used(kPageable), 128_B);
  EXPECT_THROW(manager->ensure(other, kPageable), BudgetError);
  EXPECT_EQ(places(slow), std::vector<Location>()) << "it is not there yet";
  gate.open.count_down();
  loading.finish();
}

TEST_F(ThreadsTest, CallThatMayNotBlockDoesNotWaitForAnotherOnTheSameValue) {
  start();
  const Handle slow = source(100);
  const Handle handles[] = {slow};
  Gate gate;
  sources[slow]->before_load = [&] { gate.pass(); };
  Calling loading([&] { manager->ensure(slow, kPageable); });
  gate.entered.wait();
  const ActionOptions impatient{.may_block = false};
  const AcquireOptions impatient_lease{.may_block = false};
  EXPECT_THROW(manager->ensure(slow, kPageable, impatient), UnavailableError);
  EXPECT_THROW(manager->move(slow, kCuda0, std::nullopt, impatient), UnavailableError);
  EXPECT_THROW(manager->acquire(handles, kPageable, impatient_lease).release(), UnavailableError);
  EXPECT_THROW(manager->borrow(handles, kPageable, impatient_lease).release(), UnavailableError);
  gate.open.count_down();
  loading.finish();
  manager->borrow(handles, kPageable, impatient_lease).release();
}

TEST_F(ThreadsTest, TakeFollowsAValueThatAnotherThreadMovesToDisk) {
  fake_options.completion = fake::Completion::kImmediate;
  start();
  for (int round = 0; round < 300; ++round) {
    const Handle handle = adopt(kPageable, 100);
    Calling moving([&] {
      try {
        for (int i = 0; i < 10; ++i) {
          manager->move(handle, i % 2 == 0 ? kDisk : kPageable);
        }
      } catch (const HandleError&) {
        // It was taken.
      }
    });
    const BlockPtr taken = manager->take(handle);
    moving.finish();
    ASSERT_FALSE(taken->location().is_disk());
    ASSERT_TRUE(dynamic_cast<FakeBlock&>(*taken).holds(seeds[handle]));
  }
}

TEST_F(ThreadsTest, CallsOnTheSameValueAreServedInTheOrderTheyCame) {
  start();
  const Handle handle = source(100);
  Gate gate;
  sources[handle]->before_load = [&] { gate.pass(); };
  std::vector<std::unique_ptr<Calling>> callers;
  callers.push_back(std::make_unique<Calling>([&] { manager->ensure(handle, kPageable); }));
  gate.entered.wait();
  const std::vector<Location> targets = {kPinned, kCuda0, kPageable, kCuda1, kPinned, kPageable};
  for (const Location target : targets) {
    callers.push_back(std::make_unique<Calling>([&, target] { manager->move(handle, target); }));
    callers.back()->wait_until_blocked();
  }
  gate.open.count_down();
  for (const auto& caller : callers) {
    caller->finish();
  }
  std::vector<Location> served;
  for (const auto& record : manager->trace()) {
    served.push_back(record.destination.value());
  }
  std::vector<Location> expected = {kPageable};
  expected.insert(expected.end(), targets.begin(), targets.end());
  EXPECT_EQ(served, expected);
  EXPECT_EQ(places(handle), std::vector{kPageable});
}

TEST_F(ThreadsTest, GuardsOfAValueWaitForTheActionUnderWay) {
  start();
  const Handle handle = source(100);
  Gate gate;
  sources[handle]->before_load = [&] { gate.pass(); };
  Calling loading([&] { manager->ensure(handle, kPageable); });
  gate.entered.wait();
  Calling acquiring([&] { acquire(handle, kPageable).release(); });
  acquiring.wait_until_blocked();
  Calling holding([&] { hold(handle, kPageable).release(); });
  holding.wait_until_blocked();
  Calling moving([&] { manager->move(handle, kPinned); });
  moving.wait_until_blocked();
  gate.open.count_down();
  EXPECT_NO_THROW(acquiring.finish()) << "it came after the ensure and before the move";
  EXPECT_NO_THROW(holding.finish());
  loading.finish();
  // Whether the guards had ended by then is another question.
  EXPECT_NO_THROW(try { moving.finish(); } catch (const InUseError&){});
}

TEST_F(ThreadsTest, GuardsOfSeveralValuesInAnyOrderDoNotWaitForEachOther) {
  start();
  const Handle first = source(100);
  const Handle second = source(100);
  Gate gates[2];
  sources[first]->before_load = [&] { gates[0].pass(); };
  sources[second]->before_load = [&] { gates[1].pass(); };
  Calling loading_first([&] { manager->ensure(first, kPageable); });
  Calling loading_second([&] { manager->ensure(second, kPageable); });
  gates[0].entered.wait();
  gates[1].entered.wait();
  std::vector<std::unique_ptr<Calling>> guards;
  for (int i = 0; i < 4; ++i) {
    guards.push_back(std::make_unique<Calling>([&, i] {
      const std::array forward = {first, second};
      const std::array backward = {second, first};
      if (i % 2 == 0) {
        manager->acquire(forward, kPageable).release();
        manager->hold(forward, kPageable).release();
      } else {
        manager->hold(backward, kPageable).release();
        manager->acquire(backward, kPageable).release();
      }
    }));
    guards.back()->wait_until_blocked();
  }
  gates[1].open.count_down();
  loading_second.finish();
  gates[0].open.count_down();
  for (const auto& guard : guards) {
    EXPECT_NO_THROW(guard->finish());
  }
  EXPECT_EQ(manager->snapshot().num_leases, 0U);
}

TEST_F(ThreadsTest, HoldThatWaitsForAnArrivalThatFailsIsATransferError) {
  start();
  const Handle handle = adopt(kPageable, 100);
  backend->set_waits_block(true);
  backend->fail(Call::kTransfer, 1);
  manager->ensure(handle, kCuda0);
  Calling holding([&] { hold(handle, kCuda0).release(); });
  holding.wait_until_blocked();
  backend->complete_all();
  EXPECT_THROW(holding.finish(), TransferError);
  EXPECT_EQ(manager->snapshot().num_holds, 0U);
}

TEST_F(ThreadsTest, CallThatWaitsForATransferKeepsItsPlaceInTheOrder) {
  start();
  const Handle handle = adopt(kPageable, 100);
  backend->set_waits_block(true);
  manager->ensure(handle, kCuda0);
  Calling dropping([&] { manager->drop(handle, kPageable); });  // waits for the arrival
  dropping.wait_until_blocked();
  Calling ensuring([&] { manager->ensure(handle, kPageable); });
  ensuring.wait_until_blocked();
  backend->complete_all();
  dropping.finish();
  backend->set_waits_block(false);
  ensuring.finish();
  EXPECT_EQ(places(handle), (std::vector{kPageable, kCuda0})) << "dropped, then made again";
  EXPECT_EQ(manager->trace().back().reason, Reason::kCopied);
}

TEST_F(ThreadsTest, DiscardOfAValueBeingLoadedComesAfterAndLaterCallsFindItDiscarded) {
  start();
  const Handle handle = source(100);
  Gate gate;
  sources[handle]->before_load = [&] { gate.pass(); };
  Calling loading([&] { manager->ensure(handle, kPageable); });
  gate.entered.wait();
  Calling discarding([&] { manager->discard(handle); });
  discarding.wait_until_blocked();
  Calling ensuring([&] { manager->ensure(handle, kCuda0); });
  ensuring.wait_until_blocked();
  gate.open.count_down();
  EXPECT_NO_THROW(loading.finish());
  EXPECT_NO_THROW(discarding.finish());
  EXPECT_THROW(ensuring.finish(), HandleError);
  EXPECT_EQ(used(kPageable), Bytes());
}

TEST_F(ThreadsTest, FailedLoadHandsTheTurnToTheNextCallWhichLoadsAgain) {
  start();
  const Handle handle = source(100);
  Gate gate;
  sources[handle]->before_load = [&] {
    if (sources[handle]->num_loads == 1) {
      gate.pass();
      throw std::runtime_error("the first load fails");
    }
  };
  Calling first([&] { manager->ensure(handle, kPageable); });
  gate.entered.wait();
  Calling second([&] { manager->ensure(handle, kPageable); });
  second.wait_until_blocked();
  gate.open.count_down();
  EXPECT_THROW(first.finish(), std::runtime_error);
  EXPECT_NO_THROW(second.finish());
  EXPECT_EQ(sources[handle]->num_loads, 2);
}

TEST_F(ThreadsTest, WaitForATransferOfOneValueBlocksNoCallOnAnother) {
  start();
  const Handle waiting = adopt(kPageable, 100);
  const Handle other = adopt(kPageable, 100);
  backend->set_waits_block(true);
  manager->ensure(waiting, kCuda0);
  // The only settled copy: it cannot go before the other is known to have arrived.
  Calling dropping([&] { manager->drop(waiting, kPageable); });
  dropping.wait_until_blocked();
  EXPECT_EQ(manager->ensure(other, kPinned).reason(), Reason::kCopied);
  EXPECT_EQ(places(waiting), (std::vector{kPageable, kCuda0}));
  backend->complete_all();
  dropping.finish();
  EXPECT_EQ(places(waiting), std::vector{kCuda0});
}

TEST_F(ThreadsTest, AdmissionThatWaitsForRetiringBytesBlocksNobodyElse) {
  budget(kPageable, 128_B);
  start();
  const Handle leaving = adopt(kPageable, 128);
  backend->set_waits_block(true);
  manager->move(leaving, kCuda0);
  ASSERT_EQ(account(kPageable).retiring, 128_B);
  Calling reserving([&] { manager->reserve({kPageable, 64_B, "later"}).release(); });
  reserving.wait_until_blocked();
  const Handle other = adopt(kPinned, 100);
  manager->ensure(other, kCuda1);
  backend->complete_all();
  EXPECT_NO_THROW(reserving.finish());
}

TEST_F(ThreadsTest, LeaseThatWaitsForAnArrivalOutlivesItsFailure) {
  start();
  const Handle fails = adopt(kPageable, 100);
  const Handle arrives = adopt(kPageable, 100);
  backend->set_waits_block(true);
  backend->fail(Call::kTransfer, 1);
  manager->ensure(fails, kCuda0);
  manager->ensure(arrives, kCuda0);
  const std::array both = {fails, arrives};
  Calling acquiring([&] { manager->acquire(both, kCuda0).release(); });
  acquiring.wait_until_blocked();
  ASSERT_TRUE(backend->complete(fails, kCuda0));
  // Others find out about the failure while the lease still waits for the second value.
  manager->ensure(adopt(kPageable, 8), kPinned);
  EXPECT_EQ(at(fails, kCuda0).num_leases, 1U) << "what is leased is not taken away";
  acquiring.wait_until_blocked();
  ASSERT_TRUE(backend->complete(arrives, kCuda0));
  EXPECT_THROW(acquiring.finish(), TransferError);
  backend->set_waits_block(false);
  EXPECT_EQ(places(fails), std::vector{kPageable});
  EXPECT_EQ(at(arrives, kCuda0).num_leases, 0U);
  EXPECT_EQ(manager->snapshot().num_leases, 0U);
  EXPECT_NO_THROW(manager->audit());
  EXPECT_NO_THROW(manager->ensure(fails, kCuda0));
  EXPECT_TRUE(holds(fails, kCuda0));
}

TEST_F(ThreadsTest, WriteLeaseOfAnArrivalIsWaitedForByWhoeverReadsNext) {
  start();
  const Handle handle = adopt(kPageable, 100, kReplicable, kMutable);
  manager->ensure(handle, kCuda0);  // a path that can fail later
  Lease lease = acquire(handle, kCuda0, Access::kWrite);
  backend->launch_write({kCuda0, 0}, block(lease, handle), seeds[handle] = 77);
  lease.release();
  (void)manager->snapshot();  // the arrival that was before is noticed now
  manager->ensure(handle, kPinned);
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(ThreadsTest, ArrivalThatALeaseWaitedForHasNoSayInWhatComesAfter) {
  start();
  const Handle other = adopt(kPageable, 100);
  const Handle handle = adopt(kPageable, 100, kReplicable, kMutable);
  manager->ensure(other, kCuda1);  // stays in flight, so that nothing behind it is looked at
  manager->ensure(handle, kCuda0);
  Lease lease = acquire(handle, kCuda0, Access::kWrite);
  backend->launch_write({kCuda0, 0}, block(lease, handle), seeds[handle] = 77);
  lease.release();
  manager->move(handle, kPinned, kCuda0);
  backend->complete_all();
  EXPECT_NO_THROW(manager->audit());
  EXPECT_EQ(places(handle), (std::vector{kPageable, kPinned}));
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(ThreadsTest, LeaseCanBeReleasedByAnotherThread) {
  start();
  const Handle handle = adopt(kPageable, 100);
  Lease lease = acquire(handle, kPageable);
  Calling([&] { lease.release(); }).finish();
  EXPECT_FALSE(lease.active());
  EXPECT_EQ(at(handle, kPageable).num_leases, 0U);
  EXPECT_NO_THROW(manager->move(handle, kPinned));
}

TEST_F(ThreadsTest, StreamAddedBesideAReleaseIsRecordedOrRefused) {
  start();
  const Handle a = adopt(kPinned, 100);
  manager->ensure(a, kCuda0);
  backend->complete_all();
  const Handle handles[] = {a};
  for (int round = 0; round < 2000; ++round) {
    const std::uint64_t recorded = backend->num_calls(Call::kRecordUse);
    Lease lease = manager->acquire(handles, kCuda0, {.stream = Stream{kCuda0, 1}});
    std::uint64_t num_added = 0;
    std::barrier together(2);
    std::thread adds([&] {
      together.arrive_and_wait();
      try {
        for (std::int64_t stream = 2; stream < 10; ++stream) {
          lease.add_stream({kCuda0, stream});
          ++num_added;
        }
      } catch (const LifetimeClosedError&) {
        // The release was first.
      }
    });
    together.arrive_and_wait();
    lease.release();
    adds.join();
    ASSERT_EQ(backend->num_calls(Call::kRecordUse) - recorded, 1 + num_added);
    backend->complete_all();
  }
}

TEST_F(ThreadsTest, LeaseReleasedBySixteenThreadsAtOnceEndsOnce) {
  start();
  const Handle handle = adopt(kPageable, 100);
  Lease kept = acquire(handle, kPageable);
  Lease lease = acquire(handle, kPageable);
  std::barrier together(16);
  std::vector<std::thread> threads;
  for (int i = 0; i < 16; ++i) {
    threads.emplace_back([&] {
      together.arrive_and_wait();
      lease.release();
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(at(handle, kPageable).num_leases, 1U);
  EXPECT_EQ(backend->num_calls(Call::kEndAccess), 1U);
  kept.release();
}

// --- Close

TEST_F(CloseTest, WithGuardsLeftIsRefusedWithTheCounts) {
  start();
  const Handle handle = adopt(kPageable, 100);
  Lease first = acquire(handle, kPageable);
  Lease second = acquire(handle, kPageable);
  Hold held = hold(handle, kPageable);
  Reservation reservation = manager->reserve({kCuda0, 10_B, "headroom"});
  Scope scope = manager->scope(
      ResidencyPlan({.name = "a plan", .reservations = {{kPinned, 5_B, "of the plan"}}}));
  scope.enter();
  const auto error = refused<InUseError>([&] { manager->close(); });
  EXPECT_EQ(error->protection.num_leases, 2U);
  EXPECT_EQ(error->protection.num_holds, 1U);
  EXPECT_EQ(error->num_reservations, 2U);
  EXPECT_EQ(error->num_scopes, 1U);
  EXPECT_EQ(error->num_only_on_disk, 0U);
  EXPECT_FALSE(manager->closed());
  scope.close();
  first.release();
  second.release();
  held.release();
  EXPECT_EQ(refused<InUseError>([&] { manager->close(); })->num_reservations, 1U);
  reservation.release();
  manager->close();
  EXPECT_TRUE(manager->closed());
}

TEST_F(CloseTest, WithTheOnlyCopyOnDiskIsRefusedUnlessForced) {
  start();
  const Handle only_there = adopt(kPageable, 100);
  manager->move(only_there, kDisk);
  const Handle also_elsewhere = adopt(kPageable, 100);
  manager->ensure(also_elsewhere, kDisk);
  const Handle with_source = source(100);
  manager->move(with_source, kDisk);
  const Handle good_only_there = adopt(kPageable, 100, kReplicable, kMutable);
  manager->ensure(good_only_there, kDisk);
  manager->synchronize();
  EXPECT_EQ(refused<InUseError>([&] { manager->close(); })->num_only_on_disk, 1U);
  manager->discard(only_there);
  // A stale copy elsewhere is worth nothing.
  manager->ensure(good_only_there, kPinned);
  Lease lease = acquire(good_only_there, kPinned, Access::kWrite);
  block(lease, good_only_there).write(7);
  lease.release();
  manager->move(good_only_there, kDisk, kPinned);
  manager->synchronize();
  ASSERT_EQ(places(good_only_there), (std::vector{kPageable, kDisk}));
  EXPECT_EQ(refused<InUseError>([&] { manager->close(); })->num_only_on_disk, 1U);
  manager->close({.force = true});
  EXPECT_TRUE(manager->closed());
}

TEST_F(CloseTest, OfAWrittenValueWhoseSourceCannotMakeItAgainCountsAsOnlyOnDisk) {
  start();
  const Handle handle = source(100, kPageable, kReplicable, kMutable);
  manager->ensure(handle, kPageable);
  Lease lease = acquire(handle, kPageable, Access::kWrite);
  block(lease, handle).write(7);
  lease.release();
  manager->move(handle, kDisk);
  manager->synchronize();
  EXPECT_EQ(refused<InUseError>([&] { manager->close(); })->num_only_on_disk, 1U);
}

TEST_F(CloseTest, ForceEndsEverythingAndLaterReleasesDoNothing) {
  const Warnings warnings;
  start();
  const Handle handle = adopt(kPinned, 100);
  manager->ensure(handle, kCuda0);
  Lease lease = acquire(handle, kCuda0);
  backend->launch_read({kCuda0, 0}, block(lease, handle), seeds[handle]);
  Hold held = hold(handle, kPinned);
  Reservation reservation = manager->reserve({kCuda0, 10_B, "headroom"});
  Scope scope = manager->scope(ResidencyPlan({.name = "a plan",
                                              .reservations = {{kPinned, 5_B, "of the plan"}},
                                              .exit = {EnsureResident{handle, kCuda1}}}));
  scope.enter();
  backend->allow_views_to_outlive_blocks();
  manager->close({.force = true});
  EXPECT_EQ(backend->num_queued(), 0U) << "it waits for the devices";
  EXPECT_EQ(backend->live_bytes(kCuda0), Bytes());
  EXPECT_FALSE(lease.active());
  EXPECT_FALSE(held.active());
  EXPECT_FALSE(reservation.active());
  const auto num_calls = backend->num_calls_that_can_fail();
  lease.release(true);
  held.release();
  reservation.release();
  scope.close();
  EXPECT_EQ(backend->num_calls_that_can_fail(), num_calls);
  EXPECT_EQ(lease.location(), kCuda0);
  EXPECT_EQ(reservation.fields().label, "headroom");
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(CloseTest, GuardsThatAreDestroyedAfterwardsSayNothing) {
  const Warnings warnings;
  start();
  const Handle handle = adopt(kPageable, 100);
  {
    const Lease lease = acquire(handle, kPageable);
    const Hold held = hold(handle, kPageable);
    const Reservation reservation = manager->reserve({kCuda0, 10_B, "headroom"});
    Scope scope = manager->scope(ResidencyPlan({.name = "a plan"}));
    scope.enter();
    manager->close({.force = true});
  }
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(CloseTest, GuardsMayOutliveTheManager) {
  const Warnings warnings;
  start();
  const Handle handle = adopt(kPageable, 100);
  Lease lease = acquire(handle, kPageable);
  Hold held = hold(handle, kPageable);
  Reservation reservation = manager->reserve({kCuda0, 10_B, "headroom"});
  Scope scope = manager->scope(ResidencyPlan({.name = "a plan"}));
  scope.enter();
  manager.reset();
  EXPECT_EQ(Manager::find(handle.id()), nullptr);
  EXPECT_FALSE(lease.active());
  EXPECT_THROW((void)lease.view(handle), ClosedError);
  lease.release();
  held.release();
  reservation.release();
  scope.close();
  EXPECT_TRUE(backend->closed());
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(CloseTest, AfterATransferFailedUnderACallThatHadTheTurn) {
  start();
  backend->set_waits_block(true);
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kCuda0);
  backend->fail(Call::kTransfer, 1);
  manager->ensure(handle, kDisk);
  Calling dropping([&] { manager->drop(handle, kPageable); });  // waits for both
  dropping.wait_until_blocked();
  ASSERT_TRUE(backend->complete(handle, kDisk));
  ASSERT_EQ(backend->transfer_status(handle, kDisk), FenceStatus::kFailed);
  EXPECT_EQ(used(kDisk), Bytes()) << "off the ledger, while the record still has it";
  Calling closing([&] { manager->close({.wait = false, .force = true}); });
  closing.wait_until_blocked();
  ASSERT_TRUE(backend->complete(handle, kCuda0));
  EXPECT_THROW(dropping.finish(), ClosedError);
  closing.finish();
  EXPECT_TRUE(backend->closed());
}

TEST_F(CloseTest, IsIdempotent) {
  start();
  adopt(kPageable, 100);
  manager->close();
  EXPECT_NO_THROW(manager->close());
  EXPECT_NO_THROW(manager->close({.wait = false, .force = true}));
  EXPECT_TRUE(manager->closed());
}

TEST_F(CloseTest, AfterwardsEveryOperationIsAClosedError) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kPinned);
  Lease lease = acquire(handle, kPinned);
  Scope entered = manager->scope(ResidencyPlan({.name = "entered"}));
  entered.enter();
  Scope fresh = manager->scope(ResidencyPlan({.name = "fresh"}));
  const ManagerId id = manager->id();
  Calls calls = all_calls(handle);
  manager->close({.force = true});
  calls.emplace_back("audit", [&] { manager->audit(); });
  calls.emplace_back("Lease::view", [&] { (void)lease.view(handle); });
  calls.emplace_back("Scope::enter", [&] { fresh.enter(); });
  EXPECT_EQ(not_refused<ClosedError>(calls), std::vector<std::string>());
  EXPECT_EQ(manager->id(), id);
  EXPECT_EQ(manager->trace().size(), 1U);
  EXPECT_EQ(manager->trace()[0].handle, handle);
}

TEST_F(CloseTest, WaitsForALoadThatIsUnderWay) {
  start();
  const Handle handle = source(100);
  Gate gate;
  sources[handle]->before_load = [&] { gate.pass(); };
  Calling loading([&] { manager->ensure(handle, kPageable); });
  gate.entered.wait();
  Calling closing([&] { manager->close(); });
  closing.wait_until_blocked();
  EXPECT_FALSE(backend->closed());
  EXPECT_THROW((void)manager->snapshot(), ClosedError) << "nothing new begins";
  gate.open.count_down();
  EXPECT_THROW(loading.finish(), ClosedError) << "nobody is left to give the value to";
  closing.finish();
  EXPECT_TRUE(backend->closed());
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
}

TEST_F(CloseTest, CallsThatWaitForTheirTurnAreClosedErrors) {
  start();
  const Handle handle = source(100);
  Gate gate;
  sources[handle]->before_load = [&] { gate.pass(); };
  Calling loading([&] { manager->ensure(handle, kPageable); });
  gate.entered.wait();
  Calling ensuring([&] { manager->ensure(handle, kCuda0); });
  Calling moving([&] { manager->move(handle, kPinned); });
  Calling acquiring([&] { acquire(handle, kPageable).release(); });
  ensuring.wait_until_blocked();
  moving.wait_until_blocked();
  acquiring.wait_until_blocked();
  Calling closing([&] { manager->close(); });
  closing.wait_until_blocked();
  gate.open.count_down();
  EXPECT_THROW(loading.finish(), ClosedError);
  EXPECT_THROW(ensuring.finish(), ClosedError);
  EXPECT_THROW(moving.finish(), ClosedError);
  EXPECT_THROW(acquiring.finish(), ClosedError);
  closing.finish();
}

TEST_F(CloseTest, WaitsForTransfersThatAreUnderWay) {
  start();
  const Handle staged = adopt(kPageable, 100);
  manager->move(staged, kCuda0);
  const Handle direct = adopt(kPinned, 100);
  manager->ensure(direct, kCuda1);
  backend->set_waits_block(true);
  Calling closing([&] { manager->close(); });
  closing.wait_until_blocked();
  EXPECT_FALSE(backend->closed());
  backend->complete_all();
  closing.finish();
  EXPECT_TRUE(backend->closed());
}

TEST_F(CloseTest, ReportOfATransferCanStillBeAsked) {
  start();
  const Handle handle = adopt(kPageable, 100);
  const auto report = manager->move(handle, kCuda0);
  manager->close();
  EXPECT_TRUE(report.done());
  EXPECT_NO_THROW(report.wait());
  EXPECT_FALSE(report.record().failed);
}

TEST_F(CloseTest, ByTwoThreadsAtOnceClosesOnce) {
  start();
  adopt(kPageable, 100);
  std::barrier together(2);
  Calling other([&] {
    together.arrive_and_wait();
    manager->close();
  });
  together.arrive_and_wait();
  EXPECT_NO_THROW(manager->close());
  EXPECT_NO_THROW(other.finish());
  EXPECT_TRUE(backend->closed());
}

TEST_F(CloseTest, WhileAScopeIsEnteringWaitsForItAndTheEntryFails) {
  const Warnings warnings;
  start();
  const Handle there = adopt(kPageable, 100);
  const Handle slow = source(100);
  Gate gate;
  sources[slow]->before_load = [&] { gate.pass(); };
  Scope scope = manager->scope(
      ResidencyPlan({.name = "slow",
                     .reservations = {{kPinned, 5_B, "of the plan"}},
                     .enter = {EnsureResident{there, kCuda0}, EnsureResident{slow, kPageable}},
                     .exit = {DropResident{there, kCuda0}}}));
  Calling entering([&] { scope.enter(); });
  gate.entered.wait();
  EXPECT_THROW(manager->close(), InUseError) << "the reservation of the plan";
  Calling closing([&] { manager->close({.force = true}); });
  closing.wait_until_blocked();
  gate.open.count_down();
  EXPECT_THROW(entering.finish(), PlanExecutionError);
  closing.finish();
  EXPECT_FALSE(scope.entered());
  EXPECT_NO_THROW(scope.close());
  EXPECT_TRUE(backend->closed());
  for (const Location at : {kPageable, kPinned, kCuda0}) {
    EXPECT_EQ(backend->live_bytes(at), Bytes()) << to_string(at);
  }
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(CloseTest, ByTheEndOfTheManagerWhileAScopeIsEnteringComesWithTheEndOfTheScope) {
  const Warnings warnings;
  fake_options.physical_headroom = {kPinned};
  start();
  const Handle there = adopt(kPageable, 100);
  const Handle slow = source(100);
  Gate gate;
  sources[slow]->before_load = [&] { gate.pass(); };
  auto scope = std::make_unique<Scope>(manager->scope(
      ResidencyPlan({.name = "slow",
                     .reservations = {{kPinned, 5_B, "of the plan"}},
                     .enter = {EnsureResident{there, kCuda0}, EnsureResident{slow, kPageable}}})));
  auto entering = std::make_unique<Calling>([&] { scope->enter(); });
  gate.entered.wait();
  ASSERT_EQ(backend->num_queued(), 1U) << "a transfer is under way too";
  manager.reset();
  EXPECT_FALSE(backend->closed()) << "the load uses it";
  gate.open.count_down();
  EXPECT_THROW(entering->finish(), PlanExecutionError);
  entering.reset();  // with the error, whose report can still be asked for the transfer
  scope.reset();
  EXPECT_TRUE(backend->closed());
  EXPECT_EQ(backend->headroom_bytes(kPinned), Bytes());
  backend->complete_all();
  for (const Location at : {kPageable, kPinned, kCuda0}) {
    EXPECT_EQ(backend->live_bytes(at), Bytes()) << to_string(at);
  }
  EXPECT_TRUE(warnings.texts().empty());
}

TEST_F(CloseTest, ByTheEndOfTheManagerWhileACallIsUnderWayRecordsTheUsesOfLeases) {
  start();
  const Handle leased = adopt(kPinned, 100);
  manager->ensure(leased, kCuda0);
  const Handle slow = source(100);
  Gate gate;
  sources[slow]->before_load = [&] { gate.pass(); };
  auto scope = std::make_unique<Scope>(
      manager->scope(ResidencyPlan({.name = "slow", .enter = {EnsureResident{slow, kPageable}}})));
  auto lease = std::make_unique<Lease>(acquire(leased, kCuda0));
  backend->launch_read({kCuda0, 0}, block(*lease, leased), seeds[leased]);
  Calling entering([&] { scope->enter(); });
  gate.entered.wait();
  backend->allow_views_to_outlive_blocks();
  manager.reset();
  EXPECT_EQ(backend->num_calls(Call::kRecordUse), 1U);
  lease.reset();
  gate.open.count_down();
  EXPECT_THROW(entering.finish(), PlanExecutionError);
  scope.reset();  // frees what the kernel still reads, behind it
  EXPECT_TRUE(backend->closed());
  backend->complete_all();
  EXPECT_EQ(backend->live_bytes(kCuda0), Bytes());
}

// --- Fork

/// Runs `body` in a forked child and returns how that ended; 0 when nothing was thrown.
int in_child(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a hang ends the child, not the test run
    int code = 1;
    try {
      body();
      code = testing::Test::HasFailure() ? 2 : 0;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in the child: %s\n", error.what());
    }
    std::fflush(nullptr);
    _exit(code);
  }
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

TEST_F(ForkTest, ChildUsesTheHostTierAndCloses) {
  start();
  const Handle handle = adopt(kPageable, 100);
  const Handle loaded = source(100);
  const int code = in_child([&] {
    EXPECT_TRUE(holds(handle, kPageable));
    manager->ensure(handle, kPinned);
    manager->ensure(loaded, kPageable);
    const Handle fresh = adopt(kPageable, 50);
    EXPECT_TRUE(holds(fresh, kPageable));
    manager->audit();
    manager->close();
    EXPECT_TRUE(manager->closed());
  });
  EXPECT_EQ(code, 0);
  EXPECT_EQ(places(handle), std::vector{kPageable}) << "the parent is untouched";
}

TEST_F(ForkTest, ValueThatAThreadOfTheParentWasChangingIsAForkError) {
  start();
  const Handle slow = source(100);
  const Handle other = adopt(kPageable, 100);
  Gate gate;
  sources[slow]->before_load = [&] { gate.pass(); };
  Calling loading([&] { manager->ensure(slow, kPageable); });
  gate.entered.wait();
  const int code = in_child([&] {
    const std::array handles = {slow};
    EXPECT_THROW(manager->ensure(slow, kPageable), ForkError);
    EXPECT_THROW(manager->discard(slow), ForkError);
    EXPECT_THROW((void)manager->acquire(handles, kPageable), ForkError);
    EXPECT_THROW((void)manager->hold(handles, kPageable), ForkError);
    EXPECT_TRUE(holds(other, kPageable));
    manager->move(other, kPinned);
    EXPECT_EQ(manager->snapshot().values.size(), 2U);
    manager->close({.force = true});
  });
  EXPECT_EQ(code, 0);
  gate.open.count_down();
  loading.finish();
  EXPECT_TRUE(holds(slow, kPageable));
}

TEST_F(ForkTest, TransferOfTheParentIsNotWaitedFor) {
  start();
  const Handle handle = adopt(kPageable, 100);
  const auto report = manager->ensure(handle, kCuda0);
  const int code = in_child([&] {
    EXPECT_THROW(manager->drop(handle, kPageable), ForkError);
    EXPECT_THROW(report.wait(), ForkError);
    EXPECT_THROW(manager->synchronize(), ForkError);
    EXPECT_TRUE(holds(handle, kPageable));
  });
  EXPECT_EQ(code, 0);
  report.wait();
  EXPECT_EQ(at(handle, kCuda0).state, MaterializationState::kReady);
}

TEST_F(ForkTest, ManagerMadeInTheChildWorksThere) {
  start();
  const int code = in_child([&] {
    const auto own = std::make_shared<FakeBackend>();
    const auto made = Manager::create({}, own);
    const Handle handle =
        made->adopt(own->make_block(kPageable, make_spec(100), 1), make_spec(100));
    made->ensure(handle, kCuda0);
    made->drop(handle, kPageable);
    made->close();
  });
  EXPECT_EQ(code, 0);
}

TEST_F(ForkTest, WhileOtherThreadsAreBusyLeavesNoMutexLockedInTheChild) {
  start();
  const Handle handle = adopt(kPageable, 100);
  std::atomic<bool> stop{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 4; ++i) {
    busy.emplace_back([&] {
      while (!stop.load()) {
        (void)manager->snapshot();
        (void)manager->state_version();
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(in_child([&] { EXPECT_EQ(places(handle), std::vector{kPageable}); }), 0);
  }
  stop.store(true);
  for (auto& thread : busy) {
    thread.join();
  }
}

// --- The end of the process

/// What a program leaves behind that never heard of closing: guards before and after their
/// manager in the order of destruction, and transfers under way.
void leave_static_objects() {
  static std::shared_ptr<Lease> destroyed_last;
  static std::shared_ptr<Manager> manager;
  static std::shared_ptr<Lease> lease;
  static std::shared_ptr<Hold> held;
  static std::shared_ptr<Reservation> reservation;
  static std::shared_ptr<Scope> scope;
  const auto backend = std::make_shared<FakeBackend>();
  manager = Manager::create(
      {.budgets = {}, .disks = {{.name = "nvme", .directory = "/nowhere", .budget = std::nullopt}}},
      backend);
  std::vector<Handle> handles;
  for (int i = 0; i < 3; ++i) {
    const auto spec = make_spec(100);
    handles.push_back(manager->adopt(backend->make_block(kPageable, spec, 1), spec));
  }
  const auto one = [&](std::size_t i) { return std::span(&handles[i], 1); };
  destroyed_last = std::make_shared<Lease>(manager->acquire(one(0), kPageable));
  lease = std::make_shared<Lease>(manager->acquire(one(0), kPageable));
  held = std::make_shared<Hold>(manager->hold(one(0), kPageable));
  reservation = std::make_shared<Reservation>(manager->reserve({kCuda0, 10_B, "static"}));
  scope = std::make_shared<Scope>(manager->scope(ResidencyPlan({.name = "static"})));
  scope->enter();
  manager->move(handles[1], kCuda0);
  manager->ensure(handles[2], kDisk);
}

class ProcessExitDeathTest : public testing::Test {
 protected:
  // A process of its own, from `main` on.
  void SetUp() override { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
};

TEST_F(ProcessExitDeathTest, WithStaticObjectsAliveIsQuietAndClean) {
  EXPECT_EXIT(
      {
        alarm(5);
        leave_static_objects();
        std::exit(0);
      },
      testing::ExitedWithCode(0), "^$");
}

TEST_F(ProcessExitDeathTest, WithAThreadWaitingForATransferIsQuietAndClean) {
  EXPECT_EXIT(
      {
        alarm(5);
        static std::shared_ptr<Manager> manager;
        const auto backend = std::make_shared<FakeBackend>();
        manager = Manager::create({}, backend);
        const auto spec = make_spec(100);
        const Handle handle = manager->adopt(backend->make_block(kPageable, spec, 1), spec);
        const ActionReport report = manager->ensure(handle, kCuda0);
        backend->set_waits_block(true);
        static Calling& waiting = *new Calling([report] { report.wait(); });
        waiting.wait_until_blocked();
        std::exit(0);
      },
      testing::ExitedWithCode(0), "^$");
}

TEST_F(ProcessExitDeathTest, WithAThreadInASlowLoadIsQuietAndClean) {
  EXPECT_EXIT(
      {
        alarm(5);
        static std::shared_ptr<Manager> manager;
        const auto backend = std::make_shared<FakeBackend>();
        manager = Manager::create({}, backend);
        const auto spec = make_spec(100, kReplicable, kReconstructible);
        const auto slow = std::make_shared<FakeSource>(backend, kPageable, spec, 1);
        static Gate& gate = *new Gate;
        slow->before_load = [] { gate.pass(); };
        const Handle handle = manager->register_source(slow, spec);
        static Calling& loading = *new Calling([handle] { manager->ensure(handle, kPageable); });
        static_cast<void>(loading);
        gate.entered.wait();
        std::exit(0);
      },
      testing::ExitedWithCode(0), "^$");
}

TEST_F(ProcessExitDeathTest, OfAForkedChildWithStaticObjectsOfTheParentIsQuietAndClean) {
  EXPECT_EXIT(
      {
        alarm(10);
        leave_static_objects();
        const pid_t child = fork();
        if (child == 0) {
          alarm(5);
          std::exit(0);  // static destructors run, as in a child that returns from main
        }
        int status = -1;
        waitpid(child, &status, 0);
        std::exit(WIFEXITED(status) ? WEXITSTATUS(status) : 100);
      },
      testing::ExitedWithCode(0), "^$");
}

}  // namespace
}  // namespace residency::test
