// How much more may be page-locked, from what the kernel would say.

#include "csrc/cuda/lock_limits.h"

#include <string>

#include <gtest/gtest.h>

#include "tests/aten/fixture.h"

namespace residency::testing {
namespace {

class LockLimits : public ::testing::Test {
 protected:
  void has_ulimit(const std::string& most, const std::string& capabilities) const {
    root_.write("proc/self/limits",
                "Limit                     Soft Limit           Hard Limit           Units\n"
                "Max locked memory         " +
                    most + "              unlimited            bytes");
    root_.write("proc/self/status",
                "Name:\ttest\nVmLck:\t       8 kB\nVmPin:\t       4 kB\nCapEff:\t" + capabilities);
  }
  void has_group(const std::string& group, const std::string& most, const std::string& current,
                 std::int64_t cache = 0) const {
    root_.write("sys/fs/cgroup/" + group + "/memory.max", most);
    root_.write("sys/fs/cgroup/" + group + "/memory.current", current);
    root_.write("sys/fs/cgroup/" + group + "/memory.stat",
                "anon 1\nfile 2\ninactive_file " + std::to_string(cache / 2) + "\nactive_file " +
                    std::to_string(cache - cache / 2) + "\nactive_anon 77");
  }
  std::optional<Bytes> found(std::int64_t locked = 0) const {
    return lockable_bytes(Bytes(locked), root_.path());
  }

  static constexpr const char* kNone = "0000000000000000";
  static constexpr const char* kIpcLock = "0000000000004000";

  TemporaryDirectory root_;
};

TEST_F(LockLimits, NothingLimitsWhereNothingIsSaid) {
  EXPECT_EQ(found(), std::nullopt);
  has_ulimit("unlimited", kNone);
  root_.write("proc/self/cgroup", "0::/user/job");
  has_group("user", "max", "1000");
  EXPECT_EQ(found(), std::nullopt);
}

TEST_F(LockLimits, UlimitIsForWhoeverLacksTheCapability) {
  has_ulimit("100000", kNone);
  EXPECT_EQ(found(), Bytes(100'000 - 12 * 1024));
  EXPECT_EQ(found(70'000), Bytes(30'000)) << "the driver's pages are not in the kernel's count";
  EXPECT_EQ(found(200'000), Bytes());
  has_ulimit("100000", kIpcLock);
  EXPECT_EQ(found(), std::nullopt);
}

TEST_F(LockLimits, LeastOfAllGroupsCounts) {
  root_.write("proc/self/cgroup", "12:cpu:/other\n0::/user/job");
  has_group("user/job", "max", "5000");
  has_group("user", "9000", "6000");
  EXPECT_EQ(found(), Bytes(3000));
  has_group("user/job", "7000", "5000");
  EXPECT_EQ(found(), Bytes(2000));
  has_group("", "1000", "999");
  EXPECT_EQ(found(), Bytes(1));
}

TEST_F(LockLimits, PageCacheMakesRoom) {
  root_.write("proc/self/cgroup", "0::/");
  has_group("", "9000", "8900", 8001);
  EXPECT_EQ(found(), Bytes(9000 - 899));
  has_group("", "9000", "9500", 0);
  EXPECT_EQ(found(), Bytes());
}

}  // namespace
}  // namespace residency::testing
