#include "residency/core/fence.h"

#include <chrono>
#include <thread>

#include "fork.h"
#include "residency/core/backend.h"

namespace residency {

Fence::~Fence() = default;

// What is said of the end is fixed before the status, and read without the mutex: in a forked child
// the thread that ends the work may have held it.

void Fence::wait_for(std::chrono::milliseconds most) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(
      lock, most, [&] { return status_.load(std::memory_order_acquire) != FenceStatus::kPending; });
}

void Fence::wait() {
  if (status_.load(std::memory_order_acquire) != FenceStatus::kPending) {
    return;
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock,
                [&] { return status_.load(std::memory_order_acquire) != FenceStatus::kPending; });
}

std::optional<std::int64_t> Fence::elapsed_ns() const {
  const bool ended = status_.load(std::memory_order_acquire) != FenceStatus::kPending;
  return ended && elapsed_ns_ >= 0 ? std::optional(elapsed_ns_) : std::nullopt;
}

std::exception_ptr Fence::error() const {
  return status_.load(std::memory_order_acquire) == FenceStatus::kFailed ? error_ : nullptr;
}

std::shared_ptr<Fence> Fence::done() {
  auto fence = std::make_shared<Fence>();
  fence->complete();
  return fence;
}

void Fence::complete(std::int64_t elapsed_ns) {
  // What was replaced goes before anybody is told, and without the lock: a tensor may take the GIL.
  (void)take_retained();
  std::shared_ptr<Block> replaced_late;
  const std::lock_guard lock(mutex_);
  replaced_late = std::move(retained_);
  elapsed_ns_ = elapsed_ns;
  status_.store(FenceStatus::kDone, std::memory_order_release);
  changed_.notify_all();
}

void Fence::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  status_.store(FenceStatus::kFailed, std::memory_order_release);
  changed_.notify_all();
}

void Fence::retain_until_success(std::shared_ptr<Block> block) {
  const std::lock_guard lock(mutex_);
  if (status_.load(std::memory_order_acquire) != FenceStatus::kDone) {
    retained_ = std::move(block);
  }
}

std::shared_ptr<Block> Fence::take_retained() {
  if (status_.load(std::memory_order_acquire) == FenceStatus::kDone) {
    return nullptr;
  }
  std::unique_lock lock(mutex_, std::defer_lock);
  if (fork_generation() == 0) {
    lock.lock();
  } else {
    // Whoever held it at the fork did not come along.
    constexpr int kMostTries = 100;
    for (int i = 0; i < kMostTries && !lock.try_lock(); ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  return std::move(retained_);
}

}  // namespace residency
