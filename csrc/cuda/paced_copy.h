#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <cuda_runtime_api.h>

#include "csrc/cuda/copy_batch.h"
#include "csrc/cuda/event_fence.h"

namespace residency {

class PacedCopy;

/// A stream for copies ahead of need in one direction of a device, and what of them is outstanding.
struct AheadLane {
  cudaStream_t stream = nullptr;
  std::mutex mutex;  // guards the rest; before that of a copy
  /// Not wholly enqueued yet, in the order in which they are to be.
  std::list<PacedCopy*> queue;
  struct Chunk {
    FencePtr done;
    std::size_t cost = 0;
  };
  std::deque<Chunk> outstanding;

  /// For one more chunk of so many bytes: not more than two of them are outstanding. The mutex is
  /// held.
  [[nodiscard]] bool has_room(std::size_t chunk_bytes) noexcept;
};

/// A copy ahead of need. A worker enqueues it chunk by chunk, and never so much at once that a copy
/// which is needed now would come long after it, nor anything that would have to wait there for
/// what it comes behind. Whoever waits for it has the rest enqueued at once, among the copies that
/// are needed now, so that it is behind no other copy ahead of need than those that it depends on.
///
/// Mutexes are taken in this order: the ahead lane's, one copy's.
class PacedCopy final : public StreamFence {
 public:
  /// What a piece counts for at least: a tiny copy takes the time of so many bytes (1 us or so),
  /// and a stream takes a thousand or so without making the host wait.
  static constexpr std::size_t kLeastCost = std::size_t{64} << 10;

  /// `needed_now`: the stream of what is needed now in the same direction of the device. It comes
  /// behind `source_ready`, and fails with that, and behind `after`, however those end. There is a
  /// piece. Their device must be the current one. Throws what `throw_cuda_error` throws.
  PacedCopy(std::shared_ptr<EventPool> pool, AheadLane& ahead, cudaStream_t needed_now,
            Pieces pieces, FencePtr source_ready, std::vector<FencePtr> after,
            std::optional<Peers> peers, std::size_t chunk_bytes);
  ~PacedCopy() override;

  /// Enqueues what there is room for, once those before it in the lane are enqueued and what it
  /// comes behind is over; or the rest `at_once`. True when there is no more to do here: if it
  /// could not be enqueued, whoever waits tries again. From the first call on it must live, and be
  /// called, until then.
  [[nodiscard]] bool pace(bool at_once) noexcept;

  [[nodiscard]] FenceStatus poll() const noexcept override;
  [[nodiscard]] bool has_failed() const noexcept override {
    return is_recorded_ && fence_->has_failed();
  }
  /// Once all of it is enqueued.
  [[nodiscard]] bool is_certain() const noexcept override {
    return is_recorded_ || poll() != FenceStatus::kPending;
  }
  /// Enqueues the rest, if need be for a second.
  void make_certain() override;
  void wait() override;
  [[nodiscard]] std::optional<std::int64_t> elapsed_ns() const override;
  /// Why it could not be enqueued, or what became of its device.
  [[nodiscard]] std::exception_ptr error() const override;
  /// Enqueues the rest.
  [[nodiscard]] cudaEvent_t event() override;
  [[nodiscard]] cudaStream_t stream() const noexcept override {
    return is_recorded_ ? fence_->stream() : ahead_.stream;
  }

 private:
  /// Calls `visit` on the copies that this one comes behind and that are not enqueued, each after
  /// those that it comes behind itself; on this one last.
  template <class Visit>
  void visit_in_order(const Visit& visit);
  [[nodiscard]] std::vector<std::shared_ptr<PacedCopy>> copies_before();
  /// Enqueues the rest, and that of all it comes behind, where what is needed now is.
  void promote();
  /// When those that it comes behind are enqueued.
  void enqueue_in_needed_now();

  // These with the ahead lane's mutex held.
  [[nodiscard]] bool is_turn() noexcept;
  /// Whether it went well.
  [[nodiscard]] bool enqueue_next(bool at_once) noexcept;
  void enqueue_ahead();

  // These with the copy's mutex held.
  void wait_in(cudaStream_t stream);
  void record_begin(cudaStream_t stream);
  /// Returns what it counts for.
  std::size_t enqueue_chunk(cudaStream_t stream);
  void record_end(cudaStream_t stream);

  /// Of the exception that is being handled. The copy's mutex is not held.
  void note_failure() noexcept;
  /// As failed. Waits on the host for what is in flight of it, and for what that comes behind.
  void give_up(const std::exception_ptr& why) noexcept;
  [[nodiscard]] std::exception_ptr why_not_yet() const noexcept;

  const std::shared_ptr<EventPool> pool_;
  AheadLane& ahead_;
  const cudaStream_t needed_now_;
  const std::optional<Peers> peers_;
  const std::size_t chunk_bytes_;
  std::shared_ptr<EventFence> fence_;

  // These are guarded by the ahead lane's mutex.
  std::list<PacedCopy*> node_{this};  // the lane's queue has it instead until `pace` is through
  const std::list<PacedCopy*>::iterator place_ = node_.begin();
  int num_failed_ = 0;
  std::chrono::steady_clock::time_point failing_since_;

  mutable std::mutex mutex_;     // guards the rest
  cudaEvent_t begin_ = nullptr;  // the fence's; null once it is recorded
  Pieces pieces_;
  std::size_t next_ = 0;         // of the pieces, the first that is not wholly enqueued: its rest
  std::vector<FencePtr> after_;  // the first is what brings the source
  std::size_t num_over_ = 0;     // of those, the first
  bool is_ahead_ = false;        // some of it is in the ahead lane, or may be
  std::atomic<bool> is_needed_now_{false};  // the rest goes to that stream
  std::atomic<bool> is_recorded_{false};    // all is enqueued, or it was given up
  std::exception_ptr failure_;              // why it is not enqueued yet
};

}  // namespace residency
