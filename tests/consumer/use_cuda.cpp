#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>
#include <residency/aten/manager.h>
#include <residency/cuda/cuda_layer.h>

// Devices where there are some, and a reason where there are none. The first use of CUDA in the
// process is the library's.
int main() {
  using residency::Location;
  const auto manager = residency::create_manager({}, {.devices = residency::make_cuda_layer()});
  const std::string why = manager->backend().why_unavailable(Location::cuda(0));
  std::printf("cuda:0 %s\n", why.empty() ? "is there" : why.c_str());
  if (why.empty()) {
    at::Tensor tensor = at::empty({1000}, at::TensorOptions().dtype(at::kByte));
    std::memset(tensor.mutable_data_ptr(), 7, 1000);
    const residency::Handle handle =
        residency::adopt(*manager, residency::TensorResident({{"x", std::move(tensor)}}));
    manager->move(handle, Location::cuda(0));
    manager->move(handle, Location::pinned_host()).wait();
    const residency::TensorResident back = residency::take(*manager, handle);
    if (static_cast<const char*>(back["x"].const_data_ptr())[999] != 7) {
      std::printf("other bytes came back\n");
      return 1;
    }
  }
  manager->close();
  return 0;
}
