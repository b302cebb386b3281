// torch is built with it, and at::RecordFunction has other members without.
#ifndef NDEBUG
#define NDEBUG
#endif

#include "csrc/aten/profiler_range.h"

#include <string>
#include <utility>

#include <ATen/record_function.h>
#include <fmt/format.h>

namespace residency {

struct ProfilerRange::Recording {
  explicit Recording(at::StepCallbacks&& callbacks) : function(std::move(callbacks)) {}
  std::string name;  // outlives the function, which refers to it
  at::RecordFunction function;
};

ProfilerRange::ProfilerRange(Location from, Location to) {
  auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
  if (!callbacks.has_value()) {
    return;
  }
  recording_ = std::make_unique<Recording>(*std::move(callbacks));
  recording_->name = fmt::format("residency::copy {} to {}", to_string(from), to_string(to));
  recording_->function.before(std::string_view(recording_->name));
}

ProfilerRange::~ProfilerRange() = default;

}  // namespace residency
