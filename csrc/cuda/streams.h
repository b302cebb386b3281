#pragma once

#include <memory>

#include <cuda_runtime_api.h>

#include "csrc/cuda/copy_group.h"
#include "csrc/cuda/event_fence.h"
#include "residency/core/location.h"

namespace residency {

/// The streams on which this library works at one device. One set per process and device, made at
/// first use and never destroyed: blocks of the caching allocator belong to `arena` for ever, and a
/// later stream could get its number.
struct DeviceStreams {
  std::shared_ptr<EventPool> events;
  Lane in;                       ///< copies to the device
  Lane out;                      ///< copies from it
  cudaStream_t arena = nullptr;  ///< what segments are allocated on
};

/// Throws what `throw_cuda_error` throws, `ForkError` in a child of the process that made them.
[[nodiscard]] DeviceStreams& streams_of(Location device);
/// Waits on the host for all of a device's work; a lost one has none.
void synchronize_device(Location device) noexcept;
/// Null when nothing was done there yet.
[[nodiscard]] DeviceStreams* find_streams(Location device) noexcept;

}  // namespace residency
