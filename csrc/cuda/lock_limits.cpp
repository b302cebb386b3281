#include "csrc/cuda/lock_limits.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>
#include <string>
#include <string_view>

namespace residency {
namespace {

/// The number that follows a word, or words, in a file; none where that is no number ("max",
/// "unlimited").
std::optional<std::int64_t> number_after(const std::filesystem::path& path,
                                         std::string_view words) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(words)) {
      continue;
    }
    std::istringstream rest(line.substr(words.size()));
    std::int64_t number = 0;
    return rest >> number ? std::optional(number) : std::nullopt;
  }
  return std::nullopt;
}

std::optional<std::int64_t> number_in(const std::filesystem::path& path) {
  return number_after(path, "");
}

bool may_lock_any(const std::filesystem::path& status) {
  constexpr int kIpcLock = 14;  // linux/capability.h, CAP_IPC_LOCK
  std::ifstream file(status);
  for (std::string word; file >> word;) {
    if (word == "CapEff:") {
      std::uint64_t capabilities = 0;
      return file >> std::hex >> capabilities && (capabilities >> kIpcLock & 1) != 0;
    }
  }
  return false;
}

std::optional<std::int64_t> left_of_ulimit(Bytes locked, const std::filesystem::path& process) {
  const std::filesystem::path status = process / "status";
  const auto most = number_after(process / "limits", "Max locked memory");
  if (!most.has_value() || may_lock_any(status)) {
    return std::nullopt;
  }
  constexpr std::int64_t kKib = 1024;
  const std::int64_t known = kKib * (number_after(status, "VmPin:").value_or(0) +
                                     number_after(status, "VmLck:").value_or(0));
  return *most - std::max(known, locked.count());  // not every driver has its pages counted there
}

std::optional<std::int64_t> left_of_group(const std::filesystem::path& group) {
  const auto most = number_in(group / "memory.max");
  if (!most.has_value()) {
    return std::nullopt;
  }
  const std::filesystem::path stat = group / "memory.stat";
  const std::int64_t cache = number_after(stat, "active_file ").value_or(0) +
                             number_after(stat, "inactive_file ").value_or(0);
  return *most - std::max<std::int64_t>(0, number_in(group / "memory.current").value_or(0) - cache);
}

}  // namespace

std::optional<Bytes> lockable_bytes(Bytes locked, const std::filesystem::path& root) {
  std::optional<std::int64_t> least;
  const auto limit = [&](std::optional<std::int64_t> left) {
    if (left.has_value()) {
      least = std::max<std::int64_t>(0, std::min(least.value_or(*left), *left));
    }
  };
  const std::filesystem::path process = root / "proc/self";
  limit(left_of_ulimit(locked, process));
  std::ifstream groups(process / "cgroup");
  for (std::string line; std::getline(groups, line);) {
    constexpr std::string_view kVersion2 = "0::/";
    if (!line.starts_with(kVersion2)) {
      continue;
    }
    const std::filesystem::path all = root / "sys/fs/cgroup";
    std::filesystem::path group = line.substr(kVersion2.size());
    while (!group.empty()) {
      limit(left_of_group(all / group));
      group = group.parent_path();
    }
    limit(left_of_group(all));
  }
  return least.has_value() ? std::optional(Bytes(*least)) : std::nullopt;
}

}  // namespace residency
