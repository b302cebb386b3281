// Where the virtual clock lies on the host's.
//
// Note [Placement]
// A profiler shows the host's calls in real time, and the device's work lies on the virtual clock.
// While a device has work, all of it is shown by one offset, so that durations, gaps, order and
// overlap are those of the model, to the nanosecond. When all devices are idle the offset is taken
// anew, so that the next operation comes after the call that enqueued it; only idle time stretches.
// It never falls, so nothing moves back in time.
// A profiler drops what ends after it was stopped. So where the model is slower than this machine
// (dry mode), a host that waits for the device while a profiler records really waits until then.
#ifndef RESIDENCY_CSRC_SIMCUDA_CUPTI_PLACEMENT_H
#define RESIDENCY_CSRC_SIMCUDA_CUPTI_PLACEMENT_H

#include <cstdint>

namespace simcuda {

// Nanoseconds since 1970, as the profiler counts.
int64_t host_now_ns();

// Not thread-safe.
class Placement {
 public:
  // The next operation takes the offset anew, even when a device has work.
  void restart() { restart_ = true; }
  // Of an operation enqueued at `now_ns` of the virtual clock.
  int64_t offset_at(uint64_t now_ns, bool idle);
  // When a time of the virtual clock is on the host's.
  int64_t host_time(uint64_t at_ns) const { return static_cast<int64_t>(at_ns) + offset_ns_; }

 private:
  int64_t offset_ns_ = 0;
  bool restart_ = true;
};

}  // namespace simcuda

#endif
