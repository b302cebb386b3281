#include "csrc/aten/disk_worker.h"

#include <deque>
#include <new>
#include <thread>
#include <utility>

#include <pthread.h>

#include "csrc/core/fork.h"
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

void TransferGroup::wait_until_idle() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return num_outstanding_ == 0; });
}

// Owned by the worker and by its thread, so that a thread that was let go never looks at anything
// that is gone.
struct DiskWorker::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  bool stopping = false;
  std::thread thread;

  void run() {
    pthread_setname_np(pthread_self(), "residency-disk");
    FileIo io;
    for (;;) {
      Work work;
      {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return stopping || !queue.empty(); });
        if (queue.empty()) {
          return;
        }
        work = std::move(queue.front());
        queue.pop_front();
      }
      work(io);
    }
  }
};

namespace {

struct Registry {
  std::mutex mutex;
  std::weak_ptr<DiskWorker> worker;
  std::uint64_t generation = 0;
};

// Never destroyed: static objects of others may still use it while the process ends.
Registry& registry() {
  static auto* const instance = [] {
    auto* const made = new Registry;
    // A fork while another thread holds the mutex would leave it locked in the child for ever.
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] { registry().mutex.unlock(); });
    return made;
  }();
  return *instance;
}

}  // namespace

std::shared_ptr<DiskWorker> DiskWorker::shared() {
  Registry& shared = registry();
  const std::lock_guard lock(shared.mutex);
  auto worker = shared.worker.lock();
  if (worker == nullptr || shared.generation != fork_generation()) {
    worker = std::make_shared<DiskWorker>();
    shared.worker = worker;
    shared.generation = fork_generation();
  }
  return worker;
}

DiskWorker::DiskWorker() : state_(std::make_shared<State>()), generation_(fork_generation()) {}

DiskWorker::~DiskWorker() {
  if (generation_ != fork_generation()) {
    // The thread and whoever held the mutex stayed in the parent; the state is left as it is.
    new std::shared_ptr<State>(std::move(state_));
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

void DiskWorker::submit(Work work) {
  const std::lock_guard lock(state_->mutex);
  state_->queue.push_back(std::move(work));
  if (!state_->thread.joinable()) {
    try {
      state_->thread = std::thread([state = state_] { state->run(); });
    } catch (...) {
      state_->queue.pop_back();
      throw;
    }
  }
  state_->changed.notify_one();
}

void DiskWorker::release_and_join(std::shared_ptr<DiskWorker> worker) noexcept {
  if (worker == nullptr || worker->generation_ != fork_generation()) {
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
    shared.worker.reset();
  }
  state->changed.notify_all();
  if (thread.joinable()) {
    thread.join();
  }
}

DiskFence::DiskFence() : generation_(fork_generation()) {}

bool DiskFence::is_orphan() const noexcept {
  return generation_ != fork_generation() && Fence::poll() == FenceStatus::kPending;
}

FenceStatus DiskFence::poll() const noexcept {
  return is_orphan() ? FenceStatus::kFailed : Fence::poll();
}

void DiskFence::wait() {
  if (!is_orphan()) {
    Fence::wait();
  }
}

std::exception_ptr DiskFence::error() const {
  return is_orphan() ? std::make_exception_ptr(ForkError(
                           "this process was forked while the transfer was in flight; the thread "
                           "that carries it out exists only in the parent"))
                     : Fence::error();
}

}  // namespace residency
