// The fake backend notices what it is there to notice, and does what a backend may do.

#include "tests/fake/fake_backend.h"

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fixture.h"

namespace residency::test {
namespace {

class FakeTest : public testing::Test {
 protected:
  std::vector<std::string> violations;
  std::shared_ptr<FakeBackend> backend;
  ValueSpec spec = make_spec(100);
  Handle handle{1};

  void start(fake::Completion completion = fake::Completion::kManual, std::uint64_t seed = 1) {
    fake::FakeOptions options;
    options.seed = seed;
    options.completion = completion;
    options.on_violation = [this](const std::string& text) { violations.push_back(text); };
    backend = std::make_shared<FakeBackend>(options);
    ManagerOptions declared;
    declared.disks = {{.name = "nvme", .directory = "/nowhere"}};
    backend->open(ManagerId{1}, declared);
  }

  CopyResult copy(const BlockPtr& source, Location to, FencePtr ready = nullptr,
                  const Handle& value = Handle(1)) {
    CopyRequest request;
    request.value = value;
    request.spec = &spec;
    request.source = source;
    request.from = source->location();
    request.to = to;
    request.source_ready = std::move(ready);
    return backend->copy(request);
  }
  static FakeBlock& fake(const BlockPtr& block) { return dynamic_cast<FakeBlock&>(*block); }

  bool violated(const std::string& part) {
    for (const auto& text : violations) {
      if (text.find(part) != std::string::npos) {
        return true;
      }
    }
    return false;
  }
  void release(BlockPtr& block, std::vector<FencePtr> after = {}) {
    backend->release(std::move(block), std::move(after));
  }
};

TEST_F(FakeTest, ReadBeforeReadyIsSeen) {
  start();
  BlockPtr source = backend->make_block(kPinned, spec, 1);
  BlockPtr target = copy(source, kCuda0).block;
  (void)fake(target).holds(1);
  EXPECT_TRUE(violated("before they are ready"));
  backend->complete_all();
  violations.clear();
  EXPECT_TRUE(fake(target).holds(1));
  EXPECT_TRUE(violations.empty());
  release(source);
  release(target);
}

TEST_F(FakeTest, CopyThatDoesNotWaitForItsSourceIsSeen) {
  start();
  BlockPtr source = backend->make_block(kPinned, spec, 1);
  CopyResult first = copy(source, kCuda0);
  CopyResult right = copy(first.block, kCuda1, first.ready);
  EXPECT_TRUE(violations.empty());
  CopyResult wrong = copy(first.block, kCuda1, nullptr);
  EXPECT_TRUE(violated("without waiting for a queued copy"));
  backend->complete_all();
  for (BlockPtr* block : {&source, &first.block, &right.block, &wrong.block}) {
    release(*block);
  }
}

TEST_F(FakeTest, CopyFromAnArrivalThatMayFailIsSeen) {
  start();
  BlockPtr source = backend->make_block(kPageable, spec, 1);
  CopyResult staged = copy(source, kCuda0);
  CopyResult next = copy(staged.block, kCuda1, staged.ready);
  EXPECT_TRUE(violated("whose arrival can still fail"));
  backend->complete_all();
  for (BlockPtr* block : {&source, &staged.block, &next.block}) {
    release(*block);
  }
}

TEST_F(FakeTest, ReleaseThatDoesNotWaitForAReaderIsSeen) {
  start();
  BlockPtr source = backend->make_block(kPinned, spec, 1);
  CopyResult result = copy(source, kCuda0);
  release(source);
  EXPECT_TRUE(violated("was released without waiting for a queued copy"));
  backend->complete_all();
  release(result.block);
}

TEST_F(FakeTest, ReleaseBehindTheReadersIsFine) {
  start();
  BlockPtr source = backend->make_block(kPinned, spec, 1);
  CopyResult first = copy(source, kCuda0);
  CopyResult second = copy(first.block, kCuda1, first.ready);
  // The second copy's fence implies the first.
  release(source, {second.ready});
  EXPECT_EQ(backend->live_bytes(kPinned), Bytes()) << "reused in device order";
  backend->complete_all();
  EXPECT_TRUE(fake(second.block).holds(1));
  release(first.block);
  release(second.block);
  EXPECT_TRUE(violations.empty());
}

TEST_F(FakeTest, PageableBytesLiveUntilTheirReadersHaveFinished) {
  start();
  BlockPtr source = backend->make_block(kPageable, spec, 1);
  CopyResult result = copy(source, kDisk);
  release(source, {result.ready});
  EXPECT_EQ(backend->live_bytes(kPageable), 128_B);
  backend->complete_all();
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  release(result.block);
}

TEST_F(FakeTest, BlockThatDiesUnderAQueuedCopyIsSeen) {
  start();
  BlockPtr source = backend->make_block(kPageable, spec, 1);
  CopyResult result = copy(source, kDisk);
  source.reset();
  EXPECT_TRUE(violated("was freed while a queued copy"));
  backend->complete_all();
  EXPECT_TRUE(violated("reads freed memory"));
  release(result.block);
}

TEST_F(FakeTest, DoubleReleaseIsSeen) {
  start();
  BlockPtr block = backend->make_block(kPageable, spec, 1);
  BlockPtr again = block;
  release(block);
  release(again);
  EXPECT_TRUE(violated("double release"));
}

TEST_F(FakeTest, UseAfterCloseIsSeen) {
  start();
  BlockPtr block = backend->make_block(kPageable, spec, 1);
  backend->close(true);
  (void)copy(block, kPinned);
  EXPECT_TRUE(violated("after Backend::close"));
  violations.clear();
  backend->close(true);
  EXPECT_TRUE(violated("twice"));
}

TEST_F(FakeTest, KernelOnAStreamThatDoesNotWaitIsSeen) {
  start();
  BlockPtr source = backend->make_block(kPinned, spec, 1);
  CopyResult result = copy(source, kCuda0);
  backend->launch_read({kCuda0, 1}, fake(result.block), 1);
  ASSERT_TRUE(backend->complete_one());  // one of the two; in one order the kernel comes first
  backend->complete_all();
  // With the edge it is always in order.
  violations.clear();
  CopyResult second = copy(source, kCuda0);
  backend->begin_access(*second.block, Access::kRead, Stream{kCuda0, 2},
                        std::span(&second.ready, 1), false);
  backend->launch_read({kCuda0, 2}, fake(second.block), 1);
  EXPECT_FALSE(backend->end_access(*second.block, Access::kRead, false));
  backend->complete_all();
  EXPECT_TRUE(violations.empty());
  release(source);
  release(result.block);
  release(second.block);
}

TEST_F(FakeTest, KernelStillRunningAtReleaseIsSeen) {
  start();
  BlockPtr block = backend->make_block(kCuda0, spec, 1);
  BlockPtr other = backend->make_block(kCuda0, spec, 2);
  backend->launch_read({kCuda0, 1}, fake(block), 1);
  backend->launch_read({kCuda0, 1}, fake(other), 2);
  const FencePtr use = backend->record_use({kCuda0, 1});
  EXPECT_EQ(use->poll(), FenceStatus::kPending);
  release(block, {use});
  EXPECT_TRUE(violations.empty());
  release(other);
  EXPECT_TRUE(violated("without waiting for a kernel"));
  backend->complete_all();
  EXPECT_EQ(use->poll(), FenceStatus::kDone);
}

TEST_F(FakeTest, OverwriteThatDoesNotWaitForReadersIsSeen) {
  start();
  BlockPtr source = backend->make_block(kPinned, spec, 1);
  BlockPtr target = backend->make_block(kCuda0, spec, 2);
  backend->launch_read({kCuda0, 1}, fake(target), 2);
  CopyRequest request;
  request.value = handle;
  request.spec = &spec;
  request.source = source;
  request.from = kPinned;
  request.to = kCuda0;
  request.overwrite = target;
  request.overwrite_after = {backend->record_use({kCuda0, 1})};
  (void)backend->copy(request);
  EXPECT_TRUE(violations.empty());
  backend->launch_read({kCuda0, 5}, fake(target), 1);
  request.overwrite_after = {};
  (void)backend->copy(request);
  EXPECT_TRUE(violated("overwrites"));
  backend->complete_all();
  release(source);
  release(target);
}

TEST_F(FakeTest, ViewThatOutlivesItsBlockIsSeen) {
  start();
  BlockPtr block = backend->make_block(kPageable, spec, 1);
  const auto view = backend->open_view(*block);
  release(block);
  EXPECT_TRUE(violated("while a view of it is open"));
}

TEST_F(FakeTest, CompletesInAnyLegalOrder) {
  std::set<std::vector<int>> orders;
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    start(fake::Completion::kManual, seed);
    BlockPtr source = backend->make_block(kPinned, spec, 1);
    std::vector<CopyResult> copies;
    for (int i = 0; i < 3; ++i) {
      copies.push_back(copy(source, kCuda0, nullptr, Handle(10 + i)));
    }
    copies.push_back(copy(copies[0].block, kCuda1, copies[0].ready, Handle(13)));
    std::vector<int> order;
    std::vector<bool> done(4, false);
    while (backend->complete_one()) {
      for (int i = 0; i < 4; ++i) {
        const auto at = static_cast<std::size_t>(i);
        const bool is_done = copies[at].ready->poll() == FenceStatus::kDone;
        if (is_done && !done[at]) {
          order.push_back(i);
          done[at] = true;
        }
      }
    }
    ASSERT_EQ(order.size(), 4U);
    EXPECT_LT(std::find(order.begin(), order.end(), 0), std::find(order.begin(), order.end(), 3));
    orders.insert(order);
    release(source);
    for (auto& each : copies) {
      release(each.block);
    }
  }
  EXPECT_GT(orders.size(), 6U);
  EXPECT_TRUE(violations.empty());
}

TEST_F(FakeTest, SameSeedGivesTheSameOrder) {
  const auto run = [&](std::uint64_t seed) {
    start(fake::Completion::kManual, seed);
    BlockPtr source = backend->make_block(kPinned, spec, 1);
    std::vector<BlockPtr> blocks;
    for (int i = 0; i < 5; ++i) {
      blocks.push_back(copy(source, kCuda0, nullptr, Handle(10 + i)).block);
    }
    std::vector<std::int64_t> order;
    std::size_t before = backend->queued_transfers().size();
    while (before != 0) {
      const auto queued = backend->queued_transfers();
      backend->complete_one();
      const auto left = backend->queued_transfers();
      for (const auto& transfer : queued) {
        bool there = false;
        for (const auto& other : left) {
          there = there || other.value == transfer.value;
        }
        if (!there) {
          order.push_back(transfer.value.id());
        }
      }
      before = left.size();
    }
    release(source);
    for (auto& block : blocks) {
      release(block);
    }
    return order;
  };
  EXPECT_EQ(run(7), run(7));
}

TEST_F(FakeTest, WaitCompletesWhatItDependsOnAndNothingElse) {
  start();
  BlockPtr source = backend->make_block(kPinned, spec, 1);
  CopyResult a = copy(source, kCuda0);
  CopyResult b = copy(a.block, kCuda1, a.ready);
  CopyResult unrelated = copy(source, kCuda0, nullptr, Handle(2));
  b.ready->wait();
  EXPECT_EQ(a.ready->poll(), FenceStatus::kDone);
  EXPECT_EQ(unrelated.ready->poll(), FenceStatus::kPending);
  backend->complete_all();
  for (BlockPtr* block : {&source, &a.block, &b.block, &unrelated.block}) {
    release(*block);
  }
}

TEST_F(FakeTest, NthCallFailsAndOnlyIt) {
  start();
  BlockPtr source = backend->make_block(kPinned, spec, 1);
  backend->fail(Call::kCopy, 2);
  CopyResult first = copy(source, kCuda0);
  EXPECT_FALSE(backend->fault_happened());
  const Bytes live = backend->live_bytes(kCuda0);
  EXPECT_THROW((void)copy(source, kCuda0), fake::InjectedFault);
  EXPECT_TRUE(backend->fault_happened());
  EXPECT_EQ(backend->live_bytes(kCuda0), live) << "a call that throws has changed nothing";
  CopyResult third = copy(source, kCuda0);
  EXPECT_EQ(backend->num_calls(Call::kCopy), 3U);
  backend->complete_all();
  for (BlockPtr* block : {&source, &first.block, &third.block}) {
    release(*block);
  }
}

TEST_F(FakeTest, NthTransferFailsAtItsCompletion) {
  start();
  BlockPtr source = backend->make_block(kPageable, spec, 1);
  backend->fail(Call::kTransfer, 2);
  CopyResult direct = copy(source, kPinned);  // cannot fail later, and is not counted
  CopyResult first = copy(source, kDisk);
  CopyResult second = copy(source, kCuda0);
  EXPECT_EQ(second.ready->poll(), FenceStatus::kPending);
  backend->complete_all();
  EXPECT_EQ(first.ready->poll(), FenceStatus::kDone);
  ASSERT_EQ(second.ready->poll(), FenceStatus::kFailed);
  EXPECT_THROW(std::rethrow_exception(second.ready->error()), fake::InjectedFault);
  for (BlockPtr* block : {&source, &direct.block, &first.block, &second.block}) {
    release(*block);
  }
}

TEST_F(FakeTest, FreedBytesArePoisoned) {
  start();
  BlockPtr block = backend->make_block(kPageable, spec, 1);
  BlockPtr kept = block;
  EXPECT_TRUE(fake(kept).holds(1));
  release(block);
  EXPECT_EQ(backend->live_bytes(kPageable), 128_B) << "the last reference frees it";
  const auto memory = fake(kept).memory();
  kept.reset();
  EXPECT_EQ(backend->live_bytes(kPageable), Bytes());
  EXPECT_TRUE(violations.empty());
}

TEST_F(FakeTest, SharedMemoryLivesAsLongAsItIsShared) {
  start();
  BlockPtr block = backend->make_block(kPinned, spec, 1);
  EXPECT_FALSE(backend->is_shared(*block));
  EXPECT_EQ(backend->watch_escape(*block), nullptr);
  std::shared_ptr<void> alias = fake(block).share();
  EXPECT_TRUE(backend->is_shared(*block));
  const FencePtr gone = backend->watch_escape(*block);
  release(block);
  EXPECT_EQ(gone->poll(), FenceStatus::kPending);
  EXPECT_EQ(backend->live_bytes(kPinned), 100_B);
  alias.reset();
  EXPECT_EQ(gone->poll(), FenceStatus::kDone);
  EXPECT_EQ(backend->live_bytes(kPinned), Bytes());
}

TEST_F(FakeTest, PeakIsMeasuredIndependently) {
  start();
  BlockPtr a = backend->make_block(kCuda0, spec, 1);
  BlockPtr b = backend->make_block(kCuda0, spec, 1);
  release(a);
  EXPECT_EQ(backend->live_bytes(kCuda0), 512_B);
  EXPECT_EQ(backend->peak_bytes(kCuda0), 1024_B);
  backend->reset_peaks();
  EXPECT_EQ(backend->peak_bytes(kCuda0), 512_B);
  release(b);
}

TEST_F(FakeTest, ThreadCompletesByItself) {
  start(fake::Completion::kThreaded);
  BlockPtr source = backend->make_block(kPageable, spec, 1);
  std::vector<CopyResult> copies;
  for (int i = 0; i < 50; ++i) {
    copies.push_back(copy(source, i % 2 == 0 ? kDisk : kCuda0, nullptr, Handle(10 + i)));
  }
  for (auto& each : copies) {
    if (each.ready) {
      each.ready->wait();
      EXPECT_EQ(each.ready->poll(), FenceStatus::kDone);
    }
  }
  release(source);
  for (auto& each : copies) {
    release(each.block);
  }
  backend->close(true);
  EXPECT_TRUE(violations.empty());
}

/// Says from inside a pure query, which the manager calls under its mutex, that it is called.
class ProbingBackend : public FakeBackend {
 public:
  using FakeBackend::FakeBackend;
  [[nodiscard]] std::string why_unavailable(Location location) const override {
    if (probes) {
      probe("a query");
    }
    return FakeBackend::why_unavailable(location);
  }
  bool probes = false;
};

TEST_F(FakeTest, CallUnderTheManagersMutexIsSeen) {
  fake::FakeOptions options;
  options.on_violation = [this](const std::string& text) { violations.push_back(text); };
  auto probing = std::make_shared<ProbingBackend>(options);
  auto manager = Manager::create({}, probing);
  const auto source = std::make_shared<FakeSource>(probing, kPageable,
                                                   make_spec(8, kReplicable, kReconstructible), 1);
  const Handle value =
      manager->register_source(source, make_spec(8, kReplicable, kReconstructible));
  probing->probe_lock(manager, std::chrono::seconds(20));
  manager->ensure(value, kPageable);
  EXPECT_TRUE(violations.empty()) << "load and reconstruct come without the mutex";
  probing->probe_lock(manager, std::chrono::milliseconds(100));
  probing->probes = true;
  manager->ensure(value, kPinned);
  probing->probes = false;
  EXPECT_TRUE(violated("a query was called with the manager's mutex held"));
  probing->probe_lock(nullptr);
  manager->close();
}

}  // namespace
}  // namespace residency::test
