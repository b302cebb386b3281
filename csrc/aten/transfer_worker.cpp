#include "csrc/aten/transfer_worker.h"

#include <array>
#include <chrono>
#include <cstdlib>
#include <list>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include <pthread.h>

#include "csrc/core/fork.h"
#include "csrc/core/keep_for_ever.h"
#include "residency/core/errors.h"

namespace residency {

void TransferGroup::begin() {
  const std::lock_guard lock(mutex_);
  ++num_outstanding_;
}

void TransferGroup::end() {
  const std::lock_guard lock(mutex_);
  if (--num_outstanding_ == 0) {
    idle_.notify_all();
  }
}

bool TransferGroup::is_idle() {
  const std::lock_guard lock(mutex_);
  return num_outstanding_ == 0;
}

void TransferGroup::wait_until_idle() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return num_outstanding_ == 0; });
}

namespace {

/// What the calling thread is, where it is a worker's.
struct Here {
  const void* state = nullptr;
  FileIo* io = nullptr;
};
thread_local Here t_here;

}  // namespace

// Owned by the worker and by its thread, so that a thread that was let go never looks at anything
// that is gone.
struct TransferWorker::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::condition_variable left;  // by the thread: it has nothing to do, or is gone
  std::list<Work> queue;
  bool stopping = false;
  bool is_at_work = false;
  bool has_left = false;
  std::thread thread;
  const std::uint64_t generation = device_generation();

  void run(Kind kind) {
    constexpr std::array kNames = {"residency-disk", "residency-stage", "residency-ahead",
                                   "residency-pace", "residency-left"};
    pthread_setname_np(pthread_self(), kNames.at(static_cast<std::size_t>(kind)));
    constexpr auto kPatience = std::chrono::microseconds(50);
    FileIo io;
    t_here = {this, &io};
    std::list<Work> work;         // a node of the queue, as putting it back must not fail
    std::size_t num_stalled = 0;  // that were put back one after the other
    for (;;) {
      {
        std::unique_lock lock(mutex);
        is_at_work = false;
        queue.splice(queue.end(), work);
        if (num_stalled != 0 && num_stalled >= queue.size()) {
          changed.wait_for(lock, kPatience);
          num_stalled = 0;
        }
        if (queue.empty()) {
          left.notify_all();
        }
        const auto is_exiting = [this] { return generation != device_generation(); };
        changed.wait(lock, [&] { return stopping || !queue.empty() || is_exiting(); });
        if (queue.empty() || is_exiting()) {
          has_left = true;
          left.notify_all();
          return;
        }
        work.splice(work.end(), queue, queue.begin());
        is_at_work = true;
      }
      if (work.front()(io)) {
        work.clear();
        num_stalled = 0;
      } else {
        ++num_stalled;
      }
    }
  }
};

struct TransferWorker::Registry {
  std::mutex mutex;
  std::array<std::weak_ptr<TransferWorker>, TransferWorker::kNumKinds> workers;
  std::uint64_t generation = 0;
  // Also of those that were let go of, while their threads go on.
  std::vector<std::weak_ptr<State>> known;
};

// Never destroyed: static objects of others may still use it while the process ends.
TransferWorker::Registry& TransferWorker::registry() {
  static auto* const instance = [] {
    auto* const made = new Registry;
    // A fork while another thread holds the mutex would leave it locked in the child for ever.
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] { registry().mutex.unlock(); });
    return made;
  }();
  return *instance;
}

void TransferWorker::end_with_process() {
  (void)std::atexit([] { end_all(); });
}

/// What is under way may come to its end, within a time; what is stuck is left alone then.
void TransferWorker::end_all() noexcept {
  constexpr auto kMost = std::chrono::milliseconds(1500);
  const auto until = std::chrono::steady_clock::now() + kMost;
  const std::uint64_t generation = device_generation();
  std::vector<std::shared_ptr<State>> states;
  {
    const std::lock_guard lock(registry().mutex);
    for (const auto& each : registry().known) {
      std::shared_ptr<State> state = each.lock();
      // Otherwise its thread has ended, is the parent's, or is this one.
      if (state != nullptr && state->generation == generation && state.get() != t_here.state) {
        states.push_back(std::move(state));
      }
    }
  }
  for (const auto& state : states) {
    std::unique_lock lock(state->mutex);
    state->left.wait_until(lock, until, [&] { return state->queue.empty() && !state->is_at_work; });
  }
  end_devices();
  const auto until_left = std::chrono::steady_clock::now() + kMost;
  for (const auto& state : states) {
    std::unique_lock lock(state->mutex);
    state->changed.notify_all();
    std::thread thread;
    if (!state->thread.joinable()) {  // not begun, or let go of
      state->left.wait_until(lock, until_left, [&] { return !state->is_at_work; });
    } else if (state->left.wait_until(lock, until_left, [&] { return state->has_left; })) {
      thread = std::move(state->thread);
      lock.unlock();
      thread.join();
    }
  }
}

std::shared_ptr<TransferWorker> TransferWorker::shared(Kind kind) {
  Registry& shared = registry();
  const std::lock_guard lock(shared.mutex);
  if (shared.generation != device_generation()) {
    shared.workers = {};
    shared.generation = device_generation();
  }
  std::weak_ptr<TransferWorker>& known = shared.workers[static_cast<std::size_t>(kind)];
  auto worker = known.lock();
  if (worker == nullptr) {
    worker = std::make_shared<TransferWorker>(kind);
    std::erase_if(shared.known, [](const auto& each) { return each.expired(); });
    shared.known.push_back(worker->state_);
    static std::once_flag once;
    std::call_once(once, end_with_process);
    known = worker;
  }
  return worker;
}

TransferWorker::TransferWorker(Kind kind)
    : kind_(kind), state_(std::make_shared<State>()), generation_(device_generation()) {}

TransferWorker::~TransferWorker() {
  if (generation_ != device_generation()) {
    // The thread and whoever held the mutex stayed in the parent; the state is left as it is.
    keep_for_ever(std::move(state_));
    return;
  }
  std::thread thread;
  {
    const std::lock_guard lock(state_->mutex);
    state_->stopping = true;
    thread = std::move(state_->thread);
  }
  state_->changed.notify_all();
  if (thread.joinable()) {
    thread.detach();
  }
}

void TransferWorker::submit(Work work) {
  const std::lock_guard lock(state_->mutex);
  state_->queue.push_back(std::move(work));
  if (!state_->thread.joinable()) {
    try {
      state_->thread = std::thread([state = state_, kind = kind_] { state->run(kind); });
    } catch (...) {
      state_->queue.pop_back();
      throw;
    }
  }
  state_->changed.notify_one();
}

bool TransferWorker::run_here(const Work& work) {
  return t_here.state == state_.get() && work(*t_here.io);
}

void TransferWorker::release_and_join(std::shared_ptr<TransferWorker> worker) noexcept {
  if (worker == nullptr || worker->generation_ != device_generation()) {
    return;
  }
  std::thread thread;
  const auto state = worker->state_;
  {
    Registry& shared = registry();
    const std::lock_guard lock(shared.mutex);
    if (worker.use_count() != 1) {
      worker.reset();  // inside the mutex, so that exactly one of several releases sees the last
      return;
    }
    // Under the registry's mutex nobody can find it any more.
    const std::lock_guard state_lock(state->mutex);
    state->stopping = true;
    thread = std::move(state->thread);
    shared.workers[static_cast<std::size_t>(worker->kind_)].reset();
  }
  state->changed.notify_all();
  if (thread.joinable()) {
    thread.join();
  }
}

namespace {

thread_local const WorkerFence* t_ended = nullptr;

}  // namespace

WorkerFence::WorkerFence() : generation_(device_generation()) {}

bool WorkerFence::is_orphan() const noexcept {
  return generation_ != device_generation() && Fence::poll() == FenceStatus::kPending;
}

WorkerFence::Ended::Ended(const WorkerFence& fence) noexcept {
  t_ended = &fence;
}

WorkerFence::Ended::~Ended() {
  t_ended = nullptr;
}

bool WorkerFence::has_ended_here() const noexcept {
  return t_ended == this;
}

FenceStatus WorkerFence::poll() const noexcept {
  if (has_ended_here()) {
    return FenceStatus::kDone;
  }
  return is_orphan() ? FenceStatus::kFailed : Fence::poll();
}

void WorkerFence::wait() {
  if (has_ended_here() || is_orphan()) {
    return;
  }
  if (hurry_ != nullptr && Fence::poll() == FenceStatus::kPending) {
    hurry_();
  }
  // The process may come to its end meanwhile, and the thread with it.
  while (Fence::poll() == FenceStatus::kPending && !is_orphan()) {
    wait_for(std::chrono::milliseconds(100));
  }
}

std::exception_ptr WorkerFence::error() const {
  return is_orphan() ? std::make_exception_ptr(ForkError(
                           "this process was forked, or exits, while the transfer was in flight; "
                           "the thread that carries it out does not exist here any more"))
                     : Fence::error();
}

}  // namespace residency
