// What every entry point does first: it counts the call, gives the injected fault if one is due,
// and charges the host's virtual time.
#ifndef RESIDENCY_CSRC_SIMCUDA_ENTRY_H
#define RESIDENCY_CSRC_SIMCUDA_ENTRY_H

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include <cuda_runtime_api.h>

#include "csrc/simcuda/handover.h"
#include "csrc/simcuda/sanitizer.h"

#define SIMCUDA_EXPORT extern "C" __attribute__((visibility("default")))

namespace simcuda {

// What a call costs the host on the virtual clock. A call that only reads the state of the thread
// or of a handle never reaches the device and takes nanoseconds on a real machine.
enum class Cost { kNothing, kHostCall };

// Thread-safe. Entry points live as long as the process.
class EntryPoint {
 public:
  static EntryPoint& named(const char* name);

  // Returns cudaSuccess, or the error (of the runtime or the driver) that the call is to return.
  int enter(Cost cost);

  uint64_t num_calls() const { return num_calls_.load(std::memory_order_relaxed); }
  void reset_calls() { num_calls_ = 0; }

  // Of the coming calls, `count` after the first `skip`.
  struct Selection {
    uint64_t skip = 0;
    uint64_t count = 0;

    bool takes_next();
  };
  struct Fault {
    Selection calls;
    int error = 0;
  };
  void inject(Fault fault);

  // Whether the race checker is not to know what this call puts in order.
  bool keeps_order_secret();
  void keep_order_secret(Selection calls);

 private:
  int injected_error();

  std::atomic<uint64_t> num_calls_{0};
  std::atomic<bool> armed_{false};
  std::atomic<bool> any_secret_{false};
  std::mutex mutex_;
  Fault fault_;       // guarded by mutex_
  Selection secret_;  // guarded by mutex_
};

void reset_call_counts();

// Keeps the error for cudaGetLastError and returns it. cudaErrorNotReady is an answer, no error.
cudaError_t fail(cudaError_t error);
cudaError_t last_error();
cudaError_t take_last_error();

// Why the thread's last control call was refused.
void set_message(std::string message);
const char* message();

// One line on stderr, in one write so that lines of several threads do not mix.
void complain(const std::string& line);

// Ends the process with one line: what was asked for cannot be had, and going on without it would
// hide that.
[[noreturn]] void stop_process(const std::string& reason);

// Says once that a function is not simulated; returns cudaErrorNotSupported.
cudaError_t not_simulated(const char* name, const char* advice = "");

// True in a child of fork() whose parent had used the runtime: like the real one it is unusable.
bool forked_after_use();

}  // namespace simcuda

// The first statement of each entry point.
#define SIMCUDA_ENTER(name, cost)                                                       \
  ::simcuda::Hidden hidden_call;                                                        \
  ::simcuda::ClockCall clock_call(::simcuda::Cost::cost == ::simcuda::Cost::kHostCall); \
  static ::simcuda::EntryPoint& entry_point = ::simcuda::EntryPoint::named(#name);      \
  if (int refused = entry_point.enter(::simcuda::Cost::cost)) {                         \
    return ::simcuda::fail(static_cast<cudaError_t>(refused));                          \
  }

#endif
