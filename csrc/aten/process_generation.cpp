#include "csrc/aten/process_generation.h"

#include <atomic>

#include <pthread.h>

namespace residency {
namespace {

std::atomic<std::uint32_t> generation{0};

[[maybe_unused]] const int registered =
    pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });

}  // namespace

std::uint32_t process_generation() noexcept {
  return generation.load(std::memory_order_relaxed);
}

}  // namespace residency
