#include <initializer_list>
#include <set>
#include <stdexcept>
#include <string>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include "residency/core/plan.h"

namespace residency {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kVersion = 1;

Json handle_to_json(const Handle& handle) {
  return {{"id", handle.id()}, {"type", handle.type().name()}};
}

Json action_to_json(const ResidencyAction& action) {
  Json json = {{"action", to_string(kind_of(action))},
               {"handle", handle_to_json(handle_of(action))}};
  std::visit(
      Overloaded{
          [&](const EnsureResident& ensure) { json["location"] = to_string(ensure.location); },
          [&](const MoveResident& move) {
            json["to"] = to_string(move.to);
            if (move.from_location) {
              json["from_location"] = to_string(*move.from_location);
            }
          },
          [&](const DropResident& drop) { json["location"] = to_string(drop.location); },
          [](const DiscardValue&) {},
      },
      action);
  return json;
}

Json actions_to_json(const ActionList& actions) {
  Json json = Json::array();
  for (const ResidencyAction& action : actions) {
    json.push_back(action_to_json(action));
  }
  return json;
}

/// Reads one JSON value and knows where in the document it stands, so that every fault can be
/// named by its place.
class Reader {
 public:
  Reader(const Json& json, std::string place) : json_(json), place_(std::move(place)) {}

  [[noreturn]] void fail(std::string_view expected) const {
    // Structured values only by their type: writing a deeply nested one would exhaust the stack.
    throw std::invalid_argument(
        fmt::format("plan JSON: {}: expected {}, got {}", place_, expected,
                    json_.is_structured() ? std::string(json_.type_name()) : json_.dump()));
  }
  void expect_object(std::initializer_list<std::string_view> known) const {
    if (!json_.is_object()) {
      fail("an object");
    }
    for (const auto& [key, value] : json_.items()) {
      bool is_known = false;
      for (const std::string_view name : known) {
        is_known |= key == name;
      }
      if (!is_known) {
        throw std::invalid_argument(fmt::format("plan JSON: {}: unknown field '{}'", place_, key));
      }
    }
  }
  [[nodiscard]] bool has(const char* key) const { return json_.contains(key); }
  [[nodiscard]] Reader field(const char* key) const {
    if (!has(key)) {
      throw std::invalid_argument(fmt::format("plan JSON: {}: field '{}' is missing", place_, key));
    }
    return Reader(json_.at(key), place_ + "." + key);
  }
  [[nodiscard]] std::string text() const {
    if (!json_.is_string()) {
      fail("a string");
    }
    return json_.get<std::string>();
  }
  [[nodiscard]] std::int64_t integer() const {
    const bool fits = json_.is_number_integer() &&
                      (!json_.is_number_unsigned() || json_.get<std::uint64_t>() <= INT64_MAX);
    if (!fits) {
      fail("an integer of at most 2^63-1");
    }
    return json_.get<std::int64_t>();
  }
  [[nodiscard]] Location location() const {
    const std::string canonical = text();
    try {
      return Location::parse(canonical);
    } catch (const std::logic_error& error) {  // not canonical, or one disk name too many
      throw std::invalid_argument(fmt::format("plan JSON: {}: {}", place_, error.what()));
    }
  }
  template <class Visit>
  void each(const Visit& visit) const {
    if (!json_.is_array()) {
      fail("an array");
    }
    for (std::size_t i = 0; i < json_.size(); ++i) {
      visit(Reader(json_[i], fmt::format("{}[{}]", place_, i)));
    }
  }

 private:
  const Json& json_;
  std::string place_;
};

Handle read_handle(const Reader& reader) {
  reader.expect_object({"id", "type"});
  const std::int64_t id = reader.field("id").integer();
  const std::string type = reader.field("type").text();
  if (type.empty()) {
    reader.field("type").fail("a value type that is not empty");
  }
  return Handle(id, ValueType(type));
}

ResidencyAction read_action(const Reader& reader) {
  reader.expect_object({"action", "handle", "location", "to", "from_location"});
  const std::string kind = reader.field("action").text();
  if (kind == "ensure" || kind == "drop") {
    reader.expect_object({"action", "handle", "location"});
    const Handle handle = read_handle(reader.field("handle"));
    const Location location = reader.field("location").location();
    if (kind == "ensure") {
      return EnsureResident{handle, location};
    }
    return DropResident{handle, location};
  }
  if (kind == "move") {
    reader.expect_object({"action", "handle", "to", "from_location"});
    MoveResident move{read_handle(reader.field("handle")), reader.field("to").location()};
    if (reader.has("from_location")) {
      move.from_location = reader.field("from_location").location();
    }
    return move;
  }
  if (kind == "discard") {
    reader.expect_object({"action", "handle"});
    return DiscardValue{read_handle(reader.field("handle"))};
  }
  reader.field("action").fail("'ensure', 'move', 'drop' or 'discard'");
}

ActionList read_actions(const Reader& plan, const char* phase) {
  ActionList actions;
  if (plan.has(phase)) {
    plan.field(phase).each([&](const Reader& reader) { actions.push_back(read_action(reader)); });
  }
  return actions;
}

MemoryReservation read_reservation(const Reader& reader) {
  reader.expect_object({"location", "nbytes", "label"});
  const std::int64_t nbytes = reader.field("nbytes").integer();
  if (nbytes < 0) {
    reader.field("nbytes").fail("a number of bytes that is not negative");
  }
  return {reader.field("location").location(), Bytes(nbytes), reader.field("label").text()};
}

}  // namespace

std::string ResidencyPlan::to_json() const {
  Json reservations = Json::array();
  for (const MemoryReservation& reservation : reservations_) {
    reservations.push_back({{"location", to_string(reservation.location)},
                            {"nbytes", reservation.nbytes.count()},
                            {"label", reservation.label}});
  }
  const Json json = {{"version", kVersion},
                     {"name", name_},
                     {"reclaim", actions_to_json(reclaim_)},
                     {"reservations", std::move(reservations)},
                     {"enter", actions_to_json(enter_)},
                     {"exit", actions_to_json(exit_)}};
  try {
    return json.dump();
  } catch (const Json::exception& error) {  // a name or label that is not UTF-8
    throw std::invalid_argument(
        fmt::format("plan '{}' cannot be written as JSON: {}", name_, error.what()));
  }
}

ResidencyPlan ResidencyPlan::from_json(std::string_view text) {
  // A plan nests four levels deep. Printing a hostile document would recurse as deep as it does.
  constexpr int kMaxDepth = 16;
  std::vector<std::set<std::string>> names;  // of the objects that are open
  const auto check = [&](int depth, Json::parse_event_t event, const Json& parsed) {
    if (depth > kMaxDepth) {
      throw std::invalid_argument("plan JSON: it is nested deeper than a plan can be");
    }
    if (event == Json::parse_event_t::object_start) {
      names.emplace_back();
    } else if (event == Json::parse_event_t::object_end) {
      names.pop_back();
    } else if (event == Json::parse_event_t::key &&
               !names.back().insert(parsed.get<std::string>()).second) {
      throw std::invalid_argument(
          fmt::format("plan JSON: field '{}' is given twice", parsed.get<std::string>()));
    }
    return true;
  };
  Json json;
  try {
    json = Json::parse(text, check);
  } catch (const Json::exception& error) {
    throw std::invalid_argument(fmt::format("plan JSON: {}", error.what()));
  }
  const Reader reader(json, "plan");
  reader.expect_object({"version", "name", "reclaim", "reservations", "enter", "exit"});
  if (reader.field("version").integer() != kVersion) {
    reader.field("version").fail(fmt::format("version {}", kVersion));
  }
  std::vector<MemoryReservation> reservations;
  if (reader.has("reservations")) {
    reader.field("reservations").each([&](const Reader& each) {
      reservations.push_back(read_reservation(each));
    });
  }
  return ResidencyPlan({.name = reader.field("name").text(),
                        .reclaim = read_actions(reader, "reclaim"),
                        .reservations = std::move(reservations),
                        .enter = read_actions(reader, "enter"),
                        .exit = read_actions(reader, "exit")});
}

}  // namespace residency
