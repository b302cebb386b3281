#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace residency {

/// The memory node nearest to the device with this PCI id, as sysfs has it. None where the machine
/// has one node, or does not tell.
[[nodiscard]] std::optional<int> node_of_pci_device(std::string pci_id, const std::string& sysfs);

/// Has pages that nobody has touched yet taken from the node while it has free ones. A wish: false
/// where the kernel refuses.
bool prefer_node(void* data, std::size_t nbytes, int node) noexcept;

}  // namespace residency
