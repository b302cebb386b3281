#include <cstdio>
#include <string>

#include <residency/aten/manager.h>
#include <residency/cuda/cuda_layer.h>

// Devices where there are some, and a reason where there are none.
int main() {
  const auto devices = residency::make_cuda_layer();
  const auto manager = residency::create_manager({}, {.devices = devices});
  const std::string why = manager->backend().why_unavailable(residency::Location::cuda(0));
  std::printf("cuda:0 %s\n", why.empty() ? "is there" : why.c_str());
  manager->close();
  return 0;
}
