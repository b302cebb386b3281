#include <algorithm>

#include <fmt/format.h>

#include "manager_state.h"
#include "planner.h"

namespace residency {
namespace {

/// The managers whose source is loading on this thread, innermost first.
struct Loading {
  const ManagerState* manager;
  const Loading* outer;
};
thread_local const Loading* t_loading = nullptr;

class LoadingGuard {
 public:
  explicit LoadingGuard(const ManagerState* manager) noexcept : loading_{manager, t_loading} {
    t_loading = &loading_;
  }
  LoadingGuard(const LoadingGuard&) = delete;
  LoadingGuard& operator=(const LoadingGuard&) = delete;
  ~LoadingGuard() { t_loading = loading_.outer; }

 private:
  Loading loading_;
};

}  // namespace

void ManagerState::check_not_loading() const {
  for (const Loading* each = t_loading; each != nullptr; each = each->outer) {
    if (each->manager == this) {
      throw ReentrancyError(fmt::format(
          "manager {} was called from inside the load of one of its sources, on the same thread; "
          "a source must not need the manager that it serves",
          static_cast<std::uint32_t>(id_)));
    }
  }
}

/// The refusal of an action that would have to wait and may not.
Verdict ManagerState::would_block(Verdict verdict) {
  const bool lacks_bytes = verdict.shortfall.requested > Bytes();
  verdict.reason = lacks_bytes ? Reason::kOverBudget : Reason::kWouldBlock;
  return verdict;
}

/// Puts an action into the trace that has failed with the exception which is being handled.
void ManagerState::append_failed(TransitionRecord& entry, const PlanName& plan) noexcept {
  try {
    entry.failed = true;
    entry.failure = describe(std::current_exception());
    entry.host_end_ns = now_ns();
    trace_.append(entry, nullptr, plan);
  } catch (...) {
    // No memory for an entry: the exception itself is what there is to tell.
  }
}

ActionReport ManagerState::apply(const ResidencyAction& action, const ActionOptions& options) {
  check_not_loading();
  return perform(action, options, Phase::kExecute, nullptr);
}

ActionReport ManagerState::perform(const ResidencyAction& action, const ActionOptions& options,
                                   Phase phase, const PlanName& plan, bool pin) {
  Step step;
  step.handle = handle_of(action);
  step.entry.action = kind_of(action);
  step.entry.phase = phase;
  step.entry.handle = step.handle;
  step.entry.host_start_ns = now_ns();

  Trash trash;
  Lock lock(mutex_);
  start_call(lock);
  settle_oldest(trash);
  step.record = take_turn(lock, step.handle, options.may_block);  // null: the handle is not good
  const Turn turn(*this, step.record);  // through all waits: those who came later are served later
  return perform_in_turn(lock, trash, action, options, step, plan, pin);
}

/// One hint may come behind another; but no materialization has two arrivals.
bool ManagerState::may_come_behind_hints(const ValueRecord& record, const ResidencyAction& action,
                                         const ActionOptions& options) {
  const auto* ensure = std::get_if<EnsureResident>(&action);
  if (!options.prefetch || ensure == nullptr) {
    return false;
  }
  const Materialization* target = record.find(ensure->location);
  return target == nullptr || !target->stale || !target->is_put_off();
}

ActionReport ManagerState::perform_in_turn(Lock& lock, Trash& trash, const ResidencyAction& action,
                                           const ActionOptions& options, Step& step,
                                           const PlanName& plan, bool pin) {
  if (step.record != nullptr && !may_come_behind_hints(*step.record, action, options)) {
    make_certain(lock, trash, *step.record);
    poll_arrivals(*step.record);
  }
  while (true) {
    check_open();
    if (step.record != nullptr && step.record->has_settled_arrival()) {
      settle(trash, step.record);
    }
    Verdict& verdict = step.verdict = plan_action(present_, action);
    if (verdict.reason == Reason::kOverBudget || verdict.waits) {
      settle(trash, step.record);  // perhaps no longer, once all is counted
      verdict = plan_action(present_, action);
    }
    if (!verdict.feasible()) {
      throw_refusal(verdict, step.handle, to_string(action));
    }
    if (verdict.waits) {
      if (!options.may_block) {
        throw_refusal(would_block(verdict), step.handle, to_string(action));
      }
      step.entry.waited = true;
      wait_on(lock, fences_to_wait_for(step.record, verdict));
      continue;
    }
    if (options.stream && verdict.destination) {
      const Location owner = verdict.destination->is_cuda() || !verdict.source
                                 ? *verdict.destination
                                 : *verdict.source;
      if (options.stream->device != owner) {
        throw std::invalid_argument(
            fmt::format("{}: the transfer stream belongs to {}, not to {}", to_string(action),
                        to_string(options.stream->device), to_string(owner)));
      }
    }
    note_verdict(step);
    ActionReport report;
    if (verdict.no_op()) {
      publish_no_op(step, plan, report);
    } else if (verdict.reason == Reason::kDiscarded) {
      report = carry_out_discard(lock, trash, step, plan);
    } else {
      report = carry_out(lock, trash, step, options, plan);
    }
    if (pin) {  // nobody else has had the turn since the commit
      ++step.record->num_pins;
    }
    return report;
  }
}

BlockPtr ManagerState::reconstruct(const ValueRecord& record, const Handle& handle, Location at) {
  BlockPtr loaded;
  {
    const LoadingGuard loading(this);
    loaded = backend_->reconstruct(*record.source, record.spec, at);
  }
  const ValueSpec& spec = record.spec;
  const Layout* layout = loaded->layout();
  const bool same_layout = spec.layout == nullptr || layout == nullptr ||
                           spec.layout.get() == layout || spec.layout->equals(*layout);
  if (loaded->logical_bytes() == spec.logical_bytes && same_layout) {
    return loaded;
  }
  const std::string message =
      fmt::format("{} loaded {} logical bytes ({}), {} was registered with {} ({})",
                  record.source->describe(), loaded->logical_bytes().count(),
                  layout != nullptr ? layout->describe() : "no layout", to_string(handle),
                  spec.logical_bytes.count(), spec.layout ? spec.layout->describe() : "no layout");
  backend_->release(std::move(loaded), {});
  throw MaterializationError(message);
}

}  // namespace residency
