// What managing tensors costs beside the control plane: leases on the aten host backend.

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <benchmark/benchmark.h>

#include "residency/aten/manager.h"
#include "timing.h"

namespace {

using namespace residency;

constexpr std::size_t kLeased = 100;

/// Acquires 100 values of one tensor each, reads every one, releases. What reading gives is used:
/// a pointer to the tensor's data.
void lease_100(benchmark::State& state) {
  const std::shared_ptr<Manager> manager = create_manager();
  std::vector<Handle> handles;
  for (std::size_t i = 0; i < kLeased; ++i) {
    handles.push_back(adopt(*manager, TensorResident({{"weight", at::ones({16, 16})}})));
  }
  Timing timing;
  for (auto _ : state) {
    timing.measure(1, [&] {
      Lease lease = manager->acquire(handles, Location::pageable_host());
      for (const Handle& handle : handles) {
        benchmark::DoNotOptimize(tensors(lease, handle)[0].const_data_ptr());
      }
      lease.release();
    });
  }
  state.counters["value"] = timing.median();
}
BENCHMARK(lease_100)->Name("core/lease_100_us")->UseRealTime();

}  // namespace

BENCHMARK_MAIN();
