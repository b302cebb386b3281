// What the generated stubs of the driver call.
#include "csrc/simcuda/driver_link.h"

extern "C" int simcuda_driver_stub(const char* name) {
  constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED
  int refused = simcuda_driver_enter(name);
  return refused ? refused : kNotSupported;
}
