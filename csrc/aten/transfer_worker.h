#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

#include "csrc/aten/file_io.h"
#include "residency/core/fence.h"

namespace residency {

/// The outstanding transfers of one backend. Thread-safe.
class TransferGroup {
 public:
  void begin();
  void end();
  void wait_until_idle();
  /// Makes transfers of this group end soon, as failed.
  void abandon() noexcept { abandoned_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] const std::atomic<bool>& abandoned() const noexcept { return abandoned_; }

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  std::uint64_t num_outstanding_ = 0;
  std::atomic<bool> abandoned_{false};
};

/// The process's one disk thread: it carries out work in the order in which it was submitted,
/// whoever submitted it. Started by the first `submit` while somebody holds it; the thread ends
/// with the last holder. Thread-safe.
class DiskWorker {
 public:
  using Work = std::function<void(FileIo&)>;

  [[nodiscard]] static std::shared_ptr<DiskWorker> shared();

  DiskWorker();
  DiskWorker(const DiskWorker&) = delete;
  DiskWorker& operator=(const DiskWorker&) = delete;
  /// Lets go of the thread, which ends after the work it has.
  ~DiskWorker();

  /// `work` must not throw.
  void submit(Work work);
  /// Gives up a reference; when it was the last, waits until the thread has ended.
  static void release_and_join(std::shared_ptr<DiskWorker> worker) noexcept;

 private:
  struct State;
  std::shared_ptr<State> state_;
  std::uint64_t generation_;
};

/// The completion of a transfer by the disk thread. In a forked child, where that thread does not
/// exist, one that was pending has failed with `ForkError`, and nothing waits for it.
class DiskFence final : public Fence {
 public:
  DiskFence();
  [[nodiscard]] FenceStatus poll() const noexcept override;
  void wait() override;
  [[nodiscard]] std::exception_ptr error() const override;

 private:
  [[nodiscard]] bool is_orphan() const noexcept;
  std::uint64_t generation_;
};

}  // namespace residency
