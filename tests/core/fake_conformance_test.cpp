// The fake backend passes the suite that the real ones pass.

#include "fixture.h"
#include "tests/conformance/backend_conformance.h"

namespace residency::conformance {
namespace {

struct FakeHarness {
  FakeHarness() {
    fake->open(ManagerId{900000},
               {.budgets = {},
                .disks = {{.name = "a", .directory = "/nowhere", .budget = std::nullopt},
                          {.name = "b", .directory = "/nowhere", .budget = std::nullopt}}});
  }
  ~FakeHarness() {
    fake->close(true);
    EXPECT_TRUE(fake->violations().empty());
    for (const Location location : locations()) {
      EXPECT_EQ(fake->live_bytes(location), Bytes()) << to_string(location);
    }
  }

  Backend& backend() { return *fake; }
  static std::vector<Location> memory() {
    return {test::kPageable, test::kPinned, test::kCuda0, test::kCuda1};
  }
  static std::vector<Location> locations() {
    auto all = memory();
    all.push_back(Location::disk("a"));
    all.push_back(Location::disk("b"));
    return all;
  }
  static std::vector<std::pair<Location, Location>> copies() { return all_pairs(locations()); }
  static std::vector<Location> chain() {
    return {test::kPinned, test::kCuda0, test::kCuda1, test::kPinned};
  }
  static std::vector<Location> missing() { return {Location::cuda(2), Location::disk("c")}; }
  static ValueSpec spec(std::int64_t nbytes) { return fake::make_spec(nbytes); }
  BlockPtr make(Location at, const ValueSpec& spec, std::uint64_t seed) {
    return fake->make_block(at, spec, seed);
  }
  static bool holds(Block& block, std::uint64_t seed) {
    return dynamic_cast<fake::FakeBlock&>(block).holds(seed);
  }
  static void write(Block& block, std::uint64_t seed) {
    dynamic_cast<fake::FakeBlock&>(block).write(seed);
  }
  static std::shared_ptr<void> share(Block& block) {
    return dynamic_cast<fake::FakeBlock&>(block).share();
  }
  std::optional<Bytes> measured(Location location) { return fake->live_bytes(location); }
  static std::pair<Location, Location> misplaced() { return {test::kPageable, test::kPinned}; }
  void break_transfers(bool broken) {
    if (broken) {
      fake->fail(fake::Call::kTransfer, 1);
    } else {
      fake->clear_faults();
    }
  }

  std::shared_ptr<fake::FakeBackend> fake = std::make_shared<fake::FakeBackend>();
};

INSTANTIATE_TYPED_TEST_SUITE_P(Fake, BackendConformance, FakeHarness);

}  // namespace
}  // namespace residency::conformance
