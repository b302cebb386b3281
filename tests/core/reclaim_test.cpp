// What a manager gives up when somebody else needs the memory.

#include "residency/core/reclaim.h"

#include <algorithm>

#include <gmock/gmock.h>

#include "fixture.h"

namespace residency::test {
namespace {

class ReclaimTest : public ManagerTest {
 protected:
  void start(ReclaimMode mode) {
    options.reclaim = mode;
    ManagerTest::start();
  }
  /// Costs by handle, in the order given.
  [[nodiscard]] std::vector<std::pair<Handle, Bytes>> evictable() const {
    std::vector<std::pair<Handle, Bytes>> found;
    for (const Evictable& each : backend->reclaimer()->evictable(kCuda0)) {
      EXPECT_EQ(each.ranges.size(), 1U);
      found.emplace_back(each.handle, each.cost);
    }
    return found;
  }
  using Costs = std::vector<std::pair<Handle, Bytes>>;
  bool evict(const Handle& handle) {
    return backend->reclaimer()->evict(handle, kCuda0, "512 B for somebody");
  }
  Handle replica(std::int64_t nbytes) {
    const Handle handle = adopt(kPageable, nbytes);
    manager->ensure(handle, kCuda0).wait();
    return handle;
  }
};

TEST_F(ReclaimTest, NothingMayLeaveWhenItIsOff) {
  start(ReclaimMode::kOff);
  const Handle handle = replica(1000);
  EXPECT_EQ(evictable(), Costs());
  EXPECT_FALSE(evict(handle));
  EXPECT_THAT(places(handle), testing::ElementsAre(kPageable, kCuda0));
  const std::vector<Holder> holders = backend->reclaimer()->holders(kCuda0);
  ASSERT_EQ(holders.size(), 1U);
  EXPECT_EQ(holders[0].handle, handle);
  EXPECT_NE(holders[0].why_it_stays.find("off"), std::string::npos);
}

TEST_F(ReclaimTest, ReplicasLeaveAndOnlyCopiesStay) {
  start(ReclaimMode::kReplicas);
  const Handle one = replica(1000);
  const Handle only = adopt(kCuda0, 2000);
  const Handle of_source = source(3000);
  manager->ensure(of_source, kCuda0).wait();
  const Handle other = replica(4000);
  EXPECT_EQ(evictable(), (Costs{{one, Bytes()}, {other, Bytes()}}));
  EXPECT_TRUE(evict(one));
  EXPECT_FALSE(evict(one)) << "it has left";
  EXPECT_FALSE(evict(only));
  EXPECT_FALSE(evict(of_source));
  EXPECT_THAT(places(one), testing::ElementsAre(kPageable));
  EXPECT_TRUE(holds(one, kPageable));
  EXPECT_TRUE(holds(only, kCuda0));
  const std::vector<Holder> holders = backend->reclaimer()->holders(kCuda0);
  ASSERT_EQ(holders.size(), 3U);
  EXPECT_EQ(holders[0].handle, other);
  EXPECT_EQ(holders[0].why_it_stays, "");
  EXPECT_EQ(holders[1].handle, of_source);
  EXPECT_EQ(holders[2].why_it_stays, "the only copy");
}

TEST_F(ReclaimTest, ByPolicyTheOnlyCopyMovesToWhereThereIsRoom) {
  budget(kPinned, 2500_B);
  budget(kPageable, 2500_B);
  start(ReclaimMode::kPolicy);
  std::vector<Handle> handles;
  Costs costs;
  for (int i = 0; i < 3; ++i) {
    handles.push_back(adopt(kCuda0, 2000));
    costs.emplace_back(handles.back(), 2000_B);
  }
  EXPECT_EQ(evictable(), costs);
  for (const Handle& handle : handles) {
    EXPECT_TRUE(evict(handle));
  }
  EXPECT_THAT(places(handles[0]), testing::ElementsAre(kPinned));
  EXPECT_THAT(places(handles[1]), testing::ElementsAre(kPageable));
  EXPECT_THAT(places(handles[2]), testing::ElementsAre(kDisk));
  EXPECT_TRUE(holds(handles[0], kPinned));
  EXPECT_TRUE(holds(handles[1], kPageable));
  EXPECT_EQ(manager->snapshot().find(kCuda0)->used, Bytes());
}

TEST_F(ReclaimTest, ByPolicyWhatASourceCanMakeAgainIsDropped) {
  start(ReclaimMode::kPolicy);
  const Handle handle = source(3000);
  manager->ensure(handle, kCuda0).wait();
  manager->drop(handle, kPageable);
  EXPECT_EQ(evictable(), (Costs{{handle, 3000_B}}));
  EXPECT_TRUE(evict(handle));
  EXPECT_THAT(places(handle), testing::IsEmpty());
}

TEST_F(ReclaimTest, WhatIsProtectedStays) {
  start(ReclaimMode::kPolicy);
  const Handle leased = replica(1000);
  const Handle held = replica(1000);
  const Handle written = adopt(kCuda0, 1000, kReplicable, kMutable);
  Lease lease = acquire(leased, kCuda0);
  Hold on = hold(held, kCuda0);
  Lease writing = acquire(written, kCuda0, Access::kWrite);
  EXPECT_EQ(evictable(), Costs());
  for (const Handle& handle : {leased, held, written}) {
    EXPECT_FALSE(evict(handle));
  }
  lease.release();
  on.release();
  EXPECT_EQ(evictable(), (Costs{{leased, Bytes()}, {held, Bytes()}}));
  writing.release();
}

TEST_F(ReclaimTest, DepartureIsInTheTrace) {
  start(ReclaimMode::kReplicas);
  const Handle handle = replica(1000);
  EXPECT_TRUE(evict(handle));
  const TransitionRecord entry = manager->trace().back();
  EXPECT_EQ(entry.action, ActionKind::kDrop);
  EXPECT_EQ(entry.phase, Phase::kReclaim);
  EXPECT_EQ(entry.plan, "512 B for somebody");
}

TEST_F(ReclaimTest, CopyThatFailsBringsTheValueBack) {
  start(ReclaimMode::kPolicy);
  const Handle handle = adopt(kCuda0, 1000);
  backend->fail(Call::kCopy, 1);
  EXPECT_FALSE(evict(handle));
  EXPECT_TRUE(holds(handle, kCuda0));
}

TEST_F(ReclaimTest, ClosedManagerHasNothing) {
  start(ReclaimMode::kReplicas);
  (void)replica(1000);
  const std::shared_ptr<Reclaimer> reclaimer = backend->reclaimer();
  manager->close();
  EXPECT_TRUE(reclaimer->evictable(kCuda0).empty());
  EXPECT_TRUE(reclaimer->holders(kCuda0).empty());
}

}  // namespace
}  // namespace residency::test
