#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "residency/core/backend.h"
#include "residency/core/errors.h"

/// What every Backend must do, whatever it keeps its bytes in. Instantiate it with a harness:
///
///   struct Harness {
///     Backend& backend();                                  // opened
///     std::vector<Location> locations();                   // all that exist
///     std::vector<Location> memory();                      // those whose blocks `holds` can read
///     std::vector<std::pair<Location, Location>> copies(); // the pairs that a copy can take
///     std::vector<Location> chain();                       // each is copied from the one before
///     std::vector<Location> missing();                     // locations that do not exist
///     ValueSpec spec(std::int64_t nbytes);                 // of one field `data`
///     BlockPtr make(Location at, const ValueSpec&, std::uint64_t seed);  // at one of memory()
///     bool holds(Block&, std::uint64_t seed);
///     void write(Block&, std::uint64_t seed);              // as the field's user would
///     std::shared_ptr<void> share(Block&);                 // a reference outside the manager
///     std::optional<Bytes> measured(Location);             // occupied there in all, where known
///     std::pair<Location, Location> misplaced();           // where asked for, where the block is
///     void break_transfers(bool);                          // what can fail later does
///     bool can_break(TransferPath);                        // optional: whether that works there
///   };
namespace residency::conformance {

/// For a harness's `copies`, where every location is copied to every other.
inline std::vector<std::pair<Location, Location>> all_pairs(
    const std::vector<Location>& locations) {
  std::vector<std::pair<Location, Location>> pairs;
  for (const Location from : locations) {
    for (const Location to : locations) {
      if (from != to) {
        pairs.emplace_back(from, to);
      }
    }
  }
  return pairs;
}

/// A source that calls a function.
class FunctionSource final : public Source {
 public:
  explicit FunctionSource(std::function<std::shared_ptr<Block>()> function)
      : function_(std::move(function)) {}
  [[nodiscard]] std::shared_ptr<Block> load() override { return function_(); }

 private:
  std::function<std::shared_ptr<Block>()> function_;
};

template <class Harness>
class BackendConformance : public ::testing::Test {
 protected:
  static constexpr std::int64_t kBytes = 1000;

  Backend& backend() { return harness.backend(); }

  CopyResult copy(const ValueSpec& spec, const BlockPtr& source, Location to,
                  const FencePtr& source_ready = nullptr) {
    return backend().copy(request(spec, source, to, source_ready));
  }
  CopyRequest request(const ValueSpec& spec, const BlockPtr& source, Location to,
                      const FencePtr& source_ready = nullptr) {
    CopyRequest made;
    made.value = Handle(++next_handle_);
    made.spec = &spec;
    made.source = source;
    made.from = source->location();
    made.to = to;
    made.source_ready = source_ready;
    return made;
  }
  /// Waits, and says whether the copy succeeded.
  static FenceStatus finish(const CopyResult& result) {
    if (!result.ready) {
      return FenceStatus::kDone;
    }
    result.ready->wait();
    return result.ready->poll();
  }

  [[nodiscard]] bool is_memory(Location location) {
    for (const Location each : harness.memory()) {
      if (each == location) {
        return true;
      }
    }
    return false;
  }
  /// A complete block with the seed's bytes, brought there by a copy where that is necessary.
  BlockPtr block_at(Location location, const ValueSpec& spec, std::uint64_t seed) {
    if (is_memory(location)) {
      return harness.make(location, spec, seed);
    }
    BlockPtr source = harness.make(harness.memory().front(), spec, seed);
    CopyResult result = copy(spec, source, location);
    EXPECT_EQ(finish(result), FenceStatus::kDone);
    backend().release(std::move(source), {});
    return std::move(result.block);
  }
  ::testing::AssertionResult holds(const ValueSpec& spec, const BlockPtr& block,
                                   std::uint64_t seed) {
    if (is_memory(block->location())) {
      return harness.holds(*block, seed) ? ::testing::AssertionSuccess()
                                         : ::testing::AssertionFailure() << "other bytes";
    }
    CopyResult read = copy(spec, block, harness.memory().front());
    EXPECT_EQ(finish(read), FenceStatus::kDone);
    const bool right = harness.holds(*read.block, seed);
    backend().release(std::move(read.block), {});
    return right ? ::testing::AssertionSuccess() : ::testing::AssertionFailure() << "other bytes";
  }
  void give_back(std::vector<BlockPtr> blocks) {
    for (BlockPtr& block : blocks) {
      backend().release(std::move(block), {});
    }
  }
  static std::string named(Location from, Location to) {
    return to_string(from) + " -> " + to_string(to);
  }

  Harness harness;

 private:
  std::int64_t next_handle_ = std::int64_t{1} << Handle::kValueBits;
};

TYPED_TEST_SUITE_P(BackendConformance);

TYPED_TEST_P(BackendConformance, CopiesPreserveTheBytesAndLeaveTheSource) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const auto& [from, to] : this->harness.copies()) {
    SCOPED_TRACE(this->named(from, to));
    BlockPtr source = this->block_at(from, spec, 5);
    CopyResult result = this->copy(spec, source, to);
    ASSERT_EQ(this->finish(result), FenceStatus::kDone);
    ASSERT_NE(result.block, nullptr);
    EXPECT_NE(result.block, source);
    EXPECT_EQ(result.block->location(), to);
    EXPECT_EQ(result.block->logical_bytes(), spec.logical_bytes);
    ASSERT_NE(result.block->layout(), nullptr);
    EXPECT_TRUE(result.block->layout()->equals(*spec.layout));
    EXPECT_TRUE(this->holds(spec, result.block, 5));
    EXPECT_TRUE(this->holds(spec, source, 5));
    this->give_back({std::move(result.block), std::move(source)});
  }
}

TYPED_TEST_P(BackendConformance, TakesThePathThatItAnnounced) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const auto& [from, to] : this->harness.copies()) {
    SCOPED_TRACE(this->named(from, to));
    BlockPtr source = this->block_at(from, spec, 5);
    CopyResult result = this->copy(spec, source, to);
    EXPECT_EQ(result.path, this->backend().path(from, to));
    EXPECT_EQ(this->finish(result), FenceStatus::kDone);
    this->give_back({std::move(result.block), std::move(source)});
  }
}

TYPED_TEST_P(BackendConformance, FailsLaterOnlyOnPathsThatCan) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const auto& [from, to] : this->harness.copies()) {
    SCOPED_TRACE(this->named(from, to));
    if constexpr (requires { this->harness.can_break(TransferPath::kStaged); }) {
      if (!this->harness.can_break(this->backend().path(from, to))) {
        continue;
      }
    }
    BlockPtr source = this->block_at(from, spec, 5);
    this->harness.break_transfers(true);
    std::optional<CopyResult> result;
    try {
      result = this->copy(spec, source, to);
    } catch (const std::exception&) {
      EXPECT_TRUE(can_fail_later(this->backend().path(from, to)))
          << "it is not a transfer to break";
    }
    if (result) {
      const bool fails = can_fail_later(result->path);
      EXPECT_EQ(this->finish(*result), fails ? FenceStatus::kFailed : FenceStatus::kDone);
      EXPECT_EQ(result->ready != nullptr && result->ready->error() != nullptr, fails);
      this->give_back({std::move(result->block)});
    }
    this->harness.break_transfers(false);
    EXPECT_TRUE(this->holds(spec, source, 5)) << "the source is what it was";
    this->give_back({std::move(source)});
  }
}

TYPED_TEST_P(BackendConformance, CopyBehindAnotherReadsWhatThatOneBrought) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  const std::vector<Location> chain = this->harness.chain();
  std::vector<BlockPtr> blocks = {this->block_at(chain.at(0), spec, 7)};
  FencePtr ready;
  for (std::size_t i = 1; i < chain.size(); ++i) {
    CopyResult result = this->copy(spec, blocks.back(), chain[i], ready);
    blocks.push_back(std::move(result.block));
    ready = std::move(result.ready);
  }
  if (ready) {
    ready->wait();
    EXPECT_EQ(ready->poll(), FenceStatus::kDone);
  }
  EXPECT_TRUE(this->holds(spec, blocks.back(), 7));
  this->give_back(std::move(blocks));
}

TYPED_TEST_P(BackendConformance, OverwriteKeepsTheBlockAndReplacesTheBytes) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const auto& [from, to] : this->harness.copies()) {
    if (from == to) {
      continue;
    }
    SCOPED_TRACE(this->named(from, to));
    BlockPtr target = this->block_at(to, spec, 1);
    BlockPtr source = this->block_at(from, spec, 2);
    const auto addresses = target->address_ranges();
    CopyRequest request = this->request(spec, source, to);
    request.overwrite = target;
    CopyResult result = this->backend().copy(request);
    EXPECT_EQ(result.block, target);
    EXPECT_EQ(this->finish(result), FenceStatus::kDone);
    EXPECT_EQ(target->address_ranges(), addresses);
    EXPECT_TRUE(this->holds(spec, target, 2));
    request = {};
    result.block = nullptr;
    this->give_back({std::move(target), std::move(source)});
  }
}

TYPED_TEST_P(BackendConformance, OverwriteWaitsForWhoeverReadsTheOldBytes) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const auto& [from, to] : this->harness.copies()) {
    bool both_ways = false;
    for (const auto& pair : this->harness.copies()) {
      both_ways |= pair.first == to && pair.second == from && from != to;
    }
    if (!both_ways) {
      continue;
    }
    SCOPED_TRACE(this->named(from, to));
    BlockPtr target = this->block_at(to, spec, 1);
    BlockPtr source = this->block_at(from, spec, 2);
    CopyResult reader = this->copy(spec, target, from);
    CopyRequest request = this->request(spec, source, to);
    request.overwrite = target;
    if (reader.ready) {
      request.overwrite_after = {reader.ready};
    }
    CopyResult result = this->backend().copy(request);
    EXPECT_EQ(this->finish(result), FenceStatus::kDone);
    EXPECT_EQ(this->finish(reader), FenceStatus::kDone);
    EXPECT_TRUE(this->holds(spec, reader.block, 1));
    EXPECT_TRUE(this->holds(spec, target, 2));
    request = {};
    result.block = nullptr;
    this->give_back({std::move(target), std::move(source), std::move(reader.block)});
  }
}

TYPED_TEST_P(BackendConformance, OverwriteDoesNotMindHowEarlierUsersEnded) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  const auto failed = std::make_shared<Fence>();
  failed->fail(std::make_exception_ptr(std::runtime_error("another's")));
  for (const auto& [from, to] : this->harness.copies()) {
    SCOPED_TRACE(this->named(from, to));
    BlockPtr target = this->block_at(to, spec, 1);
    BlockPtr source = this->block_at(from, spec, 2);
    CopyRequest request = this->request(spec, source, to);
    request.overwrite = target;
    request.overwrite_after = {failed};
    CopyResult result = this->backend().copy(request);
    EXPECT_EQ(this->finish(result), FenceStatus::kDone);
    EXPECT_TRUE(this->holds(spec, target, 2));
    request = {};
    result.block = nullptr;
    this->give_back({std::move(target), std::move(source)});
  }
}

TYPED_TEST_P(BackendConformance, OccupiedBytesAreConstantAndCoverTheStorage) {
  for (const std::int64_t nbytes :
       {std::int64_t{0}, std::int64_t{1}, std::int64_t{1000}, std::int64_t{5000}}) {
    const ValueSpec spec = this->harness.spec(nbytes);
    for (const Location location : this->harness.locations()) {
      const Bytes occupied = this->backend().occupied_bytes(spec, location);
      EXPECT_GE(occupied, spec.storage_bytes) << to_string(location);
      EXPECT_EQ(this->backend().occupied_bytes(this->harness.spec(nbytes), location), occupied);
    }
  }
}

TYPED_TEST_P(BackendConformance, BlocksOccupyWhatWasAnnounced) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const auto& [from, to] : this->harness.copies()) {
    if (!this->harness.measured(to)) {
      continue;
    }
    SCOPED_TRACE(this->named(from, to));
    BlockPtr source = this->block_at(from, spec, 5);
    const Bytes before = *this->harness.measured(to);
    CopyResult result = this->copy(spec, source, to);
    EXPECT_EQ(this->finish(result), FenceStatus::kDone);
    EXPECT_EQ(*this->harness.measured(to), before + this->backend().occupied_bytes(spec, to));
    this->give_back({std::move(result.block)});
    EXPECT_EQ(*this->harness.measured(to), before) << "it has been freed";
    this->give_back({std::move(source)});
  }
}

TYPED_TEST_P(BackendConformance, AddressesOfLiveBlocksAreDisjoint) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  std::vector<BlockPtr> blocks;
  std::vector<AddressRange> ranges;
  for (int i = 0; i < 3; ++i) {
    for (const Location location : this->harness.locations()) {
      blocks.push_back(this->block_at(location, spec, 1));
      const auto of_block = blocks.back()->address_ranges();
      EXPECT_EQ(of_block.empty(), location.is_disk()) << to_string(location);
      ranges.insert(ranges.end(), of_block.begin(), of_block.end());
    }
  }
  for (std::size_t i = 0; i < ranges.size(); ++i) {
    EXPECT_LT(ranges[i].begin, ranges[i].end);
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_TRUE(ranges[i].end <= ranges[j].begin || ranges[j].end <= ranges[i].begin);
    }
  }
  this->give_back(std::move(blocks));
}

TYPED_TEST_P(BackendConformance, ZeroBytesHaveNoAddressesAndTravel) {
  const ValueSpec spec = this->harness.spec(0);
  for (const auto& [from, to] : this->harness.copies()) {
    SCOPED_TRACE(this->named(from, to));
    BlockPtr source = this->block_at(from, spec, 5);
    EXPECT_TRUE(source->address_ranges().empty());
    CopyResult result = this->copy(spec, source, to);
    EXPECT_EQ(this->finish(result), FenceStatus::kDone);
    EXPECT_TRUE(result.block->address_ranges().empty());
    this->give_back({std::move(result.block), std::move(source)});
  }
}

TYPED_TEST_P(BackendConformance, ReconstructGivesWhatTheSourceLoads) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const Location at : this->harness.memory()) {
    FunctionSource source([&] { return this->harness.make(at, spec, 3); });
    BlockPtr block = this->backend().reconstruct(source, spec, at);
    ASSERT_NE(block, nullptr);
    EXPECT_EQ(block->location(), at);
    EXPECT_TRUE(this->harness.holds(*block, 3));
    EXPECT_FALSE(this->backend().is_shared(*block));
    this->give_back({std::move(block)});
  }
}

TYPED_TEST_P(BackendConformance, ReconstructRefusesNothingAndTheWrongPlace) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  FunctionSource nothing([] { return nullptr; });
  EXPECT_THROW((void)this->backend().reconstruct(nothing, spec, this->harness.memory().front()),
               MaterializationError);
  const auto [asked, given] = this->harness.misplaced();
  FunctionSource elsewhere([&, given = given] { return this->harness.make(given, spec, 3); });
  // Some backends can refuse by the location alone.
  EXPECT_THROW((void)this->backend().reconstruct(elsewhere, spec, asked), Error);
}

TYPED_TEST_P(BackendConformance, ReconstructPassesOnWhatTheSourceThrows) {
  struct Unusual {};
  const ValueSpec spec = this->harness.spec(this->kBytes);
  FunctionSource source([]() -> std::shared_ptr<Block> { throw Unusual(); });
  EXPECT_THROW((void)this->backend().reconstruct(source, spec, this->harness.memory().front()),
               Unusual);
}

TYPED_TEST_P(BackendConformance, ReconstructNeverGivesABlockThatTheSourceShares) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  const Location at = this->harness.memory().front();
  std::shared_ptr<void> kept;
  FunctionSource source([&] {
    BlockPtr block = this->harness.make(at, spec, 3);
    kept = this->harness.share(*block);
    return block;
  });
  try {
    BlockPtr block = this->backend().reconstruct(source, spec, at);
    EXPECT_FALSE(this->backend().is_shared(*block));
    EXPECT_TRUE(this->harness.holds(*block, 3));
    this->give_back({std::move(block)});
  } catch (const MaterializationError&) {
    SUCCEED() << "refusing is as good as copying";
  }
}

TYPED_TEST_P(BackendConformance, ReleaseKeepsTheBlockUntilItsUsersHaveFinished) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const Location location : this->harness.locations()) {
    if (this->backend().reuses_in_device_order(location)) {
      continue;
    }
    SCOPED_TRACE(to_string(location));
    BlockPtr block = this->block_at(location, spec, 1);
    const std::weak_ptr<Block> watched = block;
    const auto first = std::make_shared<Fence>();
    const auto second = std::make_shared<Fence>();
    this->backend().release(std::move(block), {first, second});
    first->complete();
    this->give_back({this->block_at(location, spec, 2)});  // an occasion to free what is free
    EXPECT_FALSE(watched.expired());
    second->complete();
    this->give_back({this->block_at(location, spec, 2)});
    EXPECT_TRUE(watched.expired());
  }
}

TYPED_TEST_P(BackendConformance, ReleaseWithoutUsersFreesAtOnce) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const Location location : this->harness.locations()) {
    BlockPtr block = this->block_at(location, spec, 1);
    const std::weak_ptr<Block> watched = block;
    this->backend().release(std::move(block), {});
    EXPECT_TRUE(watched.expired()) << to_string(location);
  }
}

TYPED_TEST_P(BackendConformance, ReferenceOutsideMakesABlockSharedUntilItEnds) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const Location location : this->harness.memory()) {
    SCOPED_TRACE(to_string(location));
    BlockPtr block = this->harness.make(location, spec, 1);
    EXPECT_FALSE(this->backend().is_shared(*block));
    EXPECT_EQ(this->backend().watch_escape(*block), nullptr);
    auto outside = this->harness.share(*block);
    EXPECT_TRUE(this->backend().is_shared(*block));
    outside.reset();
    EXPECT_FALSE(this->backend().is_shared(*block));
    this->give_back({std::move(block)});
  }
}

TYPED_TEST_P(BackendConformance, EscapeIsDoneWhenTheLastReferenceHasGone) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const Location location : this->harness.memory()) {
    SCOPED_TRACE(to_string(location));
    BlockPtr block = this->harness.make(location, spec, 1);
    auto outside = this->harness.share(*block);
    const FencePtr escape = this->backend().watch_escape(*block);
    ASSERT_NE(escape, nullptr);
    this->give_back({std::move(block)});
    EXPECT_EQ(escape->poll(), FenceStatus::kPending);
    outside.reset();
    EXPECT_EQ(escape->poll(), FenceStatus::kDone);
  }
}

TYPED_TEST_P(BackendConformance, OpenViewIsNoReferenceOutside) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const Location location : this->harness.memory()) {
    BlockPtr block = this->harness.make(location, spec, 1);
    std::unique_ptr<View> view = this->backend().open_view(*block);
    ASSERT_NE(view, nullptr);
    EXPECT_FALSE(this->backend().is_shared(*block)) << to_string(location);
    view.reset();
    EXPECT_FALSE(this->backend().is_shared(*block));
    this->give_back({std::move(block)});
  }
}

TYPED_TEST_P(BackendConformance, UndeclaredWriteIsNoticedOnce) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const bool checksum : {false, true}) {
    BlockPtr block = this->harness.make(this->harness.memory().front(), spec, 1);
    const auto access = [&](bool write) {
      this->backend().begin_access(*block, Access::kRead, std::nullopt, {}, checksum);
      if (write) {
        this->harness.write(*block, 2);
      }
      return this->backend().end_access(*block, Access::kRead, checksum);
    };
    EXPECT_EQ(access(false), std::nullopt);
    EXPECT_EQ(access(true), "data");
    EXPECT_EQ(access(false), std::nullopt) << "what is there now is known";
    this->give_back({std::move(block)});
  }
}

TYPED_TEST_P(BackendConformance, DeclaredWriteBecomesTheKnownContents) {
  const ValueSpec spec = this->harness.spec(this->kBytes);
  for (const bool checksum : {false, true}) {
    BlockPtr block = this->harness.make(this->harness.memory().front(), spec, 1);
    this->backend().begin_access(*block, Access::kWrite, std::nullopt, {}, checksum);
    this->harness.write(*block, 2);
    EXPECT_EQ(this->backend().end_access(*block, Access::kWrite, checksum), std::nullopt);
    this->backend().begin_access(*block, Access::kRead, std::nullopt, {}, checksum);
    EXPECT_EQ(this->backend().end_access(*block, Access::kRead, checksum), std::nullopt);
    EXPECT_TRUE(this->harness.holds(*block, 2));
    this->give_back({std::move(block)});
  }
}

TYPED_TEST_P(BackendConformance, SaysWhichLocationsExist) {
  for (const Location location : this->harness.locations()) {
    EXPECT_EQ(this->backend().why_unavailable(location), "") << to_string(location);
  }
  for (const Location location : this->harness.missing()) {
    EXPECT_NE(this->backend().why_unavailable(location), "") << to_string(location);
  }
}

REGISTER_TYPED_TEST_SUITE_P(
    BackendConformance, CopiesPreserveTheBytesAndLeaveTheSource, TakesThePathThatItAnnounced,
    FailsLaterOnlyOnPathsThatCan, CopyBehindAnotherReadsWhatThatOneBrought,
    OverwriteKeepsTheBlockAndReplacesTheBytes, OverwriteWaitsForWhoeverReadsTheOldBytes,
    OverwriteDoesNotMindHowEarlierUsersEnded, OccupiedBytesAreConstantAndCoverTheStorage,
    BlocksOccupyWhatWasAnnounced, AddressesOfLiveBlocksAreDisjoint,
    ZeroBytesHaveNoAddressesAndTravel, ReconstructGivesWhatTheSourceLoads,
    ReconstructRefusesNothingAndTheWrongPlace, ReconstructPassesOnWhatTheSourceThrows,
    ReconstructNeverGivesABlockThatTheSourceShares, ReleaseKeepsTheBlockUntilItsUsersHaveFinished,
    ReleaseWithoutUsersFreesAtOnce, ReferenceOutsideMakesABlockSharedUntilItEnds,
    EscapeIsDoneWhenTheLastReferenceHasGone, OpenViewIsNoReferenceOutside,
    UndeclaredWriteIsNoticedOnce, DeclaredWriteBecomesTheKnownContents, SaysWhichLocationsExist);

}  // namespace residency::conformance
