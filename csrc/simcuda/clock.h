// The virtual clock: when each operation would start and end on the modelled card.
//
// Note [The clock is a simulation of its own]
// Workers really run the bytes, in the order CUDA promises and as fast as they can. Beside that,
// and without looking at it, a discrete-event simulation gives every operation a start and an end:
// it becomes ready when it is enqueued (plus the launch time), everything it depends on has ended
// and its stream is not held; its engine serves in the order of readiness, then of the enqueue.
// The simulation is advanced only to the host's present time, since what the host enqueues later is
// ready later than that and cannot change what was decided; a host that waits stands still until
// what it waits for ends, so then the simulation may run up to that end. An answer thus depends on
// the sequence of calls alone, never on real time.
#ifndef RESIDENCY_CSRC_SIMCUDA_CLOCK_H
#define RESIDENCY_CSRC_SIMCUDA_CLOCK_H

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "csrc/simcuda/operation.h"
#include "csrc/simcuda/timeline.h"

namespace simcuda {

struct Device;

// A part of a card that does one thing at a time. Guarded by the clock's mutex.
struct Engine {
  Device* device = nullptr;
  uint64_t free_ns = 0;
  std::vector<OperationPtr> ready;  // a heap; the front is served next
};

// Thread-safe. Functions with a Lock parameter want `mutex` held.
class Clock {
 public:
  using Lock = std::unique_lock<std::mutex>;

  // Guards the model and, so that both have one order, what enqueues on streams, graphs included.
  std::mutex mutex;

  uint64_t now() const { return now_ns_.load(std::memory_order_relaxed); }
  // The host works for so long.
  void pass(uint64_t duration_ns) { now_ns_.fetch_add(duration_ns, std::memory_order_relaxed); }

  // Puts an operation on the clock, after `dependencies`, which may have null elements.
  void add(Lock&, const OperationPtr& operation, const std::vector<OperationPtr>& dependencies);
  // Keeps an operation that has not started from starting, and lets it start from the present on.
  void close_gate(Lock&, Operation& operation);
  void open_gate(Lock&, const OperationPtr& operation);
  // Decides all starts up to the present.
  void advance(Lock&);
  bool is_done(Lock&, const OperationPtr& operation);

  // The host waits until all have ended; really, while one of them is held. Returns the modelled
  // time it waited.
  uint64_t wait(Lock& lock, const std::vector<OperationPtr>& operations);
  // Nothing is waited for any more, as the process ends.
  void abandon();

  // When all engines and streams of a device (null: all devices) would be done if nothing more
  // were enqueued.
  uint64_t end_of(Lock&, const Device* device);
  // True when no gate is before it.
  bool would_end(Lock&, const Operation& operation);

  Timeline timeline;

 private:
  bool start_next(uint64_t limit_ns);
  void resolve(const OperationPtr& operation, uint64_t start_ns);
  void satisfy(const OperationPtr& operation, uint64_t at_ns, std::vector<OperationPtr>& resolved);
  void account(Operation& operation);
  void remember(const OperationPtr& operation);
  void raise_to(uint64_t at_ns);
  void settle(const OperationPtr& operation, uint64_t at_ns);

  // Runs the simulation to its end, calls `look`, and puts everything back.
  template <class Look>
  void try_out(Look look);

  // States to put back, the oldest last.
  using Trial = std::vector<std::pair<OperationPtr, ModelState>>;

  std::atomic<uint64_t> now_ns_{0};
  std::condition_variable gate_opened_;
  std::vector<Engine*> busy_;  // engines with something ready
  Trial* trial_ = nullptr;
  uint64_t num_gated_ = 0;
  bool abandoned_ = false;
  uint64_t next_sequence_ = 1;
};

}  // namespace simcuda

#endif
