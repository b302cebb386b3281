#include "residency/core/report.h"

#include <exception>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "manager_state.h"
#include "table.h"

namespace residency {
namespace {

using Json = nlohmann::ordered_json;

std::string place(const std::optional<Location>& location) {
  return location ? to_string(*location) : std::string("-");
}

Json to_json(const TransitionRecord& record) {
  Json json = {{"sequence", record.sequence},
               {"action", to_string(record.action)},
               {"phase", to_string(record.phase)},
               {"handle", record.handle.id()},
               {"type", record.handle.type().name()},
               {"no_op", record.no_op()},
               {"reason", to_string(record.reason)},
               {"failed", record.failed},
               {"waited", record.waited},
               {"path", to_string(record.path)},
               {"bytes", record.bytes.count()},
               {"host_start_ns", record.host_start_ns},
               {"host_end_ns", record.host_end_ns}};
  if (record.source) {
    json["source"] = to_string(*record.source);
  }
  if (record.destination) {
    json["destination"] = to_string(*record.destination);
  }
  if (record.device_elapsed_ns) {
    json["device_elapsed_ns"] = *record.device_elapsed_ns;
  }
  if (!record.plan.empty()) {
    json["plan"] = record.plan;
  }
  if (record.failed) {
    json["failure"] = record.failure;
  }
  return json;
}

/// A name or a failure text may hold bytes that are not UTF-8; an export must not fail on them.
std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::kExecute: return "execute";
    case Phase::kReclaim: return "reclaim";
    case Phase::kReserve: return "reserve";
    case Phase::kEnter: return "enter";
    case Phase::kExit: return "exit";
  }
  return {};
}

TransitionRecord ActionReport::record() const {
  TransitionRecord record = record_;
  if (fence_) {
    complete_record(record, *fence_);
  }
  return record;
}

void ActionReport::wait() const {
  if (!fence_) {
    return;
  }
  if (state_) {
    state_->wait_for(record_.handle, fence_);
  } else {
    fence_->wait();
  }
}

std::vector<TransitionRecord> PlanReport::entries() const {
  std::vector<TransitionRecord> records;
  records.reserve(entries_.size());
  for (const ActionReport& entry : entries_) {
    records.push_back(entry.record());
    records.back().plan = plan_;
  }
  return records;
}

TransitionRecord PlanReport::operator[](std::size_t index) const {
  TransitionRecord record = entries_.at(index).record();
  record.plan = plan_;
  return record;
}

Bytes PlanReport::moved_bytes() const {
  Bytes sum;
  for (const ActionReport& entry : entries_) {
    sum += entry.record_.bytes;
  }
  return sum;
}

void PlanReport::wait() const {
  std::exception_ptr first;
  for (const ActionReport& entry : entries_) {
    try {
      entry.wait();
    } catch (...) {
      if (!first) {
        first = std::current_exception();
      }
    }
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

std::string to_string(const PlanReport& report) {
  Table table({"phase", "action", "value", "from", "to", "bytes", "path", "outcome"});
  for (const TransitionRecord& record : report.entries()) {
    table.add(
        {std::string(to_string(record.phase)), std::string(to_string(record.action)),
         to_string(record.handle), place(record.source), place(record.destination),
         std::to_string(record.bytes.count()), std::string(to_string(record.path)),
         record.failed ? "failed: " + record.failure : std::string(to_string(record.reason))});
  }
  return fmt::format("report of '{}'\n{}", report.plan(), table.text());
}

std::string to_json_lines(const std::vector<TransitionRecord>& records) {
  std::string lines;
  for (const TransitionRecord& record : records) {
    lines += dump(to_json(record)) + '\n';
  }
  return lines;
}

std::string to_chrome_trace(const std::vector<TransitionRecord>& records) {
  Json events = Json::array();
  for (const TransitionRecord& record : records) {
    const std::string row = record.destination ? to_string(*record.destination) : "no destination";
    events.push_back(
        {{"name", fmt::format("{} {}", to_string(record.action), to_string(record.handle))},
         {"cat", to_string(record.phase)},
         {"ph", "X"},
         {"ts", static_cast<double>(record.host_start_ns) / 1e3},
         {"dur", static_cast<double>(record.host_end_ns - record.host_start_ns) / 1e3},
         {"pid", "torch-residency"},
         {"tid", row},
         {"args", to_json(record)}});
  }
  return dump(Json{{"traceEvents", std::move(events)}, {"displayTimeUnit", "ns"}});
}

}  // namespace residency
