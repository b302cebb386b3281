#include "csrc/simcuda/stream.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <set>
#include <string>
#include <thread>

#include <pthread.h>
#include <unistd.h>

#include "csrc/simcuda/activity.h"
#include "csrc/simcuda/device.h"
#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/graph.h"
#include "csrc/simcuda/handover.h"
#include "csrc/simcuda/runtime.h"
#include "csrc/simcuda/sanitizer.h"
#include "csrc/simcuda/settings.h"

namespace simcuda {
namespace {

// Of a xorshift generator; only the real interleaving depends on it.
uint64_t next_random(uint64_t& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

void sleep_at_most(uint64_t limit_ns, uint64_t& random) {
  if (limit_ns == 0) return;
  std::this_thread::sleep_for(std::chrono::nanoseconds(next_random(random) % (limit_ns + 1)));
}

// Note [Work in flight at the end]
// A GPU abandons what is still in flight when the process ends. Workers must not go on either:
// while the program's static objects are destroyed, kernels would run on a library (libtorch) that
// is being taken down. So once there is a worker, whose kernels' libraries are then loaded, a
// handler is registered; it runs before the destructors of all that was constructed earlier. It
// makes each worker stop after the operation that it is in, waits for that, and breaks the devices:
// later calls, whose effect CUDA leaves undefined, get cudaErrorCudartUnloading and wait for
// nothing. Other threads, waiting ones too, first stand still for so long that the process is
// usually gone: Python's could not go on. In the end they are let go, as a destructor may join
// them.
struct Workers {
  std::mutex mutex;
  std::set<Stream*> streams;  // that have a worker
  bool handler_registered = false;
};

Workers& workers() {
  static Workers* workers = new Workers;
  return *workers;
}

std::atomic<bool> g_abandoned{false};
thread_local bool t_ends_process = false;

void abandon_work() {
  // A forked child has no workers, and locks that nobody will release.
  if (forked_after_use()) return;
  Hidden hidden;
  t_ends_process = true;
  g_abandoned = true;
  for (const auto& device : runtime().devices) {
    int intact = cudaSuccess;
    device->broken.compare_exchange_strong(intact, cudaErrorCudartUnloading);
  }
  runtime().clock.abandon();
  std::lock_guard lock(workers().mutex);
  for (Stream* stream : workers().streams) stream->abandon();
  for (Stream* stream : workers().streams) stream->wait_until_idle();
}

void add_worker(Stream* stream) {
  std::lock_guard lock(workers().mutex);
  workers().streams.insert(stream);
  if (workers().handler_registered) return;
  workers().handler_registered = true;
  atexit(abandon_work);
}

void remove_worker(Stream* stream) {
  std::lock_guard lock(workers().mutex);
  workers().streams.erase(stream);
}

}  // namespace

bool work_is_abandoned() {
  return g_abandoned.load(std::memory_order_relaxed);
}

void stand_still_at_the_end() {
  if (work_is_abandoned() && !t_ends_process) std::this_thread::sleep_for(std::chrono::seconds(1));
}

// ---- Operations

void Operation::wait_until_run() {
  stream->wait_until_run(index);
  order_after(this);
}

bool Operation::wait_until_run_or_blocked() {
  constexpr int64_t kPatienceMs = 1000;
  bool may_block = runtime().num_host_functions.load() > 0;
  bool ran = stream->wait_until_run(index, may_block ? kPatienceMs : -1);
  stand_still_at_the_end();
  if (!ran) {
    mark_order_undetermined();
    return false;
  }
  order_after(this);
  return true;
}

bool Operation::has_run() const {
  return stream->has_run(index);
}

// ---- Streams: enqueuing

Stream::Stream(Device& stream_device, uint64_t stream_id, StreamOptions options)
    : device(stream_device),
      id(stream_id),
      flags(options.flags),
      priority(options.priority),
      is_legacy(options.legacy) {}

void Stream::add_default_stream_rules(std::vector<OperationPtr>& dependencies) const {
  if (!is_blocking()) return;
  if (!is_legacy) {
    dependencies.push_back(device.default_stream->last);
    return;
  }
  for (const StreamPtr& other : device.streams) {
    if (other.get() != this && other->is_blocking()) dependencies.push_back(other->last);
  }
}

OperationPtr Stream::enqueue(Clock::Lock& lock, OperationSpec spec,
                             std::vector<OperationPtr> also_after) {
  add_default_stream_rules(also_after);
  also_after.push_back(last);
  auto operation = std::make_shared<Operation>(std::move(spec), shared_from_this());
  push(lock, operation, also_after);
  last = operation;
  return operation;
}

OperationPtr Stream::enqueue_branch(Clock::Lock& lock, OperationSpec spec,
                                    std::vector<OperationPtr> dependencies) {
  auto operation = std::make_shared<Operation>(std::move(spec), shared_from_this());
  push(lock, operation, dependencies);
  return operation;
}

void Stream::push(Clock::Lock& lock, const OperationPtr& operation,
                  const std::vector<OperationPtr>& dependencies) {
  Clock& clock = runtime().clock;
  clock.advance(lock);
  observe_enqueue(lock, *operation);
  count(operation->spec);
  operation->index = ++num_enqueued_;
  operation->gated = held_ && steps_left_ == 0;
  if (held_ && steps_left_ > 0) --steps_left_;
  bool gated = operation->gated;
  for (const OperationPtr& dependency : dependencies) {
    if (dependency && dependency->stream.get() != this) operation->waits_for.push_back(dependency);
  }
  drop_resolved();
  unresolved_.push_back(operation);
  clock.add(lock, operation, dependencies);
  order_before(operation.get());

  bool start_worker = false;
  {
    std::lock_guard queue_lock(queue_mutex_);
    queue_.push_back(operation);
    if (held_ && !gated) run_limit_ = operation->index;
    start_worker = !has_worker_;
    has_worker_ = true;
  }
  if (start_worker) {
    add_worker(this);
    std::thread(work, shared_from_this()).detach();
  } else {
    work_.notify_one();
  }
}

void Stream::count(const OperationSpec& spec) {
  if (spec.kind == OperationKind::kKernel) ++device.counters.kernels;
  if (spec.kind == OperationKind::kHostFunction) ++runtime().num_host_functions;
  if (spec.kind != OperationKind::kCopy || spec.direction < 0) return;
  // Host copies are counted where the device memory is, which their engine belongs to.
  simcuda_counters& counters = spec.engine->device->counters;
  counters.copies[spec.direction] += spec.num_copies;
  counters.copied_bytes[spec.direction] += spec.num_bytes;
  if (!spec.pageable) return;
  ++counters.pageable_copies[spec.direction];
  counters.pageable_bytes[spec.direction] += spec.num_bytes;
}

void Stream::drop_resolved() {
  while (!unresolved_.empty() && unresolved_.front()->model.resolved) unresolved_.pop_front();
}

// ---- Streams: holding

void Stream::set_run_limit(uint64_t limit) {
  std::lock_guard queue_lock(queue_mutex_);
  run_limit_ = limit;
  work_.notify_one();
}

void Stream::hold(Clock::Lock& lock) {
  Clock& clock = runtime().clock;
  clock.advance(lock);
  if (held_) return;
  held_ = true;
  steps_left_ = 0;
  drop_resolved();
  // What has started on the clock is done by it, so it really runs too.
  uint64_t num_started = unresolved_.empty() ? num_enqueued_ : unresolved_.front()->index - 1;
  set_run_limit(num_started);
  for (const OperationPtr& operation : unresolved_) clock.close_gate(lock, *operation);
}

OperationPtr Stream::step(Clock::Lock& lock, uint64_t num_steps) {
  Clock& clock = runtime().clock;
  clock.advance(lock);
  OperationPtr last_stepped;
  for (const OperationPtr& operation : unresolved_) {
    if (num_steps == 0) break;
    if (!operation->gated) continue;
    clock.open_gate(lock, operation);
    last_stepped = operation;
    --num_steps;
  }
  steps_left_ += held_ ? num_steps : 0;
  if (last_stepped) set_run_limit(last_stepped->index);
  return last_stepped;
}

void Stream::release(Clock::Lock& lock) {
  if (!held_) return;
  step(lock, UINT64_MAX);
  held_ = false;
  steps_left_ = 0;
  set_run_limit(UINT64_MAX);
}

uint64_t Stream::num_pending(Clock::Lock&) const {
  std::lock_guard queue_lock(queue_mutex_);
  return num_enqueued_ - num_run_;
}

// Synchronising the device drops them too, but a program may never do that. A race checker keeps
// them, as what synchronises the device is ordered after them.
void Stream::drop_finished_orphans(Clock::Lock& lock) {
  if (race_checker_present()) return;
  std::erase_if(device.orphans, [&](const OperationPtr& orphan) {
    return runtime().clock.is_done(lock, orphan) && orphan->has_run();
  });
}

void Stream::close(Clock::Lock& lock) {
  release(lock);
  // The last operation refers to its stream, so that keeping it would keep both for ever.
  if (last) device.orphans.push_back(std::move(last));
  last = nullptr;
  drop_finished_orphans(lock);
  unresolved_.clear();
  std::lock_guard queue_lock(queue_mutex_);
  closed_ = true;
  work_.notify_one();
}

// ---- Streams: really running

bool Stream::wait_until_run(uint64_t index, int64_t timeout_ms) {
  std::unique_lock queue_lock(queue_mutex_);
  auto ran = [&] { return num_run_ >= index || work_is_abandoned(); };
  if (timeout_ms >= 0) return ran_.wait_for(queue_lock, std::chrono::milliseconds(timeout_ms), ran);
  ran_.wait(queue_lock, ran);
  return true;
}

bool Stream::has_run(uint64_t index) const {
  std::lock_guard queue_lock(queue_mutex_);
  return num_run_ >= index;
}

OperationPtr Stream::next_to_run() {
  std::unique_lock queue_lock(queue_mutex_);
  work_.wait(queue_lock,
             [&] { return queue_.empty() ? closed_ : queue_.front()->index <= run_limit_; });
  if (work_is_abandoned()) {
    queue_lock.unlock();
    rest();
  }
  if (queue_.empty()) return nullptr;
  OperationPtr operation = std::move(queue_.front());
  queue_.pop_front();
  worker_ = std::this_thread::get_id();
  running_ = operation.get();
  return operation;
}

void Stream::abandon() {
  std::lock_guard queue_lock(queue_mutex_);
  ran_.notify_all();
}

bool Stream::wait_until_idle() {
  // A host function may wait for what the ending program will not do any more. A kernel ends by
  // itself, unless it is a test's that does not.
  constexpr auto kPatience = std::chrono::seconds(60);
  constexpr auto kPatienceWithHostFunction = std::chrono::seconds(1);
  std::unique_lock queue_lock(queue_mutex_);
  if (!running_ || worker_ == std::this_thread::get_id()) return true;
  bool host_function = running_->spec.kind == OperationKind::kHostFunction;
  return ran_.wait_for(queue_lock, host_function ? kPatienceWithHostFunction : kPatience,
                       [&] { return !running_; });
}

// The worker stands still until the process is gone. It does not end, since that would destroy what
// libraries keep for the thread.
void Stream::rest() {
  {
    std::lock_guard queue_lock(queue_mutex_);
    running_ = nullptr;
    ran_.notify_all();
  }
  for (;;) pause();
}

void Stream::run(Operation& operation, uint64_t& random) {
  {
    SecretOrder secret(operation.spec.secret_order);
    for (const OperationPtr& other : operation.waits_for) other->wait_until_run();
  }
  operation.waits_for.clear();
  order_after(&operation);
  sleep_at_most(time_ns(kJitter), random);
  if (work_is_abandoned()) rest();
  std::shared_ptr<Body> body = std::move(operation.spec.body);
  if (!body) return;
  Visible visible;
  cudaError_t error = (*body)();
  body.reset();
  if (operation.spec.kind == OperationKind::kHostFunction) --runtime().num_host_functions;
  int intact = cudaSuccess;
  if (error != cudaSuccess) device.broken.compare_exchange_strong(intact, error);
}

void Stream::finish_one() {
  std::lock_guard queue_lock(queue_mutex_);
  ++num_run_;
  running_ = nullptr;
  ran_.notify_all();
}

void Stream::work(std::shared_ptr<Stream> self) {
  Hidden hidden;
  std::string name = "sim" + std::to_string(self->device.ordinal) + "." + std::to_string(self->id);
  pthread_setname_np(pthread_self(), name.c_str());
  // Such a thread does not push the one that wakes it off its core, so that enqueuing a copy takes
  // no longer on a busy machine. Without it everything works too.
  sched_param unused{};
  pthread_setschedparam(pthread_self(), SCHED_BATCH, &unused);
  set_current_device(self->device.ordinal);
  // Never zero, which the generator would stay at.
  uint64_t random = settings().seed.load() * 0x9e3779b97f4a7c15 + self->id * 2 + 1;
  while (OperationPtr operation = self->next_to_run()) {
    self->run(*operation, random);
    order_before(operation.get());
    self->finish_one();
  }
  remove_worker(self.get());
  if (work_is_abandoned()) self->rest();
}

// ---- Waiting

cudaError_t open_stream(cudaStream_t handle, StreamPtr& stream) {
  stream = find_stream(handle);
  if (!stream) return cudaErrorInvalidResourceHandle;
  stand_still_at_the_end();
  return static_cast<cudaError_t>(stream->device.broken.load());
}

StreamPtr find_stream(cudaStream_t handle) {
  bool is_default =
      handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread;
  if (is_default) return current_device().default_stream;
  return runtime().streams.find(handle);
}

bool is_busy(Clock::Lock& lock, const Device& device) {
  std::vector<OperationPtr> operations = last_operations(device);
  return std::any_of(operations.begin(), operations.end(), [&](const OperationPtr& last) {
    return !runtime().clock.is_done(lock, last);
  });
}

void synchronize(Device& device, const std::vector<OperationPtr>& operations) {
  bool was_busy = false;
  {
    Clock::Lock lock(runtime().clock.mutex);
    was_busy = is_busy(lock, device);
  }
  synchronize(device, operations, was_busy);
}

void synchronize(Device& device, const std::vector<OperationPtr>& operations, bool was_busy) {
  if (work_is_abandoned()) return stand_still_at_the_end();
  Clock& clock = runtime().clock;
  {
    Clock::Lock lock(clock.mutex);
    ++device.counters.host_syncs;
    if (was_busy) ++device.counters.busy_host_syncs;
    device.counters.blocked_time += clock.wait(lock, operations);
  }
  for (const OperationPtr& operation : operations) {
    if (operation) operation->wait_until_run();
  }
  stand_still_at_the_end();
  observe_wait();
}

void synchronize_device(Device& device) {
  std::vector<OperationPtr> operations;
  {
    Clock::Lock lock(runtime().clock.mutex);
    operations = last_operations(device);
  }
  synchronize(device, operations);
  Clock::Lock lock(runtime().clock.mutex);
  std::erase_if(device.orphans, [&](const OperationPtr& orphan) {
    return std::find(operations.begin(), operations.end(), orphan) != operations.end();
  });
}

void synchronize_all_devices() {
  for (const auto& device : runtime().devices) synchronize_device(*device);
}

void let_running_operations_finish() {
  std::vector<OperationPtr> operations;
  {
    Clock& clock = runtime().clock;
    Clock::Lock lock(clock.mutex);
    for (const auto& device : runtime().devices) {
      for (OperationPtr& last : last_operations(*device)) {
        if (last && clock.would_end(lock, *last)) operations.push_back(std::move(last));
      }
    }
  }
  for (const OperationPtr& operation : operations) {
    operation->stream->wait_until_run(operation->index);
  }
  stand_still_at_the_end();
}

}  // namespace simcuda
