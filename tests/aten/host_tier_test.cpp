#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <utility>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "residency/aten/manager.h"
#include "residency/aten/tensor_block.h"
#include "tests/aten/fixture.h"

namespace residency::testing {
namespace {

using ::testing::HasSubstr;

class HostTier : public ::testing::Test {
 protected:
  HostTier() : manager_(create_manager(with_disk(directory_))) {}
  ~HostTier() override {
    if (!manager_->closed()) {
      manager_->audit();
      manager_->close({.force = true});
    }
  }

  TemporaryDirectory directory_;
  std::shared_ptr<Manager> manager_;
};

TEST_F(HostTier, AdoptChargesThePackedStorages) {
  const Handle handle =
      adopt(*manager_, TensorResident({{"w", at::ones({100, 10}).t()}, {"b", at::ones({3})}}));
  EXPECT_EQ(used_at(*manager_, kHost), Bytes(4032 + 64));
  const Snapshot snapshot = manager_->snapshot();
  const ValueSnapshot* value = snapshot.find(handle);
  ASSERT_NE(value, nullptr);
  EXPECT_EQ(value->spec.logical_bytes, Bytes(4012));
  EXPECT_EQ(value->spec.mode, ReplicaMode::kExclusive);
  EXPECT_EQ(value->spec.recoverability, Recoverability::kMustPreserve);
}

TEST_F(HostTier, ChargeOfAnExpandedTensorAndOfASliceIsTheirStorage) {
  const Handle expanded =
      adopt(*manager_, TensorResident({{"x", at::ones({1}).expand({1'000'000})}}));
  EXPECT_EQ(used_at(*manager_, kHost), Bytes(64));
  const Handle slice =
      adopt(*manager_, TensorResident({{"x", at::ones({100, 1000}).narrow(0, 7, 1)}}));
  EXPECT_EQ(used_at(*manager_, kHost), Bytes(64 + 400'000));
  for (const Handle& handle : {expanded, slice}) {
    const Explanation explanation =
        manager_->explain(std::vector<ResidencyAction>{MoveResident{handle, kDisk}});
    ASSERT_TRUE(explanation.feasible);
    manager_->move(handle, kDisk).wait();
    EXPECT_EQ(used_at(*manager_, kDisk), explanation.find(kDisk)->used_after);
  }
}

TEST_F(HostTier, AdoptAtAnotherPlaceThanTheTensorsAre) {
  const TensorResident value({{"x", at::ones({4})}});
  EXPECT_THROW((void)adopt(*manager_, value, {.at = Location::pinned_host()}),
               MaterializationError);
  EXPECT_THROW((void)adopt(*manager_, value, {.at = kDisk}), MaterializationError);
  EXPECT_TRUE(manager_->locations().empty() || used_at(*manager_, kHost) == Bytes());
  EXPECT_TRUE(manager_->snapshot().values.empty());
  EXPECT_NO_THROW((void)adopt(*manager_, value, {.at = Location::parse("cpu")}));
}

TEST_F(HostTier, OverlapWithManagedMemoryByOneByteIsRefusedACloneIsNot) {
  const at::Tensor base = at::ones({16});
  const Handle first = adopt(*manager_, TensorResident({{"x", base}}));
  const std::uint64_t version = manager_->state_version();
  EXPECT_THROW((void)adopt(*manager_, TensorResident({{"x", base.narrow(0, 15, 1)}})),
               OwnershipError);
  EXPECT_EQ(manager_->state_version(), version);
  EXPECT_EQ(manager_->snapshot().values.size(), 1U);
  EXPECT_EQ(used_at(*manager_, kHost), Bytes(64));
  const Handle second = adopt(*manager_, TensorResident({{"x", base.clone()}}));
  EXPECT_NE(first, second);
}

TEST_F(HostTier, OverlapWithAPackThatTheManagerMadeIsRefused) {
  const Handle handle = adopt(*manager_, TensorResident({{"x", at::ones({16})}}));
  manager_->move(handle, kDisk);
  manager_->move(handle, kHost).wait();
  Lease lease = manager_->acquire(one(handle), kHost);
  const at::Tensor alias = tensors(lease, handle)["x"];
  lease.release();
  EXPECT_THROW((void)adopt(*manager_, TensorResident({{"y", alias}})), OwnershipError);
}

TEST_F(HostTier, ZeroByteValuesStayDistinct) {
  const at::Tensor empty = at::empty({0, 3});
  const Handle first = adopt(*manager_, TensorResident({{"x", empty}}));
  const Handle second = adopt(*manager_, TensorResident({{"x", empty}}));
  EXPECT_NE(first, second);
  EXPECT_EQ(used_at(*manager_, kHost), Bytes());
  manager_->move(first, kDisk);
  manager_->move(first, kHost).wait();
  EXPECT_EQ(take(*manager_, first)["x"].sizes(), at::IntArrayRef({0, 3}));
}

TEST_F(HostTier, BudgetRefusesAdoptAndNothingChanges) {
  manager_->set_budget(kHost, Bytes(64));
  const std::uint64_t version = manager_->state_version();
  EXPECT_THROW((void)adopt(*manager_, TensorResident({{"x", at::ones({17})}})), BudgetError);
  EXPECT_EQ(manager_->state_version(), version);
  EXPECT_NO_THROW((void)adopt(*manager_, TensorResident({{"x", at::ones({16})}})));
}

TEST_F(HostTier, MemoryOfSomebodyElseIsRefused) {
  std::vector<float> memory(4);
  EXPECT_THAT(message_of<MaterializationError>([&] {
                (void)adopt(*manager_, TensorResident({{"x", at::from_blob(memory.data(), {4})}}));
              }),
              HasSubstr("does not own"));
}

TEST_F(HostTier, DeviceAndPinnedLocationsSayWhyTheyAreNotThere) {
  const Handle handle = adopt(*manager_, TensorResident({{"x", at::ones({4})}}));
  for (const Location there : {Location::pinned_host(), Location::cuda(0)}) {
    EXPECT_THAT(message_of<UnavailableError>([&] { manager_->move(handle, there); }),
                HasSubstr("CUDA layer"));
  }
  EXPECT_THAT(
      message_of<UnavailableError>([&] { manager_->move(handle, Location::disk("other")); }),
      HasSubstr("declared"));
}

TEST_F(HostTier, LeaseShowsTheTensorsWithoutCopying) {
  const at::Tensor mine = at::arange(12, at::kFloat).view({3, 4}).t();
  const Handle handle = adopt(*manager_, TensorResident({{"x", mine}}));
  Lease lease = manager_->acquire(one(handle), kHost);
  const TensorResident& seen = tensors(lease, handle);
  EXPECT_TRUE(same(seen["x"], mine));
  EXPECT_TRUE(seen["x"].is_alias_of(mine));
  EXPECT_FALSE(seen["x"].is_same(mine));
  EXPECT_EQ(&seen, &tensors(lease, handle));
  lease.release();
  EXPECT_THROW((void)tensors(lease, handle), LifetimeClosedError);
}

TEST_F(HostTier, UndeclaredWriteIsReportedAtReleaseNamingTheField) {
  const Handle handle =
      adopt(*manager_, TensorResident({{"a", at::ones({4})}, {"b", at::ones({4})}}),
            {.mode = ReplicaMode::kReplicable});
  manager_->ensure(handle, kDisk).wait();
  Lease lease = manager_->acquire(one(handle), kHost);
  tensors(lease, handle)["b"].view({2, 2}).select(0, 0).fill_(7);
  std::string field;
  try {
    lease.release();
  } catch (const UndeclaredWriteError& error) {
    field = error.field;
  }
  EXPECT_EQ(field, "b");
  EXPECT_FALSE(lease.active());
  const Snapshot snapshot = manager_->snapshot();
  for (const auto& each : snapshot.find(handle)->materializations) {
    EXPECT_EQ(each.stale, each.location == kDisk);
  }
  // The bytes as they are now are the known ones.
  Lease again = manager_->acquire(one(handle), kHost);
  EXPECT_NO_THROW(again.release());
}

TEST_F(HostTier, WriteThroughTheCallersAliasIsUndeclaredToo) {
  const at::Tensor mine = at::ones({4});
  const Handle handle = adopt(*manager_, TensorResident({{"x", mine}}));
  mine.add_(1);
  Lease lease = manager_->acquire(one(handle), kHost);
  EXPECT_THROW(lease.release(), UndeclaredWriteError);
}

TEST_F(HostTier, WriteThatNoCounterSeesIsFoundByChecksums) {
  for (const bool checksum : {false, true}) {
    ManagerOptions options;
    options.checksum_leases = checksum;
    const auto manager = create_manager(std::move(options));
    const Handle handle =
        adopt(*manager, TensorResident({{"a", at::ones({4})}, {"b", at::ones({400})}}));
    Lease lease = manager->acquire(one(handle), kHost);
    tensors(lease, handle)["b"].mutable_data_ptr<float>()[399] = 5;
    if (checksum) {
      EXPECT_THROW(lease.release(), UndeclaredWriteError);
    } else {
      EXPECT_NO_THROW(lease.release());
    }
    manager->close();
  }
}

TEST_F(HostTier, WriteLeaseOfAMutableValueMakesOthersStale) {
  const Handle handle =
      adopt(*manager_, TensorResident({{"x", at::zeros({4})}}),
            {.mode = ReplicaMode::kReplicable, .mutability = Mutability::kMutable});
  manager_->ensure(handle, kDisk).wait();
  Lease lease = manager_->acquire(one(handle), kHost, {.access = Access::kWrite});
  tensors(lease, handle)["x"].fill_(3);
  lease.release();
  // The refresh carries the new bytes into the file, and they come back.
  manager_->ensure(handle, kDisk).wait();
  manager_->drop(handle, kHost);
  manager_->ensure(handle, kHost).wait();
  EXPECT_TRUE(take(*manager_, handle, kHost)["x"].equal(at::ones({4}).mul(3)));
}

TEST_F(HostTier, StaleHostCopyIsRefreshedInPlaceAndAutogradCanTell) {
  const Handle handle =
      adopt(*manager_, TensorResident({{"x", at::zeros({4})}}),
            {.mode = ReplicaMode::kReplicable, .mutability = Mutability::kMutable});
  manager_->ensure(handle, kDisk).wait();
  {
    Lease lease = manager_->acquire(one(handle), kHost, {.access = Access::kWrite});
    tensors(lease, handle)["x"].fill_(3);
    lease.release();
  }
  manager_->ensure(handle, kDisk).wait();
  {
    Lease lease = manager_->acquire(one(handle), kHost);
    EXPECT_TRUE(tensors(lease, handle)["x"].equal(at::ones({4}).mul(3)));
    lease.release();
  }
}

TEST_F(HostTier, InferenceTensorsAreRefusedAsMutableAndKeptOtherwise) {
  at::Tensor made;
  {
    const c10::InferenceMode mode;
    made = at::ones({4});
  }
  EXPECT_THROW(
      (void)adopt(*manager_, TensorResident({{"x", made}}), {.mutability = Mutability::kMutable}),
      MaterializationError);
  const Handle handle = adopt(*manager_, TensorResident({{"x", made}}));
  Lease lease = manager_->acquire(one(handle), kHost);
  EXPECT_TRUE(tensors(lease, handle)["x"].is_inference());
  EXPECT_NO_THROW(lease.release());
}

TEST_F(HostTier, LeaseNeedsAMaterializationInMemory) {
  const Handle handle = adopt(*manager_, TensorResident({{"x", at::ones({4})}}));
  EXPECT_THROW((void)manager_->acquire(one(handle), Location::pinned_host()), UnavailableError);
  manager_->move(handle, kDisk).wait();
  EXPECT_THROW((void)manager_->acquire(one(handle), kHost), UnavailableError);
  EXPECT_THROW((void)manager_->acquire(one(handle), kDisk), std::invalid_argument);
  EXPECT_THROW((void)manager_->acquire({}, kHost), std::invalid_argument);
  EXPECT_THROW((void)manager_->acquire(one(handle), kHost, {.stream = Stream{kHost, 0}}),
               std::invalid_argument);
}

TEST_F(HostTier, TakeGivesTheTensorsBackAndEndsManagement) {
  at::Tensor mine = at::ones({4}).set_requires_grad(true);
  const at::Tensor before = mine.detach().clone().set_requires_grad(true);
  const Handle handle = adopt(*manager_, TensorResident({{"x", std::move(mine)}}));
  const TensorResident back = take(*manager_, handle);
  EXPECT_TRUE(same(back["x"], before));
  EXPECT_TRUE(back["x"].is_leaf());
  EXPECT_EQ(used_at(*manager_, kHost), Bytes());
  EXPECT_THROW((void)take(*manager_, handle), HandleError);
  EXPECT_NO_THROW((void)adopt(*manager_, back));
}

TEST_F(HostTier, TakeBringsAValueOffTheDiskFirst) {
  const Handle handle = adopt(*manager_, TensorResident({{"x", at::arange(100)}}));
  DiskThread disk_thread(at::ones({1}));
  manager_->move(handle, kDisk);
  EXPECT_THROW((void)take(*manager_, handle, kDisk), std::invalid_argument);
  EXPECT_TRUE(take(*manager_, handle)["x"].equal(at::arange(100)));
  EXPECT_EQ(used_at(*manager_, kDisk), Bytes());
  disk_thread.drain();
  EXPECT_TRUE(directory_.files().empty());
}

TEST_F(HostTier, AssignReplacesContentsAndMakesOthersStale) {
  const Handle handle =
      adopt(*manager_, TensorResident({{"w", at::zeros({4}).set_requires_grad(true)}}),
            {.mode = ReplicaMode::kReplicable, .mutability = Mutability::kMutable});
  manager_->ensure(handle, kDisk).wait();
  assign(*manager_, handle, TensorResident({{"w", at::ones({4}).mul(9)}}));
  const Snapshot snapshot = manager_->snapshot();
  for (const auto& each : snapshot.find(handle)->materializations) {
    EXPECT_EQ(each.stale, each.location == kDisk);
  }
  const TensorResident back = take(*manager_, handle);
  EXPECT_TRUE(back["w"].detach().equal(at::ones({4}).mul(9)));
  EXPECT_TRUE(back["w"].requires_grad());
}

TEST_F(HostTier, AssignBringsAnExclusiveValueOffTheDisk) {
  const Handle handle = adopt(*manager_, TensorResident({{"w", at::zeros({4})}}),
                              {.mutability = Mutability::kMutable});
  manager_->move(handle, kDisk);
  assign(*manager_, handle, TensorResident({{"w", at::ones({4})}}));
  EXPECT_TRUE(take(*manager_, handle)["w"].equal(at::ones({4})));
}

TEST_F(HostTier, AssignOfAnotherLayoutOrToAnImmutableValueChangesNothing) {
  const Handle handle = adopt(*manager_, TensorResident({{"w", at::zeros({4})}}),
                              {.mutability = Mutability::kMutable});
  EXPECT_THROW(assign(*manager_, handle, TensorResident({{"w", at::ones({2, 2})}})),
               MaterializationError);
  EXPECT_TRUE(take(*manager_, handle)["w"].equal(at::zeros({4})));
  const Handle fixed = adopt(*manager_, TensorResident({{"w", at::zeros({4})}}));
  EXPECT_ANY_THROW(assign(*manager_, fixed, TensorResident({{"w", at::ones({4})}})));
  EXPECT_TRUE(take(*manager_, fixed)["w"].equal(at::zeros({4})));
  const Handle on_disk =
      adopt(*manager_, TensorResident({{"w", at::zeros({4})}}), {.mode = ReplicaMode::kExclusive});
  manager_->move(on_disk, kDisk).wait();
  const Bytes on_disk_bytes = manager_->snapshot().find(kDisk)->used;
  const std::uint64_t before = manager_->state_version();
  EXPECT_THROW(assign(*manager_, on_disk, TensorResident({{"w", at::ones({4})}})),
               std::invalid_argument);
  EXPECT_EQ(manager_->state_version(), before);
  EXPECT_EQ(manager_->snapshot().find(kDisk)->used, on_disk_bytes);
}

TEST_F(HostTier, AdoptedTensorThatIsKeptEscapesByName) {
  at::Tensor mine = at::ones({256});
  const Handle handle = adopt(*manager_, TensorResident({{"x", mine}}));
  const Explanation explanation =
      manager_->explain(std::vector<ResidencyAction>{MoveResident{handle, kDisk}});
  ASSERT_TRUE(explanation.feasible);
  EXPECT_EQ(explanation.find(kHost)->escaped_after, Bytes(1024));
  manager_->move(handle, kDisk).wait();
  manager_->synchronize();
  Snapshot snapshot = manager_->snapshot();
  EXPECT_EQ(snapshot.find(kHost)->escaped, Bytes(1024));
  EXPECT_EQ(snapshot.find(kHost)->used, explanation.find(kHost)->used_after);
  mine.reset();
  snapshot = manager_->snapshot();
  EXPECT_EQ(snapshot.find(kHost)->escaped, Bytes());
  EXPECT_EQ(snapshot.find(kHost)->used, Bytes());
}

TEST_F(HostTier, TensorSavedByAutogradEscapes) {
  const Handle handle = adopt(*manager_, TensorResident({{"w", at::ones({256})}}));
  at::Tensor loss;
  {
    Lease lease = manager_->acquire(one(handle), kHost);
    const at::Tensor input = at::ones({256}).set_requires_grad(true);
    loss = input.mul(tensors(lease, handle)["w"]).sum();
    lease.release();
  }
  manager_->move(handle, kDisk).wait();
  manager_->synchronize();
  EXPECT_EQ(manager_->snapshot().find(kHost)->escaped, Bytes(1024));
  loss.reset();
  EXPECT_EQ(manager_->snapshot().find(kHost)->escaped, Bytes());
}

TEST_F(HostTier, StrictAliasesRefuseBeforehand) {
  ManagerOptions options = with_disk(directory_);
  options.strict_aliases = true;
  const auto manager = create_manager(std::move(options));
  at::Tensor mine = at::ones({4});
  const Handle handle = adopt(*manager, TensorResident({{"x", mine}}));
  EXPECT_THROW(manager->move(handle, kDisk), InUseError);
  mine.reset();
  EXPECT_NO_THROW(manager->move(handle, kDisk).wait());
  manager->close({.force = true});
}

TEST_F(HostTier, SourceLoadsWhenUsedAndAgainAfterDrop) {
  int num_loads = 0;
  const TensorResident example({{"x", at::zeros({4})}});
  const Handle handle = register_source(*manager_, std::make_shared<CallbackSource>([&] {
    ++num_loads;
    return TensorResident({{"x", at::ones({4}).mul(num_loads)}});
  }),
                                        example.layout());
  EXPECT_EQ(num_loads, 0);
  manager_->ensure(handle, kHost);
  manager_->ensure(handle, kHost);
  EXPECT_EQ(num_loads, 1);
  manager_->drop(handle, kHost);
  Lease lease = manager_->borrow(one(handle), kHost);
  EXPECT_TRUE(tensors(lease, handle)["x"].equal(at::ones({4}).mul(2)));
  lease.release();
}

TEST_F(HostTier, SourceThatKeepsItsTensorIsCopied) {
  const at::Tensor kept = at::ones({4});
  const auto source = std::make_shared<CallbackSource>([kept] {
    return TensorResident({{"x", kept}});
  });
  const Handle handle = register_source(*manager_, source, TensorResident({{"x", kept}}).layout());
  manager_->ensure(handle, kHost);
  kept.fill_(5);
  Lease lease = manager_->acquire(one(handle), kHost);
  EXPECT_TRUE(tensors(lease, handle)["x"].equal(at::ones({4})));
  EXPECT_NO_THROW(lease.release());
}

TEST_F(HostTier, SourceOverMemoryOfSomebodyElseIsCopied) {
  std::vector<float> memory(4, 1.0F);
  const auto source = std::make_shared<CallbackSource>([&] {
    return TensorResident({{"x", at::from_blob(memory.data(), {4})}});
  });
  const Handle handle =
      register_source(*manager_, source, TensorResident({{"x", at::ones({4})}}).layout());
  manager_->ensure(handle, kHost);
  memory.assign(4, 2.0F);
  EXPECT_TRUE(take(*manager_, handle)["x"].equal(at::ones({4})));
}

TEST_F(HostTier, SourceOfAnotherLayoutFailsAndLeavesTheValueUnloaded) {
  bool right = false;
  const TensorResident example({{"x", at::zeros({4})}});
  const Handle handle = register_source(*manager_, std::make_shared<CallbackSource>([&] {
    return TensorResident({{"x", right ? at::ones({4}) : at::ones({2, 2})}});
  }),
                                        example.layout());
  EXPECT_THROW(manager_->ensure(handle, kHost), MaterializationError);
  EXPECT_EQ(used_at(*manager_, kHost), Bytes());
  right = true;
  EXPECT_NO_THROW(manager_->ensure(handle, kHost));
}

TEST_F(HostTier, ExceptionOfASourceArrivesUnchanged) {
  const TensorResident example({{"x", at::zeros({4})}});
  const Handle handle =
      register_source(*manager_, std::make_shared<CallbackSource>([]() -> TensorResident {
        throw std::domain_error("no network");
      }),
                      example.layout());
  EXPECT_EQ(message_of<std::domain_error>([&] { manager_->ensure(handle, kHost); }), "no network");
  EXPECT_EQ(used_at(*manager_, kHost), Bytes());
}

TEST_F(HostTier, SourceLoadedToDiskIsChargedOnTheHostMeanwhile) {
  manager_->set_budget(kHost, Bytes(64));
  const TensorResident small({{"x", at::zeros({4})}});
  const TensorResident large({{"x", at::zeros({400})}});
  const auto source_of = [](const at::Tensor& tensor) {
    return std::make_shared<CallbackSource>([tensor] {
      return TensorResident({{"x", tensor.clone()}});
    });
  };
  const Handle fits = register_source(*manager_, source_of(small["x"]), small.layout());
  const Handle does_not = register_source(*manager_, source_of(large["x"]), large.layout());
  manager_->ensure(fits, kDisk).wait();
  manager_->synchronize();
  EXPECT_EQ(used_at(*manager_, kHost), Bytes());
  EXPECT_EQ(manager_->snapshot().find(kHost)->peak_used, Bytes(64));
  EXPECT_THROW(manager_->ensure(does_not, kDisk), BudgetError);
}

}  // namespace
}  // namespace residency::testing
