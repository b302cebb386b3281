#include "csrc/simcuda/runtime.h"

#include <pthread.h>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/sanitizer.h"

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
  for (int ordinal = 0; ordinal < settings().num_devices; ++ordinal) {
    auto device = std::make_unique<Device>();
    device->ordinal = ordinal;
    device->capacity_bytes = settings().memory_bytes.load();
    for (Engine& engine : device->engines) {
      engine.device = device.get();
      all_engines_.push_back(&engine);
    }
    device->default_stream =
        std::make_shared<Stream>(*device, next_id++, StreamOptions{.legacy = true});
    device->streams.push_back(device->default_stream);
    devices.push_back(std::move(device));
  }
  pthread_atfork(nullptr, nullptr, note_fork);
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
