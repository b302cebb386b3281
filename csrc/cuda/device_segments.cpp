#include "csrc/cuda/device_segments.h"

#include <algorithm>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/util/Exception.h>

#include "csrc/cuda/event_fence.h"
#include "csrc/cuda/on_device.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/streams.h"

namespace residency {

Bytes DeviceSegments::segment_bytes(Bytes request, Bytes) const {
  return std::max(request, kSmallestSegment).rounded_up(kSegmentRounding);
}

c10::Device DeviceSegments::device() const {
  return {c10::kCUDA, index_of(location_)};
}

SegmentSource::Segment DeviceSegments::make(Bytes nbytes) {
  const DeviceStreams& streams = streams_of(location_);
  const RelaxedCapture relaxed;
  const OnDevice current(location_);
  void* data = nullptr;
  try {
    data = c10::cuda::CUDACachingAllocator::raw_alloc_with_stream(
        static_cast<std::size_t>(nbytes.count()), streams.arena);
  } catch (const c10::AcceleratorError& error) {  // no `c10::OutOfMemoryError`: users expect that
    throw_cuda_error(static_cast<cudaError_t>(error.get_error_code()), location_, "cudaMalloc");
  }
  try {
    // The block may be one that was given back, behind what the arena's stream was made to wait
    // for. Mostly that is over: then nobody need wait for anything.
    if (cudaStreamQuery(streams.arena) == cudaSuccess) {
      return {data, nullptr};
    }
    (void)cudaGetLastError();  // "not ready" too would be found by whoever asks next
    return {data, EventFence::record(streams.events, streams.arena)};
  } catch (...) {
    c10::cuda::CUDACachingAllocator::raw_delete(data);
    throw;
  }
}

void DeviceSegments::give_back(void* data, Bytes, const std::vector<FencePtr>& after) noexcept {
  try {
    const DeviceStreams& streams = streams_of(location_);
    const RelaxedCapture relaxed;
    const OnDevice current(location_);
    for (const FencePtr& fence : after) {
      (void)come_after(streams.arena, fence, location_);
    }
  } catch (...) {
    wait_all(after);  // some may not be enqueued yet
    if (!synchronize_device(location_)) {
      return;  // the next to have it would not come after its uses: nobody gets it
    }
  }
  try {
    c10::cuda::CUDACachingAllocator::raw_delete(data);
  } catch (...) {
    (void)cudaGetLastError();
  }
}

bool DeviceSegments::wait_for_others() noexcept {
  return synchronize_device(location_);
}

std::vector<Stream> DeviceSegments::current_streams() {
  return {current_stream_of(location_)};
}

FencePtr DeviceSegments::record(const Stream& stream) {
  return record_stream(stream);
}

}  // namespace residency
