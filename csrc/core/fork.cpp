#include "fork.h"

#include <atomic>

#include <pthread.h>

namespace residency {
namespace {

std::atomic<std::uint64_t> g_generation{0};
std::atomic<std::uint64_t> g_exits{0};

// At load: the registry's handler in the child, which comes later, already finds the new number.
[[maybe_unused]] const int kRegistered =
    pthread_atfork(nullptr, nullptr, [] { g_generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

std::uint64_t fork_generation() noexcept {
  return g_generation.load(std::memory_order_relaxed);
}

std::uint64_t device_generation() noexcept {
  return fork_generation() + g_exits.load(std::memory_order_relaxed);
}

void end_devices() noexcept {
  g_exits.store(std::uint64_t{1} << 32, std::memory_order_relaxed);
}

}  // namespace residency
