#include "residency/core/plan.h"

#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <unordered_set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace residency {
namespace {

using namespace residency::literals;
using nlohmann::json;

const Handle kHandle(42);
const Handle kOther(43, ValueType("adapters"));

ResidencyPlan example() {
  return ResidencyPlan(
      {.name = "layer 3",
       .reclaim = {DiscardValue{kOther}},
       .reservations = {MemoryReservation{Location::cuda(0), 1_MiB, "activations"},
                        MemoryReservation{Location::pinned_host(), 0_B, "staging"}},
       .enter = {EnsureResident{kHandle, Location::cuda(0)},
                 MoveResident{kOther, Location::cuda(1), Location::pinned_host()},
                 MoveResident{kOther, Location::cuda(1)}},
       .exit = {DropResident{kHandle, Location::cuda(0)}}});
}

TEST(ResidencyPlan, IsConstructedPositionally) {
  const ActionList enter = {EnsureResident{kHandle, Location::cuda(0)}};
  const ActionList exit = {DropResident{kHandle, Location::cuda(0)}};
  const std::vector<MemoryReservation> reservations = {{Location::cuda(0), 5_B, "r"}};
  const ActionList reclaim = {MoveResident{kHandle, Location::pinned_host(), Location::cuda(0)}};
  const ResidencyPlan plan({.name = "name",
                            .reclaim = reclaim,
                            .reservations = reservations,
                            .enter = enter,
                            .exit = exit});
  EXPECT_EQ(plan.name(), "name");
  EXPECT_EQ(plan.enter(), enter);
  EXPECT_EQ(plan.exit(), exit);
  EXPECT_EQ(plan.reservations(), reservations);
  EXPECT_EQ(plan.reclaim(), reclaim);
}

TEST(ResidencyPlan, ActionsAreConstructedPositionally) {
  const EnsureResident ensure{kHandle, Location::cuda(1)};
  EXPECT_EQ(ensure.handle, kHandle);
  EXPECT_EQ(ensure.location, Location::cuda(1));
  const MoveResident move{kHandle, Location::cuda(1), Location::pinned_host()};
  EXPECT_EQ(move.to, Location::cuda(1));
  EXPECT_EQ(move.from_location, Location::pinned_host());
  EXPECT_EQ((MoveResident{kHandle, Location::cuda(1)}).from_location, std::nullopt);
  const DropResident drop{kHandle, Location::cuda(1)};
  EXPECT_EQ(drop.location, Location::cuda(1));
  EXPECT_EQ(DiscardValue{kHandle}.handle, kHandle);
  const MemoryReservation reservation{Location::cuda(0), 5_B, "label"};
  EXPECT_EQ(reservation.nbytes, 5_B);
  EXPECT_EQ(reservation.label, "label");
}

TEST(ResidencyPlan, EmptyOneIsLegal) {
  const ResidencyPlan plan({.name = "nothing"});
  EXPECT_TRUE(plan.enter().empty());
  EXPECT_TRUE(plan.exit().empty());
  EXPECT_TRUE(plan.reservations().empty());
  EXPECT_TRUE(plan.reclaim().empty());
  EXPECT_EQ(ResidencyPlan::from_json(plan.to_json()), plan);
}

TEST(ResidencyPlan, EmptyNameOrLabelIsAnArgumentError) {
  EXPECT_THROW(ResidencyPlan({.name = ""}), std::invalid_argument);
  EXPECT_THROW(ResidencyPlan({.name = "p", .reservations = {{Location::cuda(0), 1_B, ""}}}),
               std::invalid_argument);
}

TEST(ResidencyPlan, SequencesAreCopiedAtConstruction) {
  ActionList enter = {EnsureResident{kHandle, Location::cuda(0)}};
  const ResidencyPlan plan({.name = "p", .enter = enter});
  enter.clear();
  EXPECT_EQ(plan.enter().size(), 1U);
}

TEST(ResidencyPlan, CannotBeChangedAfterwards) {
  ResidencyPlan plan = example();
  static_assert(std::is_same_v<decltype(plan.enter()), const ActionList&>);
  static_assert(std::is_same_v<decltype(plan.exit()), const ActionList&>);
  static_assert(std::is_same_v<decltype(plan.reclaim()), const ActionList&>);
  static_assert(
      std::is_same_v<decltype(plan.reservations()), const std::vector<MemoryReservation>&>);
  static_assert(std::is_same_v<decltype(plan.name()), const std::string&>);
}

TEST(ResidencyPlan, EqualityAndHashSeeEveryPart) {
  const ResidencyPlan plan = example();
  EXPECT_EQ(plan, example());
  EXPECT_EQ(plan.hash_code(), example().hash_code());
  const ResidencyPlan others[] = {
      ResidencyPlan({.name = "layer 4",
                     .reclaim = plan.reclaim(),
                     .reservations = plan.reservations(),
                     .enter = plan.enter(),
                     .exit = plan.exit()}),
      ResidencyPlan({.name = plan.name(),
                     .reclaim = plan.reclaim(),
                     .reservations = plan.reservations(),
                     .enter = plan.exit(),
                     .exit = plan.exit()}),
      ResidencyPlan({.name = plan.name(),
                     .reclaim = plan.reclaim(),
                     .reservations = plan.reservations(),
                     .enter = plan.enter(),
                     .exit = plan.enter()}),
      ResidencyPlan({.name = plan.name(),
                     .reclaim = plan.reclaim(),
                     .enter = plan.enter(),
                     .exit = plan.exit()}),
      ResidencyPlan({.name = plan.name(),
                     .reservations = plan.reservations(),
                     .enter = plan.enter(),
                     .exit = plan.exit()}),
      // The same actions in another phase.
      ResidencyPlan({.name = plan.name(),
                     .reclaim = plan.enter(),
                     .reservations = plan.reservations(),
                     .enter = plan.reclaim(),
                     .exit = plan.exit()}),
      ResidencyPlan({.name = plan.name(),
                     .reclaim = plan.reclaim(),
                     .reservations = {plan.reservations()[1], plan.reservations()[0]},
                     .enter = plan.enter(),
                     .exit = plan.exit()}),
  };
  std::unordered_set<std::size_t> hashes = {plan.hash_code()};
  for (const auto& other : others) {
    EXPECT_NE(other, plan);
    hashes.insert(other.hash_code());
  }
  EXPECT_EQ(hashes.size(), 1 + std::size(others));
  std::unordered_set<ResidencyPlan> set(std::begin(others), std::end(others));
  set.insert(plan);
  set.insert(example());
  EXPECT_EQ(set.size(), 1 + std::size(others));
}

TEST(ResidencyAction, HashSeesEveryPart) {
  const ResidencyAction actions[] = {
      EnsureResident{kHandle, Location::cuda(0)},
      EnsureResident{kHandle, Location::cuda(1)},
      EnsureResident{kOther, Location::cuda(0)},
      DropResident{kHandle, Location::cuda(0)},
      MoveResident{kHandle, Location::cuda(0)},
      DiscardValue{kHandle},
      MoveResident{kHandle, Location::cuda(0), Location::pageable_host()},
      MoveResident{kHandle, Location::cuda(0), Location::pinned_host()}};
  std::unordered_set<std::size_t> hashes;
  for (const auto& action : actions) {
    hashes.insert(std::hash<ResidencyAction>{}(action));
  }
  EXPECT_EQ(hashes.size(), std::size(actions));
}

TEST(ResidencyPlan, TextShowsEveryPartInOrderOfExecution) {
  const std::string text = to_string(example());
  std::size_t from = 0;
  for (const std::string part :
       {"layer 3", "discard", "activations", "staging", "ensure", "move", "pinned-host", "drop"}) {
    const std::size_t found = text.find(part, from);
    ASSERT_NE(found, std::string::npos) << part << " is missing or too early in\n" << text;
    from = found;
  }
}

TEST(ResidencyPlan, SurvivesJson) {
  const ResidencyPlan plan = example();
  const ResidencyPlan back = ResidencyPlan::from_json(plan.to_json());
  EXPECT_EQ(back, plan);
  EXPECT_EQ(back.to_json(), plan.to_json());
  EXPECT_EQ(back.enter()[1], plan.enter()[1]);
  EXPECT_EQ(handle_of(back.reclaim()[0]).type().name(), "adapters");
}

TEST(ResidencyPlan, SurvivesJsonWithStrangeNames) {
  for (const std::string& name : {std::string("quote\" \\ \n\t"), std::string("Größe 测试"),
                                  std::string("nul\0inside", 10)}) {
    const ResidencyPlan plan(
        {.name = name, .reservations = {{Location::cuda(0), Bytes::max(), name}}});
    EXPECT_EQ(ResidencyPlan::from_json(plan.to_json()), plan);
  }
}

TEST(ResidencyPlan, NameThatIsNotUtf8IsAnArgumentErrorOrKept) {
  const ResidencyPlan plan({.name = "\xff\xfe"});
  try {
    EXPECT_EQ(ResidencyPlan::from_json(plan.to_json()), plan);
  } catch (const std::invalid_argument&) {
  }
}

TEST(ResidencyPlan, JsonBeginsWithItsVersion) {
  EXPECT_EQ(ResidencyPlan({.name = "p"}).to_json().find("{\"version\":1,\"name\":\"p\""), 0U);
}

class BadPlanJson : public testing::TestWithParam<std::string> {};

TEST_P(BadPlanJson, IsAnArgumentErrorAndNothingElse) {
  EXPECT_THROW((void)ResidencyPlan::from_json(GetParam()), std::invalid_argument) << GetParam();
}

INSTANTIATE_TEST_SUITE_P(
    Documents, BadPlanJson,
    testing::Values(
        "", " ", "null", "[]", "1", "\"plan\"", "{", "{}", "not json", "{\"version\":1}",
        "{\"name\":\"p\"}", "{\"version\":2,\"name\":\"p\"}", "{\"version\":0,\"name\":\"p\"}",
        "{\"version\":\"1\",\"name\":\"p\"}", "{\"version\":1.0,\"name\":\"p\"}",
        "{\"version\":1,\"name\":\"\"}", "{\"version\":1,\"name\":7}",
        "{\"version\":1,\"name\":\"p\",\"extra\":0}", "{\"version\":1,\"name\":\"p\",\"enter\":{}}",
        "{\"version\":1,\"name\":\"p\",\"enter\":[1]}",
        "{\"version\":1,\"name\":\"p\",\"enter\":[{}]}", "{\"version\":1,\"name\":\"p\"} trailing",
        "{\"version\":1,\"name\":\"\xff\"}", R"({"version":1,"name":"p","name":"q"})",
        R"({"version":1,"name":"p","enter":[],"enter":[]})",
        R"({"version":1,"name":"p","enter":[{"action":"discard","handle":{"id":1,"id":1,"type":"t"}}]})",
        R"({"version":1,"name":"p","enter":[{"action":"evict","handle":{"id":1,"type":"t"}}]})",
        R"({"version":1,"name":"p","enter":[{"action":"discard","handle":{"id":1,"type":""}}]})",
        R"({"version":1,"name":"p","enter":[{"action":"discard","handle":{"id":1}}]})",
        R"({"version":1,"name":"p","enter":[{"action":"discard","handle":{"type":"t"}}]})",
        R"({"version":1,"name":"p","enter":[{"action":"discard","handle":{"id":1,"type":"t","x":1}}]})",
        R"({"version":1,"name":"p","enter":[{"action":"discard","handle":{"id":1.5,"type":"t"}}]})",
        R"({"version":1,"name":"p","enter":[{"action":"discard","handle":{"id":99999999999999999999,"type":"t"}}]})",
        R"({"version":1,"name":"p","enter":[{"action":"discard","handle":{"id":1,"type":"t"},"location":"cuda:0"}]})",
        R"({"version":1,"name":"p","enter":[{"action":"ensure","handle":{"id":1,"type":"t"}}]})",
        R"({"version":1,"name":"p","enter":[{"action":"ensure","handle":{"id":1,"type":"t"},"location":"cuda"}]})",
        R"({"version":1,"name":"p","enter":[{"action":"ensure","handle":{"id":1,"type":"t"},"location":0}]})",
        R"({"version":1,"name":"p","enter":[{"action":"ensure","handle":{"id":1,"type":"t"},"to":"cuda:0"}]})",
        R"({"version":1,"name":"p","enter":[{"action":"move","handle":{"id":1,"type":"t"},"location":"cuda:0"}]})",
        R"({"version":1,"name":"p","enter":[{"action":"move","handle":{"id":1,"type":"t"},"to":"cuda:0","from":"cuda:1"}]})",
        R"({"version":1,"name":"p","enter":[{"action":"move","handle":{"id":1,"type":"t"},"to":"cuda:0","from_location":null}]})",
        R"({"version":1,"name":"p","reservations":[{"location":"cuda:0","nbytes":-1,"label":"l"}]})",
        R"({"version":1,"name":"p","reservations":[{"location":"cuda:0","nbytes":1,"label":""}]})",
        R"({"version":1,"name":"p","reservations":[{"location":"cuda:0","nbytes":1}]})",
        R"({"version":1,"name":"p","reservations":[{"location":"cuda:0","nbytes":1.5,"label":"l"}]})",
        R"({"version":1,"name":"p","reservations":[{"location":"cuda:0","nbytes":9223372036854775808,"label":"l"}]})",
        R"({"version":1,"name":"p","reservations":[{"location":"cuda:0","nbytes":1,"label":"l","x":0}]})"));

TEST(ResidencyPlan, JsonFaultNamesItsPlace) {
  const std::string text =
      R"({"version":1,"name":"p","exit":[{"action":"discard","handle":{"id":1,"type":"t"}},)"
      R"({"action":"ensure","handle":{"id":1,"type":"t"},"location":"moon"}]})";
  try {
    (void)ResidencyPlan::from_json(text);
    FAIL();
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("exit[1]"), std::string::npos) << message;
    EXPECT_NE(message.find("location"), std::string::npos) << message;
    EXPECT_NE(message.find("moon"), std::string::npos) << message;
  }
}

TEST(ResidencyPlan, EveryPrefixOfItsJsonIsRefused) {
  const std::string text = example().to_json();
  for (std::size_t length = 0; length < text.size(); ++length) {
    EXPECT_THROW((void)ResidencyPlan::from_json(text.substr(0, length)), std::invalid_argument);
  }
}

TEST(ResidencyPlan, DeeplyNestedJsonIsRefusedWithoutHarm) {
  EXPECT_THROW((void)ResidencyPlan::from_json(std::string(200'000, '[')), std::invalid_argument);
  const std::string deep =
      "{\"version\":1,\"name\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}";
  EXPECT_THROW((void)ResidencyPlan::from_json(deep), std::invalid_argument);
}

TEST(Handle, IsIdentityAndType) {
  EXPECT_EQ(Handle().id(), 0);
  EXPECT_EQ(Handle().type().name(), "tensors");
  EXPECT_NE(Handle(42), Handle(42, ValueType("adapters")));
  EXPECT_EQ(Handle(42, ValueType("adapters")), Handle(42, ValueType("adapters")));
  EXPECT_THROW((void)ValueType(""), std::invalid_argument);
  EXPECT_EQ(ValueType("tensors"), ValueType());
  const std::unordered_set<Handle> set = {Handle(1), Handle(1), Handle(2),
                                          Handle(1, ValueType("x"))};
  EXPECT_EQ(set.size(), 3U);
  EXPECT_EQ(to_string(Handle((std::int64_t{7} << Handle::kValueBits) | 5)), "tensors#7:5");
}

}  // namespace
}  // namespace residency
