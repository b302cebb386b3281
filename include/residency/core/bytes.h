#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

#include "residency/core/export.h"

namespace residency {

/// A non-negative number of bytes whose arithmetic is checked.
///
/// Constructing from a negative number throws `std::invalid_argument`; a sum above 2^63-1 or a
/// difference below zero throws `std::out_of_range`. A value type: trivially copyable, ordered,
/// hashable.
class Bytes {
 public:
  constexpr Bytes() noexcept = default;
  constexpr explicit Bytes(std::int64_t count) : count_(count) {
    if (count < 0) {
      throw std::invalid_argument("Bytes: a number of bytes cannot be negative, got " +
                                  std::to_string(count));
    }
  }

  [[nodiscard]] constexpr std::int64_t count() const noexcept { return count_; }
  [[nodiscard]] static constexpr Bytes max() noexcept {
    return Bytes(std::numeric_limits<std::int64_t>::max(), Unchecked{});
  }

  constexpr Bytes& operator+=(Bytes other) {
    std::int64_t sum = 0;
    if (__builtin_add_overflow(count_, other.count_, &sum)) {
      throw std::out_of_range("Bytes: the sum exceeds 2^63-1 bytes");
    }
    count_ = sum;
    return *this;
  }
  constexpr Bytes& operator-=(Bytes other) {
    if (other.count_ > count_) {
      throw std::out_of_range("Bytes: the difference is below zero");
    }
    count_ -= other.count_;
    return *this;
  }
  friend constexpr Bytes operator+(Bytes left, Bytes right) { return left += right; }
  friend constexpr Bytes operator-(Bytes left, Bytes right) { return left -= right; }
  friend constexpr auto operator<=>(Bytes, Bytes) noexcept = default;

  /// The sum, or 2^63-1 where it would exceed that. For comparisons that must not throw.
  [[nodiscard]] constexpr Bytes saturating_add(Bytes other) const noexcept {
    std::int64_t sum = 0;
    return __builtin_add_overflow(count_, other.count_, &sum) ? max() : Bytes(sum, Unchecked{});
  }
  /// The difference, or zero where it would be below that.
  [[nodiscard]] constexpr Bytes saturating_sub(Bytes other) const noexcept {
    return other.count_ > count_ ? Bytes() : Bytes(count_ - other.count_, Unchecked{});
  }
  /// The next multiple of `granularity` (a positive number of bytes).
  [[nodiscard]] constexpr Bytes rounded_up(std::int64_t granularity) const {
    if (granularity <= 0) {
      throw std::invalid_argument("Bytes: the granularity must be positive");
    }
    const std::int64_t rest = count_ % granularity;
    return rest == 0 ? *this : *this + Bytes(granularity - rest);
  }

 private:
  struct Unchecked {};
  constexpr Bytes(std::int64_t count, Unchecked) noexcept : count_(count) {}
  std::int64_t count_ = 0;
};

/// "0 B", "512 B", "1.50 KiB", "20.00 MiB": for people; programs use `count()`.
[[nodiscard]] RESIDENCY_API std::string to_string(Bytes bytes);

namespace literals {
consteval Bytes operator""_B(unsigned long long n) {
  return Bytes(static_cast<std::int64_t>(n));
}
consteval Bytes operator""_KiB(unsigned long long n) {
  return Bytes(static_cast<std::int64_t>(n) * 1024);
}
consteval Bytes operator""_MiB(unsigned long long n) {
  return Bytes(static_cast<std::int64_t>(n) * 1024 * 1024);
}
consteval Bytes operator""_GiB(unsigned long long n) {
  return Bytes(static_cast<std::int64_t>(n) * 1024 * 1024 * 1024);
}
}  // namespace literals

}  // namespace residency

template <>
struct std::hash<residency::Bytes> {
  std::size_t operator()(residency::Bytes bytes) const noexcept {
    return std::hash<std::int64_t>{}(bytes.count());
  }
};
