#include "csrc/simcuda/entry.h"

#include <map>
#include <set>

#include <unistd.h>

#include "csrc/simcuda/runtime.h"
#include "csrc/simcuda/settings.h"
#include "csrc/simcuda/thread_object.h"

namespace simcuda {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, EntryPoint*> by_name;
  std::set<std::string> told_not_simulated;
};

Registry& registry() {
  static Registry* registry = new Registry;
  return *registry;
}

thread_local cudaError_t t_last_error = cudaSuccess;

struct Message {
  std::string text;
};

}  // namespace

EntryPoint& EntryPoint::named(const char* name) {
  Hidden hidden;
  std::lock_guard<std::mutex> lock(registry().mutex);
  EntryPoint*& entry = registry().by_name[name];
  if (!entry) entry = new EntryPoint;
  return *entry;
}

int EntryPoint::enter(Cost cost) {
  num_calls_.fetch_add(1, std::memory_order_relaxed);
  if (forked_after_use()) return cudaErrorInitializationError;
  if (cost == Cost::kHostCall) runtime().clock.pass(time_ns(kHostCall));
  if (!armed_.load(std::memory_order_relaxed)) return cudaSuccess;
  return injected_error();
}

bool EntryPoint::Selection::takes_next() {
  if (skip > 0) {
    --skip;
    return false;
  }
  if (count == 0) return false;
  --count;
  return true;
}

int EntryPoint::injected_error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return fault_.calls.takes_next() ? fault_.error : cudaSuccess;
}

void EntryPoint::inject(Fault fault) {
  std::lock_guard<std::mutex> lock(mutex_);
  fault_ = fault;
  armed_ = fault.calls.count > 0;
}

bool EntryPoint::keeps_order_secret() {
  if (!any_secret_.load(std::memory_order_relaxed)) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  return secret_.takes_next();
}

void EntryPoint::keep_order_secret(Selection calls) {
  std::lock_guard<std::mutex> lock(mutex_);
  secret_ = calls;
  any_secret_ = calls.count > 0;
}

void reset_call_counts() {
  std::lock_guard<std::mutex> lock(registry().mutex);
  for (auto& [name, entry] : registry().by_name) entry->reset_calls();
}

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess && error != cudaErrorNotReady) t_last_error = error;
  return error;
}

cudaError_t last_error() {
  return t_last_error;
}

cudaError_t take_last_error() {
  cudaError_t error = t_last_error;
  t_last_error = cudaSuccess;
  return error;
}

void set_message(std::string message) {
  thread_object<Message>().text = std::move(message);
}

const char* message() {
  return thread_object<Message>().text.c_str();
}

void complain(const std::string& line) {
  std::string text = "simcuda: " + line + "\n";
  // Nothing is left to tell it to when stderr is gone.
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

void stop_process(const std::string& reason) {
  // A race checker complains of a process that ends while something is hidden from it.
  Visible visible;
  complain(reason);
  // No destructors and no handlers: the program may not have begun.
  _exit(2);
}

cudaError_t not_simulated(const char* name, const char* advice) {
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(registry().mutex);
    first = registry().told_not_simulated.insert(name).second;
  }
  if (first) complain(std::string(name) + " is not simulated" + advice);
  return fail(cudaErrorNotSupported);
}

}  // namespace simcuda

// What the generated stubs call.
extern "C" int simcuda_stub(const char* name) {
  simcuda::Hidden hidden;
  int refused = simcuda::EntryPoint::named(name).enter(simcuda::Cost::kNothing);
  if (refused) return simcuda::fail(static_cast<cudaError_t>(refused));
  return simcuda::not_simulated(name);
}
