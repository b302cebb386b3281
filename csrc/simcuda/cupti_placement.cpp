#include "csrc/simcuda/cupti_placement.h"

#include <algorithm>
#include <chrono>

namespace simcuda {

int64_t host_now_ns() {
  auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

int64_t Placement::offset_at(uint64_t now_ns, bool idle) {
  if (idle || restart_) {
    offset_ns_ = std::max(offset_ns_, host_now_ns() - static_cast<int64_t>(now_ns));
    restart_ = false;
  }
  return offset_ns_;
}

}  // namespace simcuda
