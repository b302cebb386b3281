#pragma once

#include <cstdint>
#include <memory>

#include "residency/aten/device_layer.h"
#include "residency/core/bytes.h"
#include "residency/core/export.h"

namespace residency {

struct CudaLayerOptions {
  /// Copies ahead of need are given to a device in chunks of so many bytes, of which two at most
  /// are outstanding in one direction: for so long may a copy that is needed have to wait for them.
  Bytes prefetch_chunk = Bytes(std::int64_t{16} << 20);
};

/// The devices of this process and page-locked memory, for `TorchBackendOptions::devices`, of one
/// manager or of several, which then share segments and the buffers of staged copies. CUDA is not
/// initialized before something is moved; where it cannot be that throws `UnavailableError`.
///
/// Device memory comes in segments from PyTorch's caching allocator, on a stream of the layer's
/// own; page-locked memory in slabs of whole pages that the layer registers itself. Both are
/// divided into ranges and reused in the order of the device, so that addresses and peaks do not
/// depend on when work completes. An empty device segment goes back to the caching allocator at
/// once, slabs on `trim` and when the manager closes. Throws `std::invalid_argument` for a
/// `prefetch_chunk` that is not positive.
[[nodiscard]] RESIDENCY_API std::shared_ptr<DeviceLayer> make_cuda_layer(
    const CudaLayerOptions& options = {});

}  // namespace residency
