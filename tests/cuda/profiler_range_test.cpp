// Copies are labelled in PyTorch's profiler.

#ifndef NDEBUG
#define NDEBUG  // as torch is built: at::RecordFunction has other members without
#endif

#include <algorithm>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include "residency/aten/manager.h"
#include "residency/cuda/cuda_layer.h"
#include "tests/aten/fixture.h"
#include "tests/cuda/fixture.h"

namespace residency::testing {
namespace {

std::mutex g_mutex;
std::vector<std::string> g_names;

std::unique_ptr<at::ObserverContext> note(const at::RecordFunction& function) {
  const std::lock_guard lock(g_mutex);
  g_names.emplace_back(function.name());
  return nullptr;
}

TEST_F(CudaTest, CopiesAreNamedInTheProfiler) {
  const auto manager = create_manager({}, {.devices = make_cuda_layer()});
  at::Tensor tensor = at::empty({1000}, at::TensorOptions().dtype(at::kByte));
  TensorResident fields({{"x", std::move(tensor)}});
  const Handle handle = adopt(*manager, std::move(fields));
  const auto callback = at::addGlobalCallback(
      at::RecordFunctionCallback(&note).scopes({at::RecordScope::USER_SCOPE}));
  manager->move(handle, Location::pinned_host()).wait();
  manager->move(handle, Location::cuda(0)).wait();
  at::removeCallback(callback);
  manager->move(handle, Location::cuda(1)).wait();
  manager->close();
  const std::lock_guard lock(g_mutex);
  const auto count = [](const char* name) {
    return std::count(g_names.begin(), g_names.end(), name);
  };
  // On the calling thread, and where a thread of the library copies, there too.
  EXPECT_EQ(count("residency::copy pageable-host to pinned-host"), 2);
  EXPECT_EQ(count("residency::copy pinned-host to cuda:0"), 1);
  EXPECT_EQ(g_names.size(), 3U);
}

}  // namespace
}  // namespace residency::testing
