// On which memory node page-locked memory is. What sysfs says is made up, as the machine that runs
// the tests may have one node; the kernel is asked where it would take the pages from.

#include "csrc/cuda/numa_node.h"

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <string>

#include <c10/cuda/CUDAFunctions.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tests/aten/fixture.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/tier_fixture.h"

namespace residency::testing {
namespace {

class Sysfs {
 public:
  [[nodiscard]] std::string root() const { return directory_.path().string(); }
  void has_nodes(const std::string& nodes) const {
    directory_.write("devices/system/node/online", nodes);
  }
  void has_device(const std::string& pci_id, const std::string& node) const {
    directory_.write("bus/pci/devices/" + pci_id + "/numa_node", node);
  }

 private:
  TemporaryDirectory directory_;
};

TEST(NumaNode, IsThatOfTheDevice) {
  const Sysfs sysfs;
  sysfs.has_nodes("0-1");
  sysfs.has_device("0000:3b:00.0", "0");
  sysfs.has_device("0000:af:00.0", "1");
  sysfs.has_device("0000:d8:00.0", "-1");
  EXPECT_EQ(node_of_pci_device("0000:3B:00.0", sysfs.root()), 0);
  EXPECT_EQ(node_of_pci_device("0000:af:00.0", sysfs.root()), 1);
  EXPECT_EQ(node_of_pci_device("0000:d8:00.0", sysfs.root()), std::nullopt) << "it is not known";
  EXPECT_EQ(node_of_pci_device("0000:d9:00.0", sysfs.root()), std::nullopt) << "no such device";
}

TEST(NumaNode, IsOfNoConcernWhereThereIsOne) {
  const Sysfs sysfs;
  sysfs.has_device("0000:3b:00.0", "0");
  EXPECT_EQ(node_of_pci_device("0000:3b:00.0", sysfs.root()), std::nullopt) << "nothing is known";
  sysfs.has_nodes("0");
  EXPECT_EQ(node_of_pci_device("0000:3b:00.0", sysfs.root()), std::nullopt);
  sysfs.has_nodes("0,2");
  EXPECT_EQ(node_of_pci_device("0000:3b:00.0", sysfs.root()), 0);
}

/// The policy of the pages at an address: the mode and the first nodes.
struct Policy {
  int mode = -1;
  unsigned long nodes = 0;
  friend bool operator==(const Policy&, const Policy&) = default;
};
Policy policy_at(const void* address) {
  Policy policy;
  std::array<unsigned long, 1024 / 8 / sizeof(unsigned long)> nodes{};
  EXPECT_EQ(::syscall(SYS_get_mempolicy, &policy.mode, nodes.data(), 1024, address, MPOL_F_ADDR), 0)
      << std::strerror(errno);
  policy.nodes = nodes[0];
  return policy;
}
const Policy kNodeZero{MPOL_PREFERRED, 1};

/// A page of its own, of which the kernel is told.
class Page {
 public:
  Page()
      : data_(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
  }
  Page(const Page&) = delete;
  Page& operator=(const Page&) = delete;
  ~Page() { ::munmap(data_, kBytes); }
  static constexpr std::size_t kBytes = 4096;
  [[nodiscard]] void* data() const { return data_; }

 private:
  void* data_;
};

/// Why the kernel places no pages here; empty where it does.
std::string why_not() {
  const Page page;
  return prefer_node(page.data(), Page::kBytes, 0) ? "" : std::strerror(errno);
}

TEST(NumaNode, IsWhereTheKernelTakesThePagesFrom) {
  if (const std::string why = why_not(); !why.empty()) {
    GTEST_SKIP() << "the kernel places no pages: " << why;
  }
  const Page page;
  EXPECT_EQ(policy_at(page.data()).mode, MPOL_DEFAULT);
  EXPECT_TRUE(prefer_node(page.data(), Page::kBytes, 0));
  EXPECT_EQ(policy_at(page.data()), kNodeZero);
}

TEST(NumaNode, ThatIsRefusedIsNoError) {
  const Page page;
  for (const int node : {-1, 1023, 1024, 1 << 30}) {
    EXPECT_FALSE(prefer_node(page.data(), Page::kBytes, node)) << node;
  }
  std::memset(page.data(), 1, Page::kBytes);
}

class NumaNodeOfSlabs : public DeviceTier {
 protected:
  void SetUp() override {
    if (!simulated()) {
      GTEST_SKIP() << "only the simulated devices are known beforehand";
    }
    if (const std::string why = why_not(); !why.empty()) {
      GTEST_SKIP() << "the kernel places no pages: " << why;
    }
    ASSERT_EQ(::setenv("RESIDENCY_SYSFS", sysfs_.root().c_str(), 1), 0);
    sysfs_.has_nodes("0-1");
    sysfs_.has_device("0000:02:00.0", "0");  // of kOther
  }
  ~NumaNodeOfSlabs() override { ::unsetenv("RESIDENCY_SYSFS"); }
  Policy policy_of(const Handle& handle) {
    Lease lease = manager_->acquire(one(handle), kPinned);
    const Policy policy = policy_at(tensors(lease, handle)["x"].const_data_ptr());
    lease.release();
    return policy;
  }

  const Sysfs sysfs_;
};

TEST_F(NumaNodeOfSlabs, IsThatOfTheDeviceThatIsCopiedFrom) {
  const Handle handle = value(kMiB, 1);
  for (const Location device : {kDevice, kOther}) {
    manager_->move(handle, device).wait();
    manager_->move(handle, kPinned).wait();
    EXPECT_EQ(policy_of(handle), device == kOther ? kNodeZero : Policy(MPOL_DEFAULT, 0))
        << to_string(device);
    manager_->move(handle, kHost).wait();
    (void)layer_->trim();
  }
}

TEST_F(NumaNodeOfSlabs, IsThatOfTheCurrentDeviceForBytesOfTheHost) {
  const Handle handle = value(kMiB, 1);
  c10::cuda::set_device(1);
  manager_->move(handle, kPinned).wait();
  c10::cuda::set_device(0);
  EXPECT_EQ(policy_of(handle), kNodeZero);
}

TEST_F(NumaNodeOfSlabs, IsThatOfTheDeviceForTheBuffersOfStagedCopies) {
  std::ifstream readable("/proc/self/numa_maps");
  if (!readable) {
    GTEST_SKIP() << "the kernel does not list its placements";
  }
  const auto num_placed = [] {
    std::ifstream maps("/proc/self/numa_maps");
    int num = 0;
    for (std::string line; std::getline(maps, line);) {
      num += line.find(" prefer:0 ") != std::string::npos ? 1 : 0;
    }
    return num;
  };
  manager_->move(value(kMiB, 1), kDevice).wait();
  EXPECT_EQ(num_placed(), 0);
  manager_->move(value(kMiB, 2), kOther).wait();
  EXPECT_EQ(num_placed(), 1);
}

TEST_F(NumaNodeOfSlabs, ThatDoesNotExistIsNoError) {
  sysfs_.has_device("0000:02:00.0", "700");
  const Handle handle = value(kMiB, 1);
  manager_->move(handle, kOther).wait();
  manager_->move(handle, kPinned).wait();
  EXPECT_EQ(byte_of(handle, kPinned), 1);
}

}  // namespace
}  // namespace residency::testing
