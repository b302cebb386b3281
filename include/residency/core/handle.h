#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "residency/core/export.h"

namespace residency {

/// Identity of a manager, unique in the process, never reused.
enum class ManagerId : std::uint32_t {};

/// The name of a kind of value (`tensors` by default), interned for the life of the process.
class RESIDENCY_API ValueType {
 public:
  /// `tensors`.
  constexpr ValueType() noexcept = default;
  /// Throws `std::invalid_argument` when the name is empty.
  explicit ValueType(std::string_view name);
  [[nodiscard]] const std::string& name() const noexcept;
  friend constexpr bool operator==(ValueType, ValueType) noexcept = default;
  [[nodiscard]] constexpr std::uint32_t hash_code() const noexcept { return number_; }

 private:
  std::uint32_t number_ = 0;
};

/// Immutable name of a value: it carries the identity of manager and value in one 64-bit id that
/// is unique in the process, and the value's type. It owns no tensor and may outlive the manager.
///
/// Equality is by manager, value and type. Moving, dropping or reloading a value never changes its
/// handle; each registration gives a new one, even for equal contents.
class RESIDENCY_API Handle {
 public:
  /// Names nothing: `id() == 0`; every manager refuses it as unknown.
  constexpr Handle() noexcept = default;
  constexpr explicit Handle(std::int64_t id, ValueType type = {}) noexcept : id_(id), type_(type) {}

  /// The one number that operators take; positive for every handle a manager gave out.
  [[nodiscard]] constexpr std::int64_t id() const noexcept { return id_; }
  [[nodiscard]] constexpr ValueType type() const noexcept { return type_; }
  [[nodiscard]] constexpr ManagerId manager() const noexcept {
    return static_cast<ManagerId>(static_cast<std::uint64_t>(id_) >> kValueBits);
  }

  friend constexpr bool operator==(const Handle&, const Handle&) noexcept = default;
  friend constexpr std::strong_ordering operator<=>(const Handle& left,
                                                    const Handle& right) noexcept {
    if (const auto by_id = left.id_ <=> right.id_; by_id != 0) {
      return by_id;
    }
    return left.type_.hash_code() <=> right.type_.hash_code();
  }

  /// The low bits of an id name the value inside its manager, the bits above name the manager.
  static constexpr int kValueBits = 43;

 private:
  std::int64_t id_ = 0;
  ValueType type_;
};

/// `tensors#1:42` (type, manager, value): for messages.
[[nodiscard]] RESIDENCY_API std::string to_string(const Handle& handle);

}  // namespace residency

template <>
struct std::hash<residency::Handle> {
  std::size_t operator()(const residency::Handle& handle) const noexcept {
    // Spread, because types and ids are both small numbers in a row.
    return std::hash<std::int64_t>{}(handle.id()) ^
           (handle.type().hash_code() * std::size_t{0x9e3779b97f4a7c15ULL});
  }
};
