#include <cstdio>

#include <residency/core/location.h>

// Torch must be out of reach when only core was asked for.
#if __has_include(<ATen/core/Tensor.h>)
#error "residency::core hands on torch's include directories"
#endif

int main() {
  const residency::Location location = residency::Location::parse("cuda:1");
  std::puts(residency::to_string(location).c_str());
  return location.cuda_index() == 1 ? 0 : 1;
}
