#include <cstdio>

#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <residency/core/location.h>

int main() {
  const at::Tensor tensor = at::ones({3});
  std::printf("%s %lld\n", residency::to_string(residency::Location()).c_str(),
              static_cast<long long>(tensor.numel()));
  return tensor.sum().item<float>() == 3 ? 0 : 1;
}
