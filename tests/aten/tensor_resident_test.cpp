#include "residency/aten/tensor_resident.h"

#include <array>
#include <cstdint>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_nested_tensor_from_tensor_list.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/quantize_per_tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "residency/aten/tensor_block.h"
#include "tests/aten/fixture.h"

namespace residency::testing {
namespace {

using ::testing::HasSubstr;

std::string refusal_of(const at::Tensor& tensor) {
  return message_of<MaterializationError>([&] { TensorResident value({{"weight", tensor}}); });
}

TEST(TensorResident, KeepsFieldsInOrderAndFindsThemByName) {
  const at::Tensor a = at::ones({2});
  const at::Tensor b = at::zeros({3});
  const TensorResident value({{"b", b}, {"a", a}});
  ASSERT_EQ(value.size(), 2U);
  EXPECT_EQ(value.name(0), "b");
  EXPECT_TRUE(value["a"].is_same(a));
  EXPECT_TRUE(value[0].is_same(b));
  EXPECT_TRUE(value.contains("a"));
  EXPECT_FALSE(value.contains("c"));
  EXPECT_THAT(message_of<std::out_of_range>([&] { (void)value["c"]; }), HasSubstr("b, a"));
  EXPECT_THAT(message_of<std::out_of_range>([&] { (void)value[2]; }), HasSubstr("has 2"));
  EXPECT_THAT(message_of<std::out_of_range>([&] { (void)value.name(2); }), HasSubstr("has 2"));
}

TEST(TensorResident, NamesThatAreEmptyOrTwiceAreArgumentErrors) {
  const at::Tensor a = at::ones({2});
  EXPECT_THROW(TensorResident({{"", a}}), std::invalid_argument);
  EXPECT_THROW(TensorResident({{"a", a}, {"a", a}}), std::invalid_argument);
  EXPECT_THROW(TensorResident({{"\xff", a}}), std::invalid_argument);
}

TEST(TensorResident, KindsThatCannotBeKeptAreRefusedByName) {
  EXPECT_THAT(refusal_of(at::Tensor()), HasSubstr("'weight' is an undefined tensor"));
  EXPECT_THAT(refusal_of(at::ones({2, 2}).to_sparse()), HasSubstr("a sparse tensor"));
  EXPECT_THAT(refusal_of(at::ones({2, 2}).to_sparse_csr()), HasSubstr("a sparse tensor"));
  EXPECT_THAT(refusal_of(at::empty({2}, at::TensorOptions().device(at::kMeta))),
              HasSubstr("a meta tensor"));
  const std::vector<at::Tensor> parts = {at::ones({2}), at::ones({3})};
  EXPECT_THAT(refusal_of(at::_nested_tensor_from_tensor_list(parts)), HasSubstr("a nested tensor"));
  EXPECT_THAT(refusal_of(at::quantize_per_tensor(at::ones({2}), 0.1, 0, at::kQInt8)),
              HasSubstr("a quantized tensor"));
}

TEST(TensorResident, NonLeafIsRefused) {
  const at::Tensor leaf = at::ones({2}).set_requires_grad(true);
  EXPECT_THAT(refusal_of(leaf.mul(2)), HasSubstr("not a leaf"));
  EXPECT_EQ(refusal_of(leaf), "");
}

TEST(TensorResident, StorageThatLostItsMemoryIsRefused) {
  const at::Tensor tensor = at::ones({8});
  tensor.storage().unsafeGetStorageImpl()->set_nbytes(0);
  EXPECT_THAT(refusal_of(tensor), HasSubstr("storage of 0 bytes"));
}

TEST(TensorResident, OverlapWithoutCommonStorageIsRefused) {
  std::array<float, 8> memory{};
  const at::Tensor left = at::from_blob(memory.data(), {6});
  const at::Tensor right = at::from_blob(memory.data() + 5, {3});
  EXPECT_THAT(message_of<MaterializationError>([&] {
                TensorResident value({{"left", left}, {"right", right}});
              }),
              HasSubstr("overlap in memory"));
}

TEST(TensorResident, TiedFieldsAreOneStorageCountedOnce) {
  const at::Tensor weight = at::ones({4, 4});
  const TensorResident value({{"embedding", weight}, {"head", weight}});
  EXPECT_EQ(value.layout()->storages().size(), 1U);
  EXPECT_EQ(value.logical_bytes(), Bytes(128));
  EXPECT_EQ(value.storage_bytes(), Bytes(64));
}

TEST(TensorResident, ExpandedViewIsLogicallyLargeAndStoredSmall) {
  const TensorResident value({{"row", at::ones({1, 4}).expand({1000, 4})}});
  EXPECT_EQ(value.logical_bytes(), Bytes(16000));
  EXPECT_EQ(value.layout()->packed_bytes(), Bytes(64));
}

TEST(TensorResident, SliceIsChargedItsWholeStorage) {
  const at::Tensor base = at::ones({1000, 25});
  const TensorResident value({{"slice", base.narrow(0, 500, 10)}});
  EXPECT_EQ(value.logical_bytes(), Bytes(1000));
  EXPECT_EQ(value.layout()->packed_bytes(), Bytes(100'000).rounded_up(64));
}

TEST(TensorResident, LayoutsDifferInEachThingThatMustBeKept) {
  const at::Tensor base = at::ones({4, 4});
  const auto layout = [](const at::Tensor& tensor) {
    return TensorResident({{"x", tensor}}).layout();
  };
  EXPECT_EQ(*layout(base), *layout(at::zeros({4, 4})));
  EXPECT_NE(*layout(base), *layout(base.t()));
  EXPECT_NE(*layout(base), *layout(base.narrow(0, 1, 3)));
  EXPECT_NE(*layout(base), *layout(base.view(at::kInt)));
  EXPECT_NE(*layout(base), *layout(at::ones({4, 4}).set_requires_grad(true)));
  const at::Tensor complex = at::ones({2}, at::kComplexFloat);
  EXPECT_NE(*layout(complex), *layout(complex.conj()));
  EXPECT_NE(*layout(complex), *layout(complex._neg_view()));
  EXPECT_THAT(layout(base)->describe(), HasSubstr("x: Float[4, 4]"));
}

TEST(TensorBlock, PackSharesWhatWasSharedAndKeepsExactStorages) {
  const at::Tensor base = at::arange(24, at::kFloat).view({4, 6});
  const at::Tensor other = at::arange(3, at::kByte);
  const TensorResident value({{"base", base},
                              {"slice", base.narrow(0, 1, 2)},
                              {"transposed", base.t()},
                              {"other", other}});
  const auto pack = TensorBlock::adopt(value)->clone();
  ASSERT_TRUE(pack->is_packed());
  const TensorResident copy = pack->tensors();
  for (std::size_t i = 0; i < value.size(); ++i) {
    EXPECT_TRUE(same(copy[i], value[i])) << value.name(i);
    EXPECT_FALSE(copy[i].is_alias_of(value[i]));
    EXPECT_EQ(copy[i].storage().nbytes(), value[i].storage().nbytes());
  }
  EXPECT_TRUE(copy["slice"].is_alias_of(copy["base"]));
  EXPECT_TRUE(copy["transposed"].is_alias_of(copy["base"]));
  EXPECT_FALSE(copy["other"].is_alias_of(copy["base"]));
  // One allocation: both storages lie within it, aligned.
  const auto address = [](const at::Tensor& tensor) {
    return reinterpret_cast<std::uintptr_t>(tensor.storage().data());
  };
  EXPECT_EQ(address(copy["base"]) % 64, 0U);
  EXPECT_EQ(address(copy["other"]), address(copy["base"]) + 128);
  copy["slice"].fill_(-1);
  EXPECT_EQ(copy["base"]._version(), copy["slice"]._version());
  EXPECT_EQ(copy["base"]._version(), 1);
  EXPECT_EQ(copy["other"]._version(), 0);
}

TEST(TensorBlock, TensorOutlivesItsBlock) {
  at::Tensor kept;
  {
    const auto pack =
        TensorBlock::adopt(TensorResident({{"a", at::ones({5})}, {"b", at::zeros({7})}}))->clone();
    EXPECT_FALSE(pack->is_shared());
    kept = pack->tensors()["a"];
    EXPECT_FALSE(pack->is_shared());  // a tensor is not a storage
    kept = kept.view({5, 1});
    EXPECT_TRUE(pack->is_shared());
  }
  EXPECT_TRUE(kept.equal(at::ones({5, 1})));
}

TEST(TensorBlock, LaterChangesOfTheCallersTensorDoNotReachIt) {
  at::Tensor mine = at::arange(6, at::kFloat);
  const auto block = TensorBlock::adopt(TensorResident({{"x", mine}}));
  mine.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef({2}), at::IntArrayRef({3}));
  mine.set_requires_grad(true);
  EXPECT_EQ(block->tensors()["x"].sizes(), at::IntArrayRef({6}));
  EXPECT_FALSE(block->tensors()["x"].requires_grad());
}

TEST(TensorBlock, EscapeIsDoneWhenTheLastAliasDies) {
  at::Tensor mine = at::ones({16});
  auto block = TensorBlock::adopt(TensorResident({{"x", mine}}));
  const FencePtr escape = block->watch_escape();
  ASSERT_NE(escape, nullptr);
  block.reset();
  EXPECT_EQ(escape->poll(), FenceStatus::kPending);
  mine.reset();
  EXPECT_EQ(escape->poll(), FenceStatus::kDone);
}

TEST(TensorBlock, WeakReferencesAndOpenViewsDoNotShare) {
  const auto block = TensorBlock::adopt(TensorResident({{"x", at::ones({16})}}));
  const auto weak = block->tensors()[0].storage().getWeakStorageImpl();
  EXPECT_FALSE(block->is_shared());
  EXPECT_EQ(block->watch_escape(), nullptr);
  {
    const TensorView view(*block);
    EXPECT_FALSE(block->is_shared());
    const at::Tensor alias = view.tensors()[0].view({4, 4});
    EXPECT_TRUE(block->is_shared());
  }
  EXPECT_FALSE(block->is_shared());
}

TEST(TensorBlock, EachViewShowsTensorsOfItsOwn) {
  const auto block = TensorBlock::adopt(TensorResident({{"x", at::ones({4, 4})}}));
  const auto tensor_of = [](const View& view) {
    return dynamic_cast<const TensorView&>(view).tensors()["x"];
  };
  auto first = block->open_view();
  auto second = block->open_view();
  at::Tensor kept = tensor_of(*first);
  EXPECT_NE(kept.unsafeGetTensorImpl(), tensor_of(*second).unsafeGetTensorImpl());
  kept.transpose_(0, 1).unsqueeze_(0).set_requires_grad(true);
  first.reset();
  EXPECT_TRUE(block->is_shared()) << "the tensor that was kept is somebody else's";
  first = block->open_view();  // made of the memory of the one before
  EXPECT_EQ(tensor_of(*first).sizes(), at::IntArrayRef({4, 4}));
  EXPECT_FALSE(tensor_of(*first).requires_grad());
  EXPECT_EQ(kept.sizes(), at::IntArrayRef({1, 4, 4}));
  EXPECT_EQ(kept.detach().sum().item<float>(), 16);
  kept.reset();
  EXPECT_FALSE(block->is_shared());
  second.reset();
  first.reset();
  EXPECT_FALSE(block->is_shared());
}

TEST(TensorBlock, InferenceTensorsStayInferenceTensors) {
  at::Tensor made;
  {
    const c10::InferenceMode mode;
    made = at::ones({4});
  }
  const TensorResident value({{"x", made}});
  EXPECT_FALSE(value.layout()->detects_writes());
  EXPECT_THAT(value.layout()->describe(), HasSubstr("write_detection=none"));
  EXPECT_TRUE(TensorBlock::adopt(value)->clone()->tensors()[0].is_inference());
  const c10::InferenceMode mode;
  const auto normal =
      TensorBlock::allocate(TensorResident({{"x", at::ones({1}).clone()}}).layout());
  EXPECT_TRUE(normal->tensors()[0].is_inference());
  std::shared_ptr<TensorBlock> outside;
  {
    const c10::InferenceMode off(false);
    const TensorResident plain({{"x", at::ones({4})}});
    const c10::InferenceMode on(true);
    outside = TensorBlock::adopt(plain)->clone();
  }
  EXPECT_FALSE(outside->tensors()[0].is_inference());
}

TEST(TensorBlock, ResizedStorageIsFound) {
  at::Tensor mine = at::ones({4});
  const auto block = TensorBlock::adopt(TensorResident({{"x", mine}}));
  EXPECT_NO_THROW(block->check_intact());
  mine.resize_({4096});
  EXPECT_THAT(message_of<MaterializationError>([&] { block->check_intact(); }),
              HasSubstr("field 'x' was resized"));
}

}  // namespace
}  // namespace residency::testing
