#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <span>

#include "residency/core/export.h"

namespace residency {

class Block;

enum class FenceStatus : std::uint8_t { kPending, kDone, kFailed };

/// A point in the future: the completion of a copy, or the last use of a materialization.
///
/// Thread-safe. A backend either completes a plain Fence from its worker (`complete`, `fail`), or
/// derives from it and answers `poll` from the device (an event). Once it left `kPending` it stays
/// what it became.
class RESIDENCY_API Fence {
 public:
  Fence() = default;
  Fence(const Fence&) = delete;
  Fence& operator=(const Fence&) = delete;
  virtual ~Fence();

  /// What the fence is now. Never blocks, allocates nothing, calls back into nobody: it is called
  /// under the manager's mutex.
  [[nodiscard]] virtual FenceStatus poll() const noexcept {
    return status_.load(std::memory_order_acquire);
  }
  /// Whether streams of a device can be made to come after it, so that the host need not wait.
  [[nodiscard]] virtual bool on_stream() const noexcept { return false; }
  /// Whether it is known by now that the work has failed; the device is not asked.
  [[nodiscard]] virtual bool has_failed() const noexcept { return poll() == FenceStatus::kFailed; }
  /// Whether the work can fail no more unless its device is lost, or has ended. What is put off, to
  /// be given to a device later, is not certain until then. As `poll` never blocks.
  [[nodiscard]] virtual bool is_certain() const noexcept { return poll() != FenceStatus::kPending; }
  /// Makes it so. Blocks the host until the work has ended only where nothing less will do.
  virtual void make_certain() { wait(); }
  /// Blocks the host until the fence is no longer pending. Does not throw on failure.
  virtual void wait();
  /// Time that the device or the worker spent, when known and done.
  [[nodiscard]] virtual std::optional<std::int64_t> elapsed_ns() const;
  /// Why it failed; null unless `kFailed`.
  [[nodiscard]] virtual std::exception_ptr error() const;

  /// One whose work has ended.
  [[nodiscard]] static std::shared_ptr<Fence> done();

  /// Marks the work done (worker side). `elapsed_ns` < 0 means unknown.
  void complete(std::int64_t elapsed_ns = -1);
  /// Marks the work failed (worker side).
  void fail(std::exception_ptr error);

  /// Keeps a reference on the block that the work replaces: dropped by the completing thread when
  /// the work succeeds (at once if it has), handed back by `take_retained` when it fails.
  /// A lost value is the one unforgivable fault, and a freed source would be one.
  void retain_until_success(std::shared_ptr<Block> block);
  [[nodiscard]] std::shared_ptr<Block> take_retained();

 protected:
  /// Blocks the host until it has been completed or has failed, or for so long.
  void wait_for(std::chrono::milliseconds most);

 private:
  std::atomic<FenceStatus> status_{FenceStatus::kPending};
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  std::int64_t elapsed_ns_ = -1;
  std::shared_ptr<Block> retained_;
};

using FencePtr = std::shared_ptr<Fence>;

/// False for null, which stands for what is ready. Never blocks.
[[nodiscard]] inline bool is_pending(const FencePtr& fence) noexcept {
  return fence && fence->poll() == FenceStatus::kPending;
}
[[nodiscard]] inline bool any_pending(std::span<const FencePtr> fences) noexcept {
  for (const FencePtr& fence : fences) {
    if (is_pending(fence)) {
      return true;
    }
  }
  return false;
}
/// Blocks the host until none of them is pending; null stands for what is ready.
inline void wait_all(std::span<const FencePtr> fences) {
  for (const FencePtr& fence : fences) {
    if (fence) {
      fence->wait();
    }
  }
}

}  // namespace residency
