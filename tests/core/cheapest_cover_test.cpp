#include "csrc/core/cheapest_cover.h"

#include <bit>
#include <random>

#include <gtest/gtest.h>

namespace residency::test {
namespace {

using namespace residency::literals;

struct Sum {
  Bytes frees;
  Bytes cost;
  std::size_t count = 0;
};

Sum sum_of(const std::vector<CoverItem>& items, unsigned chosen) {
  Sum sum;
  for (std::size_t i = 0; i < items.size(); ++i) {
    if ((chosen >> i & 1U) != 0) {
      sum.frees += items[i].frees;
      sum.cost += items[i].cost;
      sum.count += items[i].count;
    }
  }
  return sum;
}

unsigned as_bits(const std::vector<std::size_t>& positions) {
  unsigned bits = 0;
  for (const std::size_t position : positions) {
    bits |= 1U << position;
  }
  return bits;
}

TEST(CheapestCover, IsTheCheapestOfAllChoices) {
  std::mt19937 random(20261203);
  const auto up_to = [&](unsigned most) {
    return static_cast<std::int64_t>(random() % (most + 1));
  };
  for (int world = 0; world < 2000; ++world) {
    std::vector<CoverItem> items(random() % 9);
    for (CoverItem& item : items) {
      item = {Bytes((1 + up_to(5)) * (2 << 20)), Bytes(up_to(4)), 1 + random() % 3};
    }
    const Bytes needed(up_to(30 << 20));
    const auto choice = cheapest_cover(items, needed);
    const unsigned all = (1U << items.size()) - 1;
    ASSERT_EQ(choice.has_value(), sum_of(items, all).frees >= needed);
    if (!choice.has_value()) {
      continue;
    }
    const unsigned chosen = as_bits(*choice);
    const Sum got = sum_of(items, chosen);
    EXPECT_GE(got.frees, needed);
    for (unsigned other = 0; other <= all; ++other) {
      const Sum sum = sum_of(items, other);
      if (sum.frees >= needed) {
        EXPECT_LE(std::pair(got.cost, got.count), std::pair(sum.cost, sum.count));
      }
    }
  }
}

TEST(CheapestCover, OfVeryManyNoneIsSuperfluous) {
  std::mt19937 random(20261203);
  std::vector<CoverItem> items(20'000);
  Bytes all;
  for (CoverItem& item : items) {
    item = {Bytes(static_cast<std::int64_t>(5 + random() % 100) << 21),
            Bytes(static_cast<std::int64_t>(random() % 1000))};
    all += item.frees;
  }
  const Bytes needed = Bytes(all.count() / 3);
  const std::vector<std::size_t> chosen = cheapest_cover(items, needed).value();
  Bytes freed;
  for (const std::size_t item : chosen) {
    freed += items[item].frees;
  }
  EXPECT_GE(freed, needed);
  for (const std::size_t item : chosen) {
    EXPECT_LT(freed - items[item].frees, needed);
  }
}

TEST(CheapestCover, PartsOfAUnitCount) {
  const std::vector<CoverItem> items = {{1_MiB, Bytes(1)}, {1_MiB, Bytes(1)}};
  EXPECT_EQ(cheapest_cover(items, 2_MiB), (std::vector<std::size_t>{0, 1}));
  EXPECT_EQ(cheapest_cover(items, 2_MiB + 1_B), std::nullopt);
}

}  // namespace
}  // namespace residency::test
