// Sections A3-4, B, C14-16, F: handles, registration, adoption, drop, discard, take.

#include <functional>
#include <new>
#include <set>
#include <string>
#include <thread>
#include <type_traits>

#include "fixture.h"

namespace residency::test {
namespace {

using ValueTest = ManagerTest;

TEST_F(ValueTest, EachRegistrationGivesANewHandle) {
  start();
  std::set<Handle> handles;
  for (int i = 0; i < 100; ++i) {
    handles.insert(adopt(kPageable, 64));
    handles.insert(source(64));
  }
  EXPECT_EQ(handles.size(), 200U);
  for (const Handle& handle : handles) {
    EXPECT_GT(handle.id(), 0);
    EXPECT_EQ(handle.manager(), manager->id());
    EXPECT_EQ(handle.type(), ValueType());
  }
}

TEST_F(ValueTest, HandleStaysTheSameThroughMovesDropsAndReloads) {
  start();
  const Handle handle = source(100);
  manager->ensure(handle, kCuda0);
  manager->move(handle, kPinned);
  manager->drop(handle, kPinned);
  manager->ensure(handle, kPageable);
  EXPECT_EQ(manager->snapshot().values.at(0).handle, handle);
  EXPECT_TRUE(holds(handle, kPageable));
}

TEST_F(ValueTest, ValueTypeIsPartOfTheHandle) {
  start();
  const auto spec = make_spec(8);
  const Handle handle =
      manager->adopt(backend->make_block(kPageable, spec, 1), spec, ValueType("adapter"));
  EXPECT_EQ(handle.type().name(), "adapter");
  EXPECT_NO_THROW(manager->ensure(handle, kPageable));
  const auto error = refused<HandleError>([&] { manager->ensure(Handle(handle.id()), kPageable); });
  EXPECT_EQ(error->reason, Reason::kUnknownHandle);
}

TEST_F(ValueTest, HandleOfAnotherManagerIsRefusedAndNamesBoth) {
  start();
  auto other_backend = std::make_shared<FakeBackend>();
  auto other = Manager::create({}, other_backend);
  const auto spec = make_spec(8);
  const Handle foreign = other->adopt(other_backend->make_block(kPageable, spec, 1), spec);
  const Handle handles[] = {foreign};
  const std::function<void()> calls[] = {
      [&] { manager->ensure(foreign, kPageable); },
      [&] { manager->move(foreign, kPageable); },
      [&] { manager->drop(foreign, kPageable); },
      [&] { manager->discard(foreign); },
      [&] { (void)manager->take(foreign); },
      [&] { manager->acquire(handles, kPageable).release(); },
      [&] { manager->borrow(handles, kPageable).release(); },
      [&] { manager->hold(handles, kPageable).release(); },
      [&] {
        manager->apply(EnsureResident{foreign, kPageable});
      },
  };
  for (const auto& call : calls) {
    const auto error = refused<HandleError>(call);
    ASSERT_TRUE(error);
    EXPECT_EQ(error->reason, Reason::kForeignHandle);
    EXPECT_EQ(error->handle, foreign);
    EXPECT_EQ(error->manager, manager->id());
    const std::string text = error->what();
    EXPECT_NE(text.find(std::to_string(static_cast<unsigned>(manager->id()))), std::string::npos);
    EXPECT_NE(text.find(std::to_string(static_cast<unsigned>(other->id()))), std::string::npos);
  }
  EXPECT_NE(manager->id(), other->id());
}

TEST_F(ValueTest, UnknownAndDiscardedHandlesSayWhich) {
  start();
  const Handle handle = adopt(kPageable, 8);
  const Handle unknown(handle.id() + 1000);
  EXPECT_EQ(refused<HandleError>([&] { manager->drop(unknown, kPageable); })->reason,
            Reason::kUnknownHandle);
  EXPECT_EQ(refused<HandleError>([&] { manager->drop(Handle(), kPageable); })->reason,
            Reason::kUnknownHandle);
  EXPECT_EQ(refused<HandleError>([&] { manager->drop(Handle(-5), kPageable); })->code(),
            ErrorCode::kHandle);
  manager->discard(handle);
  EXPECT_EQ(refused<HandleError>([&] { manager->ensure(handle, kPageable); })->reason,
            Reason::kDiscardedHandle);
  EXPECT_EQ(refused<HandleError>([&] { manager->discard(handle); })->reason,
            Reason::kDiscardedHandle);
}

TEST_F(ValueTest, ManagerIsFoundByHandleIdWhileItLives) {
  start();
  const Handle handle = adopt(kPageable, 8);
  EXPECT_EQ(Manager::find(handle.id()), manager);
  EXPECT_EQ(Manager::find(0), nullptr);
  EXPECT_EQ(Manager::find(-1), nullptr);
  manager.reset();
  EXPECT_EQ(Manager::find(handle.id()), nullptr);
}

TEST_F(ValueTest, IdentityIsReadableAfterClose) {
  start();
  const ManagerId id = manager->id();
  manager->close();
  EXPECT_EQ(manager->id(), id);
  EXPECT_TRUE(manager->closed());
}

TEST_F(ValueTest, RegisteringASourceLoadsNothing) {
  start();
  const Handle handle = source(1000, kPinned);
  EXPECT_EQ(sources[handle]->num_loads, 0);
  EXPECT_TRUE(places(handle).empty());
  EXPECT_EQ(used(kPinned), Bytes());
  (void)manager->snapshot();
  const ActionList actions = {EnsureResident{handle, kCuda0}};
  (void)manager->explain(actions);
  EXPECT_EQ(sources[handle]->num_loads, 0);
  const Snapshot snapshot = manager->snapshot();
  EXPECT_TRUE(snapshot.find(handle)->has_source);
  EXPECT_EQ(snapshot.find(handle)->source_location, kPinned);
}

TEST_F(ValueTest, MoveThatFailsBeforeItStartsLoadsNothing) {
  budget(kCuda0, 10_B);
  start();
  const Handle handle = source(1000);
  refused<BudgetError>([&] { manager->move(handle, kCuda0); });
  refused<UnavailableError>([&] { manager->move(handle, kPinned, kCuda1); });
  EXPECT_EQ(sources[handle]->num_loads, 0);
}

TEST_F(ValueTest, SourceMustBeReconstructible) {
  start();
  const auto spec = make_spec(8, kReplicable, kMustPreserve);
  auto made = std::make_shared<FakeSource>(backend, kPageable, spec, 1);
  refused<std::invalid_argument>([&] { (void)manager->register_source(made, spec); });
  refused<std::invalid_argument>([&] {
    (void)manager->register_source(nullptr, make_spec(8, kReplicable, kReconstructible));
  });
}

TEST_F(ValueTest, SourceAtAMissingLocationIsRefused) {
  fake_options.num_devices = 1;
  start();
  const auto spec = make_spec(8, kReplicable, kReconstructible);
  auto made = std::make_shared<FakeSource>(backend, kCuda1, spec, 1);
  refused<UnavailableError>([&] { (void)manager->register_source(made, spec, kCuda1); });
}

TEST_F(ValueTest, ExceptionOfASourceReachesTheCallerUnchangedAndALaterAttemptLoadsAgain) {
  budget(kPageable, 1000_B);
  start();
  const Handle handle = source(500);
  struct Special {
    int number;
  };
  sources[handle]->before_load = [] { throw Special{42}; };
  const auto version = manager->state_version();
  try {
    manager->ensure(handle, kCuda0);
    FAIL();
  } catch (const Special& special) {
    EXPECT_EQ(special.number, 42);
  }
  EXPECT_EQ(manager->state_version(), version);
  EXPECT_EQ(used(kPageable), Bytes());
  EXPECT_EQ(used(kCuda0), Bytes());
  EXPECT_TRUE(places(handle).empty());
  ASSERT_EQ(manager->trace().size(), 1U);
  EXPECT_TRUE(manager->trace()[0].failed);
  sources[handle]->before_load = nullptr;
  manager->ensure(handle, kCuda0);
  EXPECT_TRUE(holds(handle, kCuda0));
  EXPECT_EQ(sources[handle]->num_loads, 2);
}

CopyResult made_block(BlockPtr block) {
  CopyResult made;
  made.block = std::move(block);
  return made;
}

TEST_F(ValueTest, BlockThatIsMadeToBeAdoptedIsBookedBefore) {
  budget(kPinned, 100_B);
  start();
  const auto spec = make_spec(100);
  const auto make = [&] {
    EXPECT_EQ(account(kPinned).used, 100_B);
    EXPECT_THROW(manager->reserve({kPinned, 1_B, "no room"}).release(), BudgetError);
    return made_block(backend->make_block(kPinned, spec, 7));
  };
  const Handle handle = manager->adopt(make, kPinned, spec);
  seeds[handle] = 7;
  EXPECT_TRUE(holds(handle, kPinned));
  EXPECT_EQ(account(kPinned).used, 100_B);
  changes_nothing([&] {
    refused<BudgetError>([&] {
      (void)manager->adopt(
          []() -> CopyResult { throw std::logic_error("there is no room for it"); }, kPinned,
          make_spec(1));
    });
  });
}

TEST_F(ValueTest, BlockThatCannotBeMadeOrIsAnotherOneIsNotAdopted) {
  start();
  const auto spec = make_spec(100);
  const auto refuse = [&]<class Error>(std::type_identity<Error>, const auto& make) {
    changes_nothing([&] {
      refused<Error>([&] { (void)manager->adopt(make, kPinned, spec); });
      manager->audit();
    });
    EXPECT_EQ(backend->live_bytes(kPinned), Bytes());
    EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  };
  refuse(std::type_identity<std::bad_alloc>(), []() -> CopyResult { throw std::bad_alloc(); });
  refuse(std::type_identity<std::invalid_argument>(), [] { return CopyResult(); });
  refuse(std::type_identity<MaterializationError>(),
         [&] { return made_block(backend->make_block(kPageable, spec, 1)); });
  refuse(std::type_identity<MaterializationError>(),
         [&] { return made_block(backend->make_block(kPinned, make_spec(99), 1)); });
}

TEST_F(ValueTest, SourceThatGivesSomethingElseIsAMaterializationError) {
  start();
  const Handle handle = source(100);
  FakeSource& made = *sources[handle];
  const auto spec = make_spec(100);
  auto other_backend = std::make_shared<FakeBackend>();
  std::shared_ptr<Block> kept;
  const std::function<std::shared_ptr<Block>()> wrong[] = {
      [] { return std::shared_ptr<Block>(); },
      [&] { return backend->make_block(kPageable, make_spec(101), 1); },  // other bytes
      [&] { return backend->make_block(kPinned, spec, 1); },              // another place
      [&] {                                                               // another layout
        return backend->make_block(
            kPageable, make_spec({{"other", 100}}, 0, kReplicable, kMustPreserve, kImmutable), 1);
      },
      [&] { return other_backend->make_block(kPageable, spec, 1); },
      [&] { return kept = backend->make_block(kPageable, spec, 1); },  // keeps it
  };
  for (const auto& instead : wrong) {
    made.instead = instead;
    const std::string before = fingerprint(manager->snapshot());
    const auto version = manager->state_version();
    EXPECT_THROW(manager->ensure(handle, kPageable), MaterializationError);
    EXPECT_THROW(manager->ensure(handle, kCuda0), MaterializationError);
    EXPECT_EQ(fingerprint(manager->snapshot()), before);
    EXPECT_EQ(manager->state_version(), version);
  }
  kept.reset();
  made.instead = nullptr;
  manager->ensure(handle, kPageable);
  EXPECT_TRUE(holds(handle, kPageable));
}

TEST_F(ValueTest, AfterTheLastDropTheNextUseLoadsAgain) {
  start();
  const Handle handle = source(100);
  manager->ensure(handle, kPageable);
  manager->drop(handle, kPageable);
  EXPECT_EQ(used(kPageable), Bytes());
  manager->ensure(handle, kPageable);
  EXPECT_EQ(sources[handle]->num_loads, 2);
}

TEST_F(ValueTest, LogicalBytesNeverEnterACharge) {
  start();
  // A tie: 3,000 logical bytes in 1,000 bytes of storage.
  const auto spec = make_spec({{"a", 1000}, {"b", 1000}, {"c", 1000}}, 2000, kReplicable,
                              kMustPreserve, kImmutable);
  const Handle handle = manager->adopt(backend->make_block(kPinned, spec, 1), spec);
  EXPECT_EQ(used(kPinned), 1000_B);
  manager->ensure(handle, kCuda0);
  EXPECT_EQ(used(kCuda0), 1024_B);
  const Snapshot snapshot = manager->snapshot();
  EXPECT_EQ(snapshot.find(handle)->spec.logical_bytes, 3000_B);
  EXPECT_EQ(snapshot.find(handle)->spec.storage_bytes, 1000_B);
}

TEST_F(ValueTest, ChargesAreRoundedAsEachLocationRounds) {
  start();
  const Handle handle = adopt(kPageable, 100);
  for (const Location location : {kPinned, kCuda0, kDisk}) {
    manager->ensure(handle, location);
  }
  EXPECT_EQ(used(kPageable), 128_B);
  EXPECT_EQ(used(kPinned), 100_B);
  EXPECT_EQ(used(kCuda0), 512_B);
  EXPECT_EQ(used(kDisk), 4096_B);
}

TEST_F(ValueTest, OverlapByAnyByteIsAnOwnershipErrorAndACloneIsAccepted) {
  start();
  const auto spec = make_spec(1000);
  auto block = backend->make_block(kPageable, spec, 1);
  auto head = backend->make_overlapping_block(*block, 0, make_spec(1));
  auto tail = backend->make_overlapping_block(*block, 999, make_spec(1));
  auto inside = backend->make_overlapping_block(*block, 10, make_spec(10));
  auto around = backend->make_overlapping_block(*block, -10, make_spec(2000));
  auto before = backend->make_overlapping_block(*block, -10, make_spec(10));
  auto behind = backend->make_overlapping_block(*block, 1000, make_spec(10));
  (void)manager->adopt(block, spec);
  block.reset();
  refused<OwnershipError>([&] { (void)manager->adopt(head, make_spec(1)); });
  refused<OwnershipError>([&] { (void)manager->adopt(tail, make_spec(1)); });
  refused<OwnershipError>([&] { (void)manager->adopt(inside, make_spec(10)); });
  refused<OwnershipError>([&] { (void)manager->adopt(around, make_spec(2000)); });
  (void)manager->adopt(before, make_spec(10));
  (void)manager->adopt(behind, make_spec(10));
  refused<OwnershipError>([&] { (void)manager->adopt(behind, make_spec(10)); });
  (void)manager->adopt(backend->make_block(kPageable, spec, 1), spec);
  head.reset();
  tail.reset();
  inside.reset();
  around.reset();
  before.reset();
  behind.reset();
}

TEST_F(ValueTest, ZeroByteValuesOverlapNothingAndStayDistinct) {
  start();
  const Handle one = adopt(kPageable, 0);
  const Handle two = adopt(kPageable, 0);
  EXPECT_NE(one, two);
  EXPECT_EQ(used(kPageable), Bytes());
  manager->move(one, kCuda0);
  EXPECT_EQ(places(one), std::vector{kCuda0});
  EXPECT_EQ(places(two), std::vector{kPageable});
  manager->move(two, kDisk);
  EXPECT_EQ(used(kDisk), 4096_B);
}

TEST_F(ValueTest, MemoryThatIsDepartingCanBeAdoptedAgainOnceItHasGone) {
  start();
  const auto spec = make_spec(128);
  auto block = backend->make_block(kPageable, spec, 1);
  auto alias = backend->make_overlapping_block(*block, 100, make_spec(20));
  const Handle handle = manager->adopt(std::move(block), spec);
  manager->move(handle, kDisk);
  ASSERT_EQ(backend->num_queued(), 1U);
  refused<OwnershipError>([&] { (void)manager->adopt(alias, make_spec(20)); });
  backend->complete_all();
  EXPECT_NO_THROW((void)manager->adopt(alias, make_spec(20)));
  alias.reset();
}

TEST_F(ValueTest, MemoryWhoseDepartureFailedIsManagedAsBefore) {
  start();
  const auto spec = make_spec(128);
  auto block = backend->make_block(kPageable, spec, 1);
  auto alias = backend->make_overlapping_block(*block, 100, make_spec(20));
  const Handle handle = manager->adopt(std::move(block), spec);
  backend->fail(Call::kTransfer, 1);
  manager->move(handle, kDisk);
  backend->complete_all();
  refused<OwnershipError>([&] { (void)manager->adopt(alias, make_spec(20)); });
  EXPECT_THROW(manager->ensure(handle, kPinned), TransferError);
  manager->discard(handle);
  EXPECT_NO_THROW((void)manager->adopt(alias, make_spec(20)));
  alias.reset();
}

TEST_F(ValueTest, AddressesThatATransferFreedMayBeAllocatedBeforeThatIsNoticed) {
  start();
  const auto spec = make_spec(128);
  auto block = backend->make_block(kPageable, spec, 1);
  std::shared_ptr<FakeBlock> reused = backend->make_overlapping_block(*block, 0, spec);
  auto alias = backend->make_overlapping_block(*block, 100, make_spec(20));
  const Handle older = adopt(kPageable, 100);
  manager->ensure(older, kCuda0);  // stays in flight: what ended behind it is not looked at
  const Handle departing = manager->adopt(std::move(block), spec);
  manager->move(departing, kDisk);
  ASSERT_TRUE(backend->complete(departing, kDisk));
  const Handle loaded = source(128);
  sources[loaded]->instead = [&] { return std::exchange(reused, nullptr); };
  manager->ensure(loaded, kPageable);
  EXPECT_NO_THROW(manager->audit());  // notices that the departing one has gone
  refused<OwnershipError>([&] { (void)manager->adopt(alias, make_spec(20)); });
  manager->drop(loaded, kPageable);
  EXPECT_NO_THROW((void)manager->adopt(alias, make_spec(20)));
  alias.reset();
}

TEST_F(ValueTest, AdoptedMemoryCanBeAdoptedAgainAfterItEnded) {
  start();
  const auto spec = make_spec(100);
  const Handle handle = manager->adopt(backend->make_block(kPageable, spec, 1), spec);
  BlockPtr block = manager->take(handle);
  EXPECT_NO_THROW((void)manager->adopt(block, spec));
  block.reset();
}

TEST_F(ValueTest, AdoptedValueIsMustPreserve) {
  start();
  // Whatever the spec says: nothing could make it again.
  const auto spec = make_spec(100, kReplicable, kReconstructible);
  const Handle handle = manager->adopt(backend->make_block(kPageable, spec, 1), spec);
  const Snapshot snapshot = manager->snapshot();
  EXPECT_EQ(snapshot.find(handle)->spec.recoverability, kMustPreserve);
  refused<OwnershipError>([&] { manager->drop(handle, kPageable); });
}

TEST_F(ValueTest, FailedAdoptChangesNothing) {
  budget(kPinned, 99_B);
  fake_options.unavailable = {kCuda1};
  start();
  const auto spec = make_spec(100);
  const auto error = refused<BudgetError>(
      [&] { (void)manager->adopt(backend->make_block(kPinned, spec, 1), spec); });
  EXPECT_EQ(error->shortfall.location, kPinned);
  EXPECT_EQ(error->shortfall.budget, 99_B);
  EXPECT_EQ(error->shortfall.used, Bytes());
  EXPECT_EQ(error->shortfall.requested, 100_B);
  refused<UnavailableError>(
      [&] { (void)manager->adopt(backend->make_block(kCuda1, spec, 1), spec); });
  refused<std::invalid_argument>([&] { (void)manager->adopt(nullptr, spec); });
  EXPECT_EQ(manager->locations(), (std::vector{kPinned}));
}

TEST_F(ValueTest, AdoptedBlockMustMatchItsSpec) {
  start();
  refused<MaterializationError>([&] {
    (void)manager->adopt(backend->make_block(kPageable, make_spec(100), 1), make_spec(101));
  });
}

TEST_F(ValueTest, DropOfAnAbsentMaterializationIsANoOpReport) {
  start();
  const Handle handle = adopt(kPageable, 100);
  changes_nothing([&] {
    const auto report = manager->drop(handle, kCuda0);
    EXPECT_TRUE(report.no_op());
    EXPECT_EQ(report.reason(), Reason::kAlreadyAbsent);
  });
  EXPECT_EQ(manager->locations(), std::vector{kPageable});
}

TEST_F(ValueTest, DropOfTheLastCopyIsRefusedUnlessASourceCanMakeItAgain) {
  start();
  const Handle kept = adopt(kPageable, 100);
  manager->ensure(kept, kPinned);
  EXPECT_EQ(manager->drop(kept, kPageable).reason(), Reason::kReleased);
  refused<OwnershipError>([&] { manager->drop(kept, kPinned); });
  const Handle again = source(100);
  manager->ensure(again, kPinned);
  manager->drop(again, kPinned);
  EXPECT_TRUE(places(again).empty());
  EXPECT_TRUE(holds(kept, kPinned));
}

TEST_F(ValueTest, ProtectionIsPerMaterialization) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kCuda0);
  Lease lease = acquire(handle, kCuda0);
  Lease second = acquire(handle, kCuda0);
  Hold held = hold(handle, kCuda0);
  const auto error = refused<InUseError>([&] { manager->drop(handle, kCuda0); });
  EXPECT_EQ(error->protection.num_leases, 2U);
  EXPECT_EQ(error->protection.num_holds, 1U);
  manager->drop(handle, kPageable);  // the other one is free to go
  lease.release();
  second.release();
  refused<InUseError>([&] { manager->move(handle, kPinned); });
  held.release();
  manager->move(handle, kPinned);
  EXPECT_TRUE(holds(handle, kPinned));
}

TEST_F(ValueTest, DiscardIsAllOrNothing) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kCuda0);
  manager->ensure(handle, kPinned);
  Hold held = hold(handle, kPinned);
  refused<InUseError>([&] { manager->discard(handle); });
  EXPECT_EQ(places(handle).size(), 3U);
  held.release();
  EXPECT_EQ(manager->discard(handle).reason(), Reason::kDiscarded);
  for (const Location location : {kPageable, kPinned, kCuda0}) {
    EXPECT_EQ(used(location), Bytes());
  }
}

TEST_F(ValueTest, DiscardedValuesStayVisibleUntilForgotten) {
  start();
  const Handle handle = adopt(kPageable, 100);
  const Handle other = adopt(kPageable, 100);
  manager->discard(handle);
  const Snapshot snapshot = manager->snapshot();
  ASSERT_EQ(snapshot.values.size(), 2U);
  EXPECT_TRUE(snapshot.find(handle)->discarded);
  EXPECT_FALSE(snapshot.find(other)->discarded);
  EXPECT_EQ(manager->forget_discarded(), 1U);
  EXPECT_EQ(manager->forget_discarded(), 0U);
  EXPECT_EQ(manager->snapshot().values.size(), 1U);
  EXPECT_EQ(refused<HandleError>([&] { manager->ensure(handle, kPageable); })->reason,
            Reason::kUnknownHandle);
}

TEST_F(ValueTest, ForgottenHandlesAreNeverGivenToAnotherValue) {
  start();
  std::set<Handle> seen;
  for (int i = 0; i < 5000; ++i) {
    const Handle handle = source(8);
    ASSERT_TRUE(seen.insert(handle).second) << to_string(handle) << " was given out twice";
    manager->discard(handle);
    manager->forget_discarded();
  }
  for (const Handle& handle : seen) {
    EXPECT_THROW(manager->drop(handle, kPageable), HandleError);
  }
}

TEST_F(ValueTest, SnapshotKeepsTheOrderOfRegistrationAfterForgetting) {
  start();
  std::vector<Handle> order;
  for (int i = 0; i < 300; ++i) {
    order.push_back(source(8));
  }
  for (int i = 0; i < 300; i += 2) {
    manager->discard(order[static_cast<std::size_t>(i)]);
  }
  manager->forget_discarded();
  std::vector<Handle> expected;
  for (std::size_t i = 1; i < 300; i += 2) {
    expected.push_back(order[i]);
  }
  for (int i = 0; i < 200; ++i) {
    expected.push_back(source(8));
  }
  const Snapshot snapshot = manager->snapshot();
  ASSERT_EQ(snapshot.values.size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(snapshot.values[i].handle, expected[i]);
  }
}

TEST_F(ValueTest, TakeIsTheInverseOfAdopt) {
  start();
  const auto spec = make_spec(100);
  auto mine = backend->make_block(kPageable, spec, 7);
  Block* const address = mine.get();
  const Handle handle = manager->adopt(std::move(mine), spec);
  manager->ensure(handle, kCuda0);
  const BlockPtr taken = manager->take(handle, kPageable);
  EXPECT_EQ(taken.get(), address);
  EXPECT_TRUE(dynamic_cast<FakeBlock&>(*taken).holds(7));
  EXPECT_EQ(used(kPageable), Bytes());
  EXPECT_EQ(used(kCuda0), Bytes());
  EXPECT_EQ(refused<HandleError>([&] { manager->ensure(handle, kCuda0); })->reason,
            Reason::kDiscardedHandle);
  ASSERT_FALSE(manager->trace().empty());
  EXPECT_EQ(manager->trace().back().action, ActionKind::kTake);
}

TEST_F(ValueTest, TakeWaitsUntilTheBytesAreThere) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->move(handle, kDisk);
  manager->move(handle, kPinned);
  EXPECT_GT(backend->num_queued(), 0U);
  const BlockPtr taken = manager->take(handle);
  EXPECT_EQ(taken->location(), kPinned);
  EXPECT_TRUE(dynamic_cast<FakeBlock&>(*taken).holds(seeds[handle]));
}

TEST_F(ValueTest, TakeGivesMemoryWhateverTheLinkOrderSays) {
  options.link_order = {LocationKind::kDisk, LocationKind::kCuda};
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->ensure(handle, kDisk);
  const BlockPtr taken = manager->take(handle);
  EXPECT_EQ(taken->location(), kPageable);
  EXPECT_TRUE(dynamic_cast<FakeBlock&>(*taken).holds(seeds[handle]));
  EXPECT_EQ(used(kDisk), Bytes());
}

TEST_F(ValueTest, TakeBringsWhatIsOnlyOnDiskToMemory) {
  start();
  for (const ReplicaMode mode : {kReplicable, kExclusive}) {
    const Handle handle = adopt(kPageable, 100, mode);
    manager->move(handle, kDisk);
    refused<std::invalid_argument>([&] { (void)manager->take(handle, kDisk); });
    const BlockPtr taken = manager->take(handle);
    EXPECT_EQ(taken->location(), kPageable);
    EXPECT_TRUE(dynamic_cast<FakeBlock&>(*taken).holds(seeds[handle]));
    EXPECT_EQ(used(kDisk), Bytes());
    EXPECT_EQ(used(kPageable), Bytes());
  }
}

TEST_F(ValueTest, TakeOfWhatCannotBeReadFromDiskLosesNothing) {
  start();
  const Handle handle = adopt(kPageable, 100);
  manager->move(handle, kDisk);
  backend->complete_all();
  backend->fail(Call::kTransfer, 1);
  EXPECT_THROW((void)manager->take(handle), TransferError);
  EXPECT_EQ(places(handle), std::vector{kDisk});
  backend->clear_faults();
  EXPECT_TRUE(dynamic_cast<FakeBlock&>(*manager->take(handle)).holds(seeds[handle]));
}

TEST_F(ValueTest, TakeOfWhatIsProtectedAbsentOrUnloadedIsRefused) {
  start();
  const Handle handle = adopt(kPageable, 100);
  refused<UnavailableError>([&] { (void)manager->take(handle, kCuda0); });
  const Handle unloaded = source(100);
  refused<UnavailableError>([&] { (void)manager->take(unloaded); });
  manager->ensure(handle, kPinned);
  Lease lease = acquire(handle, kPinned);
  refused<InUseError>([&] { (void)manager->take(handle, kPageable); });
  lease.release();
  EXPECT_NE(manager->take(handle, kPageable), nullptr);
}

TEST_F(ValueTest, MissingDeviceIsRefusedAtEveryEntryPointEvenForANoOp) {
  fake_options.num_devices = 1;
  start();
  const Handle handle = adopt(kPageable, 100);
  const Handle handles[] = {handle};
  for (const Location missing : {kCuda1, Location::cuda(127), Location::disk("undeclared")}) {
    const std::function<void()> calls[] = {
        [&] { manager->ensure(handle, missing); },
        [&] { manager->move(handle, missing); },
        [&] { manager->move(handle, missing, missing); },
        [&] { manager->move(handle, kPageable, missing); },
        [&] { manager->drop(handle, missing); },
        [&] { (void)manager->take(handle, missing); },
        [&] { manager->hold(handles, missing).release(); },
        [&] {
          manager->reserve({missing, 0_B, "r"}).release();
        },
        [&] { manager->set_budget(missing, 1_B); },
    };
    for (std::size_t i = 0; i < std::size(calls); ++i) {
      SCOPED_TRACE(i);
      refused<UnavailableError>(calls[i]);
    }
    if (!missing.is_disk()) {  // which nobody can lease, existing or not
      refused<UnavailableError>([&] { manager->acquire(handles, missing).release(); });
      refused<UnavailableError>([&] { manager->borrow(handles, missing).release(); });
    }
  }
}

TEST_F(ValueTest, BudgetedLocationsAreListedFirstThenOthersAtFirstSuccess) {
  budget(kCuda0, 1_MiB);
  budget(kPageable, std::nullopt);
  start();
  const std::vector<Location> budgeted = {kCuda0, kPageable};
  EXPECT_EQ(manager->locations(), budgeted);
  const Handle handle = adopt(kPageable, 100);
  const ActionList actions = {EnsureResident{handle, kCuda1}};
  (void)manager->explain(actions);
  manager->drop(handle, kPinned);
  EXPECT_THROW(manager->ensure(handle, Location::cuda(9)), UnavailableError);
  backend->fail(Call::kCopy, 1);
  EXPECT_THROW(manager->ensure(handle, kPinned), fake::InjectedFault);
  EXPECT_EQ(manager->locations(), budgeted);
  manager->ensure(handle, kPinned);
  manager->reserve({kCuda1, 0_B, "r"}).release();
  const std::vector<Location> listed = {kCuda0, kPageable, kPinned, kCuda1};
  EXPECT_EQ(manager->locations(), listed);
  manager->drop(handle, kPinned);
  EXPECT_EQ(manager->locations(), listed);
  (void)source(8, kDisk);
  EXPECT_EQ(manager->locations().back(), kDisk);
}

TEST_F(ValueTest, DuplicateBudgetsAndDisksAreArgumentErrors) {
  const auto make = [](ManagerOptions given) {
    return Manager::create(std::move(given), std::make_shared<FakeBackend>());
  };
  ManagerOptions twice;
  twice.budgets = {{kCuda0, 1_B}, {kCuda0, 2_B}};
  EXPECT_THROW((void)make(twice), std::invalid_argument);
  ManagerOptions disks;
  disks.disks = {{.name = "a", .directory = "/x", .budget = std::nullopt},
                 {.name = "a", .directory = "/y", .budget = std::nullopt}};
  EXPECT_THROW((void)make(disks), std::invalid_argument);
  ManagerOptions both;
  both.disks = {{.name = "a", .directory = "/x", .budget = 1_B}};
  both.budgets = {{Location::disk("a"), 1_B}};
  EXPECT_THROW((void)make(both), std::invalid_argument);
  EXPECT_THROW((void)Manager::create({}, nullptr), std::invalid_argument);
  ManagerOptions bad_name;
  bad_name.disks = {{.name = "../x", .directory = "/x", .budget = std::nullopt}};
  EXPECT_THROW((void)make(bad_name), std::invalid_argument);
  ManagerOptions nowhere;
  nowhere.disks = {{.name = "a", .directory = "", .budget = std::nullopt}};
  EXPECT_THROW((void)make(nowhere), std::invalid_argument);
  ManagerOptions order;
  order.link_order = {LocationKind::kDisk, LocationKind::kCuda, LocationKind::kDisk};
  EXPECT_THROW((void)make(order), std::invalid_argument);
}

TEST_F(ValueTest, BudgetOfAMissingDeviceIsRefusedAtCreation) {
  ManagerOptions missing;
  missing.budgets = {{Location::cuda(77), 1_B}};
  EXPECT_THROW((void)Manager::create(missing, std::make_shared<FakeBackend>()), UnavailableError);
}

TEST_F(ValueTest, BackendThatCannotOpenFailsTheCreation) {
  auto broken = std::make_shared<FakeBackend>();
  broken->fail(Call::kOpen, 1);
  EXPECT_THROW((void)Manager::create({}, broken), fake::InjectedFault);
}

TEST_F(ValueTest, DestructionOfSourcesAndBlocksHappensWithoutTheMutex) {
  start();
  backend->probe_lock(manager);
  const Handle loaded = source(100);
  manager->ensure(loaded, kCuda0);
  manager->ensure(loaded, kDisk);
  sources.clear();
  manager->discard(loaded);
  const Handle adopted = adopt(kPageable, 100);
  manager->move(adopted, kDisk);
  (void)manager->snapshot();
  backend->complete_all();
  (void)manager->snapshot();
  manager->discard(adopted);
  manager->forget_discarded();
  backend->probe_lock(nullptr);
}

}  // namespace
}  // namespace residency::test
