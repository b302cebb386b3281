// Situations from the field (`CASES.md`) that need all tiers; the others are where their subject
// is.

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/randn.h>

#include "residency/aten/manager.h"
#include "residency/core/errors.h"
#include "residency/cuda/cuda_layer.h"
#include "tests/aten/fixture.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/tier_fixture.h"

namespace residency::testing {
namespace {

class Cases : public CudaTest {
 protected:
  ~Cases() override {
    manager_->audit();
    manager_->close({.force = true});
  }
  /// Moves the value through all tiers; `look` sees its tensors wherever they are in memory.
  template <class Look>
  void travel(const Handle& handle, const Look& look) {
    for (const Location to : {kPinned, kDevice, kDisk, kOther, kHost, kDevice, kPinned, kDisk}) {
      SCOPED_TRACE(to_string(to));
      manager_->move(handle, to).wait();
      if (!to.is_disk()) {
        Lease lease = manager_->acquire(one(handle), to);
        look(tensors(lease, handle));
        lease.release();
      }
    }
  }

  TemporaryDirectory directory_;
  std::shared_ptr<DeviceLayer> layer_ = make_cuda_layer();
  std::shared_ptr<Manager> manager_ = create_manager(with_disk(directory_), {.devices = layer_});
};

TEST_F(Cases, Case1LockedBytesAreWhatExplainSaid) {
  if (!simulated()) {
    GTEST_SKIP() << "only the simulated runtime counts";
  }
  constexpr std::int64_t kGiB = std::int64_t{1} << 30;
  for (const auto& [num, nbytes] : {std::pair(5, kGiB * 6 / 5), std::pair(1, 4 * kGiB),
                                    std::pair(1000, 70'000L), std::pair(1000, 1000L)}) {
    std::vector<ResidencyAction> actions;
    for (int i = 0; i < num; ++i) {
      TensorResident fields({{"x", at::empty({nbytes}, at::TensorOptions().dtype(at::kByte))}});
      actions.emplace_back(
          MoveResident{adopt(*manager_, std::move(fields)), kPinned, std::nullopt});
    }
    const Explanation explanation = manager_->explain(actions);
    const PredictedLocation predicted = *explanation.find(kPinned);
    const auto locked = static_cast<std::int64_t>(simcuda_pinned_bytes());
    manager_->execute(actions).wait();
    const auto grown = static_cast<std::int64_t>(simcuda_pinned_bytes()) - locked;
    EXPECT_EQ(Bytes(grown), predicted.segments->after - predicted.segments->before);
    const Bytes booked = predicted.used_after - predicted.used_before;
    EXPECT_EQ(manager_->snapshot().find(kPinned)->used, predicted.used_after);
    EXPECT_LE(static_cast<double>(grown), 1.02 * static_cast<double>(booked.count()));
    for (const ResidencyAction& action : actions) {
      manager_->discard(handle_of(action));
    }
    manager_->synchronize();
    (void)layer_->trim();
  }
}

TEST_F(Cases, Case17TiedFieldsAreOneMaterializationCountedOnce) {
  const at::Tensor weight = at::randn({100, 10});
  const at::Tensor expected = weight.clone();
  const Handle handle = adopt(*manager_, TensorResident({{"embedding", weight}, {"head", weight}}));
  EXPECT_EQ(manager_->spec(handle).storage_bytes, Bytes(4000));
  travel(handle, [](const TensorResident& tied) {
    EXPECT_EQ(tied["embedding"].const_data_ptr(), tied["head"].const_data_ptr());
    EXPECT_TRUE(tied["embedding"].storage().is_alias_of(tied["head"].storage()));
  });
  EXPECT_EQ(manager_->snapshot().find(handle)->materializations.size(), 1U);
  TensorResident back = take(*manager_, handle);
  EXPECT_TRUE(back["head"].equal(expected));
  back["head"].mul_(2);
  EXPECT_TRUE(back["embedding"].equal(expected.mul(2))) << "tied still";
}

TEST_F(Cases, Case18BaseSliceAndTransposeStillShare) {
  const at::Tensor base = at::randn({8, 6});
  const at::Tensor expected = base.clone();
  const Handle handle = adopt(
      *manager_, TensorResident({{"slice", base.slice(0, 2, 5)}, {"base", base}, {"t", base.t()}}));
  travel(handle, [&](const TensorResident& view) {
    EXPECT_TRUE(view["slice"].storage().is_alias_of(view["base"].storage()));
    EXPECT_TRUE(view["t"].storage().is_alias_of(view["base"].storage()));
    EXPECT_EQ(view["slice"].storage_offset(), 12);
    EXPECT_EQ(view["t"].strides(), expected.t().strides());
  });
  const TensorResident back = take(*manager_, handle);
  EXPECT_TRUE(back["slice"].equal(expected.slice(0, 2, 5)));
  EXPECT_TRUE(back["t"].equal(expected.t()));
}

TEST_F(Cases, Case18FieldThatSharesWithAnotherValueIsRefused) {
  const at::Tensor base = at::randn({8, 6});
  const Handle handle = adopt(*manager_, TensorResident({{"base", base.slice(0, 0, 4)}}));
  EXPECT_THROW((void)adopt(*manager_, TensorResident({{"x", base.slice(0, 4, 8)}})),
               OwnershipError);
  manager_->move(handle, kDevice).wait();
}

// A square tensor and its transpose, both saved for backward: y = a @ b with b = a.t().
TEST_F(Cases, Case19SquareTensorAndItsTransposeKeepTheirGradients) {
  const at::Tensor a = at::randn({16, 16});
  const at::Tensor gradient = at::randn({16, 16});
  const at::Tensor expected_for_a = at::mm(gradient, a);              // gradient @ b.t()
  const at::Tensor expected_for_b = at::mm(a.t(), gradient).clone();  // a.t() @ gradient
  const Handle first = adopt(*manager_, TensorResident({{"x", a.clone()}}));
  const Handle second = adopt(*manager_, TensorResident({{"x", a.clone().t()}}));
  for (const Location way : {kPinned, kDisk}) {
    for (const Handle& each : {first, second}) {
      manager_->move(each, way).wait();
      manager_->move(each, kHost).wait();
    }
    Lease lease = manager_->acquire(std::vector{first, second}, kHost);
    const at::Tensor saved_a = tensors(lease, first)["x"];
    const at::Tensor saved_b = tensors(lease, second)["x"];
    EXPECT_EQ(saved_b.strides(), a.t().strides());
    EXPECT_TRUE(at::mm(gradient, saved_b.t()).equal(expected_for_a));
    EXPECT_TRUE(at::mm(saved_a.t(), gradient).equal(expected_for_b));
    lease.release();
  }
}

TEST_F(Cases, Case20ChannelsLastKeepsItsStrides) {
  const at::Tensor weight = at::randn({4, 3, 5, 5}).contiguous(at::MemoryFormat::ChannelsLast);
  const at::Tensor expected = weight.clone();
  const Handle handle = adopt(*manager_, TensorResident({{"weight", weight}}));
  travel(handle, [&](const TensorResident& view) {
    EXPECT_EQ(view["weight"].strides(), expected.strides());
    EXPECT_TRUE(view["weight"].is_contiguous(at::MemoryFormat::ChannelsLast));
  });
  EXPECT_TRUE(take(*manager_, handle)["weight"].equal(expected));
}

}  // namespace
}  // namespace residency::testing
