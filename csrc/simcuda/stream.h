// Streams: an order of operations, and the worker thread that really runs them.
#ifndef RESIDENCY_CSRC_SIMCUDA_STREAM_H
#define RESIDENCY_CSRC_SIMCUDA_STREAM_H

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include "csrc/simcuda/clock.h"
#include "csrc/simcuda/operation.h"

namespace simcuda {

struct Capture;
struct Device;
struct GraphNode;

struct StreamOptions {
  unsigned flags = cudaStreamDefault;
  int priority = 0;
  bool legacy = false;  // the device's default stream
};

// Thread-safe; functions with a Lock parameter want the clock's mutex held. The worker thread is
// started by the first operation, since torch makes many streams that it never uses.
class Stream : public std::enable_shared_from_this<Stream> {
 public:
  Stream(Device& stream_device, uint64_t stream_id, StreamOptions options);

  // Enqueues after all earlier operations of the stream, after what the default stream's rules
  // add, and after `also_after`.
  OperationPtr enqueue(Clock::Lock& lock, OperationSpec spec,
                       std::vector<OperationPtr> also_after = {});
  // Enqueues a part of a graph: on the clock it comes after `dependencies` alone. It really runs
  // in the order of the calls, which is one of the orders that the graph allows.
  OperationPtr enqueue_branch(Clock::Lock& lock, OperationSpec spec,
                              std::vector<OperationPtr> dependencies);

  // What the default stream's rules put before an operation of this stream.
  bool is_blocking() const { return (flags & cudaStreamNonBlocking) == 0; }

  void hold(Clock::Lock& lock);
  // The operations that it lets run; the last is what a caller waits for.
  OperationPtr step(Clock::Lock& lock, uint64_t count);
  void release(Clock::Lock& lock);
  uint64_t num_pending(Clock::Lock& lock) const;

  // No operation follows; the worker ends when it has run all.
  void close(Clock::Lock& lock);

  // For the end of the process, see Note [Work in flight at the end]: lets go who waits for it.
  void abandon();
  // Waits until the worker is in no operation. False when it still is after its patience.
  bool wait_until_idle();

  // Waits until the operation of that index really ran, at most so long.
  bool wait_until_run(uint64_t index, int64_t timeout_ms = -1);
  bool has_run(uint64_t index) const;

  Device& device;
  const uint64_t id;
  const unsigned flags;
  const int priority;
  const bool is_legacy;

  // Guarded by the clock's mutex.
  OperationPtr last;
  std::shared_ptr<Capture> capture;  // it is being captured
  std::vector<GraphNode*> capture_tail;

 private:
  void push(Clock::Lock& lock, const OperationPtr& operation,
            const std::vector<OperationPtr>& dependencies);
  void add_default_stream_rules(std::vector<OperationPtr>& dependencies) const;
  void count(const OperationSpec& spec);
  void drop_resolved();
  void drop_finished_orphans(Clock::Lock& lock);
  void set_run_limit(uint64_t limit);
  static void work(std::shared_ptr<Stream> self);
  OperationPtr next_to_run();
  void run(Operation& operation, uint64_t& random);
  [[noreturn]] void rest();
  void finish_one();

  // Guarded by the clock's mutex.
  uint64_t num_enqueued_ = 0;
  bool held_ = false;
  uint64_t steps_left_ = 0;
  std::deque<OperationPtr> unresolved_;  // in order; resolved ones are dropped when it is used

  mutable std::mutex queue_mutex_;
  std::condition_variable work_;
  std::condition_variable ran_;
  std::deque<OperationPtr> queue_;
  uint64_t run_limit_ = UINT64_MAX;  // index of the last operation that may run
  uint64_t num_run_ = 0;
  bool closed_ = false;
  bool has_worker_ = false;
  std::thread::id worker_;
  const Operation* running_ = nullptr;
};

using StreamPtr = std::shared_ptr<Stream>;

// The stream of a handle, of a device that works; or why there is none.
cudaError_t open_stream(cudaStream_t handle, StreamPtr& stream);
// The stream of a handle; null and the special handles are the current device's default stream
// (a per-thread default stream is not told apart from it). Null when there is none.
StreamPtr find_stream(cudaStream_t handle);

// Whether the process is ending, so that nothing runs and nothing is waited for any more.
bool work_is_abandoned();
// Threads but the one that ends the process: the rest of the time that they usually have.
void stand_still_at_the_end();

// Whether the clock sees work left on a device.
bool is_busy(Clock::Lock& lock, const Device& device);
// The host waits for operations in a call that counts as synchronising on `device`, which had work
// left, or not, when the call was entered.
void synchronize(Device& device, const std::vector<OperationPtr>& operations, bool was_busy);
// The same, entered just now.
void synchronize(Device& device, const std::vector<OperationPtr>& operations);
// The same for all that a device has to do.
void synchronize_device(Device& device);
void synchronize_all_devices();
// Waits, off the clock, until nothing that can run now still uses memory that is about to go.
// Another device may be copying from or to it.
void let_running_operations_finish();

}  // namespace simcuda

#endif
