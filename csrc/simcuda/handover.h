// Whether one host thread at a time enqueues, so that figures repeat.
#ifndef RESIDENCY_CSRC_SIMCUDA_HANDOVER_H
#define RESIDENCY_CSRC_SIMCUDA_HANDOVER_H

namespace simcuda {

// A call that moves the virtual clock. Two of two threads at once, or a change of threads while the
// former still runs, leave the order to chance; that is remembered for simcuda_deterministic.
//
// Note [Hand-over]
// Autograd's thread enqueues the backward pass while the thread that called it sleeps, and the
// other way round: one thread at a time. When the calling thread changes, the former one is looked
// up in /proc: if it has ended or sleeps, it handed over; it gets 100 ms to fall asleep. A Python
// thread that waits for the interpreter lock sleeps too, but in a futex wait with a timeout, which
// /proc/self/task/<id>/syscall shows: it will go on by itself, so that is no hand-over. Where the
// kernel does not offer that file, a sleeping thread counts as having handed over. Autograd's
// thread waits for that lock too, to drop the callbacks of a backward pass that has ended: when the
// caller is in no backward pass itself, it was that one, and nothing of it is left to enqueue.
class [[nodiscard]] ClockCall {
 public:
  explicit ClockCall(bool moves_clock);
  ~ClockCall();
  ClockCall(const ClockCall&) = delete;
  ClockCall& operator=(const ClockCall&) = delete;

 private:
  bool entered_;
};

// How to ask whether the calling thread is in a backward pass; told by the operator layer.
void ask_for_backward_by(int (*in_backward)());

bool one_thread_at_a_time();
// The order was seen to depend on real time.
void mark_order_undetermined();

}  // namespace simcuda

#endif
