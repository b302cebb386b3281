#include <algorithm>
#include <stdexcept>

#include <fmt/format.h>

#include "manager_state.h"
#include "planner.h"
#include "warning.h"

namespace residency {
namespace {

void check_streams(const std::vector<Stream>& streams) {
  for (std::size_t i = 0; i < streams.size(); ++i) {
    for (std::size_t j = 0; j < i; ++j) {
      if (streams[i].device == streams[j].device) {
        throw std::invalid_argument("two transfer streams are given for " +
                                    to_string(streams[i].device));
      }
    }
  }
}

std::string in_words(const MemoryReservation& reservation) {
  return fmt::format("reserve {} B at {} for '{}'", reservation.nbytes.count(),
                     to_string(reservation.location), reservation.label);
}

}  // namespace

// --- The dry run

ManagerState::Simulated ManagerState::simulate(World& world, Phase phase,
                                               std::span<const ResidencyAction> actions,
                                               Explanation* out, bool may_block) {
  for (std::size_t i = 0; i < actions.size(); ++i) {
    values_.prefetch(actions.subspan(i));
    Verdict verdict = plan_action(world, actions[i]);
    if (verdict.waits && !may_block) {
      verdict = would_block(verdict);
    }
    if (out != nullptr) {
      out->actions.push_back({phase, static_cast<std::uint32_t>(i), actions[i], verdict});
    }
    if (!verdict.feasible()) {
      return {false, phase, i, verdict};
    }
    if (out != nullptr && verdict.staging != Bytes()) {
      out->reservations.emplace_back().reservation = staging_reservation(verdict.staging);
    }
    if (!verdict.no_op() || out != nullptr) {
      world.apply(handle_of(actions[i]), verdict);
    }
  }
  return {};
}

ManagerState::Simulated ManagerState::simulate_reservations(World& world, const ResidencyPlan& plan,
                                                            Explanation* out, bool may_block) {
  for (std::size_t i = 0; i < plan.reservations().size(); ++i) {
    const MemoryReservation& each = plan.reservations()[i];
    Verdict verdict = plan_reservation(world, each.location, each.nbytes);
    if (verdict.waits && !may_block) {
      verdict = would_block(verdict);
    }
    if (out != nullptr) {
      out->reservations.push_back({each, verdict.feasible(), verdict.reason, verdict.shortfall});
    }
    if (!verdict.feasible()) {
      return {false, Phase::kReserve, i, verdict};
    }
    world.reserve(each.location, each.nbytes);
  }
  return {};
}

ManagerState::Simulated ManagerState::simulate(World& world, const ResidencyPlan& plan,
                                               Explanation* out, bool may_block) {
  Simulated simulated = simulate(world, Phase::kReclaim, plan.reclaim(), out, may_block);
  if (simulated.feasible) {
    simulated = simulate_reservations(world, plan, out, may_block);
  }
  if (simulated.feasible) {
    simulated = simulate(world, Phase::kEnter, plan.enter(), out, may_block);
  }
  if (simulated.feasible) {
    simulated = simulate(world, Phase::kExit, plan.exit(), out, may_block);
  }
  return simulated;
}

/// What the system refuses of the growth that a simulation has found.
World::Limits ManagerState::limits_of_growth(Lock& lock, const World& world) {
  struct Growing {
    Location location;
    Growth from;
    Growth by;
  };
  std::vector<Growing> growing;
  for (const Account& account : world.touched()) {
    const Account* now = ledger_.find(account.location);
    const Growth from = now != nullptr ? Growth{now->used + now->retiring, now->staging} : Growth();
    const Growth by{account.peak_held - from.values, account.staging - from.staging};
    if (by.values + by.staging > Bytes()) {
      growing.push_back({account.location, from, by});
    }
  }
  World::Limits limits;
  const Unlocked unlocked(*this, lock);
  for (const Growing& each : growing) {
    const auto spare = backend_->spare_bytes(each.location, each.by);
    if (spare.has_value() &&
        each.by.values.saturating_sub(spare->in_segments) + each.by.staging > spare->in_system) {
      limits.emplace_back(each.location,
                          SystemLimit{{each.from.values + spare->in_segments, each.from.staging},
                                      spare->in_system});
    }
  }
  return limits;
}

/// Simulates, and once more within the limits of the system where they forbid what was found.
template <class Simulate>
ManagerState::Simulated ManagerState::simulate_within_limits(Lock& lock, std::size_t num_actions,
                                                             const Simulate& simulate) {
  World::Limits limits;
  {
    World world(values_, ledger_, *backend_, options_, num_actions);
    const Simulated simulated = simulate(world);
    if (!simulated.feasible) {
      return simulated;
    }
    limits = limits_of_growth(lock, world);
    if (limits.empty()) {
      return simulated;
    }
  }
  check_open();
  World world(values_, ledger_, *backend_, options_, num_actions, std::move(limits));
  return simulate(world);
}

Explanation ManagerState::explain(const ResidencyPlan* plan,
                                  std::span<const ResidencyAction> actions,
                                  std::optional<std::uint64_t> expected_state_version) {
  check_not_loading();
  Explanation explanation;
  explanation.plan = plan != nullptr ? plan->name() : "execute";
  explanation.actions.reserve(plan != nullptr ? plan->reclaim().size() + plan->enter().size() +
                                                    plan->exit().size()
                                              : actions.size());
  Trash trash;
  Lock lock(mutex_);
  check_open();
  settle(trash);
  check_version(explanation.plan, expected_state_version);
  const Simulated simulated =
      simulate_within_limits(lock, explanation.actions.capacity(), [&](World& world) {
        explanation.actions.clear();
        explanation.reservations.clear();
        explanation.state_version = version_;
        world.note_steps();
        const Simulated found = plan != nullptr
                                    ? simulate(world, *plan, &explanation, true)
                                    : simulate(world, Phase::kExecute, actions, &explanation, true);
        explanation.locations = predicted_locations(world);
        return found;
      });
  explanation.feasible = simulated.feasible;
  if (!simulated.feasible) {
    const std::string what = simulated.phase == Phase::kReserve
                                 ? in_words(plan->reservations()[simulated.index])
                                 : to_string(explanation.actions.back().action);
    explanation.infeasible_because =
        fmt::format("{} {}, {}: {}", to_string(simulated.phase), simulated.index, what,
                    describe(simulated.verdict));
  }
  return explanation;
}

std::vector<PredictedLocation> ManagerState::predicted_locations(const World& world) const {
  std::vector<PredictedLocation> locations;
  for (const Account& account : world.touched()) {
    const Account* before = ledger_.find(account.location);
    locations.push_back({.location = account.location,
                         .budget = account.budget,
                         .used_before = before != nullptr ? before->used : Bytes(),
                         .used_after = account.used,
                         .escaped_after = account.escaped,
                         .peak_used = account.peak_used,
                         .peak_charged = account.peak_charged,
                         .segments = predicted_segments(world, account)});
  }
  std::ranges::sort(locations, {}, &PredictedLocation::location);
  return locations;
}

std::optional<SegmentBytes> ManagerState::predicted_segments(const World& world,
                                                             const Account& account) const {
  auto segments = backend_->predict_segments(account.location, world.steps_at(account.location));
  if (segments.has_value()) {
    const Account* now = ledger_.find(account.location);
    segments->before += now != nullptr ? now->staging : Bytes();
    segments->peak += account.staging;
    segments->after += account.staging;
  }
  return segments;
}

void ManagerState::check_version(const std::string& plan,
                                 std::optional<std::uint64_t> expected) const {
  if (expected && *expected != version_) {
    throw StaleStateError(plan, *expected, version_);
  }
}

void ManagerState::throw_plan_error(const std::string& plan, const Simulated& failed,
                                    const std::string& what) {
  throw PlanError(
      plan, failed.phase, failed.index, failed.verdict,
      fmt::format("plan '{}' cannot be carried out, nothing has changed: {} {}, {}: {}", plan,
                  to_string(failed.phase), failed.index, what, describe(failed.verdict)));
}

// --- Carrying out

PlanReport ManagerState::execute(std::span<const ResidencyAction> actions,
                                 const ExecuteOptions& options) {
  check_not_loading();
  if (options.name.empty()) {
    throw std::invalid_argument("execute: the name is empty");
  }
  check_streams(options.streams);
  {
    Trash trash;
    Lock lock(mutex_);
    start_call(lock);
    settle(trash);
    check_version(options.name, options.expected_state_version);
    const Simulated simulated = simulate_within_limits(lock, actions.size(), [&](World& world) {
      return simulate(world, Phase::kExecute, actions, nullptr, options.may_block);
    });
    if (!simulated.feasible) {
      throw_plan_error(options.name, simulated, to_string(actions[simulated.index]));
    }
  }
  PlanReport report;
  report.plan_ = options.name;
  report.entries_.reserve(actions.size());
  run_phase(report, actions, Phase::kExecute, std::make_shared<const std::string>(options.name),
            {options.on_failure, options.may_block, options.streams}, 0);
  return report;
}

PlanReport ManagerState::prefetch(std::span<const Handle> handles, Location at) {
  check_not_loading();
  PlanReport report;
  report.plan_ = "prefetch";
  report.entries_.reserve(handles.size());
  const auto name = std::make_shared<const std::string>(report.plan_);
  const auto would_load = [&](const ResidencyAction& ensure) {
    const Lock lock(mutex_);
    check_open();
    return plan_action(present_, ensure).reason == Reason::kLoaded;
  };
  for (const Handle& handle : handles) {
    const EnsureResident ensure{handle, at};
    if (would_load(ensure)) {
      break;
    }
    try {
      report.entries_.push_back(
          perform(ensure, {.may_block = false, .prefetch = true}, Phase::kExecute, name));
    } catch (const HandleError&) {
      throw;
    } catch (const ClosedError&) {
      throw;
    } catch (const ForkError&) {
      throw;
    } catch (const TransferError&) {
      throw;  // of an earlier transfer, which is told once
    } catch (...) {
      break;  // whoever needs the value will be told; what was tried is in the trace
    }
  }
  return report;
}

/// Carries out the actions of one phase and adds them to the report. On failure with rollback,
/// everything in the report from `rollback_from` on is undone.
void ManagerState::run_phase(PlanReport& report, std::span<const ResidencyAction> actions,
                             Phase phase, const PlanName& plan, const RunOptions& options,
                             std::size_t rollback_from) {
  const std::size_t begin = report.size();
  Together together;
  while (report.size() - begin != actions.size()) {
    try {
      perform_next(report, actions.subspan(report.size() - begin), options, phase, plan, together);
    } catch (...) {
      const std::size_t i = report.size() - begin;
      const std::exception_ptr cause = std::current_exception();
      if (options.when_failed) {
        options.when_failed();
      }
      const bool rolls_back = options.on_failure == OnFailure::kRollback;
      const bool restored = rolls_back ? roll_back(report, rollback_from, phase, plan)
                                       : changed_nothing(report, rollback_from);
      const std::string failed = to_string(actions[i]);
      throw PlanExecutionError(
          *plan, phase, i, failed, report, cause, restored,
          fmt::format(
              "plan '{}' failed in phase {} at action {}, {}: {}; {} action(s) before it {}", *plan,
              to_string(phase), i, failed, describe(cause),
              rolls_back ? report.size() - rollback_from : report.size(),
              !rolls_back ? "stay as they are"
              : restored  ? "were undone"
                          : "could not all be undone"));
    }
  }
}

bool ManagerState::changed_nothing(const PlanReport& report, std::size_t from) {
  return std::all_of(report.entries_.begin() + static_cast<std::ptrdiff_t>(from),
                     report.entries_.end(), [](const ActionReport& each) { return each.no_op(); });
}

bool ManagerState::roll_back(const PlanReport& report, std::size_t from, Phase phase,
                             const PlanName& plan) {
  bool restored = true;
  for (std::size_t i = report.entries_.size(); i > from; --i) {
    const ActionReport& done = report.entries_[i - 1];
    if (done.no_op()) {
      continue;
    }
    if (!undo(done.record_, done.gave_up_stale_, phase, plan)) {
      return false;  // what came before it rests on what could not be undone
    }
    // Stale bytes are worth nothing, but they were there; escaped ones count until they go.
    restored &= !done.gave_up_stale_ && !done.gave_up_shared_;
  }
  return restored;
}

/// Undoes one action by its inverse, which goes through the same planner and admission, so that
/// bytes that must be preserved are never at risk. False when it cannot be undone.
bool ManagerState::undo(const TransitionRecord& done, bool gave_up_stale, Phase phase,
                        const PlanName& plan) {
  const Handle& handle = done.handle;
  const auto is_undone = [&] {
    const Lock lock(mutex_);
    const ValueRecord* record = closed() ? nullptr : values_.find(handle).record;
    return done.destination && record != nullptr && record->find(*done.destination) == nullptr;
  };
  const auto run = [&](const ResidencyAction& inverse) {
    constexpr int kMostTold = 16;  // more than there can be copies of one value on their way
    for (int num_told = 0; num_told < kMostTold; ++num_told) {
      try {
        (void)perform(inverse, {}, phase, plan);
        return true;
      } catch (const TransferError& error) {
        // A transfer of this value was still on its way and has failed, which is told once. When it
        // was the one to undo, that has put everything back; when not, it is out of the way now.
        warn(fmt::format("rollback of plan '{}': {}", *plan, error.what()));
        if (is_undone()) {
          return true;
        }
      } catch (...) {
        warn(fmt::format("rollback of plan '{}' stops at: {}: {}", *plan, to_string(inverse),
                         describe(std::current_exception())));
        return false;
      }
    }
    return false;
  };
  switch (done.reason) {
    case Reason::kCopied:
      return done.action == ActionKind::kMove && !gave_up_stale
                 ? run(MoveResident{handle, *done.source, *done.destination})
                 : run(DropResident{handle, *done.destination});
    case Reason::kLoaded: return run(DropResident{handle, *done.destination});
    case Reason::kReleased: return gave_up_stale || run(EnsureResident{handle, *done.source});
    case Reason::kRefreshed: {
      // The old bytes are gone, but they were worth nothing: it is stale again.
      if (done.action == ActionKind::kMove && !gave_up_stale &&
          !run(EnsureResident{handle, *done.source})) {
        return false;
      }
      const Lock lock(mutex_);
      ValueRecord* record = closed() ? nullptr : values_.find(handle).record;
      Materialization* refreshed = record != nullptr ? record->find(*done.destination) : nullptr;
      if (refreshed == nullptr || refreshed->is_protected()) {
        return false;
      }
      refreshed->stale = true;
      ++version_;
      return true;
    }
    case Reason::kDiscarded:
    case Reason::kTaken: return false;
    default: return true;  // the rest are no-ops and refusals, which changed nothing
  }
}

// --- Scopes

Scope ManagerState::scope(ResidencyPlan plan, ScopeOptions options) {
  check_not_loading();
  check_streams(options.streams);
  {
    const Lock lock(mutex_);
    check_open();
  }
  auto name = std::make_shared<const std::string>(plan.name());
  return Scope(std::unique_ptr<ScopeState>(new ScopeState{.manager = shared_from_this(),
                                                          .plan = std::move(plan),
                                                          .options = std::move(options),
                                                          .plan_name = std::move(name),
                                                          .reservations = {},
                                                          .report = {}}));
}

void ManagerState::enter(ScopeState& scope) {
  check_not_loading();
  if (scope.attempted) {
    throw LifetimeClosedError(fmt::format(
        "the scope of plan '{}' was entered before; a scope is for one use", scope.plan.name()));
  }
  scope.attempted = true;
  const ResidencyPlan& plan = scope.plan;
  {
    Trash trash;
    Lock lock(mutex_);
    start_call(lock);
    settle(trash);
    check_version(plan.name(), scope.options.expected_state_version);
    const Simulated simulated = simulate_within_limits(lock, 0, [&](World& world) {
      return simulate(world, plan, nullptr, scope.options.may_block);
    });
    if (!simulated.feasible) {
      const auto phase_actions = [&]() -> const ActionList& {
        return simulated.phase == Phase::kReclaim ? plan.reclaim()
               : simulated.phase == Phase::kEnter ? plan.enter()
                                                  : plan.exit();
      };
      throw_plan_error(plan.name(), simulated,
                       simulated.phase == Phase::kReserve
                           ? in_words(plan.reservations()[simulated.index])
                           : to_string(phase_actions()[simulated.index]));
    }
  }
  scope.report.plan_ = plan.name();
  scope.report.entries_.reserve(plan.reclaim().size() + plan.enter().size() + plan.exit().size());
  const RunOptions options{scope.options.on_failure, scope.options.may_block,
                           scope.options.streams};
  const auto release_reservations = [&] {
    while (!scope.reservations.empty()) {
      scope.reservations.back().release();
      scope.reservations.pop_back();
    }
    scope.report.reservations_.clear();
  };
  run_phase(scope.report, plan.reclaim(), Phase::kReclaim, scope.plan_name, options, 0);
  for (std::size_t i = 0; i < plan.reservations().size(); ++i) {
    try {
      scope.reservations.push_back(
          reserve(plan.reservations()[i], scope.options.require_physical, scope.options.may_block));
      scope.report.reservations_.push_back(
          {plan.reservations()[i], scope.reservations.back().physical(), std::nullopt});
    } catch (...) {
      const std::exception_ptr cause = std::current_exception();
      release_reservations();
      const bool rolls_back = options.on_failure == OnFailure::kRollback;
      const bool restored = rolls_back
                                ? roll_back(scope.report, 0, Phase::kReserve, scope.plan_name)
                                : changed_nothing(scope.report, 0);
      const std::string failed = in_words(plan.reservations()[i]);
      throw PlanExecutionError(plan.name(), Phase::kReserve, i, failed, scope.report, cause,
                               restored,
                               fmt::format("plan '{}' failed in phase reserve at reservation {}, "
                                           "{}: {}",
                                           plan.name(), i, failed, describe(cause)));
    }
  }
  RunOptions enter_options = options;
  enter_options.when_failed = release_reservations;  // what is undone may need their room
  run_phase(scope.report, plan.enter(), Phase::kEnter, scope.plan_name, enter_options, 0);
  const Lock lock(mutex_);
  scope.entered = true;
  ++num_scopes_;
}

void ManagerState::close(ScopeState& scope) {
  if (!scope.entered || scope.closed) {
    return;
  }
  check_not_loading();
  scope.closed = true;
  std::exception_ptr failure;
  if (!closed()) {
    try {
      run_phase(scope.report, scope.plan.exit(), Phase::kExit, scope.plan_name,
                {scope.options.on_failure, scope.options.may_block, scope.options.streams},
                scope.report.size());
    } catch (...) {
      failure = std::current_exception();
    }
  }
  while (!scope.reservations.empty()) {
    scope.reservations.back().release();
    scope.reservations.pop_back();
  }
  {
    const Lock lock(mutex_);
    num_scopes_ -= closed() ? 0U : 1U;
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void ManagerState::abandon(ScopeState& scope) noexcept {
  if (!scope.entered || scope.closed) {
    return;
  }
  scope.closed = true;
  const bool was_open = !closed();
  while (!scope.reservations.empty()) {
    try {
      release(*scope.reservations.back().state_);
    } catch (...) {
      warn(describe(std::current_exception()));
    }
    scope.reservations.pop_back();
  }
  {
    const Lock lock(mutex_);
    num_scopes_ -= closed() ? 0U : 1U;
  }
  if (was_open) {
    warn(
        fmt::format("the scope of plan '{}' was destroyed without close(); its reservations have "
                    "been released, its exit actions were not run",
                    scope.plan.name()));
  }
}

Scope::Scope(std::unique_ptr<ScopeState> state) noexcept : state_(std::move(state)) {}
Scope::Scope(Scope&&) noexcept = default;
Scope& Scope::operator=(Scope&& other) noexcept {
  const Scope ended(std::move(*this));
  state_ = std::move(other.state_);
  return *this;
}
Scope::~Scope() {
  if (state_) {
    state_->manager->abandon(*state_);
  }
}
const ResidencyPlan& Scope::plan() const noexcept {
  return state_->plan;
}
bool Scope::entered() const noexcept {
  return state_->entered;
}
bool Scope::closed() const noexcept {
  return state_->closed;
}
void Scope::enter() {
  state_->manager->enter(*state_);
}
void Scope::close() {
  state_->manager->close(*state_);
}
const PlanReport& Scope::report() const noexcept {
  return state_->report;
}

}  // namespace residency
