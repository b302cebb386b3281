#include "csrc/simcuda/runtime.h"

#include <cstdlib>

#include <pthread.h>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/sanitizer.h"
#include "csrc/simcuda/visibility.h"

namespace simcuda {
namespace {

std::atomic<bool> g_in_use{false};
std::atomic<bool> g_forked{false};

void note_fork() {
  if (g_in_use) g_forked = true;
}

}  // namespace

Runtime::Runtime()
    : dry(settings().dry),
      memory(settings().memory_bytes * static_cast<uint64_t>(settings().num_devices), dry) {
  const char* list = getenv("CUDA_VISIBLE_DEVICES");
  for (int card : visible_cards(list, settings().num_devices)) {
    devices.push_back(make_device(static_cast<int>(devices.size()), card));
  }
  no_device = make_device(0, -1);
  no_device->broken = cudaErrorNoDevice;
  pthread_atfork(nullptr, nullptr, note_fork);
}

std::unique_ptr<Device> Runtime::make_device(int ordinal, int card) {
  auto device = std::make_unique<Device>();
  device->ordinal = ordinal;
  device->card = card;
  device->capacity_bytes = settings().memory_bytes.load();
  for (Engine& engine : device->engines) {
    engine.device = device.get();
    all_engines_.push_back(&engine);
  }
  StreamOptions options{.legacy = true};
  device->default_stream = std::make_shared<Stream>(*device, next_id++, options);
  device->streams.push_back(device->default_stream);
  return device;
}

Engine& Runtime::peer_engine(int source, int destination) {
  Engine& engine = peer_engines_[static_cast<size_t>(source)][static_cast<size_t>(destination)];
  if (!engine.device) {
    engine.device = devices[static_cast<size_t>(destination)].get();
    all_engines_.push_back(&engine);
  }
  return engine;
}

Runtime& runtime() {
  static Runtime* runtime = [] {
    Hidden hidden;
    g_in_use = true;
    return new Runtime;
  }();
  return *runtime;
}

bool runtime_in_use() {
  return g_in_use;
}

bool forked_after_use() {
  return g_forked.load(std::memory_order_relaxed);
}

}  // namespace simcuda
