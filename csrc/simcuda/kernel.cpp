// Kernels: those that nvcc compiled are known by name and refused (but torch.cuda._sleep), those
// of simcuda_launch run.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include <cxxabi.h>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/graph.h"
#include "csrc/simcuda/runtime.h"
#include "csrc/simcuda/thread_object.h"

using namespace simcuda;

namespace {

struct KernelName {
  const void* function;
  const char* mangled;
};

struct KernelNames {
  std::mutex mutex;
  // torch registers a hundred thousand when it is loaded and asks for none: a list, not a map.
  std::vector<KernelName> names;
};

KernelNames& kernel_names() {
  static KernelNames* names = new KernelNames;
  return *names;
}

std::string name_of(const void* function) {
  std::lock_guard lock(kernel_names().mutex);
  for (const KernelName& known : kernel_names().names) {
    if (known.function != function) continue;
    int status = 0;
    char* readable = abi::__cxa_demangle(known.mangled, nullptr, nullptr, &status);
    std::string name = status == 0 ? readable : known.mangled;
    free(readable);
    return name;
  }
  return "an unregistered kernel";
}

cudaError_t refuse_launch(const void* function) {
  // Template arguments make names of many lines.
  constexpr size_t kLongestName = 300;
  std::string name = name_of(function);
  if (name.size() > kLongestName) name = name.substr(0, kLongestName) + "...";
  complain("kernel refused, compiled kernels cannot be simulated: " + name);
  return fail(cudaErrorNoKernelImageForDevice);
}

// torch.cuda._sleep(cycles): the one compiled kernel that is simulated, as it does nothing.
bool is_sleep(const std::string& name) {
  return name.find("spin_kernel(long") != std::string::npos;
}

cudaError_t launch_sleep(cudaStream_t handle, int64_t num_cycles) {
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  OperationSpec spec{.kind = OperationKind::kKernel, .name = "spin_kernel"};
  spec.engine = &stream->device.engines[kEngineCompute];
  spec.launch_ns = time_ns(kLaunch);
  double seconds = static_cast<double>(std::max(num_cycles, int64_t{0})) /
                   settings().card.load()->cycles_a_second;
  spec.duration_ns = static_cast<uint64_t>(std::llround(seconds * 1e9));
  return fail(submit(stream, std::move(spec)));
}

cudaError_t launch_compiled(const void* function, void** arguments, cudaStream_t stream) {
  if (arguments && is_sleep(name_of(function))) {
    return launch_sleep(stream, *static_cast<const int64_t*>(arguments[0]));
  }
  return refuse_launch(function);
}

struct CallConfiguration {
  dim3 grid;
  dim3 block;
  size_t shared_bytes;
  cudaStream_t stream;
};

std::vector<CallConfiguration>& call_configurations() {
  return thread_object<std::vector<CallConfiguration>>();
}

// The program's function and data of simcuda_launch. Its end is the end of the data.
class LaunchedKernel {
 public:
  LaunchedKernel(int (*run)(void*), void (*destroy)(void*), void* data)
      : run_(run), destroy_(destroy), data_(data) {}
  ~LaunchedKernel() {
    if (destroy_) destroy_(data_);
  }
  LaunchedKernel(const LaunchedKernel&) = delete;
  LaunchedKernel& operator=(const LaunchedKernel&) = delete;

  cudaError_t run() const {
    if (runtime().dry || !run_) return cudaSuccess;
    return static_cast<cudaError_t>(run_(data_));
  }

 private:
  int (*run_)(void*);
  void (*destroy_)(void*);
  void* data_;
};

}  // namespace

SIMCUDA_EXPORT int simcuda_launch(void* handle, const simcuda_work* work, int (*run)(void*),
                                  void (*destroy)(void*), void* data) {
  // Before anything can refuse the launch, as the data is then ended too.
  auto kernel = std::make_shared<LaunchedKernel>(run, destroy, data);
  SIMCUDA_ENTER(cudaLaunchKernel, kHostCall);
  StreamPtr stream;
  if (cudaError_t error = open_stream(static_cast<cudaStream_t>(handle), stream)) {
    return fail(error);
  }
  OperationSpec spec{.kind = OperationKind::kKernel, .name = "kernel"};
  spec.engine = &stream->device.engines[kEngineCompute];
  spec.launch_ns = time_ns(kLaunch);
  if (work) {
    const CardModel& card = *settings().card;
    spec.name = work->name ? work->name : "kernel";
    spec.num_bytes = static_cast<uint64_t>(work->bytes);
    spec.duration_ns = roofline_ns(*work, card.flops, card.memory_rate);
  }
  spec.body = std::make_shared<Body>([kernel = std::move(kernel)] { return kernel->run(); });
  return fail(submit(stream, std::move(spec)));
}

SIMCUDA_EXPORT void simcuda_in_backward(int (*ask)(void)) {
  ask_for_backward_by(ask);
}

SIMCUDA_EXPORT void simcuda_host_work(const simcuda_work* work) {
  Hidden hidden_call;
  if (!work || forked_after_use()) return;
  ClockCall clock_call(true);
  const HostModel& host = *settings().host;
  uint64_t duration = roofline_ns(*work, host.flops, host.memory_rate);
  Clock& clock = runtime().clock;
  uint64_t start = clock.now();
  clock.pass(duration);
  clock.timeline.add_host_work(work->name ? work->name : "operator", start, start + duration);
}

// ---- What compiled kernels call

SIMCUDA_EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}

SIMCUDA_EXPORT void __cudaRegisterFatBinaryEnd(void**) {}

SIMCUDA_EXPORT void __cudaUnregisterFatBinary(void**) {}

SIMCUDA_EXPORT char __cudaInitModule(void**) {
  return 0;
}

SIMCUDA_EXPORT void __cudaRegisterFunction(void**, const char* function, char*, const char* name,
                                           int, uint3*, uint3*, dim3*, dim3*, int*) {
  Hidden hidden_call;
  std::lock_guard lock(kernel_names().mutex);
  kernel_names().names.push_back({function, name});
}

SIMCUDA_EXPORT void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

SIMCUDA_EXPORT cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}

SIMCUDA_EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes,
                                                    cudaStream_t stream) {
  call_configurations().push_back({grid, block, shared_bytes, stream});
  return 0;
}

SIMCUDA_EXPORT cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes,
                                                      void* stream) {
  if (call_configurations().empty()) return fail(cudaErrorLaunchFailure);
  CallConfiguration top = call_configurations().back();
  call_configurations().pop_back();
  *grid = top.grid;
  *block = top.block;
  *shared_bytes = top.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = top.stream;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void** arguments,
                                              size_t, cudaStream_t stream) {
  SIMCUDA_ENTER(cudaLaunchKernel, kHostCall);
  return launch_compiled(kernel, arguments, stream);
}

SIMCUDA_EXPORT cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void** arguments,
                                            size_t, cudaStream_t stream) {
  SIMCUDA_ENTER(cudaLaunchKernel, kHostCall);
  return launch_compiled(function, arguments, stream);
}

SIMCUDA_EXPORT cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**,
                                                       size_t, cudaStream_t) {
  SIMCUDA_ENTER(cudaLaunchCooperativeKernel, kHostCall);
  return refuse_launch(function);
}

SIMCUDA_EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* configuration,
                                               const void* function, void** arguments) {
  SIMCUDA_ENTER(cudaLaunchKernelExC, kHostCall);
  return launch_compiled(function, arguments, configuration->stream);
}

// ---- What is asked about kernels before a launch; the launch itself is refused

SIMCUDA_EXPORT cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  SIMCUDA_ENTER(cudaFuncGetAttributes, kNothing);
  memset(attributes, 0, sizeof *attributes);
  const CardModel& card = *settings().card;
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->binaryVersion = card.compute_major * 10 + card.compute_minor;
  attributes->ptxVersion = attributes->binaryVersion;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) {
  SIMCUDA_ENTER(cudaFuncSetAttribute, kNothing);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num_blocks,
                                                                                  const void*, int,
                                                                                  size_t,
                                                                                  unsigned) {
  SIMCUDA_ENTER(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, kNothing);
  *num_blocks = 2;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks,
                                                                         const void*, int, size_t) {
  SIMCUDA_ENTER(cudaOccupancyMaxActiveBlocksPerMultiprocessor, kNothing);
  *num_blocks = 2;
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaProfilerStart() {
  SIMCUDA_ENTER(cudaProfilerStart, kNothing);
  return cudaSuccess;
}

SIMCUDA_EXPORT cudaError_t cudaProfilerStop() {
  SIMCUDA_ENTER(cudaProfilerStop, kNothing);
  return cudaSuccess;
}
