#include "csrc/cuda/numa_node.h"

#include <algorithm>
#include <array>
#include <climits>
#include <fstream>

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace residency {

std::optional<int> node_of_pci_device(std::string pci_id, const std::string& sysfs) {
  std::string online;
  std::ifstream(sysfs + "/devices/system/node/online") >> online;  // as "0-3" or "0,2"
  if (online.find_first_of(",-") == std::string::npos) {
    return std::nullopt;
  }
  // CUDA may write it in capitals.
  std::transform(pci_id.begin(), pci_id.end(), pci_id.begin(), [](char c) {
    return c >= 'A' && c <= 'F' ? static_cast<char>(c - 'A' + 'a') : c;
  });
  int node = -1;  // which is also how the file says that it is not known
  std::ifstream file(sysfs + "/bus/pci/devices/" + pci_id + "/numa_node");
  return file >> node && node >= 0 ? std::optional(node) : std::nullopt;
}

bool prefer_node(void* data, std::size_t nbytes, int node) noexcept {
  constexpr std::size_t kBits = sizeof(unsigned long) * CHAR_BIT;
  std::array<unsigned long, 1024 / kBits> nodes{};
  const auto index = static_cast<std::size_t>(node);
  if (node < 0 || index / kBits >= nodes.size()) {
    return false;
  }
  nodes[index / kBits] = 1UL << index % kBits;
  // The kernel takes the number of bits for one more than there are.
  return ::syscall(SYS_mbind, data, nbytes, MPOL_PREFERRED, nodes.data(), nodes.size() * kBits + 1,
                   0) == 0;
}

}  // namespace residency
