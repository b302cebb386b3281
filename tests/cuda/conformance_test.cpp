// The torch backend with devices and page-locked memory passes the suite that every backend passes.

#include <cstring>
#include <optional>

#include <ATen/ops/empty.h>
#include <ATen/ops/fill.h>

#include "residency/aten/tensor_block.h"
#include "residency/aten/torch_backend.h"
#include "residency/cuda/cuda_layer.h"
#include "tests/aten/fixture.h"
#include "tests/conformance/backend_conformance.h"
#include "tests/cuda/fixture.h"

namespace residency::conformance {
namespace {

using residency::testing::BreakableCalls;
using residency::testing::simulated;

struct CudaHarness : residency::testing::CudaTest {
  CudaHarness() {
    ManagerOptions options;
    options.disks.push_back(
        {.name = "a", .directory = directory.path(), .budget = std::nullopt, .fsync = false});
    torch.open(ManagerId{900001}, options);
  }
  ~CudaHarness() override {
    torch.close(true);
    EXPECT_TRUE(directory.contents().empty());
    for (const Location at : memory()) {
      EXPECT_EQ(layer->usage(at).segments, Bytes()) << to_string(at);
    }
  }
  void TestBody() override {}

  Backend& backend() { return torch; }
  static std::vector<Location> memory() {
    return {Location::pageable_host(), Location::pinned_host(), Location::cuda(0),
            Location::cuda(1)};
  }
  static std::vector<Location> locations() {
    std::vector<Location> all = memory();
    all.push_back(Location::disk("a"));
    return all;
  }
  static std::vector<std::pair<Location, Location>> copies() { return all_pairs(locations()); }
  static std::vector<Location> chain() {
    return {Location::pageable_host(), Location::pinned_host(), Location::cuda(0),
            Location::cuda(1),         Location::pinned_host(), Location::cuda(1),
            Location::pageable_host(), Location::cuda(0),       Location::disk("a"),
            Location::cuda(1)};
  }
  static std::vector<Location> missing() { return {Location::cuda(2), Location::disk("c")}; }

  static at::Tensor tensor_at(Location at, std::int64_t nbytes) {
    if (at.is_cuda()) {
      return residency::testing::on_device(nbytes, at.cuda_index());
    }
    return at == Location::pinned_host()
               ? residency::testing::page_locked(nbytes)
               : at::empty({nbytes}, at::TensorOptions().dtype(at::kByte));
  }
  static std::vector<char> bytes(std::int64_t nbytes, std::uint64_t seed) {
    return std::vector<char>(static_cast<std::size_t>(nbytes), static_cast<char>(seed));
  }
  static void fill(const at::Tensor& tensor, std::uint64_t seed) {
    const auto from = bytes(tensor.numel(), seed);
    EXPECT_EQ(cudaMemcpy(tensor.data_ptr(), from.data(), from.size(), cudaMemcpyDefault),
              cudaSuccess);
  }
  static ValueSpec spec(std::int64_t nbytes) {
    const auto tensor = at::empty({nbytes}, at::TensorOptions().dtype(at::kByte));
    return spec_of(TensorResident({{"data", tensor}}).layout(), ReplicaMode::kReplicable,
                   Recoverability::kMustPreserve, Mutability::kMutable);
  }
  BlockPtr make(Location at, const ValueSpec& spec, std::uint64_t seed) {
    if (at == Location::pinned_host() && spec.storage_bytes == Bytes()) {
      // A tensor without memory is nowhere locked.
      return layer->allocate(std::static_pointer_cast<const TensorLayout>(spec.layout), at).block;
    }
    const at::Tensor tensor = tensor_at(at, spec.storage_bytes.count());
    fill(tensor, seed);
    return TensorBlock::adopt(TensorResident({{"data", tensor}}));
  }
  static bool holds(Block& block, std::uint64_t seed) {
    const at::Tensor tensor = dynamic_cast<TensorBlock&>(block).tensors()["data"];
    std::vector<char> found(static_cast<std::size_t>(tensor.numel()));
    EXPECT_EQ(cudaMemcpy(found.data(), tensor.data_ptr(), found.size(), cudaMemcpyDefault),
              cudaSuccess);
    return found == bytes(tensor.numel(), seed);
  }
  static void write(Block& block, std::uint64_t seed) {
    dynamic_cast<TensorBlock&>(block).tensors()["data"].fill_(static_cast<std::int64_t>(seed));
  }
  static std::shared_ptr<void> share(Block& block) {
    return std::make_shared<c10::Storage>(
        dynamic_cast<TensorBlock&>(block).tensors()["data"].storage());
  }
  std::optional<Bytes> measured(Location location) {
    if (location.is_disk() || location == Location::pageable_host()) {
      return std::nullopt;  // host_tier_test and the torch backend's own run of this suite
    }
    return layer->usage(location).live;
  }
  static std::pair<Location, Location> misplaced() {
    return {Location::cuda(0), Location::pageable_host()};
  }
  /// Files answer with an error, and waiting for a device fails for a while: a staged copy ends,
  /// and who waits for another one tries again.
  static bool can_break(TransferPath path) { return simulated() || path != TransferPath::kStaged; }
  void break_transfers(bool broken) {
    calls->broken = broken;
    if (!simulated()) {
      return;
    }
    EXPECT_EQ(simcuda_fail("cudaEventSynchronize", 0, broken ? 10 : 0, cudaErrorInvalidValue), 0);
  }

  residency::testing::TemporaryDirectory directory;
  std::shared_ptr<BreakableCalls> calls = std::make_shared<BreakableCalls>();
  std::shared_ptr<DeviceLayer> layer = make_cuda_layer();
  TorchBackend torch{
      {.file_engine = FileEngine::kBlocking, .system_calls = calls, .devices = layer}};
};

INSTANTIATE_TYPED_TEST_SUITE_P(Cuda, BackendConformance, CudaHarness);

}  // namespace
}  // namespace residency::conformance
