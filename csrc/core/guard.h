#pragma once

#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include <fmt/format.h>

#include "manager_state.h"
#include "residency/core/errors.h"
#include "warning.h"

// What leases, holds and reservations have in common.
namespace residency {

[[nodiscard]] std::string in_words(const LeaseState& lease);
[[nodiscard]] std::string in_words(const HoldState& hold);
[[nodiscard]] std::string in_words(const ReservationState& reservation);

template <class State>
[[nodiscard]] bool is_active(const std::unique_ptr<State>& state) noexcept {
  return state && !state->ended.load(std::memory_order_acquire) && !state->manager->closed();
}

/// Releases as the user asks for it. Does nothing for a guard that was moved from.
template <class State, class... Options>
void release_guard(const std::unique_ptr<State>& state, Options... options) {
  if (!state) {
    return;
  }
  if (is_active(state)) {
    state->manager->check_not_loading();
  }
  state->manager->release(*state, options...);
}

/// Releases what a guard still has, in a destructor: never throws, refuses or waits.
template <class State, class... Options>
void abandon_guard(const std::unique_ptr<State>& state, Options... options) noexcept {
  if (!is_active(state)) {
    return;
  }
  std::exception_ptr failure;
  try {
    state->manager->release(*state, options...);
  } catch (...) {
    failure = std::current_exception();
  }
  try {
    const std::string_view outcome = !failure ? "it has been released. Release it explicitly"
                                     : state->ended.load()
                                         ? "it has been released: "
                                         : "it could not be released and is kept until it can be: ";
    warn(fmt::format("{} was destroyed while active; {}{}", in_words(*state), outcome,
                     failure ? describe(failure) : ""));
  } catch (...) {
    // No memory for a warning.
  }
}

}  // namespace residency
