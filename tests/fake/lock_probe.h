#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>

namespace residency {
class Manager;
}

namespace residency::fake {

/// Finds out whether the calling thread holds a manager's mutex, by asking the manager something
/// from another thread: when no answer comes in time, it does.
///
/// Thread-safe.
class LockProbe {
 public:
  LockProbe(std::weak_ptr<Manager> manager, std::chrono::milliseconds patience);
  ~LockProbe();
  LockProbe(const LockProbe&) = delete;
  LockProbe& operator=(const LockProbe&) = delete;

  /// False when the manager did not answer within the time given.
  [[nodiscard]] bool answers();

 private:
  void run();
  std::weak_ptr<Manager> manager_;
  std::chrono::milliseconds patience_;
  std::mutex turn_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool asked_ = false;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace residency::fake
