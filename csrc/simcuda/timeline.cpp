#include "csrc/simcuda/timeline.h"

#include <cerrno>
#include <cstring>
#include <fstream>
#include <set>
#include <utility>

#include <nlohmann/json.hpp>

#include "csrc/simcuda/device.h"
#include "csrc/simcuda/operation.h"
#include "csrc/simcuda/stream.h"

namespace simcuda {
namespace {

constexpr uint64_t kWaitRow = 0;
constexpr uint64_t kWorkRow = 1;

const char* category_of(OperationKind kind) {
  switch (kind) {
    case OperationKind::kCopy: return "copy";
    case OperationKind::kMemset: return "memset";
    case OperationKind::kKernel: return "kernel";
    case OperationKind::kHostFunction: return "host function";
    case OperationKind::kEventRecord:
    case OperationKind::kEventWait:
    case OperationKind::kEmpty: return nullptr;
  }
  return nullptr;
}

// Processes are devices, from 1 on; 0 is the host.
int process_of(int device) {
  return device + 1;
}

nlohmann::json name_row(const char* what, int process, uint64_t thread, const std::string& name) {
  return {
      {"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", {{"name", name}}}};
}

}  // namespace

void Timeline::record(bool on) {
  std::lock_guard<std::mutex> lock(mutex_);
  on_ = on;
}

void Timeline::push(Entry entry) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (on_) entries_.push_back(std::move(entry));
}

void Timeline::add(const Operation& operation) {
  const char* category = category_of(operation.spec.kind);
  if (!category) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!on_) return;
  }
  push({operation.spec.name, category, operation.stream->device.ordinal, operation.stream->id,
        operation.model.start_ns, operation.model.end_ns, operation.spec.num_bytes});
}

void Timeline::add_wait(uint64_t start_ns, uint64_t end_ns) {
  push({"wait", "host", -1, kWaitRow, start_ns, end_ns, 0});
}

void Timeline::add_host_work(const char* name, uint64_t start_ns, uint64_t end_ns) {
  push({name, "host", -1, kWorkRow, start_ns, end_ns, 0});
}

std::string Timeline::write(const char* path) {
  std::lock_guard<std::mutex> lock(mutex_);
  nlohmann::json events = nlohmann::json::array();
  std::set<std::pair<int, uint64_t>> rows;
  for (const Entry& entry : entries_) {
    int process = process_of(entry.device);
    rows.insert({process, entry.thread});
    // The format counts in microseconds; fractions keep the nanoseconds.
    nlohmann::json event = {{"ph", "X"},
                            {"name", entry.name},
                            {"cat", entry.category},
                            {"pid", process},
                            {"tid", entry.thread},
                            {"ts", static_cast<double>(entry.start_ns) / 1e3},
                            {"dur", static_cast<double>(entry.end_ns - entry.start_ns) / 1e3}};
    if (entry.num_bytes > 0) event["args"] = {{"bytes", entry.num_bytes}};
    events.push_back(std::move(event));
  }
  int named_process = -1;
  for (auto [process, thread] : rows) {
    bool host = process == process_of(-1);
    if (process != named_process) {
      std::string name = host ? "host" : "device " + std::to_string(process - 1);
      events.push_back(name_row("process_name", process, thread, name));
      named_process = process;
    }
    std::string row = thread == kWaitRow ? "waits" : "operators";
    events.push_back(
        name_row("thread_name", process, thread, host ? row : "stream " + std::to_string(thread)));
  }
  std::ofstream file(path);
  file << nlohmann::json{{"traceEvents", events}, {"displayTimeUnit", "ns"}}.dump() << '\n';
  file.close();
  if (file) return "";
  return std::string("cannot write ") + path + ": " + strerror(errno);
}

}  // namespace simcuda
