#include "csrc/aten/content_stamp.h"

#include <bit>
#include <cstring>

#include <fmt/format.h>

namespace residency {
namespace {

constexpr std::uint64_t kPrime1 = 0x9e3779b185ebca87U;
constexpr std::uint64_t kPrime2 = 0xc2b2ae3d27d4eb4fU;
constexpr std::uint64_t kPrime3 = 0x165667b19e3779f9U;
constexpr std::uint64_t kPrime4 = 0x85ebca77c2b2ae63U;
constexpr std::uint64_t kPrime5 = 0x27d4eb2f165667c5U;

std::uint64_t read64(const std::byte* at) noexcept {
  std::uint64_t word = 0;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

std::uint64_t round(std::uint64_t lane, std::uint64_t word) noexcept {
  return std::rotl(lane + word * kPrime2, 31) * kPrime1;
}

void add_stripe(std::array<std::uint64_t, 4>& lanes, const std::byte* stripe) noexcept {
  for (std::size_t i = 0; i < 4; ++i) {
    lanes[i] = round(lanes[i], read64(stripe + 8 * i));
  }
}

}  // namespace

void ContentStamp::add(const void* data, std::size_t nbytes) noexcept {
  const auto* at = static_cast<const std::byte*>(data);
  const std::size_t held = num_bytes_ % 32;
  num_bytes_ += nbytes;
  if (held + nbytes < 32) {
    if (nbytes != 0) {
      std::memcpy(tail_.data() + held, at, nbytes);
    }
    return;
  }
  if (held != 0) {
    std::memcpy(tail_.data() + held, at, 32 - held);
    add_stripe(lanes_, tail_.data());
    at += 32 - held;
    nbytes -= 32 - held;
  }
  auto lanes = lanes_;
  for (; nbytes >= 32; at += 32, nbytes -= 32) {
    add_stripe(lanes, at);
  }
  lanes_ = lanes;
  if (nbytes != 0) {
    std::memcpy(tail_.data(), at, nbytes);
  }
}

std::uint64_t ContentStamp::value() const noexcept {
  std::uint64_t hash = kPrime5;
  if (num_bytes_ >= 32) {
    hash = std::rotl(lanes_[0], 1) + std::rotl(lanes_[1], 7) + std::rotl(lanes_[2], 12) +
           std::rotl(lanes_[3], 18);
    for (const std::uint64_t lane : lanes_) {
      hash = (hash ^ round(0, lane)) * kPrime1 + kPrime4;
    }
  }
  hash += num_bytes_;
  const std::byte* at = tail_.data();
  std::size_t rest = num_bytes_ % 32;
  for (; rest >= 8; at += 8, rest -= 8) {
    hash = std::rotl(hash ^ round(0, read64(at)), 27) * kPrime1 + kPrime4;
  }
  if (rest >= 4) {
    std::uint32_t word = 0;
    std::memcpy(&word, at, sizeof(word));
    hash = std::rotl(hash ^ (word * kPrime1), 23) * kPrime2 + kPrime3;
    at += 4;
    rest -= 4;
  }
  for (; rest > 0; ++at, --rest) {
    hash = std::rotl(hash ^ (std::to_integer<std::uint64_t>(*at) * kPrime5), 11) * kPrime1;
  }
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

std::string fixed_width_hex(std::uint64_t number) {
  return fmt::format("{:016x}", number);
}

}  // namespace residency
