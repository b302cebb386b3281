// The control interface, include/residency/simcuda/control.h.
#include "include/residency/simcuda/control.h"

#include <string>

#include <dlfcn.h>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/handover.h"
#include "csrc/simcuda/runtime.h"
#include "csrc/simcuda/thread_object.h"

using namespace simcuda;

namespace {

int refuse(std::string reason) {
  set_message(std::move(reason));
  return -1;
}

int accept() {
  set_message("");
  return 0;
}

bool known_stream(void* handle, StreamPtr& stream) {
  stream = find_stream(static_cast<cudaStream_t>(handle));
  return stream != nullptr;
}

// Whether a function of that name is exported by the runtime or, when it is loaded, the driver.
bool is_entry_point(const char* name) {
  if (!name || std::string_view(name).substr(0, 2) != "cu") return false;
  if (dlsym(RTLD_DEFAULT, name)) return true;
  void* driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (!driver) return std::string_view(name).substr(0, 4) != "cuda";
  bool found = dlsym(driver, name) != nullptr;
  dlclose(driver);
  return found;
}

void add(simcuda_counters& sum, const simcuda_counters& part) {
  for (int direction = 0; direction < SIMCUDA_NUM_DIRECTIONS; ++direction) {
    sum.copies[direction] += part.copies[direction];
    sum.copied_bytes[direction] += part.copied_bytes[direction];
    sum.copy_time[direction] += part.copy_time[direction];
  }
  for (int direction = 0; direction < 2; ++direction) {
    sum.pageable_copies[direction] += part.pageable_copies[direction];
    sum.pageable_bytes[direction] += part.pageable_bytes[direction];
  }
  sum.kernels += part.kernels;
  sum.kernel_time += part.kernel_time;
  sum.overlap_time += part.overlap_time;
  sum.host_syncs += part.host_syncs;
  sum.busy_host_syncs += part.busy_host_syncs;
  sum.blocked_time += part.blocked_time;
  sum.device_bytes += part.device_bytes;
  sum.peak_device_bytes += part.peak_device_bytes;
  sum.failed_allocations += part.failed_allocations;
}

simcuda_counters counters_of(const Device& device) {
  simcuda_counters counters = device.counters;
  AddressSpace::Usage usage = runtime().memory.usage(device);
  counters.device_bytes = usage.used_bytes;
  counters.peak_device_bytes = usage.peak_bytes;
  counters.failed_allocations = usage.failed_allocations;
  return counters;
}

std::string no_such_device(int device) {
  return "device " + std::to_string(device) + ", expected -1 to " +
         std::to_string(static_cast<int>(runtime().devices.size()) - 1);
}

}  // namespace

int simcuda_present(void) {
  return 1;
}

const char* simcuda_message(void) {
  return message();
}

int simcuda_set(const char* key, const char* value) {
  Hidden hidden;
  if (!key || !value) return refuse("a key and a value are expected");
  std::string reason = set_setting(key, value, runtime_in_use());
  return reason.empty() ? accept() : refuse(std::move(reason));
}

const char* simcuda_get(const char* key) {
  Hidden hidden;
  std::optional<std::string> value = get_setting(key ? key : "");
  if (!value) {
    set_message("unknown setting");
    return nullptr;
  }
  struct Answer {
    std::string text;
  };
  std::string& text = thread_object<Answer>().text;
  text = *std::move(value);
  return text.c_str();
}

int simcuda_set_capacity(int device, uint64_t bytes) {
  Hidden hidden;
  if (!is_device(device)) return refuse(no_such_device(device));
  runtime().devices[static_cast<size_t>(device)]->capacity_bytes = bytes;
  return accept();
}

int simcuda_read_counters(int device, simcuda_counters* out) {
  Hidden hidden;
  if (!out) return refuse("a place for the counters is expected");
  if (device != -1 && !is_device(device)) return refuse(no_such_device(device));
  Clock& clock = runtime().clock;
  Clock::Lock lock(clock.mutex);
  clock.advance(lock);
  *out = {};
  for (const auto& each : runtime().devices) {
    if (device == -1 || each->ordinal == device) add(*out, counters_of(*each));
  }
  return accept();
}

uint64_t simcuda_calls(const char* entry_point) {
  Hidden hidden;
  if (!is_entry_point(entry_point)) return 0;
  return EntryPoint::named(entry_point).num_calls();
}

uint64_t simcuda_pinned_bytes(void) {
  Hidden hidden;
  return runtime().memory.pinned_bytes();
}

uint64_t simcuda_peak_pinned_bytes(void) {
  Hidden hidden;
  return runtime().memory.peak_pinned_bytes();
}

void simcuda_reset_counters(void) {
  Hidden hidden;
  {
    Clock::Lock lock(runtime().clock.mutex);
    runtime().clock.advance(lock);
    for (const auto& device : runtime().devices) {
      device->counters = {};
      runtime().memory.reset_usage(*device);
    }
  }
  runtime().memory.reset_peak_pinned();
  reset_call_counts();
}

uint64_t simcuda_now(void) {
  Hidden hidden;
  return runtime().clock.now();
}

uint64_t simcuda_device_end(int device) {
  Hidden hidden;
  if (device != -1 && !is_device(device)) return 0;
  Clock& clock = runtime().clock;
  Clock::Lock lock(clock.mutex);
  const Device* one = device == -1 ? nullptr : runtime().devices[static_cast<size_t>(device)].get();
  return clock.end_of(lock, one);
}

int simcuda_deterministic(void) {
  return one_thread_at_a_time() ? 1 : 0;
}

void simcuda_record_timeline(int on) {
  Hidden hidden;
  Clock& clock = runtime().clock;
  Clock::Lock lock(clock.mutex);
  clock.advance(lock);
  clock.timeline.record(on != 0);
}

int simcuda_write_timeline(const char* path) {
  Hidden hidden;
  if (!path) return refuse("a path is expected");
  Clock& clock = runtime().clock;
  {
    Clock::Lock lock(clock.mutex);
    clock.advance(lock);
  }
  std::string reason = clock.timeline.write(path);
  return reason.empty() ? accept() : refuse(std::move(reason));
}

int simcuda_hold(void* handle) {
  Hidden hidden;
  StreamPtr stream;
  if (!known_stream(handle, stream)) return refuse("a stream is expected");
  Clock::Lock lock(runtime().clock.mutex);
  stream->hold(lock);
  return accept();
}

int simcuda_step(void* handle, uint64_t count) {
  Hidden hidden;
  StreamPtr stream;
  if (!known_stream(handle, stream)) return refuse("a stream is expected");
  OperationPtr last;
  {
    Clock::Lock lock(runtime().clock.mutex);
    last = stream->step(lock, count);
    // What waits for another held stream cannot run yet.
    if (last && !runtime().clock.would_end(lock, *last)) last = nullptr;
  }
  // Only the stream is waited for: the caller has not synchronised with what ran.
  if (last) stream->wait_until_run(last->index);
  return accept();
}

int simcuda_release(void* handle) {
  Hidden hidden;
  StreamPtr stream;
  if (!known_stream(handle, stream)) return refuse("a stream is expected");
  Clock::Lock lock(runtime().clock.mutex);
  stream->release(lock);
  return accept();
}

int simcuda_hold_all(int on) {
  Hidden hidden;
  Clock::Lock lock(runtime().clock.mutex);
  for (const auto& device : runtime().devices) {
    for (const StreamPtr& stream : device->streams) {
      if (on != 0) {
        stream->hold(lock);
      } else {
        stream->release(lock);
      }
    }
  }
  return accept();
}

uint64_t simcuda_pending(void* handle) {
  Hidden hidden;
  StreamPtr stream;
  if (!known_stream(handle, stream)) return 0;
  Clock::Lock lock(runtime().clock.mutex);
  return stream->num_pending(lock);
}

int simcuda_fail(const char* entry_point, uint64_t skip, uint64_t count, int error) {
  Hidden hidden;
  if (!is_entry_point(entry_point)) {
    return refuse(std::string("'") + (entry_point ? entry_point : "") +
                  "' is no function of the runtime or driver");
  }
  if (count > 0 && error == 0) return refuse("an error other than success is expected");
  EntryPoint::named(entry_point).inject({{skip, count}, error});
  return accept();
}

int simcuda_keep_order_secret(const char* entry_point, uint64_t skip, uint64_t count) {
  Hidden hidden;
  std::string_view name = entry_point ? entry_point : "";
  if (name != "cudaStreamWaitEvent" && name != "cudaEventSynchronize" && name != "cudaEventQuery") {
    return refuse(
        "cudaStreamWaitEvent, cudaEventSynchronize or cudaEventQuery is expected, which "
        "put things in order by an event");
  }
  EntryPoint::named(entry_point).keep_order_secret({skip, count});
  return accept();
}

int simcuda_break_device(int device, int error) {
  Hidden hidden;
  if (!is_device(device)) return refuse(no_such_device(device));
  if (error == 0) return refuse("an error other than success is expected");
  runtime().devices[static_cast<size_t>(device)]->broken = error;
  return accept();
}

void* simcuda_host_address(const void* address) {
  Hidden hidden;
  return runtime().memory.bytes_at(address);
}
