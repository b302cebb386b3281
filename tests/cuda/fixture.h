#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "residency/simcuda/control.h"

namespace residency::testing {

inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;

/// True on the simulated runtime, false on a GPU.
inline bool simulated() {
  return simcuda_present != nullptr;
}

/// Waits for what another thread brings about; fails the test where that does not come.
template <class Predicate>
void eventually(const char* what, const Predicate& is_so) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!is_so()) {
    ASSERT_LT(std::chrono::steady_clock::now(), until) << what << ": it has not come about";
    std::this_thread::yield();
  }
}

/// Keeps a stream from going on until it is opened or dies: held by the simulated runtime, behind a
/// waiting host function on a GPU. A query never waits for either.
class Gate {
 public:
  explicit Gate(const c10::cuda::CUDAStream& stream);
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;
  ~Gate() { open(); }
  void open();

 private:
  cudaStream_t stream_;
  std::shared_ptr<std::promise<void>> opened_ = std::make_shared<std::promise<void>>();
  bool is_open_ = false;
};

/// Bytes on a device, from PyTorch's caching allocator; not initialized.
at::Tensor on_device(std::int64_t nbytes, int device = 0);
/// What PyTorch's caching allocator has given out.
std::int64_t allocated_bytes(int device = 0);
/// Page-locked bytes, from PyTorch's caching host allocator; not initialized.
at::Tensor page_locked(std::int64_t nbytes);

/// Starts from an allocator without cached blocks, and gives the test the process's one
/// `FreeMemoryCallback`.
class CudaTest : public ::testing::Test {
 protected:
  CudaTest();
  ~CudaTest() override;

  /// What the callback does; nothing, and false, when empty. Called with the allocator's lock held.
  void on_free_memory(std::function<bool()> callback);
  [[nodiscard]] int num_callbacks() const;

  [[nodiscard]] bool runs_out_of_memory(std::int64_t nbytes, int device = 0) const;
  /// A size of which the device has room for one and not for two.
  [[nodiscard]] std::int64_t most_of_the_device() const;
};

}  // namespace residency::testing
