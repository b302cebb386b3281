#include "tests/cuda/fixture.h"

#include <atomic>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

namespace residency::testing {
namespace {

std::function<bool()>& callback() {
  static std::function<bool()> function;
  return function;
}
std::atomic<int> g_num_callbacks{0};

// Before the first use of the runtime, which fixes both.
[[maybe_unused]] const bool configured = [] {
  if (simulated()) {
    EXPECT_EQ(simcuda_set("devices", "2"), 0) << simcuda_message();
    EXPECT_EQ(simcuda_set("memory", "1GiB"), 0) << simcuda_message();
    // torch 2.11 opens a library that needs the driver; it finds the one that is here already.
    EXPECT_NE(dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), nullptr) << dlerror();
  }
  return true;
}();

// Registered once: PyTorch has no way to take a callback back.
class TestCallback final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    ++g_num_callbacks;
    return callback() && callback()();
  }
};

}  // namespace
}  // namespace residency::testing

namespace c10 {
REGISTER_FREE_MEMORY_CALLBACK("residency_test", residency::testing::TestCallback)
}  // namespace c10

namespace residency::testing {

Gate::Gate(const c10::cuda::CUDAStream& stream) : stream_(stream.stream()) {
  if (simulated()) {
    simcuda_hold(stream_);
    return;
  }
  auto* opened = new std::shared_future<void>(opened_->get_future());
  const auto wait = [](void* data) {
    const std::unique_ptr<std::shared_future<void>> future(
        static_cast<std::shared_future<void>*>(data));
    future->wait();
  };
  if (cudaLaunchHostFunc(stream_, wait, opened) != cudaSuccess) {
    delete opened;
    ADD_FAILURE() << "cudaLaunchHostFunc failed";
  }
}

void Gate::open() {
  if (is_open_) {
    return;
  }
  is_open_ = true;
  if (simulated()) {
    simcuda_release(stream_);
  } else {
    opened_->set_value();
  }
}

at::Tensor on_device(std::int64_t nbytes, int device) {
  return at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).device(
                                 at::kCUDA, static_cast<c10::DeviceIndex>(device)));
}

std::int64_t allocated_bytes(int device) {
  constexpr auto kAll = static_cast<std::size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  return c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device))
      .allocated_bytes[kAll]
      .current;
}

at::Tensor page_locked(std::int64_t nbytes) {
  return at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
}

CudaTest::CudaTest() {
  at::globalContext().lazyInitDevice(at::kCUDA);
  callback() = nullptr;
  c10::cuda::CUDACachingAllocator::emptyCache();
  g_num_callbacks = 0;
}

CudaTest::~CudaTest() {
  callback() = nullptr;
}

void CudaTest::on_free_memory(std::function<bool()> function) {
  callback() = std::move(function);
}

int CudaTest::num_callbacks() const {
  return g_num_callbacks;
}

bool CudaTest::runs_out_of_memory(std::int64_t nbytes, int device) const {
  try {
    on_device(nbytes, device);
    return false;
  } catch (const c10::OutOfMemoryError&) {
    return true;
  }
}

std::int64_t CudaTest::most_of_the_device() const {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  EXPECT_EQ(cudaMemGetInfo(&free_bytes, &total_bytes), cudaSuccess);
  return static_cast<std::int64_t>(free_bytes) / 100 * 60 / (2 * kMiB) * (2 * kMiB);
}

}  // namespace residency::testing
