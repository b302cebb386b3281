// How programs find the driver's functions through the runtime.
#include <string>

#include <dlfcn.h>

#include "csrc/simcuda/entry.h"
#include "include/residency/simcuda/control.h"

using namespace simcuda;

namespace {

void* open_driver() {
  void* loaded = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
  if (loaded) return loaded;
  // On no loader path: the driver of this runtime lies beside it.
  Dl_info own;
  if (!dladdr(reinterpret_cast<void*>(&simcuda_present), &own)) return nullptr;
  std::string path = own.dli_fname;
  path = path.substr(0, path.rfind('/') + 1) + "libcuda.so.1";
  return dlopen(path.c_str(), RTLD_LAZY | RTLD_GLOBAL);
}

cudaError_t find_entry(const char* name, void** function, cudaDriverEntryPointQueryResult* result) {
  static void* driver = open_driver();
  *function = driver ? dlsym(driver, name) : nullptr;
  std::string versioned = std::string(name) + "_v2";
  if (!*function && driver) *function = dlsym(driver, versioned.c_str());
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // namespace

SIMCUDA_EXPORT cudaError_t
cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                 cudaDriverEntryPointQueryResult* result) {
  SIMCUDA_ENTER(cudaGetDriverEntryPointByVersion, kNothing);
  if (!name || !function) return fail(cudaErrorInvalidValue);
  return find_entry(name, function, result);
}

SIMCUDA_EXPORT cudaError_t cudaGetDriverEntryPoint(const char* name, void** function,
                                                   unsigned long long,
                                                   cudaDriverEntryPointQueryResult* result) {
  SIMCUDA_ENTER(cudaGetDriverEntryPoint, kNothing);
  if (!name || !function) return fail(cudaErrorInvalidValue);
  return find_entry(name, function, result);
}
