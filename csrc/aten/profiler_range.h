#pragma once

#include <memory>

#include "residency/core/location.h"

namespace residency {

/// Shows what the thread does in this scope in PyTorch's profiler, as a copy between two locations
/// ("residency::copy pinned-host to cuda:0"). Costs some nanoseconds while nobody profiles.
class ProfilerRange {
 public:
  ProfilerRange(Location from, Location to);
  // A scope of the thread: there is nothing to hand over.
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
  ~ProfilerRange();

 private:
  struct Recording;
  std::unique_ptr<Recording> recording_;
};

}  // namespace residency
