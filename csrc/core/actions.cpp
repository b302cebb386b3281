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

/// Whether an arrival that could fail has come to an end, good or bad.
bool has_settled_arrival(const ValueRecord& record) noexcept {
  for (const Materialization* each = record.first.get(); each != nullptr; each = each->next.get()) {
    if (each->is_uncertain() && each->ready()->poll() != FenceStatus::kPending) {
      return true;
    }
  }
  return false;
}

std::vector<FencePtr> pending_of(const Materialization& materialization) {
  std::vector<FencePtr> fences;
  materialization.for_each_pending([&](const FencePtr& fence) { fences.push_back(fence); });
  return fences;
}

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
void ManagerState::append_failed(TransitionRecord& entry, const PlanName& plan) {
  entry.failed = true;
  entry.failure = describe(std::current_exception());
  entry.host_end_ns = now_ns();
  trace_.append(entry, nullptr, plan);
}

ActionReport ManagerState::apply(const ResidencyAction& action, const ActionOptions& options) {
  return perform(action, options, Phase::kExecute, nullptr);
}

ActionReport ManagerState::perform(const ResidencyAction& action, const ActionOptions& options,
                                   Phase phase, const PlanName& plan, bool pin,
                                   std::span<const ResidencyAction> next) {
  check_not_loading();
  const Handle handle = handle_of(action);
  TransitionRecord entry;
  entry.action = kind_of(action);
  entry.phase = phase;
  entry.handle = handle;
  entry.host_start_ns = now_ns();

  Trash trash;
  Lock lock(mutex_);
  check_open();
  if (constexpr std::size_t kAhead = 4; next.size() > kAhead) {
    values_.prefetch(handle_of(next[kAhead]));
    values_.prefetch_contents(handle_of(next[kAhead / 2]));
  }
  settle_oldest(trash);
  ValueRecord* record = take_turn(lock, handle, options.may_block);
  const Turn turn(*this, record);  // through all waits: those who came later are served later
  return perform_in_turn(lock, trash, record, action, options, entry, plan, pin);
}

/// `record` is null where the handle is not good.
ActionReport ManagerState::perform_in_turn(Lock& lock, Trash& trash, ValueRecord* record,
                                           const ResidencyAction& action,
                                           const ActionOptions& options, TransitionRecord& entry,
                                           const PlanName& plan, bool pin) {
  const Handle handle = handle_of(action);
  while (true) {
    check_open();
    if (record != nullptr && has_settled_arrival(*record)) {
      settle(trash, record);
    }
    Verdict verdict = plan_action(present_, action);
    if (verdict.reason == Reason::kOverBudget || verdict.waits) {
      settle(trash, record);  // perhaps no longer, once all is counted
      verdict = plan_action(present_, action);
    }
    if (!verdict.feasible()) {
      throw_refusal(verdict, handle, to_string(action));
    }
    if (verdict.waits) {
      if (!options.may_block) {
        throw_refusal(would_block(verdict), handle, to_string(action));
      }
      entry.waited = true;
      wait_on(lock, fences_to_wait_for(record, verdict));
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
    entry.reason = verdict.reason;
    entry.source = verdict.source;
    entry.destination = verdict.destination;
    if (verdict.no_op()) {
      entry.host_end_ns = entry.host_start_ns;
      trace_.append(entry, nullptr, plan);
      if (pin) {
        ++record->num_pins;
      }
      ActionReport report;
      report.record_ = std::move(entry);
      return report;
    }
    ActionReport report =
        verdict.reason == Reason::kDiscarded
            ? carry_out_discard(lock, trash, *record, handle, entry, plan)
            : carry_out(lock, trash, *record, handle, verdict, options, entry, plan);
    if (pin) {  // nobody else has had the turn since the commit
      ++record->num_pins;
    }
    return report;
  }
}

/// What `make` needs of the record, collected under the mutex: releases of leases change
/// materializations without having the turn.
ManagerState::Inputs ManagerState::collect_inputs(const ValueRecord& record,
                                                  const Verdict& verdict) const {
  Inputs inputs;
  for (std::size_t i = 0; i < verdict.num_transitions; ++i) {
    const Transition& each = verdict.transitions[i];
    const Materialization* from = record.find(each.from);
    switch (each.kind) {
      case TransitionKind::kReconstruct: break;
      case TransitionKind::kRefresh:
        inputs.overwrite = record.find(each.to)->block;
        inputs.overwrite_after = pending_of(*record.find(each.to));
        [[fallthrough]];
      case TransitionKind::kCopy:
        if (from != nullptr) {  // null: what this action has loaded is copied
          inputs.source = from->block;
          inputs.source_ready = from->ready();
        }
        break;
      case TransitionKind::kRelease:
        if (!each.temporary) {
          inputs.given_up = from->block;
          inputs.given_up_is_read = i > 0 && verdict.transitions[i - 1].from == each.from;
        }
        break;
    }
  }
  return inputs;
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

/// Runs in the open. Throws with nothing of the backend's left behind: what is not certain to
/// succeed comes before the copy.
ManagerState::Made ManagerState::make(const ValueRecord& record, const Handle& handle,
                                      const Verdict& verdict, const ActionOptions& options,
                                      const Inputs& inputs, bool more_follow) {
  Made made;
  if (inputs.given_up) {
    made.escape_watch = backend_->watch_escape(*inputs.given_up);
  }
  BlockPtr made_block;
  try {
    for (std::size_t i = 0; i < verdict.num_transitions; ++i) {
      const Transition& each = verdict.transitions[i];
      if (each.kind == TransitionKind::kReconstruct) {
        made.path = TransferPath::kSource;
        (each.temporary ? made.temporary : made_block) = reconstruct(record, handle, each.to);
      } else if (each.kind != TransitionKind::kRelease) {
        CopyRequest request;
        request.value = handle;
        request.spec = &record.spec;
        request.source = inputs.source ? inputs.source : made.temporary;
        request.from = each.from;
        request.to = each.to;
        request.source_ready = inputs.source_ready;
        request.overwrite = inputs.overwrite;
        request.overwrite_after = inputs.overwrite_after;
        request.stream = options.stream;
        // Not where the source goes: until the copy is enqueued it could still be refused.
        request.more_follow = more_follow && !inputs.given_up;
        request.ahead_of_need = options.prefetch && !inputs.given_up;
        CopyResult result = backend_->copy(request);
        made.fence = std::move(result.ready);
        made.path = result.path;
        made.blocked = result.blocked;
        if (each.kind == TransitionKind::kCopy) {
          made_block = std::move(result.block);
        }
      }
    }
    if (inputs.given_up_is_read && made.fence && can_fail_later(made.path)) {
      made.fence->retain_until_success(inputs.given_up);
    }
    if (made_block) {
      made.arriving = MaterializationPtr(new Materialization);
      std::vector<AddressRange> ranges = made_block->address_ranges();
      if (!ranges.empty()) {
        made.arriving->ranges =
            std::make_unique<const std::vector<AddressRange>>(std::move(ranges));
      }
      made.arriving->block = std::move(made_block);
    }
  } catch (...) {
    unmake(made, std::move(made_block));
    throw;
  }
  return made;
}

/// Gives back what was made and will not be published. Runs in the open; waits, so that nothing
/// is in flight afterwards that nobody knows of.
void ManagerState::unmake(Made& made, BlockPtr block) {
  if (made.fence) {
    made.fence->wait();
    (void)made.fence->take_retained();
  }
  if (made.arriving) {
    block = std::move(made.arriving->block);
  }
  if (block) {
    backend_->release(std::move(block), {});
  }
  if (made.temporary) {
    backend_->release(std::move(made.temporary), {});
  }
}

ActionReport ManagerState::carry_out(Lock& lock, Trash& trash, ValueRecord& record,
                                     const Handle& handle, const Verdict& verdict,
                                     const ActionOptions& options, TransitionRecord& entry,
                                     const PlanName& plan) {
  const std::span transitions(verdict.transitions.data(), verdict.num_transitions);
  const auto makes = [](const Transition& each) {
    return each.kind == TransitionKind::kReconstruct || each.kind == TransitionKind::kCopy;
  };
  for (const Transition& each : transitions) {
    if (makes(each)) {
      ledger_.account(each.to).charge(each.charge);
    }
  }
  const auto staging = staging_use(*backend_, verdict);
  if (staging.has_value()) {
    if (ledger_.account(staging->device).num_staged++ == 0) {
      ledger_.account(Location::pinned_host()).reserve_staging(staging->nbytes);
    }
  }
  const std::uint32_t content_epoch = record.content_epoch;
  Inputs inputs = collect_inputs(record, verdict);
  Made made;
  try {
    const Unlocked unlocked(*this, lock);
    const Inputs owned = std::move(inputs);  // let go of with the mutex open
    made = make(record, handle, verdict, options, owned, /*more_follow=*/plan != nullptr);
    if (closed()) {  // meanwhile: nobody is left to give it to
      unmake(made, nullptr);
      check_open();
    }
  } catch (...) {
    for (const Transition& each : transitions) {
      if (makes(each)) {
        ledger_.account(each.to).used -= each.charge;
      }
    }
    if (staging.has_value()) {
      if (--ledger_.account(staging->device).num_staged == 0) {  // or others rely on them
        ledger_.account(Location::pinned_host()).release_staging(staging->nbytes);
      }
    }
    append_failed(entry, plan);
    throw;
  }
  if (staging.has_value()) {
    ledger_.list(Location::pinned_host());
  }

  const bool fails_later = made.fence && can_fail_later(made.path);
  Arrival arrival;
  std::vector<Release> releases;
  Materialization* target = nullptr;
  bool gave_up_stale = false;
  const bool gave_up_shared = made.escape_watch != nullptr;
  for (const Transition& each : transitions) {
    switch (each.kind) {
      case TransitionKind::kReconstruct:
      case TransitionKind::kCopy:
      case TransitionKind::kRefresh: {
        if (each.temporary) {
          break;
        }
        if (each.kind == TransitionKind::kRefresh) {
          target = record.find(each.to);
          trash.objects.push_back(target->ready());
        } else {
          made.arriving->location = each.to;
          made.arriving->charge = each.charge;
          target = attach(record, std::move(made.arriving));
          ledger_.list(each.to);
        }
        target->set_ready(made.fence);
        target->fails_later = fails_later;
        target->replaces = false;
        // Written while it was being copied, by somebody who did not say so.
        target->stale = record.content_epoch != content_epoch;
        arrival.at = each.to;
        arrival.from = each.from;
        arrival.overwrites = each.kind == TransitionKind::kRefresh;
        if (made.fence) {
          if (Materialization* source = record.find(each.from);
              source != nullptr && source != target) {
            source->add_reader(made.fence);
          }
        }
        break;
      }
      case TransitionKind::kRelease: {
        if (each.temporary) {
          Account& account = ledger_.account(each.from);
          account.used -= each.charge;
          std::vector<FencePtr> after;
          if (is_pending(made.fence)) {
            after.push_back(made.fence);
          }
          if (!after.empty() && !backend_->reuses_in_device_order(each.from)) {
            account.retiring += each.charge;
            retiring_.push_back({each.from, each.charge, after});
          }
          releases.push_back({std::move(made.temporary), std::move(after)});
          break;
        }
        MaterializationPtr given_up = detach(record, each.from);
        gave_up_stale = given_up->stale;
        if (!fails_later || arrival.from != each.from) {
          give_up(handle, std::move(given_up), std::move(made.escape_watch), releases);
          break;
        }
        // The fence keeps the block until the transfer has succeeded, the arrival the rest; and
        // the block too where others use it, who may need it for longer.
        bool used_by_others = false;
        given_up->for_each_pending(
            [&](const FencePtr& fence) { used_by_others |= fence != made.fence; });
        if (!used_by_others) {
          trash.objects.push_back(std::move(given_up->block));
          given_up->block = nullptr;
        }
        Account& account = ledger_.account(each.from);
        if (made.escape_watch) {
          account.escaped += given_up->charge;
          arrival.escape_watch = made.escape_watch;
          escaped_.push_back({handle, each.from, given_up->charge, std::move(made.escape_watch),
                              given_up->ranges ? *given_up->ranges : std::vector<AddressRange>()});
        } else {
          account.used -= given_up->charge;
          account.retiring += given_up->charge;
        }
        register_ranges(*given_up);  // its memory is ours until it has gone
        target->replaces = true;
        arrival.departing = std::move(given_up);
        break;
      }
    }
  }
  if (fails_later) {
    arrival.handle = handle;
    arrival.path = made.path;
    arrival.fence = made.fence;
    arrivals_.push_back(std::move(arrival));
  }
  ++version_;
  entry.bytes = verdict.bytes;
  entry.path = made.path;
  entry.waited |= made.blocked;
  entry.host_end_ns = now_ns();
  trace_.append(entry, made.fence, plan);

  ActionReport report;
  report.record_ = std::move(entry);
  report.fence_ = made.fence;
  report.gave_up_stale_ = gave_up_stale;
  report.gave_up_shared_ = gave_up_shared;
  if (fails_later) {
    report.state_ = shared_from_this();
  }
  run_releases(lock, releases);
  return report;
}

ActionReport ManagerState::carry_out_discard(Lock& lock, Trash& trash, ValueRecord& record,
                                             const Handle& handle, TransitionRecord& entry,
                                             const PlanName& plan) {
  std::vector<Release> releases;
  std::vector<FencePtr> watches;
  try {
    watches = watch_escapes(lock, record);
  } catch (...) {
    append_failed(entry, plan);
    throw;
  }
  for (FencePtr& watch : watches) {
    give_up(handle, detach(record, record.first->location), std::move(watch), releases);
  }
  end_value(record, trash);
  failures_.erase(handle.id());
  ++version_;
  entry.host_end_ns = now_ns();
  trace_.append(entry, nullptr, plan);
  ActionReport report;
  report.record_ = std::move(entry);
  run_releases(lock, releases);
  return report;
}

}  // namespace residency
