#include "tests/fake/lock_probe.h"

#include <chrono>
#include <utility>

#include "residency/core/errors.h"
#include "residency/core/manager.h"

namespace residency::fake {

LockProbe::LockProbe(std::weak_ptr<Manager> manager, std::chrono::milliseconds patience)
    : manager_(std::move(manager)), patience_(patience), thread_([this] { run(); }) {}

LockProbe::~LockProbe() {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
  }
  changed_.notify_all();
  // The probe may hold the last reference on the manager, whose end then reaches us on its thread.
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

bool LockProbe::answers() {
  if (thread_.get_id() == std::this_thread::get_id()) {
    return true;
  }
  const std::lock_guard turn(turn_);
  std::unique_lock lock(mutex_);
  asked_ = true;
  changed_.notify_all();
  // The system clock, because ThreadSanitizer does not know waits by the steady one.
  return changed_.wait_until(lock, std::chrono::system_clock::now() + patience_,
                             [this] { return !asked_; });
}

void LockProbe::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return asked_ || stopped_; });
    if (stopped_) {
      return;
    }
    lock.unlock();
    if (const auto manager = manager_.lock()) {
      try {
        static_cast<void>(manager->locations());
        static_cast<void>(manager->state_version());
      } catch (const Error&) {
        // A closed manager has answered as well.
      }
    }
    lock.lock();
    asked_ = false;
    changed_.notify_all();
  }
}

}  // namespace residency::fake
