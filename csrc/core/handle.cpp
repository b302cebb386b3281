#include "residency/core/handle.h"

#include <stdexcept>

#include <fmt/format.h>

#include "intern.h"

namespace residency {
namespace {

InternTable& type_names() {
  static InternTable& table = *[] {
    auto* made = new InternTable;
    made->number("tensors");  // number 0: what a default ValueType names
    return made;
  }();
  return table;
}

}  // namespace

ValueType::ValueType(std::string_view name) {
  if (name.empty()) {
    throw std::invalid_argument("ValueType: the name of a value type cannot be empty");
  }
  number_ = type_names().number(name);
}

const std::string& ValueType::name() const noexcept {
  return type_names().text(number_);
}

std::string to_string(const Handle& handle) {
  constexpr std::int64_t kValueMask = (std::int64_t{1} << Handle::kValueBits) - 1;
  return fmt::format("{}#{}:{}", handle.type().name(), static_cast<std::uint32_t>(handle.manager()),
                     handle.id() & kValueMask);
}

}  // namespace residency
