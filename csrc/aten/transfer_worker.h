#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "csrc/aten/file_io.h"
#include "residency/core/export.h"
#include "residency/core/fence.h"

namespace residency {

/// The outstanding transfers of one backend. Thread-safe.
class TransferGroup {
 public:
  void begin();
  void end();
  void wait_until_idle();
  [[nodiscard]] bool is_idle();
  /// Makes transfers of this group end soon, as failed.
  void abandon() noexcept { abandoned_.store(true, std::memory_order_relaxed); }
  [[nodiscard]] const std::atomic<bool>& abandoned() const noexcept { return abandoned_; }

 private:
  std::mutex mutex_;
  std::condition_variable idle_;
  std::uint64_t num_outstanding_ = 0;
  std::atomic<bool> abandoned_{false};
};

/// A thread of the process: one for files, one for copies staged through page-locked memory, one
/// for both of them ahead of need, one that enqueues the other copies ahead of need, and one for
/// what managers leave behind that were destroyed without being closed. It carries out work in the
/// order in which it was submitted, whoever submitted it; what cannot go on lets the others pass.
/// Started by the first `submit` while somebody holds it; the thread ends with the last holder, or
/// the process. Thread-safe.
class TransferWorker {
 public:
  /// False: to be called again, after the others.
  using Work = std::function<bool(FileIo&)>;

  enum class Kind : std::uint8_t { kDisk, kStaging, kAhead, kPace, kLeftBehind };
  static constexpr std::size_t kNumKinds = 5;
  [[nodiscard]] static std::shared_ptr<TransferWorker> shared(Kind kind);

  explicit TransferWorker(Kind kind);
  TransferWorker(const TransferWorker&) = delete;
  TransferWorker& operator=(const TransferWorker&) = delete;
  /// Lets go of the thread, which ends after the work it has.
  ~TransferWorker();

  /// `work` must not throw.
  void submit(Work work);
  /// Carries `work` out at once where the calling thread is this worker's: between two transfers,
  /// or in one that has not begun to transfer. Returns what it returned; false on other threads.
  [[nodiscard]] bool run_here(const Work& work);
  /// Gives up a reference; when it was the last, waits until the thread has ended.
  static void release_and_join(std::shared_ptr<TransferWorker> worker) noexcept;
  /// Has the threads end when the process exits, before the static objects that are there by now
  /// are destroyed: they use c10's. What they have to do has 1.5 seconds to come to its end, and as
  /// much again to come to a point where it can be left. To be called by whoever has just used what
  /// a thread will use.
  RESIDENCY_API static void end_with_process();

 private:
  struct State;
  struct Registry;
  static Registry& registry();
  static void end_all() noexcept;
  const Kind kind_;
  std::shared_ptr<State> state_;
  std::uint64_t generation_;
};

/// The completion of a transfer by such a thread. In a forked child, and once the process exits,
/// where that thread does not exist, one that was pending has failed with `ForkError`, and nothing
/// waits for it.
class WorkerFence final : public Fence {
 public:
  WorkerFence();
  /// What to do whenever somebody comes to wait. Set before anybody else has the fence.
  void on_wait(std::function<void()> hurry) { hurry_ = std::move(hurry); }
  [[nodiscard]] FenceStatus poll() const noexcept override;
  void wait() override;
  [[nodiscard]] std::exception_ptr error() const override;

  /// In its scope the fence is done for the calling thread, which has carried out the transfer and
  /// now lets go of what it used: memory that is freed there must not wait for the fence that this
  /// thread has yet to complete.
  class Ended {
   public:
    explicit Ended(const WorkerFence& fence) noexcept;
    // A scope of the thread: there is nothing to hand over.
    Ended(const Ended&) = delete;
    Ended& operator=(const Ended&) = delete;
    ~Ended();
  };

 private:
  [[nodiscard]] bool is_orphan() const noexcept;
  [[nodiscard]] bool has_ended_here() const noexcept;
  std::uint64_t generation_;
  std::function<void()> hurry_;
};

}  // namespace residency
