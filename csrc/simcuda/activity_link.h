// What the simulated CUPTI asks of the simulated runtime, across the libraries: to be told of
// operations while a profiler records. Not for programs.
#ifndef RESIDENCY_CSRC_SIMCUDA_ACTIVITY_LINK_H
#define RESIDENCY_CSRC_SIMCUDA_ACTIVITY_LINK_H

#include <stdint.h>

extern "C" {

enum simcuda_activity_kind {
  SIMCUDA_ACTIVITY_NONE,  // an operation that only orders others
  SIMCUDA_ACTIVITY_KERNEL,
  SIMCUDA_ACTIVITY_COPY,
  SIMCUDA_ACTIVITY_MEMSET
};

// What the observer knows an operation by. The runtime keeps it, and does not look at it.
struct simcuda_activity_tag {
  uint64_t id;  // 0: the observer does not want to hear of it again
  int64_t host_offset_ns;
};

struct simcuda_activity {
  int kind;
  int direction;  // of a copy: SIMCUDA_H2D..., -1 within host memory
  int pageable;
  int device;
  uint64_t stream;
  const char* name;  // lives as long as the process
  uint64_t num_bytes;
  uint64_t start_ns;  // on the virtual clock
  uint64_t end_ns;
  struct simcuda_activity_tag tag;
};

struct simcuda_observer {
  // An operation is about to be enqueued by the calling thread; `idle`: nothing is left to do on
  // any device. Called with the clock's mutex held, as `settled` is: neither may call the runtime.
  struct simcuda_activity_tag (*enqueued)(int kind, uint64_t now_ns, int idle);
  // The start and end of an operation with a tag are decided.
  void (*settled)(const struct simcuda_activity* activity);
  // The calling thread has waited for the device, until then on the virtual clock.
  void (*waited)(uint64_t now_ns);
};

// There is one observer, which lives as long as the process; null: none.
void simcuda_observe(const struct simcuda_observer* observer);
// Decides, and tells of, all that has started by the present.
void simcuda_settle_activities(void);
// One line on stderr, as the runtime says it.
void simcuda_complain(const char* line);

}  // extern "C"

#endif
