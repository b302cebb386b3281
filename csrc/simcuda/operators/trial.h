#ifndef RESIDENCY_SIMCUDA_OPERATORS_TRIAL_H
#define RESIDENCY_SIMCUDA_OPERATORS_TRIAL_H

#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>

namespace residency::simcuda {

/// The first run of a kernel with arguments of one kind. CUDA's operators refuse wrong arguments in
/// the call, and the device works on; the CPU's kernels, which stand in for them, find some of
/// these when they run. So the call waits for the first run, in real time alone: the clock does not
/// see it. What depends on values (an index out of bounds) breaks the device as an assertion in a
/// kernel does, and so does what fails after the caller has stopped waiting.
class Trial {
 public:
  /// Null where nothing is run now: in a capture, in dry mode, and where jitter looks for races.
  [[nodiscard]] static std::shared_ptr<Trial> begin();

  /// For the worker. False when the error is not the caller's: then it breaks the device.
  [[nodiscard]] bool take_error(std::exception_ptr error);
  void finish();

  /// For the caller: waits while the stream gets on, and throws the error.
  void wait(void* stream);

 private:
  enum class State { kRunning, kFinished, kGivenUp };
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::kRunning;
  std::exception_ptr error_;
};

}  // namespace residency::simcuda

#endif
