#include "residency/core/plan.h"

#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "hash.h"

namespace residency {

ResidencyPlan::ResidencyPlan(PlanParts parts)
    : name_(std::move(parts.name)),
      reclaim_(std::move(parts.reclaim)),
      reservations_(std::move(parts.reservations)),
      enter_(std::move(parts.enter)),
      exit_(std::move(parts.exit)) {
  if (name_.empty()) {
    throw std::invalid_argument("ResidencyPlan: the name of a plan cannot be empty");
  }
  for (std::size_t i = 0; i < reservations_.size(); ++i) {
    if (reservations_[i].label.empty()) {
      throw std::invalid_argument(
          fmt::format("ResidencyPlan '{}': the label of reservation {} is empty", name_, i));
    }
  }
}

std::size_t ResidencyPlan::hash_code() const noexcept {
  std::size_t seed = hash_all(name_);
  for (const ActionList* actions : {&reclaim_, &enter_, &exit_}) {
    seed = hash_all(seed, actions->size());
    for (const ResidencyAction& action : *actions) {
      seed = hash_all(seed, action);
    }
  }
  for (const MemoryReservation& reservation : reservations_) {
    seed = hash_all(seed, reservation.location, reservation.nbytes, reservation.label);
  }
  return seed;
}

std::string to_string(const ResidencyPlan& plan) {
  std::string text = fmt::format("plan '{}'\n", plan.name());
  const auto add = [&text](std::string_view phase, const ActionList& actions) {
    for (const ResidencyAction& action : actions) {
      text += fmt::format("  {:<8} {}\n", phase, to_string(action));
    }
  };
  add("reclaim", plan.reclaim());
  for (const MemoryReservation& reservation : plan.reservations()) {
    text += fmt::format("  {:<8} {} at {} for '{}'\n", "reserve", to_string(reservation.nbytes),
                        to_string(reservation.location), reservation.label);
  }
  add("enter", plan.enter());
  add("exit", plan.exit());
  return text;
}

}  // namespace residency
