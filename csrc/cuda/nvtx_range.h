#pragma once

#include <nvtx3/nvToolsExt.h>

namespace residency {

/// Labels what the thread enqueues in this scope in NVIDIA's tools. A few nanoseconds without one.
class NvtxRange {
 public:
  explicit NvtxRange(const char* name) { nvtxRangePushA(name); }
  // A scope of the thread: there is nothing to hand over.
  NvtxRange(const NvtxRange&) = delete;
  NvtxRange& operator=(const NvtxRange&) = delete;
  ~NvtxRange() { nvtxRangePop(); }
};

}  // namespace residency
