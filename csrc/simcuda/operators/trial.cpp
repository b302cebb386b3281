#include "csrc/simcuda/operators/trial.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <string_view>
#include <utility>

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/Exception.h>

#include "csrc/simcuda/operators/simulation_mode.h"
#include "residency/simcuda/control.h"

namespace residency::simcuda {
namespace {

// A stream that has not finished one more operation after so long is held, or works for long.
constexpr std::chrono::milliseconds kPatience{200};

// What CUDA's kernels assert, in the words of the CPU's.
bool depends_on_values(const std::exception_ptr& error) {
  static constexpr std::array<std::string_view, 4> kWords{"out of bounds", "index out of range",
                                                          "probability tensor", "between 0 and 1"};
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    const std::string_view text = known.what_without_backtrace();
    return std::ranges::any_of(
        kWords, [&](std::string_view words) { return text.find(words) != std::string_view::npos; });
  } catch (...) {
    return false;
  }
}

}  // namespace

std::shared_ptr<Trial> Trial::begin() {
  const bool runs_now =
      !dry_mode() && std::string_view(simcuda_get("jitter")) == "0ns" &&
      c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
  return runs_now ? std::make_shared<Trial>() : nullptr;
}

bool Trial::take_error(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (state_ != State::kRunning || depends_on_values(error)) {
    return false;
  }
  error_ = std::move(error);
  return true;
}

void Trial::finish() {
  const std::lock_guard lock(mutex_);
  state_ = State::kFinished;
  changed_.notify_all();
}

void Trial::wait(void* stream) {
  std::unique_lock lock(mutex_);
  uint64_t pending = simcuda_pending(stream);
  while (!changed_.wait_for(lock, kPatience, [&] { return state_ == State::kFinished; })) {
    if (const uint64_t left = simcuda_pending(stream); std::exchange(pending, left) == left) {
      state_ = State::kGivenUp;
      return;
    }
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
}

}  // namespace residency::simcuda
