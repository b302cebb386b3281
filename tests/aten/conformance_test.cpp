// The torch backend, in host memory and in files, passes the suite that every backend passes.

#include <cstring>

#include <ATen/ops/empty.h>
#include <sys/statvfs.h>

#include "fixture.h"
#include "residency/aten/tensor_block.h"
#include "residency/aten/torch_backend.h"
#include "tests/conformance/backend_conformance.h"

namespace residency::conformance {
namespace {

using residency::testing::BreakableCalls;

struct TorchHarness {
  TorchHarness() {
    ManagerOptions options;
    for (const char* name : {"a", "b"}) {
      options.disks.push_back(
          {.name = name, .directory = directory.path(), .budget = std::nullopt});
    }
    torch.open(ManagerId{900000}, options);
  }
  ~TorchHarness() {
    torch.close(true);
    EXPECT_TRUE(directory.contents().empty());
  }

  Backend& backend() { return torch; }
  static std::vector<Location> memory() { return {Location::pageable_host()}; }
  static std::vector<Location> locations() {
    return {Location::pageable_host(), Location::disk("a"), Location::disk("b")};
  }
  static std::vector<std::pair<Location, Location>> copies() { return all_pairs(locations()); }
  static std::vector<Location> chain() {
    return {Location::pageable_host(), Location::disk("a"), Location::disk("b"),
            Location::pageable_host()};
  }
  static std::vector<Location> missing() {
    return {Location::pinned_host(), Location::cuda(0), Location::disk("c")};
  }
  static at::Tensor tensor(std::int64_t nbytes, std::uint64_t seed) {
    at::Tensor made = at::empty({nbytes}, at::TensorOptions().dtype(at::kByte));
    std::memset(made.mutable_data_ptr(), static_cast<int>(seed), static_cast<std::size_t>(nbytes));
    return made;
  }
  static ValueSpec spec(std::int64_t nbytes) {
    return spec_of(TensorResident({{"data", tensor(nbytes, 0)}}).layout(), ReplicaMode::kReplicable,
                   Recoverability::kMustPreserve, Mutability::kMutable);
  }
  static BlockPtr make(Location, const ValueSpec& spec, std::uint64_t seed) {
    return TensorBlock::adopt(TensorResident({{"data", tensor(spec.storage_bytes.count(), seed)}}));
  }
  static bool holds(Block& block, std::uint64_t seed) {
    const auto tensors = dynamic_cast<TensorBlock&>(block).tensors();
    return tensors["data"].equal(tensor(tensors["data"].numel(), seed));
  }
  static void write(Block& block, std::uint64_t seed) {
    dynamic_cast<TensorBlock&>(block).tensors()["data"].fill_(static_cast<std::int64_t>(seed));
  }
  static std::shared_ptr<void> share(Block& block) {
    return std::make_shared<c10::Storage>(
        dynamic_cast<TensorBlock&>(block).tensors()["data"].storage());
  }
  /// The files, rounded as their file system rounds.
  std::optional<Bytes> measured(Location location) {
    if (location != Location::disk("a")) {  // the two share a directory: measure one of them
      return std::nullopt;
    }
    struct statvfs status = {};
    EXPECT_EQ(::statvfs(directory.path().c_str(), &status), 0);
    Bytes sum;
    for (const auto& path : directory.files()) {
      sum += Bytes(static_cast<std::int64_t>(std::filesystem::file_size(path)))
                 .rounded_up(static_cast<std::int64_t>(status.f_frsize));
    }
    return sum;
  }
  static std::pair<Location, Location> misplaced() {
    return {Location::disk("a"), Location::pageable_host()};
  }
  void break_transfers(bool broken) { calls->broken = broken; }

  residency::testing::TemporaryDirectory directory;
  std::shared_ptr<BreakableCalls> calls = std::make_shared<BreakableCalls>();
  TorchBackend torch{{.file_engine = FileEngine::kBlocking, .system_calls = calls}};
};

INSTANTIATE_TYPED_TEST_SUITE_P(Torch, BackendConformance, TorchHarness);

}  // namespace
}  // namespace residency::conformance
