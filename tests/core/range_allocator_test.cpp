#include "csrc/core/range_allocator.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <new>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "failing_new.h"

namespace residency::test {
namespace {

using namespace literals;

Range range(std::uint32_t segment, std::int64_t begin, std::int64_t nbytes) {
  return {segment, Bytes(begin), Bytes(nbytes)};
}

/// All that can be seen of an allocator: what its requests will get, until it is full. Puts it
/// back.
std::vector<Range> drain(RangeAllocator& allocator, std::int64_t nbytes) {
  std::vector<Range> given;
  while (const auto each = allocator.allocate(Bytes(nbytes))) {
    given.push_back(*each);
  }
  std::for_each(given.rbegin(), given.rend(), [&](const Range& each) { allocator.free(each); });
  return given;
}

TEST(RangeAllocatorTest, NothingFitsWithoutASegment) {
  RangeAllocator allocator(512_B);
  EXPECT_EQ(allocator.allocate(1_B), std::nullopt);
  EXPECT_EQ(allocator.largest_free(), 0_B);
  EXPECT_EQ(allocator.allocate(0_B), Range()) << "no bytes are always there";
  allocator.free(Range());
  EXPECT_EQ(allocator.live_bytes(), 0_B);
}

TEST(RangeAllocatorTest, RoundsRequestsAndFillsFromTheFront) {
  RangeAllocator allocator(512_B);
  EXPECT_EQ(allocator.add_segment(2_KiB), 0U);
  EXPECT_EQ(allocator.allocate(1_B), range(0, 0, 512));
  EXPECT_EQ(allocator.allocate(513_B), range(0, 512, 1024));
  EXPECT_EQ(allocator.live_bytes(), 1536_B);
  EXPECT_EQ(allocator.largest_free(), 512_B);
  EXPECT_EQ(allocator.allocate(513_B), std::nullopt);
  EXPECT_EQ(allocator.allocate(512_B), range(0, 1536, 512));
  allocator.audit();
}

TEST(RangeAllocatorTest, TakesTheSmallestThatFitsThenTheLowest) {
  RangeAllocator allocator(1_B);
  allocator.add_segment(100_B);
  const auto a = allocator.allocate(30_B);
  const auto wall = allocator.allocate(1_B);
  const auto b = allocator.allocate(20_B);
  const auto other_wall = allocator.allocate(1_B);
  const auto c = allocator.allocate(20_B);
  const auto last_wall = allocator.allocate(28_B);
  ASSERT_TRUE(a && wall && b && other_wall && c && last_wall);
  allocator.free(*a);
  allocator.free(*c);
  allocator.free(*b);
  EXPECT_EQ(allocator.allocate(15_B), range(0, 31, 15)) << "in the lower of the two of 20 B";
  EXPECT_EQ(allocator.allocate(20_B), range(0, 52, 20));
  EXPECT_EQ(allocator.allocate(20_B), range(0, 0, 20));
  allocator.audit();
}

TEST(RangeAllocatorTest, FreeNeighboursBecomeOne) {
  RangeAllocator allocator(1_B);
  allocator.add_segment(30_B);
  const Range first = allocator.allocate(10_B).value();
  const Range second = allocator.allocate(10_B).value();
  const Range third = allocator.allocate(10_B).value();
  allocator.free(first);
  allocator.free(third);
  EXPECT_EQ(allocator.largest_free(), 10_B);
  allocator.free(second);
  EXPECT_EQ(allocator.largest_free(), 30_B);
  EXPECT_TRUE(allocator.is_empty(0));
  allocator.audit();
}

TEST(RangeAllocatorTest, SegmentsDoNotGrowTogetherAndNumbersAreUsedAgain) {
  RangeAllocator allocator(1_B);
  EXPECT_EQ(allocator.add_segment(10_B), 0U);
  EXPECT_EQ(allocator.add_segment(10_B), 1U);
  EXPECT_EQ(allocator.add_segment(5_B), 2U);
  EXPECT_EQ(allocator.allocate(11_B), std::nullopt);
  EXPECT_EQ(allocator.allocate(6_B), range(0, 0, 6));
  EXPECT_EQ(allocator.empty_segments(), (std::vector<std::uint32_t>{1, 2}));
  EXPECT_THROW(allocator.remove_segment(0), std::logic_error);
  allocator.remove_segment(1);
  EXPECT_EQ(allocator.segment_bytes(), 15_B);
  EXPECT_EQ(allocator.empty_segments(), std::vector<std::uint32_t>{2});
  EXPECT_THROW(allocator.remove_segment(1), std::logic_error);
  EXPECT_EQ(allocator.add_segment(20_B), 1U);
  EXPECT_EQ(allocator.allocate(20_B), range(1, 0, 20));
  allocator.audit();
}

TEST(RangeAllocatorTest, MisuseIsRefusedAndChangesNothing) {
  RangeAllocator allocator(2_B);
  EXPECT_THROW(RangeAllocator(0_B), std::invalid_argument);
  EXPECT_THROW(allocator.add_segment(0_B), std::logic_error);
  EXPECT_THROW(allocator.add_segment(3_B), std::logic_error);
  allocator.add_segment(20_B);
  EXPECT_THROW(allocator.put_back_segment(0, 20_B), std::logic_error);
  const Range taken = allocator.allocate(4_B).value();
  const std::vector<Range> before = drain(allocator, 2);
  for (const Range& wrong : {range(0, 2, 2), range(0, 0, 2), range(0, 4, 4), range(1, 0, 4)}) {
    EXPECT_THROW(allocator.free(wrong), std::logic_error);
  }
  for (const Range& wrong :
       {taken, range(0, 2, 4), range(0, 18, 4), range(0, 5, 2), range(0, 6, 3), range(7, 0, 2)}) {
    EXPECT_THROW(allocator.take(wrong), std::logic_error);
  }
  EXPECT_EQ(drain(allocator, 2), before);
  allocator.audit();
  allocator.free(taken);
  EXPECT_THROW(allocator.free(taken), std::logic_error);
}

/// Random calls against bytes that are marked one by one, and every one of them taken back.
TEST(RangeAllocatorTest, RandomCallsKeepRangesApartAndCanBeUndone) {
  for (std::uint32_t seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto draw = [&](std::size_t below) { return random() % below; };
    RangeAllocator allocator(4_B);
    std::vector<std::vector<bool>> used;  // by segment, by byte
    std::vector<Range> live;
    std::vector<std::function<void()>> undo;
    std::vector<std::vector<Range>> states;  // before each call
    const auto mark = [&](const Range& each, bool value) {
      for (std::int64_t i = 0; i < each.nbytes.count(); ++i) {
        const auto at = static_cast<std::size_t>(each.begin.count() + i);
        ASSERT_NE(used[each.segment][at], value);
        used[each.segment][at] = value;
      }
    };
    for (int step = 0; step < 200; ++step) {
      states.push_back(drain(allocator, 4));
      if (const auto what = draw(10); what == 0) {
        const auto nbytes = static_cast<std::int64_t>(4 + 4 * draw(50));
        const std::uint32_t number = allocator.add_segment(Bytes(nbytes));
        used.resize(std::max<std::size_t>(used.size(), number + 1));
        used[number].assign(static_cast<std::size_t>(nbytes), false);
        undo.emplace_back([&allocator, number] { allocator.remove_segment(number); });
      } else if (const auto empty = allocator.empty_segments(); what == 1 && !empty.empty()) {
        const std::uint32_t number = empty[draw(empty.size())];
        const Bytes nbytes = allocator.bytes_of(number);
        allocator.remove_segment(number);
        undo.emplace_back(
            [&allocator, number, nbytes] { allocator.put_back_segment(number, nbytes); });
      } else if (what < 6 || live.empty()) {
        const auto nbytes = static_cast<std::int64_t>(1 + draw(60));
        const Bytes largest = allocator.largest_free();
        const auto given = allocator.allocate(Bytes(nbytes));
        EXPECT_EQ(given.has_value(), largest >= Bytes(nbytes).rounded_up(4));
        undo.emplace_back([] {});
        if (given) {
          mark(*given, true);
          live.push_back(*given);
          undo.back() = [&allocator, each = *given] { allocator.free(each); };
        }
      } else {
        const auto chosen = static_cast<std::ptrdiff_t>(draw(live.size()));
        const Range each = live[static_cast<std::size_t>(chosen)];
        live.erase(live.begin() + chosen);
        mark(each, false);
        allocator.free(each);
        undo.emplace_back([&allocator, each] { allocator.take(each); });
      }
      ASSERT_NO_THROW(allocator.audit());
    }
    for (; !undo.empty(); undo.pop_back(), states.pop_back()) {
      undo.back()();
      ASSERT_EQ(drain(allocator, 4), states.back());
    }
    allocator.audit();
    EXPECT_EQ(allocator.segment_bytes(), 0_B);
  }
}

// A dry run takes back what it did, and destructors free: neither may fail.
TEST(RangeAllocatorTest, WithoutMemoryNothingChangesAndWhatIsUndoneOrFreedNeedsNone) {
  std::mt19937 random(7);
  const auto draw = [&](std::size_t below) { return random() % below; };
  RangeAllocator allocator(4_B);
  std::vector<Range> live;
  std::vector<std::function<void()>> undo;
  std::size_t num_failed = 0;
  const auto tried = [&](const auto& call) {
    const Bytes live_bytes = allocator.live_bytes();
    const Bytes segment_bytes = allocator.segment_bytes();
    fail_allocation(1);
    try {
      call();
      fail_allocation(0);
      return;
    } catch (const std::bad_alloc&) {
      ++num_failed;
    }
    allocator.audit();
    EXPECT_EQ(allocator.live_bytes(), live_bytes);
    EXPECT_EQ(allocator.segment_bytes(), segment_bytes);
    call();
  };
  for (int i = 0; i < 3000; ++i) {
    if (draw(100) == 0 || i == 0) {
      tried([&] {
        const std::uint32_t number = allocator.add_segment(40'000_B);
        const AllocationsPass pass;
        undo.emplace_back([&allocator, number] { allocator.remove_segment(number); });
      });
    } else if (draw(3) != 0 || live.empty()) {
      tried([&] {
        if (const auto given = allocator.allocate(Bytes(static_cast<std::int64_t>(1 + draw(60))))) {
          const AllocationsPass pass;
          live.push_back(*given);
          undo.emplace_back([&allocator, each = *given] { allocator.free(each); });
        }
      });
    } else {
      std::swap(live.at(draw(live.size())), live.back());
      const Range each = live.back();
      live.pop_back();
      fail_allocation(1);
      ASSERT_NO_THROW(allocator.free(each));
      fail_allocation(0);
      undo.emplace_back([&allocator, each] { allocator.take(each); });
    }
  }
  EXPECT_GT(num_failed, 5U);
  fail_allocation(1);
  for (; !undo.empty(); undo.pop_back()) {
    ASSERT_NO_THROW(undo.back()());
  }
  fail_allocation(0);
  allocator.audit();
  EXPECT_EQ(allocator.segment_bytes(), 0_B);
}

}  // namespace
}  // namespace residency::test
