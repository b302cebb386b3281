#include "residency/aten/device_layer.h"

#include "csrc/core/fork.h"
#include "residency/core/errors.h"

namespace residency {

DeviceLayer::DeviceLayer() : generation_(device_generation()) {}

DeviceLayer::~DeviceLayer() = default;

bool DeviceLayer::is_orphan() const noexcept {
  return generation_ != device_generation();
}

void DeviceLayer::refuse_in_forked_child() const {
  if (is_orphan()) {
    throw ForkError(
        "this process was forked from the one that made the layer; devices and page-locked memory "
        "exist only in the parent (start processes with spawn)");
  }
}

}  // namespace residency
