// What the generated stubs of the driver call, and what foreign copies of the runtime reach first.
#include <cstdint>
#include <string_view>

#include "csrc/simcuda/driver_link.h"

namespace {

constexpr int kNotSupported = 801;  // CUDA_ERROR_NOT_SUPPORTED

// The functions of kernels that come as binaries: of NVRTC, which is behind TorchScript's fuser and
// torch.cuda.jiterator, or of Triton, which is behind torch.compile.
bool is_of_kernels(std::string_view name) {
  for (std::string_view prefix : {"cuModule", "cuLibrary", "cuKernel", "cuLink", "cuFunc",
                                  "cuLaunch", "cuOccupancy", "cuTensorMap"}) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

int refuse_foreign_runtime() {
  simcuda_driver_refuse("cuGetProcAddress",
                        ": a library with CUDA's own runtime linked into it, as NCCL, cannot use "
                        "the simulated card (torch.distributed can with gloo)");
  return kNotSupported;
}

}  // namespace

extern "C" int simcuda_driver_stub(const char* name) {
  if (int refused = simcuda_driver_enter(name)) return refused;
  simcuda_driver_refuse(name,
                        is_of_kernels(name)
                            ? ": kernels compiled at run time (NVRTC, Triton) are not simulated; "
                              "torch.compile works with backend=\"eager\" or \"aot_eager\""
                            : "");
  return kNotSupported;
}

#define SIMCUDA_DRIVER extern "C" __attribute__((visibility("default"))) int

SIMCUDA_DRIVER cuGetProcAddress(const char*, void** function) {
  if (function) *function = nullptr;
  return refuse_foreign_runtime();
}

SIMCUDA_DRIVER cuGetProcAddress_v2(const char*, void** function) {
  if (function) *function = nullptr;
  return refuse_foreign_runtime();
}

// NVRTC asks for a table of undocumented functions and looks at its size, the first word, whatever
// the answer is: here there is nothing behind it.
SIMCUDA_DRIVER cuGetExportTable(const void** table, const void*) {
  static const uint64_t empty_table = sizeof(uint64_t);
  if (table) *table = &empty_table;
  return kNotSupported;
}
