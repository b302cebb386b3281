// What copies do with bytes, and which are refused.
#include "tests/simcuda/fixture.h"

namespace simcuda_test {
namespace {

class CopyTest : public SimcudaTest {};

TEST_F(CopyTest, BytesArriveInEveryDirection) {
  PinnedBytes source(3 * kMiB, 4);
  PinnedBytes result(3 * kMiB);
  DeviceBytes first(3 * kMiB);
  DeviceBytes second(3 * kMiB);
  ASSERT_CUDA(cudaSetDevice(1));
  DeviceBytes remote(3 * kMiB);
  ASSERT_CUDA(cudaSetDevice(0));
  Stream stream;
  const uint64_t bytes = 3 * kMiB;
  EXPECT_CUDA(cudaMemcpyAsync(first.get(), source.get(), bytes, cudaMemcpyHostToDevice, stream));
  EXPECT_CUDA(cudaMemcpyAsync(second.get(), first.get(), bytes, cudaMemcpyDeviceToDevice, stream));
  EXPECT_CUDA(cudaMemcpyPeerAsync(remote.get(), 1, second.get(), 0, bytes, stream));
  EXPECT_CUDA(cudaMemcpyAsync(result.get(), remote.get(), bytes, cudaMemcpyDefault, stream));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(memcmp(source.get(), result.get(), bytes), 0);
  simcuda_counters seen = counters();
  for (int direction = 0; direction < SIMCUDA_NUM_DIRECTIONS; ++direction) {
    EXPECT_EQ(seen.copies[direction], 1u) << direction;
    EXPECT_EQ(seen.copied_bytes[direction], bytes) << direction;
  }
  // The last one read the other device's memory.
  EXPECT_EQ(counters(1).copied_bytes[SIMCUDA_D2H], bytes);
}

TEST_F(CopyTest, WrongPointersAreRefusedAtTheCall) {
  DeviceBytes device(2 * kMiB);
  PinnedBytes host(2 * kMiB);
  const uint64_t bytes = 2 * kMiB;
  EXPECT_EQ(cudaMemcpy(device.get(), host.get(), bytes + 1, cudaMemcpyHostToDevice),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device.get(), host.get(), bytes, cudaMemcpyDeviceToHost),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpy(device.get(), host.get(), bytes, cudaMemcpyDeviceToDevice),
            cudaErrorInvalidValue);
  EXPECT_CUDA(cudaMemcpy(device.get(), host.get(), 0, cudaMemcpyHostToDevice));
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 0u);
}

TEST_F(CopyTest, RowsAreCopiedWithTheirPitches) {
  PinnedBytes source(12);
  for (int i = 0; i < 12; ++i) source.get()[i] = static_cast<char>(i);
  DeviceBytes device(100);
  PinnedBytes result(6, 99);
  EXPECT_CUDA(
      cudaMemcpy2DAsync(device.get(), 10, source.get(), 4, 2, 3, cudaMemcpyHostToDevice, nullptr));
  EXPECT_CUDA(cudaMemcpy2D(result.get(), 2, device.get(), 10, 2, 3, cudaMemcpyDeviceToHost));
  const char expected[6] = {0, 1, 4, 5, 8, 9};
  EXPECT_EQ(memcmp(result.get(), expected, 6), 0);
  EXPECT_EQ(counters().copied_bytes[SIMCUDA_H2D], 6u);
  EXPECT_EQ(
      cudaMemcpy2DAsync(device.get(), 1, source.get(), 4, 2, 3, cudaMemcpyHostToDevice, nullptr),
      cudaErrorInvalidPitchValue);
}

// A batch of copies that all have one order of access to their sources.
cudaError_t copy_batch(std::vector<void*> destinations, std::vector<const void*> sources,
                       size_t num_bytes, cudaStream_t stream,
                       cudaMemcpySrcAccessOrder order = cudaMemcpySrcAccessOrderStream) {
  std::vector<size_t> sizes(destinations.size(), num_bytes);
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = order;
  size_t start = 0;
  return cudaMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(), sizes.size(),
                              &attributes, &start, 1, stream);
}

TEST_F(CopyTest, BatchCopiesEach) {
  PinnedBytes source(4, 1);
  source.get()[3] = 2;
  DeviceBytes device(4);
  PinnedBytes result(4);
  Stream stream;
  EXPECT_CUDA(
      copy_batch({device.get(), device.get() + 2}, {source.get(), source.get() + 2}, 2, stream));
  EXPECT_CUDA(cudaMemcpyAsync(result.get(), device.get(), 4, cudaMemcpyDeviceToHost, stream));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(memcmp(result.get(), source.get(), 4), 0);
  EXPECT_EQ(counters().copies[SIMCUDA_H2D], 2u);
  EXPECT_EQ(
      copy_batch({device.get(), device.get() + 2}, {source.get(), source.get() + 2}, 2, nullptr),
      cudaErrorInvalidValue);
}

TEST_F(CopyTest, BatchTakesAsLongAsItsCopies) {
  set("h2d", "1GB/s");
  set("copy_latency", "1us");
  PinnedBytes source(3000, 1);
  DeviceBytes device(3000);
  Stream stream;
  EXPECT_CUDA(copy_batch({device.get(), device.get() + 1000, device.get() + 2000},
                         {source.get(), source.get() + 1000, source.get() + 2000}, 1000, stream));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(counters().copied_bytes[SIMCUDA_H2D], 3000u);
  EXPECT_EQ(counters().copy_time[SIMCUDA_H2D], 3 * (1000u + 1000u));
}

TEST_F(CopyTest, CopiesOfABatchAreInNoOrder) {
  PinnedBytes source(2, 1);
  source.get()[1] = 2;
  DeviceBytes device(1);
  PinnedBytes result(1);
  Stream stream;
  EXPECT_CUDA(
      copy_batch({device.get(), device.get()}, {source.get(), source.get() + 1}, 1, stream));
  EXPECT_CUDA(cudaMemcpyAsync(result.get(), device.get(), 1, cudaMemcpyDeviceToHost, stream));
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(result.get()[0], 1);
}

TEST_F(CopyTest, SourceOfABatchMayEndWithTheCall) {
  PinnedBytes source(1, 1);
  DeviceBytes device(1);
  PinnedBytes result(1);
  Stream stream;
  ASSERT_EQ(simcuda_hold(stream), 0);
  EXPECT_CUDA(
      copy_batch({device.get()}, {source.get()}, 1, stream, cudaMemcpySrcAccessOrderDuringApiCall));
  source.get()[0] = 2;
  EXPECT_CUDA(cudaMemcpyAsync(result.get(), device.get(), 1, cudaMemcpyDeviceToHost, stream));
  ASSERT_EQ(simcuda_release(stream), 0);
  EXPECT_CUDA(cudaStreamSynchronize(stream));
  EXPECT_EQ(result.get()[0], 1);
}

TEST_F(CopyTest, CopiesWithinTheDeviceDoNotBlockTheHost) {
  set("d2d", "1GB/s");
  DeviceBytes device(2 * kMiB);
  uint64_t before = simcuda_now();
  EXPECT_CUDA(cudaMemcpy(device.get(), device.get() + kMiB, kMiB, cudaMemcpyDeviceToDevice));
  EXPECT_EQ(simcuda_now(), before);
  EXPECT_EQ(counters().host_syncs, 0u);
}

TEST_F(CopyTest, MemsetFillsRows) {
  DeviceBytes device(20);
  PinnedBytes result(20);
  EXPECT_CUDA(cudaMemset(device.get(), 0, 20));
  EXPECT_CUDA(cudaMemset2DAsync(device.get(), 10, 5, 3, 2, nullptr));
  EXPECT_CUDA(cudaMemcpy(result.get(), device.get(), 20, cudaMemcpyDeviceToHost));
  EXPECT_EQ(result.get()[2], 5);
  EXPECT_EQ(result.get()[3], 0);
  EXPECT_EQ(result.get()[12], 5);
  int on_stack = 0;
  EXPECT_EQ(cudaMemset(&on_stack, 0, 4), cudaErrorInvalidValue);
}

}  // namespace
}  // namespace simcuda_test
