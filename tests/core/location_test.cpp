#include "residency/core/location.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <vector>

#include <gtest/gtest.h>

namespace residency {
namespace {

TEST(Location, ParseIsTheInverseOfText) {
  std::vector<Location> all = {Location::pageable_host(), Location::pinned_host(),
                               Location::disk("nvme"), Location::disk("a.b-c_D9")};
  for (int i = 0; i <= 127; ++i) {
    all.push_back(Location::cuda(i));
  }
  for (const Location location : all) {
    EXPECT_EQ(Location::parse(to_string(location)), location);
    EXPECT_EQ(to_string(Location::parse(to_string(location))), to_string(location));
  }
}

TEST(Location, TextIsCanonical) {
  EXPECT_EQ(to_string(Location::pageable_host()), "pageable-host");
  EXPECT_EQ(to_string(Location::pinned_host()), "pinned-host");
  EXPECT_EQ(to_string(Location::cuda(0)), "cuda:0");
  EXPECT_EQ(to_string(Location::cuda(127)), "cuda:127");
  EXPECT_EQ(to_string(Location::disk("fast")), "disk:fast");
  EXPECT_EQ(to_string(Location()), "pageable-host");
}

TEST(Location, CpuSpellingsNamePageableHost) {
  EXPECT_EQ(Location::parse("cpu"), Location::pageable_host());
  EXPECT_EQ(Location::parse("cpu:0"), Location::pageable_host());
}

class BadLocation : public testing::TestWithParam<const char*> {};

TEST_P(BadLocation, IsAnArgumentErrorThatShowsIt) {
  try {
    const Location parsed = Location::parse(GetParam());
    FAIL() << "parsed as " << to_string(parsed);
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(GetParam()), std::string::npos) << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Texts, BadLocation,
                         testing::Values("", " ", "cuda", "cuda:", "cuda:-1", "cuda:01", " cuda:0",
                                         "cuda:0 ", "cuda:128", "cuda:+1", "cuda:1x", "cuda: 1",
                                         "cuda:0x1", "cuda:99999999999999999999", "CUDA:0",
                                         "Cuda:0", "cuda:0:0", "cpu:1", "cpu:", "cpu:00", "CPU",
                                         "disk", "disk:", "disk:a/b", "disk:.hidden", "disk:-a",
                                         "disk:a b", "disk:../x", "pinned", "pageable",
                                         "pinned-host ", "pageable-host:0", "meta", "mps:0"));

TEST(Location, NulInTheTextIsRefused) {
  EXPECT_THROW((void)Location::parse(std::string("cuda:0\0", 7)), std::invalid_argument);
  EXPECT_THROW((void)Location::disk(std::string("a\0b", 3)), std::invalid_argument);
}

TEST(Location, CudaIndexOutsideItsRangeIsOutOfRange) {
  EXPECT_THROW((void)Location::cuda(-1), std::out_of_range);
  EXPECT_THROW((void)Location::cuda(128), std::out_of_range);
  EXPECT_NO_THROW((void)Location::cuda(0));
  EXPECT_NO_THROW((void)Location::cuda(127));
}

TEST(Location, DiskNamesAreLimited) {
  EXPECT_NO_THROW((void)Location::disk(std::string(64, 'x')));
  EXPECT_THROW((void)Location::disk(std::string(65, 'x')), std::invalid_argument);
  EXPECT_THROW((void)Location::disk(""), std::invalid_argument);
  EXPECT_THROW((void)Location::disk("_a"), std::invalid_argument);
  EXPECT_NO_THROW((void)Location::disk("0"));
}

TEST(Location, OrderIsKindThenIndexOrName) {
  // Interned in another order than sorted, which must not matter.
  const Location zebra = Location::disk("order-zebra");
  const Location apple = Location::disk("order-apple");
  std::vector<Location> all = {zebra,
                               Location::cuda(10),
                               apple,
                               Location::pinned_host(),
                               Location::cuda(2),
                               Location::pageable_host()};
  std::sort(all.begin(), all.end());
  const std::vector<Location> sorted = {Location::pageable_host(),
                                        Location::pinned_host(),
                                        Location::cuda(2),
                                        Location::cuda(10),
                                        apple,
                                        zebra};
  EXPECT_EQ(all, sorted);
}

TEST(Location, EqualOnesHashEqual) {
  std::unordered_set<Location> set;
  for (int i = 0; i <= 127; ++i) {
    set.insert(Location::cuda(i));
    set.insert(Location::cuda(i));
  }
  set.insert(Location::disk("hash"));
  set.insert(Location::parse("disk:hash"));
  set.insert(Location::pageable_host());
  set.insert(Location::parse("cpu"));
  EXPECT_EQ(set.size(), 130U);
}

TEST(Location, PartsOfAnotherKindAreArgumentErrors) {
  EXPECT_EQ(Location::cuda(3).cuda_index(), 3);
  EXPECT_EQ(Location::disk("part").disk_name(), "part");
  EXPECT_THROW((void)Location::pinned_host().cuda_index(), std::invalid_argument);
  EXPECT_THROW((void)Location::cuda(0).disk_name(), std::invalid_argument);
}

TEST(Location, KindsAreTold) {
  EXPECT_TRUE(Location::pageable_host().is_host());
  EXPECT_TRUE(Location::pinned_host().is_host());
  EXPECT_FALSE(Location::cuda(0).is_host());
  EXPECT_TRUE(Location::cuda(0).is_cuda());
  EXPECT_TRUE(Location::disk("kind").is_disk());
  EXPECT_EQ(sizeof(Location), 4U);
}

}  // namespace
}  // namespace residency
