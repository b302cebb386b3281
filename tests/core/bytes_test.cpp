#include "residency/core/bytes.h"

#include <limits>
#include <stdexcept>
#include <unordered_set>

#include <gtest/gtest.h>

namespace residency {
namespace {

using namespace residency::literals;

constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();

TEST(Bytes, NegativeNumbersAreRefused) {
  EXPECT_THROW((void)Bytes(-1), std::invalid_argument);
  EXPECT_THROW((void)Bytes(std::numeric_limits<std::int64_t>::min()), std::invalid_argument);
  EXPECT_EQ(Bytes(0), Bytes());
}

TEST(Bytes, SumThatOverflowsThrowsAndKeepsTheValue) {
  Bytes bytes = Bytes::max() - 1_B;
  EXPECT_EQ(bytes + 1_B, Bytes::max());
  EXPECT_THROW(bytes += 2_B, std::out_of_range);
  EXPECT_EQ(bytes.count(), kMax - 1);
  EXPECT_THROW((void)(Bytes::max() + Bytes::max()), std::out_of_range);
}

TEST(Bytes, DifferenceBelowZeroThrowsAndKeepsTheValue) {
  Bytes bytes = 5_B;
  EXPECT_THROW(bytes -= 6_B, std::out_of_range);
  EXPECT_EQ(bytes, 5_B);
  EXPECT_EQ(bytes - 5_B, Bytes());
}

TEST(Bytes, SaturatingArithmeticStopsAtTheEnds) {
  EXPECT_EQ(Bytes::max().saturating_add(1_B), Bytes::max());
  EXPECT_EQ((3_B).saturating_add(4_B), 7_B);
  EXPECT_EQ((3_B).saturating_sub(4_B), Bytes());
  EXPECT_EQ((4_B).saturating_sub(3_B), 1_B);
}

TEST(Bytes, RoundsUpToTheGranularity) {
  EXPECT_EQ(Bytes().rounded_up(512), Bytes());
  EXPECT_EQ((1_B).rounded_up(512), 512_B);
  EXPECT_EQ((512_B).rounded_up(512), 512_B);
  EXPECT_EQ((513_B).rounded_up(512), 1_KiB);
  EXPECT_EQ((7_B).rounded_up(1), 7_B);
  EXPECT_THROW((void)(1_B).rounded_up(0), std::invalid_argument);
  EXPECT_THROW((void)(1_B).rounded_up(-8), std::invalid_argument);
  EXPECT_THROW((void)Bytes::max().rounded_up(512), std::out_of_range);
}

TEST(Bytes, IsWrittenForPeople) {
  EXPECT_EQ(to_string(Bytes()), "0 B");
  EXPECT_EQ(to_string(512_B), "512 B");
  EXPECT_EQ(to_string(1023_B), "1023 B");
  EXPECT_EQ(to_string(1536_B), "1.50 KiB");
  EXPECT_EQ(to_string(20_MiB), "20.00 MiB");
  EXPECT_EQ(to_string(3_GiB), "3.00 GiB");
  EXPECT_EQ(to_string(Bytes(1024 * 1024 - 1)), "1.00 MiB");
}

TEST(Bytes, IsOrderedAndHashed) {
  EXPECT_LT(1_B, 2_B);
  EXPECT_GT(1_GiB, 1_MiB);
  EXPECT_EQ(1_KiB, 1024_B);
  const std::unordered_set<Bytes> set = {1_B, 1_B, 1024_B, 1_KiB};
  EXPECT_EQ(set.size(), 2U);
}

}  // namespace
}  // namespace residency
