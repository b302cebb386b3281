// What moves between a device and page-locked memory cost beside raw copies of the same bytes. On
// the simulated runtime the device's times are those of its clock, with links of 50 GB/s each way;
// on a GPU they are the GPU's.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <benchmark/benchmark.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "residency/aten/manager.h"
#include "residency/cuda/cuda_layer.h"
#include "residency/simcuda/control.h"

namespace {

using namespace residency;

const Location kPinned = Location::pinned_host();
const Location kDevice = Location::cuda(0);

void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(error));
    std::exit(1);
  }
}
#define RESIDENCY_CHECK(call) check(call, #call)

/// Before the first use of the runtime.
[[maybe_unused]] const bool configured = [] {
  if (simcuda_present != nullptr) {
    for (const auto& [key, value] : {std::pair("devices", "2"), std::pair("memory", "4GiB"),
                                     std::pair("h2d", "50GB/s"), std::pair("d2h", "50GB/s")}) {
      if (simcuda_set(key, value) != 0) {
        std::fprintf(stderr, "%s\n", simcuda_message());
        std::exit(1);
      }
    }
    (void)dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  }
  at::globalContext().lazyInitDevice(at::kCUDA);
  return true;
}();

at::Tensor bytes(std::int64_t nbytes) {
  at::Tensor tensor = at::empty({nbytes}, at::TensorOptions().dtype(at::kByte));
  std::memset(tensor.mutable_data_ptr(), 1, static_cast<std::size_t>(nbytes));
  return tensor;
}

/// Time of the device from when it is idle until all that `enqueue` gave it, and what the stream
/// was made to wait for, is done.
template <class Enqueue>
double device_ms(const c10::cuda::CUDAStream& stream, Enqueue enqueue) {
  RESIDENCY_CHECK(cudaDeviceSynchronize());
  cudaEvent_t begin = nullptr;
  cudaEvent_t end = nullptr;
  RESIDENCY_CHECK(cudaEventCreate(&begin));
  RESIDENCY_CHECK(cudaEventCreate(&end));
  RESIDENCY_CHECK(cudaEventRecord(begin, stream));
  enqueue();
  RESIDENCY_CHECK(cudaEventRecord(end, stream));
  RESIDENCY_CHECK(cudaEventSynchronize(end));
  float elapsed = 0;
  RESIDENCY_CHECK(cudaEventElapsedTime(&elapsed, begin, end));
  RESIDENCY_CHECK(cudaEventDestroy(begin));
  RESIDENCY_CHECK(cudaEventDestroy(end));
  return static_cast<double>(elapsed);
}

double wall_us(const std::chrono::steady_clock::time_point& begin) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
      .count();
}

/// Page-locked and device memory for raw copies.
struct Raw {
  explicit Raw(std::int64_t nbytes) {
    RESIDENCY_CHECK(cudaHostAlloc(&host, static_cast<std::size_t>(nbytes), cudaHostAllocDefault));
    RESIDENCY_CHECK(cudaMalloc(&device, static_cast<std::size_t>(nbytes)));
    std::memset(host, 1, static_cast<std::size_t>(nbytes));
  }
  ~Raw() {
    (void)cudaFreeHost(host);
    (void)cudaFree(device);
  }
  void* host = nullptr;
  void* device = nullptr;
};

std::shared_ptr<Manager> make_manager() {
  return create_manager({.trace_capacity = 0}, {.devices = make_cuda_layer()});
}

Handle page_locked(Manager& manager, TensorResident value) {
  const Handle handle = adopt(manager, std::move(value), {.mode = ReplicaMode::kReplicable});
  manager.move(handle, kPinned).wait();
  return handle;
}

/// While the host's own part is timed: the simulated device is at work on this machine's cores,
/// where a real one is beside them.
class DeviceHeld {
 public:
  explicit DeviceHeld(bool is_held) : is_held_(is_held && simcuda_present != nullptr) { hold(1); }
  DeviceHeld(const DeviceHeld&) = delete;
  DeviceHeld& operator=(const DeviceHeld&) = delete;
  ~DeviceHeld() { hold(0); }

 private:
  void hold(int on) const {
    if (is_held_ && simcuda_hold_all(on) != 0) {
      std::fprintf(stderr, "%s\n", simcuda_message());
      std::exit(1);
    }
  }
  const bool is_held_;
};

/// The device's time for bringing values there, all enqueued by one execute.
double bring(Manager& manager, const std::vector<Handle>& handles,
             const c10::cuda::CUDAStream& stream, double* host_us = nullptr) {
  std::vector<ResidencyAction> actions;
  for (const Handle& handle : handles) {
    actions.emplace_back(EnsureResident{handle, kDevice});
  }
  std::optional<Lease> lease;
  const double elapsed = device_ms(stream, [&] {
    const DeviceHeld held(host_us != nullptr);
    const auto begin = std::chrono::steady_clock::now();
    (void)manager.execute(actions);
    if (host_us != nullptr) {
      *host_us = wall_us(begin);
    }
    lease.emplace(manager.acquire(handles, kDevice, {.stream = Stream{kDevice, stream.id()}}));
  });
  lease->release();
  for (const Handle& handle : handles) {
    manager.drop(handle, kDevice);
  }
  return elapsed;
}

void one_value(benchmark::State& state) {
  constexpr std::int64_t kBytes = std::int64_t{256} << 20;
  const auto stream = c10::cuda::getStreamFromPool();
  const auto manager = make_manager();
  const std::vector<Handle> handles = {
      page_locked(*manager, TensorResident({{"x", bytes(kBytes)}}))};
  const Raw raw(kBytes);
  bring(*manager, handles, stream);  // the segment is there from then on
  double ratio = 0;
  for (auto _ : state) {
    const double with_raw = device_ms(stream, [&] {
      RESIDENCY_CHECK(
          cudaMemcpyAsync(raw.device, raw.host, kBytes, cudaMemcpyHostToDevice, stream));
    });
    ratio = with_raw / bring(*manager, handles, stream);
  }
  state.counters["value"] = ratio;
}
BENCHMARK(one_value)->Name("moves/one_256mib_ratio")->Iterations(3);

void many_fields(benchmark::State& state) {
  constexpr std::int64_t kFieldBytes = 4096;
  constexpr int kNumFields = 1000;
  const auto stream = c10::cuda::getStreamFromPool();
  const auto manager = make_manager();
  TensorResident::Fields fields;
  for (int i = 0; i < kNumFields; ++i) {
    fields.emplace_back(std::to_string(i), bytes(kFieldBytes));
  }
  const std::vector<Handle> handles = {page_locked(*manager, TensorResident(std::move(fields)))};
  const Raw raw(kFieldBytes * kNumFields);
  bring(*manager, handles, stream);
  double ratio = 0;
  for (auto _ : state) {
    const double with_raw = device_ms(stream, [&] {
      RESIDENCY_CHECK(cudaMemcpyAsync(raw.device, raw.host, kFieldBytes * kNumFields,
                                      cudaMemcpyHostToDevice, stream));
    });
    ratio = with_raw / bring(*manager, handles, stream);
  }
  state.counters["value"] = ratio;
}
BENCHMARK(many_fields)->Name("moves/1000_fields_ratio")->Iterations(3);

constexpr std::int64_t kSmallBytes = 4096;
constexpr std::int64_t kNumSmall = 10'000;

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values.at(values.size() / 2);
}

/// 10,000 raw copies of 4 KiB, beside one execute of 10,000 ensures.
void many_values(benchmark::State& state, bool of_the_device) {
  const auto stream = c10::cuda::getStreamFromPool();
  const auto manager = make_manager();
  std::vector<Handle> handles;
  for (std::int64_t i = 0; i < kNumSmall; ++i) {
    handles.push_back(page_locked(*manager, TensorResident({{"x", bytes(kSmallBytes)}})));
  }
  const Raw raw(kSmallBytes * kNumSmall);
  bring(*manager, handles, stream);
  double ratio = 0;
  std::vector<double> host_us;
  std::vector<double> raw_us;
  for (auto _ : state) {
    const double with_raw = device_ms(stream, [&] {
      const DeviceHeld held(!of_the_device);
      const auto begin = std::chrono::steady_clock::now();
      for (std::int64_t i = 0; i < kNumSmall; ++i) {
        RESIDENCY_CHECK(cudaMemcpyAsync(static_cast<char*>(raw.device) + i * kSmallBytes,
                                        static_cast<char*>(raw.host) + i * kSmallBytes, kSmallBytes,
                                        cudaMemcpyHostToDevice, stream));
      }
      raw_us.push_back(wall_us(begin));
    });
    ratio = with_raw /
            bring(*manager, handles, stream, of_the_device ? nullptr : &host_us.emplace_back());
  }
  constexpr auto kEach = static_cast<double>(kNumSmall);
  state.counters["value"] = of_the_device ? ratio : median(host_us) / kEach;
  state.counters["peer"] = of_the_device ? 1.0 : median(raw_us) / kEach;
}
BENCHMARK_CAPTURE(many_values, device, true)
    ->Name("moves/10000_values_device_ratio")
    ->Iterations(3);
BENCHMARK_CAPTURE(many_values, host, false)->Name("moves/10000_values_host_us")->Iterations(20);

/// A copy from pageable memory beside the slower of memcpy into page-locked memory and a raw copy
/// from there. The simulated clock has no time for the host's own work, so that there it is the
/// link alone that counts.
void staged(benchmark::State& state) {
  constexpr std::int64_t kBytes = std::int64_t{256} << 20;
  const auto stream = c10::cuda::getStreamFromPool();
  const auto manager = make_manager();
  const at::Tensor source = bytes(kBytes);
  const Handle handle =
      adopt(*manager, TensorResident({{"x", bytes(kBytes)}}), {.mode = ReplicaMode::kReplicable});
  const Raw raw(kBytes);
  const auto bring_staged = [&] {
    const double elapsed = device_ms(stream, [&] { manager->ensure(handle, kDevice).wait(); });
    manager->drop(handle, kDevice);
    return elapsed;
  };
  bring_staged();  // the segment and the buffers are there from then on
  double ratio = 0;
  for (auto _ : state) {
    const auto begin = std::chrono::steady_clock::now();
    std::memcpy(raw.host, source.const_data_ptr(), kBytes);
    const double by_host = simcuda_present != nullptr ? 0 : wall_us(begin) / 1000;
    const double by_link = device_ms(stream, [&] {
      RESIDENCY_CHECK(
          cudaMemcpyAsync(raw.device, raw.host, kBytes, cudaMemcpyHostToDevice, stream));
    });
    ratio = std::max(by_host, by_link) / bring_staged();
  }
  state.counters["value"] = ratio;
}
BENCHMARK(staged)->Name("moves/staged_ratio")->Iterations(5);

void both_directions(benchmark::State& state) {
  constexpr std::int64_t kBytes = std::int64_t{64} << 20;
  constexpr std::size_t kNumValues = 4;
  const auto stream = c10::cuda::getStreamFromPool();
  const auto manager = make_manager();
  std::vector<Handle> in;
  std::vector<Handle> out;
  for (std::size_t i = 0; i < kNumValues; ++i) {
    in.push_back(page_locked(*manager, TensorResident({{"x", bytes(kBytes)}})));
    out.push_back(page_locked(*manager, TensorResident({{"x", bytes(kBytes)}})));
    manager->move(out.back(), kDevice);
  }
  // Each way alone and both at once, with the room that each needs.
  const auto exchange = [&](bool load, bool evict) {
    return device_ms(stream, [&] {
      for (std::size_t i = 0; i < kNumValues; ++i) {
        if (evict) {
          manager->ensure(out[i], kPinned);
        }
        if (load) {
          manager->ensure(in[i], kDevice);
        }
      }
      if (load) {
        manager->acquire(in, kDevice, {.stream = Stream{kDevice, stream.id()}}).release();
      }
      if (evict) {
        manager->synchronize();  // a host location has no stream to wait on
      }
    });
  };
  const auto restore = [&] {
    manager->synchronize();
    for (std::size_t i = 0; i < kNumValues; ++i) {
      manager->drop(in[i], kDevice);
      manager->drop(out[i], kPinned);
    }
  };
  double ratio = 0;
  for (auto _ : state) {
    const double one_way = exchange(true, false);
    for (const Handle& handle : in) {
      manager->drop(handle, kDevice);
    }
    const double both = exchange(true, true);
    restore();
    ratio = 2 * one_way / both;
  }
  state.counters["value"] = ratio;
}
BENCHMARK(both_directions)->Name("moves/both_directions_ratio")->Iterations(3);

}  // namespace

BENCHMARK_MAIN();
