// Device memory, page-locked memory, pointers, and the driver's virtual memory management.
#include <csignal>
#include <numeric>

#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include "tests/simcuda/fixture.h"

namespace simcuda_test {
namespace {

class MemoryTest : public SimcudaTest {};

TEST_F(MemoryTest, CapacityIsGivenOutInUnitsOfTwoMebibytes) {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  {
    DeviceBytes bytes(1);
    EXPECT_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
    EXPECT_EQ(total_bytes, 64 * kMiB);
    EXPECT_EQ(free_bytes, 62 * kMiB);
    EXPECT_EQ(counters(0).device_bytes, 2 * kMiB);
  }
  EXPECT_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  EXPECT_EQ(free_bytes, 64 * kMiB);
  EXPECT_EQ(counters(0).peak_device_bytes, 2 * kMiB);
}

TEST_F(MemoryTest, AllocationBeyondTheCapacityIsRefusedAndCounted) {
  void* block = &block;
  EXPECT_EQ(cudaMalloc(&block, 65 * kMiB), cudaErrorMemoryAllocation);
  EXPECT_EQ(block, nullptr);
  EXPECT_EQ(cudaMalloc(&block, SIZE_MAX), cudaErrorMemoryAllocation);
  EXPECT_EQ(cudaGetLastError(), cudaErrorMemoryAllocation);
  EXPECT_EQ(counters(0).failed_allocations, 1u);
  DeviceBytes fits(64 * kMiB);
}

TEST_F(MemoryTest, CapacityChangesAtAnyTime) {
  DeviceBytes bytes(8 * kMiB);
  ASSERT_EQ(simcuda_set_capacity(0, 4 * kMiB), 0);
  void* block = nullptr;
  EXPECT_EQ(cudaMalloc(&block, 1), cudaErrorMemoryAllocation);
  size_t free_bytes = 1;
  size_t total_bytes = 0;
  EXPECT_CUDA(cudaMemGetInfo(&free_bytes, &total_bytes));
  EXPECT_EQ(free_bytes, 0u);
  EXPECT_EQ(simcuda_set_capacity(2, 1), -1);
}

TEST_F(MemoryTest, FreshMemoryIsPoisonedWhenAsked) {
  set("poison", "171");
  DeviceBytes bytes(100);
  unsigned char seen = 0;
  EXPECT_CUDA(cudaMemcpy(&seen, bytes.get() + 99, 1, cudaMemcpyDeviceToHost));
  EXPECT_EQ(seen, 171);
}

TEST_F(MemoryTest, HostFaultsWhenItTouchesDeviceMemory) {
  DeviceBytes bytes(100);
  volatile char* address = bytes.get();
  EXPECT_DEATH((void)*address, "");
}

TEST_F(MemoryTest, WrongFreesAreRefused) {
  DeviceBytes bytes(4 * kMiB);
  int on_stack = 0;
  EXPECT_EQ(cudaFree(bytes.get() + 512), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFree(&on_stack), cudaErrorInvalidValue);
  EXPECT_EQ(cudaFreeHost(bytes.get()), cudaErrorInvalidValue);
  EXPECT_CUDA(cudaFree(nullptr));
  EXPECT_CUDA(cudaFreeHost(nullptr));
}

TEST_F(MemoryTest, PageLockedBytesAreWholePages) {
  {
    PinnedBytes bytes(5000);
    EXPECT_EQ(simcuda_pinned_bytes(), 8192u);
    std::vector<char> memory(20000);
    // The middle of the allocation: two bytes of one page and one of the next.
    auto page = (reinterpret_cast<uintptr_t>(memory.data()) + 8191) / 4096 * 4096;
    void* across = reinterpret_cast<void*>(page - 2);
    EXPECT_CUDA(cudaHostRegister(across, 3, 0));
    EXPECT_EQ(simcuda_pinned_bytes(), 16384u);
    EXPECT_EQ(cudaHostRegister(across, 1, 0), cudaErrorHostMemoryAlreadyRegistered);
    EXPECT_EQ(simcuda_pinned_bytes(), 16384u);
    EXPECT_CUDA(cudaHostUnregister(across));
    EXPECT_EQ(cudaHostUnregister(across), cudaErrorHostMemoryNotRegistered);
  }
  EXPECT_EQ(simcuda_pinned_bytes(), 0u);
  EXPECT_EQ(simcuda_peak_pinned_bytes(), 16384u);
}

TEST_F(MemoryTest, PageLockingStopsAtTheLimit) {
  set("pinned_limit", "8KiB");
  PinnedBytes bytes(4096);
  void* more = nullptr;
  EXPECT_EQ(cudaHostAlloc(&more, 4097, 0), cudaErrorMemoryAllocation);
  std::vector<char> memory(100000);
  EXPECT_EQ(cudaHostRegister(memory.data(), memory.size(), 0), cudaErrorMemoryAllocation);
  EXPECT_EQ(simcuda_pinned_bytes(), 4096u);
  PinnedBytes fits(4096);
}

TEST_F(MemoryTest, PointerAttributesSayWhatAPointerIs) {
  ASSERT_CUDA(cudaSetDevice(1));
  DeviceBytes device(1000);
  ASSERT_CUDA(cudaSetDevice(0));
  PinnedBytes pinned(1000);
  int on_stack = 0;
  cudaPointerAttributes attributes;
  EXPECT_CUDA(cudaPointerGetAttributes(&attributes, device.get() + 999));
  EXPECT_EQ(attributes.type, cudaMemoryTypeDevice);
  EXPECT_EQ(attributes.device, 1);
  EXPECT_EQ(attributes.hostPointer, nullptr);
  EXPECT_CUDA(cudaPointerGetAttributes(&attributes, pinned.get() + 10));
  EXPECT_EQ(attributes.type, cudaMemoryTypeHost);
  EXPECT_EQ(attributes.hostPointer, pinned.get() + 10);
  EXPECT_CUDA(cudaPointerGetAttributes(&attributes, &on_stack));
  EXPECT_EQ(attributes.type, cudaMemoryTypeUnregistered);
}

TEST_F(MemoryTest, HostAddressLeadsToTheBytes) {
  DeviceBytes device(100);
  EXPECT_CUDA(cudaMemset(device.get(), 9, 100));
  EXPECT_CUDA(cudaDeviceSynchronize());
  char* bytes = static_cast<char*>(simcuda_host_address(device.get()));
  EXPECT_EQ(bytes[99], 9);
  EXPECT_EQ(simcuda_host_address(bytes), bytes);
}

TEST_F(MemoryTest, MallocAsyncIsRefusedWithAdvice) {
  void* block = nullptr;
  ::testing::internal::CaptureStderr();
  EXPECT_EQ(cudaMallocAsync(&block, 100, nullptr), cudaErrorNotSupported);
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("backend:native"), std::string::npos);
}

TEST_F(MemoryTest, PeerAccessIsAsConfigured) {
  int can = 0;
  EXPECT_CUDA(cudaDeviceCanAccessPeer(&can, 0, 1));
  EXPECT_EQ(can, 1);
  EXPECT_CUDA(cudaDeviceEnablePeerAccess(1, 0));
  EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorPeerAccessAlreadyEnabled);
  EXPECT_CUDA(cudaDeviceDisablePeerAccess(1));
  set("peer_access", "off");
  EXPECT_CUDA(cudaDeviceCanAccessPeer(&can, 0, 1));
  EXPECT_EQ(can, 0);
  EXPECT_EQ(cudaDeviceEnablePeerAccess(1, 0), cudaErrorInvalidDevice);
}

TEST_F(MemoryTest, PropertiesAreTheCards) {
  set("card", "rtx4090");
  cudaDeviceProp properties;
  EXPECT_CUDA(cudaGetDeviceProperties(&properties, 1));
  EXPECT_NE(std::string(properties.name).find("4090"), std::string::npos);
  EXPECT_EQ(properties.major * 10 + properties.minor, 89);
  EXPECT_EQ(properties.totalGlobalMem, 64 * kMiB);
  int major = 0;
  EXPECT_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 1));
  EXPECT_EQ(major, 8);
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 2), cudaErrorInvalidDevice);
  EXPECT_EQ(cudaSetDevice(-1), cudaErrorInvalidDevice);
}

// The driver's functions, found as torch finds them.
template <class Function>
Function* driver(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  EXPECT_CUDA(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result));
  EXPECT_EQ(result, cudaDriverEntryPointSuccess) << name;
  return reinterpret_cast<Function*>(function);
}

TEST_F(MemoryTest, ExpandableSegmentIsMappedGrownAndUnmapped) {
  auto* reserve = driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  auto* unreserve = driver<decltype(cuMemAddressFree)>("cuMemAddressFree");
  auto* create = driver<decltype(cuMemCreate)>("cuMemCreate");
  auto* release = driver<decltype(cuMemRelease)>("cuMemRelease");
  auto* map = driver<decltype(cuMemMap)>("cuMemMap");
  auto* unmap = driver<decltype(cuMemUnmap)>("cuMemUnmap");
  auto* set_access = driver<decltype(cuMemSetAccess)>("cuMemSetAccess");

  CUmemAllocationProp properties{};
  properties.location.id = 0;
  CUmemAccessDesc access{};
  CUdeviceptr base = 0;
  ASSERT_EQ(reserve(&base, 1024 * kMiB, 0, 0, 0), CUDA_SUCCESS);
  CUmemGenericAllocationHandle handles[2];
  for (uint64_t i = 0; i < 2; ++i) {
    ASSERT_EQ(create(&handles[i], 2 * kMiB, &properties, 0), CUDA_SUCCESS);
    ASSERT_EQ(map(base + i * 2 * kMiB, 2 * kMiB, 0, handles[i], 0), CUDA_SUCCESS);
    ASSERT_EQ(set_access(base + i * 2 * kMiB, 2 * kMiB, &access, 1), CUDA_SUCCESS);
  }
  EXPECT_EQ(counters(0).device_bytes, 4 * kMiB);
  EXPECT_EQ(map(base, 2 * kMiB, 0, handles[0], 0), CUDA_ERROR_ALREADY_MAPPED);
  EXPECT_EQ(unreserve(base, 1024 * kMiB), CUDA_ERROR_INVALID_VALUE);

  // A copy across both.
  PinnedBytes source(4 * kMiB, 6);
  PinnedBytes result(4 * kMiB);
  void* device = reinterpret_cast<void*>(base);
  EXPECT_CUDA(cudaMemcpy(device, source.get(), 4 * kMiB, cudaMemcpyHostToDevice));
  EXPECT_CUDA(cudaMemcpy(result.get(), device, 4 * kMiB, cudaMemcpyDeviceToHost));
  EXPECT_EQ(memcmp(source.get(), result.get(), 4 * kMiB), 0);
  EXPECT_EQ(cudaMemcpy(device, source.get(), 4 * kMiB + 1, cudaMemcpyHostToDevice),
            cudaErrorInvalidValue);

  ASSERT_EQ(unmap(base, 4 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(cudaMemcpy(device, source.get(), 1, cudaMemcpyHostToDevice), cudaErrorInvalidValue);
  EXPECT_EQ(counters(0).device_bytes, 4 * kMiB);
  for (CUmemGenericAllocationHandle handle : handles) EXPECT_EQ(release(handle), CUDA_SUCCESS);
  EXPECT_EQ(counters(0).device_bytes, 0u);
  EXPECT_EQ(unreserve(base, 1024 * kMiB), CUDA_SUCCESS);
  EXPECT_EQ(simcuda_calls("cuMemCreate"), 2u);
}

TEST_F(MemoryTest, PhysicalMemoryCountsAgainstTheCapacity) {
  auto* create = driver<decltype(cuMemCreate)>("cuMemCreate");
  CUmemAllocationProp properties{};
  CUmemGenericAllocationHandle handle;
  EXPECT_EQ(create(&handle, 66 * kMiB, &properties, 0), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(create(&handle, kMiB, &properties, 0), CUDA_ERROR_INVALID_VALUE);
  ASSERT_EQ(simcuda_fail("cuMemCreate", 0, 1, CUDA_ERROR_NOT_PERMITTED), 0);
  EXPECT_EQ(create(&handle, 2 * kMiB, &properties, 0), CUDA_ERROR_NOT_PERMITTED);
}

}  // namespace
}  // namespace simcuda_test
