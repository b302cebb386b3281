#include <algorithm>
#include <utility>

#include "manager_state.h"
#include "planner.h"

namespace residency {
namespace {

/// The transfer stream given for an action: that of its destination.
std::optional<Stream> stream_for(const ResidencyAction& action, std::span<const Stream> streams) {
  const std::optional<Location> destination =
      std::visit(Overloaded{
                     [](const EnsureResident& ensure) { return std::optional(ensure.location); },
                     [](const MoveResident& move) { return std::optional(move.to); },
                     [](const DropResident&) { return std::optional<Location>(); },
                     [](const DiscardValue&) { return std::optional<Location>(); },
                 },
                 action);
  for (const Stream& stream : streams) {
    if (stream.device == destination) {
      return stream;
    }
  }
  return std::nullopt;
}

}  // namespace

/// Ends the turns of all steps. The mutex is held.
class ManagerState::TurnsOf {
 public:
  TurnsOf(ManagerState& state, const std::vector<Step>& steps) noexcept
      : state_(state), steps_(steps) {}
  TurnsOf(const TurnsOf&) = delete;
  TurnsOf& operator=(const TurnsOf&) = delete;
  ~TurnsOf() {
    for (const Step& step : steps_) {
      state_.end_turn(*step.record);
    }
  }

 private:
  ManagerState& state_;
  const std::vector<Step>& steps_;
};

/// Adds the action to those that are carried out together, with the turn of its value and its bytes
/// charged. False, and nothing has changed, when it has to be carried out by itself.
bool ManagerState::join(Together& together, const ResidencyAction& action,
                        const RunOptions& options) {
  ValueRecord* record = values_.find(handle_of(action)).record;
  if (record == nullptr || record->busy || record->has_settled_arrival()) {
    return false;
  }
  const Verdict verdict = plan_action(present_, action);
  const auto may_join = [&] {
    if (verdict.no_op()) {
      return true;
    }
    if (verdict.reason != Reason::kCopied || verdict.waits) {
      return false;
    }
    const Transition& copy = verdict.transitions[0];
    if (together.from.has_value()) {
      return together.from == copy.from && together.to == copy.to;
    }
    return !can_fail_later(backend_->path(copy.from, copy.to)) &&
           std::ranges::none_of(options.streams,
                                [&](const Stream& each) { return each.device == copy.to; });
  };
  if (!may_join()) {
    return false;
  }
  Step& step = together.steps.emplace_back();
  step.record = record;
  record->busy = true;
  step.verdict = verdict;
  step.handle = handle_of(action);
  step.entry.action = kind_of(action);
  step.entry.handle = step.handle;
  note_verdict(step);
  if (!step.verdict.no_op()) {
    charge(step);
    together.from = step.verdict.transitions[0].from;
    together.to = step.verdict.transitions[0].to;
  }
  return true;
}

/// Runs in the open, and throws nothing. Returns how many of the steps went well, from the first
/// on; of the others nothing is left.
std::size_t ManagerState::make_together(Together& together, std::exception_ptr& failure) noexcept {
  std::vector<Step>& steps = together.steps;
  std::size_t num_made = steps.size();
  const auto fail_at = [&](std::size_t step) {
    num_made = step;
    failure = std::current_exception();
  };
  try {
    together.requests.reserve(steps.size());
    together.results.reserve(steps.size());
  } catch (...) {
    fail_at(0);
  }
  for (std::size_t i = 0; i < num_made; ++i) {
    Step& step = steps[i];
    if (step.verdict.no_op()) {
      continue;
    }
    try {
      if (step.inputs.given_up) {
        step.made.escape_watch = backend_->watch_escape(*step.inputs.given_up);
      }
      together.requests.push_back(
          request_of(step, std::move(step.inputs), step.verdict.transitions[0]));
    } catch (...) {
      fail_at(i);
    }
  }
  std::exception_ptr error;
  try {
    error = backend_->copy_all(together.requests, together.results);
  } catch (...) {
    error = std::current_exception();
  }
  together.requests.clear();
  auto result = together.results.begin();
  for (std::size_t i = 0; i < num_made; ++i) {
    Step& step = steps[i];
    if (step.verdict.no_op()) {
      continue;
    }
    if (result == together.results.end()) {
      num_made = i;
      failure = error;
      break;
    }
    step.made.fence = std::move(result->ready);
    step.made.path = result->path;
    step.made.blocked = result->blocked;
    BlockPtr block = std::move(result->block);
    ++result;
    try {
      keep_made(step, block);
    } catch (...) {
      fail_at(i);
      unmake(step.made, std::move(block));
    }
  }
  for (; result != together.results.end(); ++result) {
    Made unwanted;
    unwanted.fence = std::move(result->ready);
    unmake(unwanted, std::move(result->block));
  }
  together.results.clear();
  return num_made;
}

/// Carries out the first of the actions together, as far as they change nothing or are copies
/// between the same two locations that wait for nothing: of the mutex, the backend and the device
/// each is asked once for all of them. False: the first is none of those. When one fails it throws
/// why, with those before it in the report.
bool ManagerState::copy_together(PlanReport& report, std::span<const ResidencyAction> actions,
                                 const RunOptions& options, Phase phase, const PlanName& plan,
                                 Together& together, bool pin) {
  constexpr std::size_t kMost = 256;  // the device waits for the first until then
  if (kind_of(actions.front()) != ActionKind::kEnsure &&
      kind_of(actions.front()) != ActionKind::kMove) {
    return false;
  }
  check_not_loading();
  const std::int64_t start = now_ns();
  std::vector<Step>& steps = together.steps;
  steps.clear();
  steps.reserve(std::min(kMost, actions.size()));
  together.from.reset();
  Trash trash;
  Lock lock(mutex_);
  check_open();
  settle_oldest(trash);
  const TurnsOf turns(*this, steps);
  try {
    for (std::size_t i = 0; i < std::min(kMost, actions.size()); ++i) {
      values_.prefetch(actions.subspan(i));
      if (!join(together, actions[i], options)) {
        break;
      }
      steps.back().entry.phase = phase;
      steps.back().entry.host_start_ns = start;
    }
  } catch (...) {
    give_back(lock, steps);
    throw;
  }
  if (steps.empty()) {
    return false;
  }
  std::exception_ptr failure;
  std::size_t num_made = steps.size();
  if (together.from.has_value()) {
    const Unlocked unlocked(*this, lock);
    num_made = make_together(together, failure);
  }
  const std::int64_t end = now_ns();
  const std::size_t begin = report.size();
  std::size_t num_done = 0;
  try {
    check_open();  // or nobody is left to give it to
    for (; num_done < num_made; ++num_done) {
      Step& step = steps[num_done];
      step.entry.host_end_ns = end;
      ActionReport& entry = report.entries_.emplace_back();
      if (step.verdict.no_op()) {
        publish_no_op(step, plan, entry);
      } else {
        publish(step, trash, together.releases, plan, entry);
      }
      if (pin) {  // nobody else has had the turn since
        ++step.record->num_pins;
      }
    }
  } catch (...) {
    failure = std::current_exception();
    report.entries_.resize(begin + num_done);
  }
  if (failure != nullptr) {
    give_back(lock, std::span(steps).subspan(num_done));
  }
  run_releases(lock, together.releases);
  if (failure != nullptr) {
    try {
      std::rethrow_exception(failure);
    } catch (...) {
      append_failed(steps[num_done].entry, plan);
      throw;
    }
  }
  return true;
}

/// Of steps that were charged and will not be published.
void ManagerState::give_back(Lock& lock, std::span<Step> steps) {
  for (const Step& step : steps) {
    if (!step.verdict.no_op() && step.record->find(step.verdict.transitions[0].to) == nullptr) {
      take_back(step);
    }
  }
  const Unlocked unlocked(*this, lock);
  for (Step& step : steps) {
    unmake(step.made, nullptr);
  }
}

/// Carries out the next of the actions, or several, and adds them to the report.
void ManagerState::perform_next(PlanReport& report, std::span<const ResidencyAction> actions,
                                const RunOptions& options, Phase phase, const PlanName& plan,
                                Together& together, bool pin) {
  if (!copy_together(report, actions, options, phase, plan, together, pin)) {
    report.entries_.push_back(
        perform(actions.front(), {stream_for(actions.front(), options.streams), options.may_block},
                phase, plan, pin));
  }
}

}  // namespace residency
