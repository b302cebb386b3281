// The shortest whole use of the library: a byte budget, a plan, its dry run, a scope, a lease.
// docs/guide.md explains it step by step.

#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>

#include "residency/aten/manager.h"

using namespace residency;
using namespace residency::literals;

int main() {
  const Location host = Location::pageable_host();
  const Location disk = Location::disk("spill");

  // Host memory for two of the three matrices below, and a directory beneath it.
  ManagerOptions options;
  options.budgets = {{host, 8_MiB}};
  options.disks = {{.name = "spill", .directory = std::filesystem::temp_directory_path()}};
  const std::shared_ptr<Manager> manager = create_manager(options);

  // The manager owns values from here on; a handle is only their name.
  std::vector<Handle> layers;
  for (int i = 0; i < 3; ++i) {
    layers.push_back(adopt(*manager, TensorResident({{"weight", at::ones({1024, 1024})}})));
    manager->move(layers.back(), disk);
  }

  // One plan per layer: what it needs, and what becomes of it afterwards. A plan is a value; it can
  // be read, compared, written as JSON, and tried without doing anything.
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const ResidencyPlan plan({.name = "layer " + std::to_string(i),
                              .reservations = {{host, 1_MiB, "activations"}},
                              .enter = {MoveResident{layers[i], host}},
                              .exit = {MoveResident{layers[i], disk}}});
    std::fputs(to_string(manager->explain(plan)).c_str(), stdout);

    const PlanReport report = manager->with(plan, [&](Scope&) {
      Lease lease = manager->acquire(std::vector{layers[i]}, host);
      const at::Tensor& weight = tensors(lease, layers[i])["weight"];
      const at::Tensor result = at::matmul(weight, at::ones({1024, 1}));
      std::printf("layer %zu computes %.0f\n", i, result[0].item<float>());
      lease.release();
    });
    report.wait();
    std::printf("%s\n", to_string(report).c_str());
  }

  // What a manager gives back is the tensors themselves.
  for (const Handle& layer : layers) {
    (void)take(*manager, layer);
  }
  manager->close();
  return 0;
}
