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

bool ManagerState::may_join(const Together& together, const Verdict& verdict,
                            const RunOptions& options) const {
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
}

/// Adds the action to those that are carried out together, with the turn of its value and its bytes
/// charged. False, and nothing has changed, when it has to be carried out by itself.
bool ManagerState::join(Together& together, Turns& turns, const ResidencyAction& action,
                        const RunOptions& options) {
  ValueRecord* record = values_.find(handle_of(action)).record;
  if (record == nullptr || record->busy || record->has_uncertain_arrival()) {
    return false;
  }
  Step& step = together.steps.emplace_back();
  try {
    step.verdict = plan_action(present_, action);
    if (!may_join(together, step.verdict, options)) {
      together.steps.pop_back();
      return false;
    }
    turns.take_idle(*record);
    step.record = record;
    step.handle = handle_of(action);
    step.entry.action = kind_of(action);
    step.entry.handle = step.handle;
    note_verdict(step);
    if (!step.verdict.no_op()) {
      charge(step);
      together.from = step.verdict.transitions[0].from;
      together.to = step.verdict.transitions[0].to;
    }
  } catch (...) {
    together.steps.pop_back();  // it was not charged
    throw;
  }
  return true;
}

/// What the steps ask of the backend; up to the first of which the source may not be given up now.
/// Returns the number of that one, with why in `failure`; otherwise how many there are.
std::size_t ManagerState::request_all(Together& together, std::exception_ptr& failure) noexcept {
  std::vector<Step>& steps = together.steps;
  std::size_t i = 0;
  try {
    together.requests.reserve(steps.size());
    together.results.reserve(steps.size());
    for (; i < steps.size(); ++i) {
      Step& step = steps[i];
      if (step.verdict.no_op()) {
        continue;
      }
      if (step.inputs.given_up) {
        step.made.escape_watch = backend_->watch_escape(*step.inputs.given_up);
      }
      together.requests.push_back(
          request_of(step, std::move(step.inputs), step.verdict.transitions[0]));
    }
  } catch (...) {
    failure = std::current_exception();
  }
  return i;
}

/// Runs in the open, and throws nothing. Returns how many of the steps went well, from the first
/// on, with why the next did not in `failure`; of the others nothing is left.
std::size_t ManagerState::make_together(Together& together, std::exception_ptr& failure) noexcept {
  std::size_t num_made = request_all(together, failure);
  std::exception_ptr error;
  try {
    error = backend_->copy_all(together.requests, together.results);
  } catch (...) {
    error = std::current_exception();
  }
  together.requests.clear();
  auto result = together.results.begin();
  for (std::size_t i = 0; i < num_made; ++i) {
    Step& step = together.steps[i];
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
      num_made = i;
      failure = std::current_exception();
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

/// Adds to the report what `make_together` has made. Returns how many that are; the next one could
/// not be published for the reason in `failure`.
std::size_t ManagerState::publish_together(PlanReport& report, Together& together,
                                           std::size_t num_made, Trash& trash, const PlanName& plan,
                                           bool pin, std::exception_ptr& failure) noexcept {
  const std::int64_t end = now_ns();
  const std::size_t begin = report.size();
  std::size_t i = 0;
  try {
    check_open();  // or nobody is left to give it to
    for (; i < num_made; ++i) {
      Step& step = together.steps[i];
      step.entry.host_end_ns = end;
      ActionReport& entry = report.entries_.emplace_back();
      if (step.verdict.no_op()) {
        publish_no_op(step, plan, entry);
      } else {
        prepare(step, trash, together.releases);
        publish(step, trash, together.releases, plan, entry);
      }
      if (pin) {  // nobody else has had the turn since
        ++step.record->num_pins;
      }
    }
  } catch (...) {
    failure = std::current_exception();
    report.entries_.resize(begin + i);
  }
  return i;
}

/// Of steps that were charged and will not be published.
void ManagerState::undo_unpublished(Lock& lock, std::span<Step> steps) {
  for (const Step& step : steps) {
    if (!step.verdict.no_op() && step.record->find(step.verdict.transitions[0].to) == nullptr) {
      uncharge(step);
    }
  }
  const Unlocked unlocked(*this, lock);
  for (Step& step : steps) {
    unmake(step.made, nullptr);
  }
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
  const std::size_t most = std::min(kMost, actions.size());
  std::vector<Step>& steps = together.steps;
  steps.clear();
  steps.reserve(most);
  together.from.reset();
  Trash trash;
  Lock lock(mutex_);
  start_call(lock);
  settle_oldest(trash);
  Turns turns(*this);
  try {
    for (std::size_t i = 0; i < most; ++i) {
      values_.prefetch(actions.subspan(i));
      if (!join(together, turns, actions[i], options)) {
        break;
      }
      steps.back().entry.phase = phase;
      steps.back().entry.host_start_ns = start;
    }
  } catch (...) {
    undo_unpublished(lock, steps);
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
  const std::size_t num_done =
      publish_together(report, together, num_made, trash, plan, pin, failure);
  if (failure != nullptr) {
    undo_unpublished(lock, std::span(steps).subspan(num_done));
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

/// Carries out the next of the actions, or several, and adds them to the report.
void ManagerState::perform_next(PlanReport& report, std::span<const ResidencyAction> actions,
                                const RunOptions& options, Phase phase, const PlanName& plan,
                                Together& together, bool pin) {
  make_room_in(report.entries_, 1);
  if (!copy_together(report, actions, options, phase, plan, together, pin)) {
    report.entries_.push_back(
        perform(actions.front(), {stream_for(actions.front(), options.streams), options.may_block},
                phase, plan, pin));
  }
}

}  // namespace residency
