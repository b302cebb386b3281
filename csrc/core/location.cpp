#include "residency/core/location.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <stdexcept>

#include <fmt/format.h>

#include "intern.h"

namespace residency {
namespace {

constexpr std::string_view kCudaPrefix = "cuda:";
constexpr std::string_view kDiskPrefix = "disk:";
constexpr int kMaxCudaIndex = 127;

InternTable& disk_names() {
  static InternTable& table = *new InternTable;
  return table;
}

bool is_disk_name(std::string_view name) {
  const auto alphanumeric = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
  };
  return !name.empty() && name.size() <= 64 && alphanumeric(name.front()) &&
         std::ranges::all_of(
             name, [&](char c) { return alphanumeric(c) || c == '_' || c == '.' || c == '-'; });
}

}  // namespace

Location Location::cuda(int index) {
  if (index < 0 || index > kMaxCudaIndex) {
    throw std::out_of_range(
        fmt::format("Location: a CUDA device index lies in 0...{}, got {}", kMaxCudaIndex, index));
  }
  return Location(LocationKind::kCuda, static_cast<std::uint16_t>(index));
}

Location Location::disk(std::string_view name) {
  if (!is_disk_name(name)) {
    throw std::invalid_argument(
        fmt::format("Location: a disk name is 1 to 64 characters of [A-Za-z0-9_.-] beginning with "
                    "a letter or digit, got '{}'",
                    name));
  }
  const std::uint32_t number = disk_names().number(name);
  if (number > std::numeric_limits<std::uint16_t>::max()) {
    throw std::out_of_range("Location: a process can name 65536 disk tiers, not more");
  }
  return Location(LocationKind::kDisk, static_cast<std::uint16_t>(number));
}

Location Location::parse(std::string_view text) {
  if (text == "pageable-host" || text == "cpu" || text == "cpu:0") {
    return pageable_host();
  }
  if (text == "pinned-host") {
    return pinned_host();
  }
  if (text.starts_with(kCudaPrefix)) {
    const std::string_view digits = text.substr(kCudaPrefix.size());
    int index = -1;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
    const bool canonical = error == std::errc() && end == digits.data() + digits.size() &&
                           digits.front() != '-' && (digits.size() == 1 || digits.front() != '0');
    if (canonical && index <= kMaxCudaIndex) {
      return cuda(index);
    }
  }
  if (text.starts_with(kDiskPrefix) && is_disk_name(text.substr(kDiskPrefix.size()))) {
    return disk(text.substr(kDiskPrefix.size()));
  }
  throw std::invalid_argument(fmt::format(
      "Location: expected 'pageable-host' (or 'cpu'), 'pinned-host', 'cuda:N' with N in "
      "0...{} and no leading zero, or 'disk:NAME', got '{}'",
      kMaxCudaIndex, text));
}

int Location::cuda_index() const {
  if (!is_cuda()) {
    throw std::invalid_argument("Location: " + to_string(*this) + " has no device index");
  }
  return index_;
}

const std::string& Location::disk_name() const {
  if (!is_disk()) {
    throw std::invalid_argument("Location: " + to_string(*this) + " is not a disk tier");
  }
  return disk_names().text(index_);
}

std::strong_ordering operator<=>(Location left, Location right) noexcept {
  if (left.kind_ != right.kind_) {
    return left.kind_ <=> right.kind_;
  }
  if (left.index_ == right.index_) {
    return std::strong_ordering::equal;
  }
  if (left.is_disk()) {  // by name: interning order differs from run to run
    return left.disk_name() <=> right.disk_name();
  }
  return left.index_ <=> right.index_;
}

std::string to_string(Location location) {
  switch (location.kind()) {
    case LocationKind::kPageableHost:
    case LocationKind::kPinnedHost: return std::string(to_string(location.kind()));
    case LocationKind::kCuda: return fmt::format("{}{}", kCudaPrefix, location.cuda_index());
    case LocationKind::kDisk: return fmt::format("{}{}", kDiskPrefix, location.disk_name());
  }
  return {};
}

std::string_view to_string(LocationKind kind) {
  switch (kind) {
    case LocationKind::kPageableHost: return "pageable-host";
    case LocationKind::kPinnedHost: return "pinned-host";
    case LocationKind::kCuda: return "cuda";
    case LocationKind::kDisk: return "disk";
  }
  return {};
}

}  // namespace residency
