#pragma once

#include <cstddef>
#include <memory>

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include "csrc/cuda/event_fence.h"
#include "csrc/cuda/paced_copy.h"
#include "residency/core/location.h"
#include "residency/core/stream.h"

namespace residency {

[[nodiscard]] inline c10::DeviceIndex index_of(Location device) {
  return static_cast<c10::DeviceIndex>(device.cuda_index());
}

/// A stream for copies.
struct Lane {
  const char* label = "";  ///< of its copies in NVIDIA's tools
  cudaStream_t stream = nullptr;
};

/// The streams on which this library works at one device. One set per process and device, made at
/// first use and never destroyed: blocks of the caching allocator belong to `arena` for ever, and a
/// later stream could get its number.
struct DeviceStreams {
  std::shared_ptr<EventPool> events;
  Lane in;              ///< copies to the device
  Lane out;             ///< copies from it
  AheadLane ahead_in;   ///< copies ahead of need to the device
  AheadLane ahead_out;  ///< and from it
  /// Copies through page-locked buffers to the device, and from it. They have waited on the host
  /// for what they come behind, and would only wait for others in the streams above.
  cudaStream_t staged_in = nullptr;
  cudaStream_t staged_out = nullptr;
  cudaStream_t arena = nullptr;  ///< what segments are allocated on

  [[nodiscard]] bool has(cudaStream_t stream) const noexcept {
    return stream == in.stream || stream == out.stream || stream == ahead_in.stream ||
           stream == ahead_out.stream || stream == staged_in || stream == staged_out ||
           stream == arena;
  }
};

/// Throws what `throw_cuda_error` throws, `ForkError` in a child of the process that made them.
[[nodiscard]] DeviceStreams& streams_of(Location device);
/// Waits on the host for all of a device's work; a lost one has none. Whether that is over.
[[nodiscard]] bool synchronize_device(Location device) noexcept;
/// Throws what `throw_cuda_error` throws for a call that has failed as a device was made current,
/// which may answer with what became of another one.
[[noreturn]] void throw_error_of_switching(cudaError_t error, Location device);
/// Waits on the host for what a stream was given, when one of its calls has failed: nothing of that
/// may be in flight when it is told. A device that does not answer within a second is lost.
void drain(cudaStream_t stream, Location device) noexcept;
/// Whether what is enqueued on the stream becomes part of a graph. Throws what `throw_cuda_error`
/// throws.
[[nodiscard]] bool is_capturing(cudaStream_t stream, Location device);
/// Throws `std::invalid_argument` for what names no stream.
[[nodiscard]] cudaStream_t handle_of(const Stream& stream);
/// That of the calling thread.
[[nodiscard]] Stream current_stream_of(Location device);
/// A fence behind what the stream was given; null while it is being captured, where the fence would
/// become part of the graph. Of a stream that was destroyed nobody can tell: then the host waits
/// for the device. Throws what `throw_cuda_error` throws.
[[nodiscard]] FencePtr record_stream(const Stream& stream);
/// Null when nothing was done there yet, and in a child of the process that did it.
[[nodiscard]] DeviceStreams* find_streams(Location device) noexcept;

}  // namespace residency
