#include "residency/aten/safetensors.h"

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "residency/aten/manager.h"
#include "tests/aten/fixture.h"

namespace residency::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SafetensorsTest : public ::testing::Test {
 protected:
  [[nodiscard]] std::filesystem::path write(const std::string& header, std::size_t data_bytes,
                                            std::int64_t header_bytes = -1) const {
    const auto path = directory_.path() / "model.safetensors";
    std::ofstream file(path, std::ios::binary | std::ios::trunc);
    auto length = static_cast<std::uint64_t>(
        header_bytes < 0 ? static_cast<std::int64_t>(header.size()) : header_bytes);
    for (int i = 0; i < 8; ++i) {
      file.put(static_cast<char>(length & 0xffU));
      length >>= 8;
    }
    file << header;
    for (std::size_t i = 0; i < data_bytes; ++i) {
      file.put(static_cast<char>(i % 251));
    }
    return path;
  }
  [[nodiscard]] std::string refusal(const std::string& header, std::size_t data_bytes,
                                    std::int64_t header_bytes = -1) const {
    const auto path = write(header, data_bytes, header_bytes);
    const std::string message =
        message_of<MaterializationError>([&] { (void)SafetensorsFile::open(path); });
    EXPECT_TRUE(message.empty() || message.find(path.string()) != std::string::npos) << message;
    return message;
  }

  TemporaryDirectory directory_;
};

TEST_F(SafetensorsTest, NamedTensorsAreLoadedWhenUsed) {
  const auto file = SafetensorsFile::open(
      write(R"({"__metadata__":{"a":"b"},"w":{"dtype":"U8","shape":[2,3],"data_offsets":[0,6]},)"
            R"("v":{"dtype":"I16","shape":[],"data_offsets":[6,8]},)"
            R"("none":{"dtype":"F32","shape":[0,3],"data_offsets":[8,8]}})",
            8));
  EXPECT_THAT(file->names(), ElementsAre("w", "v", "none"));
  EXPECT_EQ(file->layout({"w", "v"})->logical_bytes(), Bytes(8));
  EXPECT_THROW((void)file->source({"x"}), std::out_of_range);

  const auto manager = create_manager();
  const Handle handle =
      register_source(*manager, *file, {SafetensorsField("w").as("weight"), "v", "none"});
  EXPECT_EQ(used_at(*manager, kHost), Bytes());
  manager->ensure(handle, kHost);
  EXPECT_EQ(used_at(*manager, kHost), Bytes(128));
  const TensorResident value = take(*manager, handle);
  EXPECT_TRUE(value["weight"].equal(at::arange(6, at::kByte).view({2, 3})));
  EXPECT_EQ(value["v"].item<std::int16_t>(), 6 + 256 * 7);
  EXPECT_EQ(value["none"].sizes(), at::IntArrayRef({0, 3}));
}

TEST_F(SafetensorsTest, EveryDtypeThatTorchHas) {
  const std::vector<std::pair<std::string, c10::ScalarType>> dtypes = {
      {"BOOL", at::kBool},
      {"U8", at::kByte},
      {"I8", at::kChar},
      {"U16", c10::ScalarType::UInt16},
      {"I16", at::kShort},
      {"U32", c10::ScalarType::UInt32},
      {"I32", at::kInt},
      {"U64", c10::ScalarType::UInt64},
      {"I64", at::kLong},
      {"F16", at::kHalf},
      {"BF16", at::kBFloat16},
      {"F32", at::kFloat},
      {"F64", at::kDouble},
      {"C64", at::kComplexFloat},
      {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
      {"F8_E5M2", c10::ScalarType::Float8_e5m2},
      {"F8_E4M3FNUZ", c10::ScalarType::Float8_e4m3fnuz},
      {"F8_E5M2FNUZ", c10::ScalarType::Float8_e5m2fnuz},
      {"F8_E8M0", c10::ScalarType::Float8_e8m0fnu}};
  for (const auto& [name, dtype] : dtypes) {
    const std::size_t nbytes = 2 * c10::elementSize(dtype);
    const auto file = SafetensorsFile::open(write(R"({"x":{"dtype":")" + name +
                                                      R"(","shape":[2],"data_offsets":[0,)" +
                                                      std::to_string(nbytes) + "]}}",
                                                  nbytes));
    EXPECT_EQ(file->layout({"x"})->fields()[0].dtype, dtype) << name;
    const auto manager = create_manager();
    const Handle handle = register_source(*manager, *file, {"x"});
    manager->ensure(handle, kHost);
    const at::Tensor loaded = take(*manager, handle)["x"];
    EXPECT_EQ(loaded.scalar_type(), dtype) << name;
    EXPECT_EQ(static_cast<const std::uint8_t*>(loaded.const_data_ptr())[nbytes - 1], nbytes - 1);
  }
  const auto packed =
      SafetensorsFile::open(write(R"({"x":{"dtype":"F4","shape":[3,4],"data_offsets":[0,6]}})", 6));
  EXPECT_EQ(packed->layout({"x"})->fields()[0].dtype, c10::ScalarType::Float4_e2m1fn_x2);
  EXPECT_THAT(packed->layout({"x"})->fields()[0].sizes, ElementsAre(3, 2));
}

TEST_F(SafetensorsTest, InvalidFilesAreRefusedNamingTheFile) {
  const std::string good = R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})";
  EXPECT_EQ(refusal(good, 4), "");
  EXPECT_THAT(refusal(good, 3), HasSubstr("claims bytes 0 to 4 of 3"));
  EXPECT_THAT(refusal(good, 5), HasSubstr("end at byte"));
  EXPECT_THAT(refusal(good, 4, 1'000'000), HasSubstr("truncated"));
  EXPECT_THAT(refusal(good, 4, 1'000'000'000'000), HasSubstr("limit"));
  EXPECT_THAT(refusal("not json", 0), HasSubstr("not JSON"));
  EXPECT_THAT(refusal("[]", 0), HasSubstr("not a JSON object"));
  const auto with = [](const std::string& x) { return R"({"x":)" + x + "}"; };
  EXPECT_THAT(refusal(with("3"), 0), HasSubstr("'x' is not described"));
  EXPECT_THAT(refusal(with(R"({"dtype":"U8","shape":[4]})"), 4), HasSubstr("lacks"));
  EXPECT_THAT(refusal(with(R"({"dtype":"U8","shape":[4],"data_offsets":[4,0]})"), 4),
              HasSubstr("claims bytes"));
  EXPECT_THAT(refusal(with(R"({"dtype":"U8","shape":[4],"data_offsets":[-4,0]})"), 4),
              HasSubstr("lacks"));
  EXPECT_THAT(refusal(with(R"({"dtype":"F32","shape":[4],"data_offsets":[0,4]})"), 4),
              HasSubstr("need 16"));
  EXPECT_THAT(refusal(with(R"({"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]})"), 3),
              HasSubstr("F6_E2M3"));
  EXPECT_THAT(
      refusal(with(R"({"dtype":"U8","shape":[9223372036854775807,9],"data_offsets":[0,4]})"), 4),
      HasSubstr("impossible shape"));
  EXPECT_THAT(refusal(with(R"({"dtype":"U8","shape":[-4],"data_offsets":[0,4]})"), 4),
              HasSubstr("impossible shape"));
  EXPECT_THAT(refusal(R"({"x":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                      R"("y":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
                      5),
              HasSubstr("overlaps"));
  EXPECT_THAT(refusal(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                      R"("y":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
                      5),
              HasSubstr("gap"));
  EXPECT_THAT(refusal(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},)"
                      R"("x":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}})",
                      4),
              HasSubstr("'x' appears twice"));
  const auto path = directory_.path() / "model.safetensors";
  std::ofstream(path, std::ios::trunc).close();
  EXPECT_THROW((void)SafetensorsFile::open(path), MaterializationError);
  EXPECT_THROW((void)SafetensorsFile::open(directory_.path()), StorageError);
  EXPECT_THROW((void)SafetensorsFile::open(directory_.path() / "missing"), StorageError);
}

TEST_F(SafetensorsTest, FileThatShrinksAfterItWasOpenedIsRefused) {
  const auto path = write(R"({"x":{"dtype":"U8","shape":[9000],"data_offsets":[0,9000]}})", 9000);
  const auto file = SafetensorsFile::open(path);
  const auto manager = create_manager();
  const Handle handle = register_source(*manager, *file, {"x"});
  std::filesystem::resize_file(path, 100);
  EXPECT_THAT(message_of<MaterializationError>([&] { manager->ensure(handle, kHost); }),
              HasSubstr(path.string()));
}

/// Resident memory of this process, in bytes.
std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t total = 0;
  std::int64_t resident = 0;
  statm >> total >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

TEST_F(SafetensorsTest, ModelOfManyBytesNeverTakesMoreThanAFewMore) {
  constexpr std::int64_t kNumTensors = 16;
  constexpr std::int64_t kTensorBytes = 8 << 20;
  std::string header = "{";
  for (std::int64_t i = 0; i < kNumTensors; ++i) {
    header += (i == 0 ? "" : ",") + std::string("\"t") + std::to_string(i) +
              R"(":{"dtype":"F32","shape":[)" + std::to_string(kTensorBytes / 4) +
              R"(],"data_offsets":[)" + std::to_string(i * kTensorBytes) + "," +
              std::to_string((i + 1) * kTensorBytes) + "]}";
  }
  const auto path = write(header + "}", 0);
  std::filesystem::resize_file(path, 8 + header.size() + 1 + kNumTensors * kTensorBytes);

  // The mark is of the whole process, so that the maximum is watched instead.
  const std::int64_t before = resident_bytes();
  const auto file = SafetensorsFile::open(path);
  const auto manager = create_manager();
  std::int64_t peak = 0;
  std::vector<Handle> handles;
  for (const std::string& name : file->names()) {
    handles.push_back(register_source(*manager, *file, {SafetensorsField(name)}));
  }
  EXPECT_LT(resident_bytes() - before, 4 << 20);
  for (const Handle& handle : handles) {
    manager->ensure(handle, kHost);
    peak = std::max(peak, resident_bytes() - before);
  }
  EXPECT_GE(peak, kNumTensors * kTensorBytes / 2);  // it does see the loads
  EXPECT_LE(peak, kNumTensors * kTensorBytes * 11 / 10);
}

}  // namespace
}  // namespace residency::testing
