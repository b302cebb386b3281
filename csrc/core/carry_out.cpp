#include <algorithm>
#include <utility>

#include "manager_state.h"
#include "planner.h"

namespace residency {
namespace {

std::vector<FencePtr> pending_of(const Materialization& materialization) {
  std::vector<FencePtr> fences;
  materialization.for_each_pending([&](const FencePtr& fence) { fences.push_back(fence); });
  return fences;
}

bool makes(const Transition& transition) noexcept {
  return transition.kind == TransitionKind::kReconstruct ||
         transition.kind == TransitionKind::kCopy;
}

}  // namespace

/// The devices that alone have the value once a materialization was given up for which no copy is
/// made: one of them must answer still. Empty when it is somewhere else too.
std::vector<Location> ManagerState::relied_on_without(const ValueRecord& record,
                                                      const Materialization& given_up,
                                                      const Verdict& verdict) const {
  std::vector<Location> devices;
  if (verdict.reason != Reason::kReleased || given_up.stale || record.can_be_made_again()) {
    return devices;
  }
  for (const Materialization* each = record.first.get(); each != nullptr; each = each->next.get()) {
    if (each == &given_up || !is_good(*each)) {
      continue;
    }
    if (!each->location.is_cuda()) {
      return {};
    }
    devices.push_back(each->location);
  }
  return devices;
}

/// What `make` needs of the record, collected under the mutex: releases of leases change
/// materializations without having the turn.
void ManagerState::collect_inputs(const ValueRecord& record, const Verdict& verdict,
                                  Inputs& inputs) const {
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
          inputs.relied_on = relied_on_without(record, *from, verdict);
        }
        break;
    }
  }
}

/// Charges all that the planned step is about to make, and notes what it works on.
void ManagerState::charge(Step& step) {
  step.staging = staging_use(*backend_, step.verdict);
  collect_inputs(*step.record, step.verdict, step.inputs);
  for (const Transition& each : step.transitions()) {
    (void)ledger_.account(each.to);
  }
  if (step.staging.has_value()) {
    (void)ledger_.account(step.staging->device);
    (void)ledger_.account(Location::pinned_host());
  }
  // From here on nothing allocates.
  for (const Transition& each : step.transitions()) {
    if (makes(each)) {
      ledger_.account(each.to).charge(each.charge);
    }
  }
  if (step.staging.has_value()) {
    if (ledger_.account(step.staging->device).num_staged++ == 0) {
      ledger_.account(Location::pinned_host()).reserve_staging(step.staging->nbytes);
    }
  }
  step.content_epoch = step.record->content_epoch;
}

/// Undoes `charge`.
void ManagerState::uncharge(const Step& step) noexcept {
  for (const Transition& each : step.transitions()) {
    if (makes(each)) {
      ledger_.account(each.to).used -= each.charge;
    }
  }
  if (step.staging.has_value()) {
    if (--ledger_.account(step.staging->device).num_staged == 0) {  // or others rely on them
      ledger_.account(Location::pinned_host()).release_staging(step.staging->nbytes);
    }
  }
}

CopyRequest ManagerState::request_of(const Step& step, Inputs&& inputs, const Transition& copy) {
  CopyRequest request;
  request.value = step.handle;
  request.spec = &step.record->spec;
  request.source = inputs.source ? std::move(inputs.source) : step.made.temporary;
  request.from = copy.from;
  request.to = copy.to;
  request.source_ready = std::move(inputs.source_ready);
  request.overwrite = std::move(inputs.overwrite);
  request.overwrite_after = std::move(inputs.overwrite_after);
  return request;
}

/// The materialization of what was made, in the record if there is room. Runs in the open: nobody
/// without the turn looks at what is not among the materializations yet.
void ManagerState::keep_made(Step& step, BlockPtr& block) {
  Materialization& slot = step.record->slot_for_first;
  if (slot.in_slot) {
    step.made.arriving = MaterializationPtr(new Materialization);
  } else {
    slot.in_slot = true;
    step.made.arriving = MaterializationPtr(&slot);
  }
  if (step.made.fence) {
    step.made.arriving->set_ready(step.made.fence);
  }
  step.made.arriving->block = std::move(block);
}

/// Throws `DeviceLostError` when none of the devices answers any more. Runs in the open.
void ManagerState::check_one_answers(std::span<const Location> devices) {
  for (std::size_t i = 0; i < devices.size(); ++i) {
    try {
      backend_->check_answers(devices[i]);
      return;
    } catch (const DeviceLostError&) {
      if (i + 1 == devices.size()) {
        throw;
      }
    }
  }
}

/// Runs in the open. Throws with nothing of the backend's left behind: what is not certain to
/// succeed comes before the copy.
void ManagerState::make(Step& step, const Inputs& inputs, const ActionOptions& options) {
  Made& made = step.made;
  if (inputs.given_up) {
    check_one_answers(inputs.relied_on);
    made.escape_watch = backend_->watch_escape(*inputs.given_up);
  }
  BlockPtr made_block;
  try {
    for (const Transition& each : step.transitions()) {
      if (each.kind == TransitionKind::kReconstruct) {
        made.path = TransferPath::kSource;
        (each.temporary ? made.temporary : made_block) =
            reconstruct(*step.record, step.handle, each.to);
      } else if (each.kind != TransitionKind::kRelease) {
        CopyRequest request = request_of(step, Inputs(inputs), each);
        request.stream = options.stream;
        // Not where the source goes, which could still be refused until the copy is enqueued.
        request.ahead_of_need = options.prefetch && !inputs.given_up;
        CopyResult result = backend_->copy(request);
        made.fence = std::move(result.ready);
        made.path = result.path;
        made.blocked = result.blocked;
        made.fails_later = made.fence && (result.put_off || can_fail_later(made.path));
        if (each.kind == TransitionKind::kCopy) {
          made_block = std::move(result.block);
        }
      }
    }
    if (inputs.given_up_is_read && made.fails_later) {
      made.fence->retain_until_success(inputs.given_up);
    }
    if (made_block) {
      keep_made(step, made_block);
    }
  } catch (...) {
    unmake(made, std::move(made_block));
    throw;
  }
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
    made.arriving = nullptr;  // it may stand in the record
  }
  if (block) {
    backend_->release(std::move(block), {});
  }
  if (made.temporary) {
    backend_->release(std::move(made.temporary), {});
  }
}

ActionReport ManagerState::carry_out(Lock& lock, Trash& trash, Step& step,
                                     const ActionOptions& options, const PlanName& plan) {
  std::vector<Release> releases;
  charge(step);
  try {
    {
      const Unlocked unlocked(*this, lock);
      const Inputs owned = std::move(step.inputs);  // let go of with the mutex open
      make(step, owned, options);
    }
    try {
      check_open();  // or nobody is left to give it to
      prepare(step, trash, releases);
    } catch (...) {
      const Unlocked unlocked(*this, lock);
      unmake(step.made, nullptr);
      throw;
    }
  } catch (...) {
    uncharge(step);
    append_failed(step.entry, plan);
    throw;
  }
  step.entry.host_end_ns = now_ns();
  ActionReport report;
  publish(step, trash, releases, plan, report);
  run_releases(lock, releases);
  return report;
}

/// All that `publish` needs memory for. When it throws nothing has changed; otherwise `publish`
/// comes next.
void ManagerState::prepare(Step& step, Trash& trash, std::vector<Release>& releases) {
  const Made& made = step.made;
  trash.make_room(4, 1);
  make_room_in(releases, 2);
  ledger_.make_room_to_list(3);
  trace_.make_room();
  AddressRanges arriving;
  for (const Transition& each : step.transitions()) {
    Materialization* const from = step.record->find(each.from);
    switch (each.kind) {
      case TransitionKind::kReconstruct:
      case TransitionKind::kCopy:
        if (!each.temporary) {
          arriving = made.arriving->block->address_ranges();
        }
        [[fallthrough]];
      case TransitionKind::kRefresh:
        if (each.temporary) {
          break;
        }
        if (made.fence && from != nullptr) {
          from->make_room_for_reader();
        }
        if (each.kind == TransitionKind::kRefresh && made.fence) {
          step.record->find(each.to)->make_room_for_ready();
        }
        if (made.fails_later) {
          step.arrival.emplace_back().from = each.from;
        }
        break;
      case TransitionKind::kRelease:
        if (each.temporary) {
          step.leave.after.reserve(1);
          step.leave.retiring.emplace_back().until.reserve(1);
          break;
        }
        step.leave = leave_of(*from, made.escape_watch != nullptr);
        if (!step.arrival.empty() && step.arrival.front().from == each.from) {
          step.arrival.front().departing_ranges = step.leave.ranges;
        }
        break;
    }
  }
  if (step.arrival.empty()) {
    register_ranges(arriving);
  } else {
    const AddressRanges& departing = step.arrival.front().departing_ranges;
    range_nodes_.make_room(arriving.size() + departing.size());
    // From here on nothing allocates.
    register_ranges(arriving);
    register_ranges(departing);  // their memory is ours until they go
  }
}

/// The materialization that the step's copy or reconstruct has made, or overwritten.
void ManagerState::publish_made(Step& step, const Transition& transition, Trash& trash) noexcept {
  ValueRecord& record = *step.record;
  Made& made = step.made;
  Materialization* target = nullptr;
  if (transition.kind == TransitionKind::kRefresh) {
    target = record.find(transition.to);
    trash.objects.push_back(target->ready());
  } else {
    made.arriving->location = transition.to;
    made.arriving->charge = transition.charge;
    target = link(record, std::move(made.arriving));
    ledger_.list(transition.to);
  }
  target->set_ready(made.fence);
  target->fails_later = made.fails_later;
  target->replaces = false;
  // Written while it was being copied, by somebody who did not say so.
  target->stale = record.content_epoch != step.content_epoch;
  if (made.fence) {
    if (Materialization* source = record.find(transition.from);
        source != nullptr && source != target) {
      source->add_reader(made.fence);
      if (FencePtr ready = source->take_ready(); ready != nullptr) {
        trash.objects.push_back(std::move(ready));
      }
    }
  }
}

/// What was loaded for this step alone.
void ManagerState::release_temporary(Step& step, const Transition& transition,
                                     std::vector<Release>& releases) noexcept {
  ledger_.account(transition.from).used -= transition.charge;
  std::vector<FencePtr>& after = step.leave.after;
  if (is_pending(step.made.fence)) {
    after.push_back(step.made.fence);
  }
  if (!is_reused_at_once(transition.from, after)) {
    note_retiring(transition.from, transition.charge, after, step.leave);
  }
  releases.push_back({std::move(step.made.temporary), std::move(after)});
}

/// The source of a transfer that can still fail goes only when that has succeeded: the fence keeps
/// the block until then, the arrival the rest; and the block too where others use it, who may need
/// it for longer.
void ManagerState::depart(Step& step, MaterializationPtr given_up, Arrival& arrival,
                          Trash& trash) noexcept {
  bool used_by_others = false;
  given_up->for_each_pending(
      [&](const FencePtr& fence) { used_by_others |= fence != step.made.fence; });
  if (!used_by_others) {
    trash.objects.push_back(std::move(given_up->block));
    given_up->block = nullptr;
  }
  if (FencePtr& watch = step.made.escape_watch; watch != nullptr) {
    arrival.escape_watch = watch;
    note_escaped(step.handle, *given_up, std::move(watch), step.leave);
  } else {
    Account& account = ledger_.account(given_up->location);
    account.used -= given_up->charge;
    account.retiring += given_up->charge;
  }
  arrival.departing = std::move(given_up);
}

/// Makes the manager's what `make` has made, right after `prepare`. The releases are to be run with
/// the mutex open. See Note [Commits cannot fail].
void ManagerState::publish(Step& step, Trash& trash, std::vector<Release>& releases,
                           const PlanName& plan, ActionReport& report) noexcept {
  ValueRecord& record = *step.record;
  Made& made = step.made;
  report.gave_up_shared_ = made.escape_watch != nullptr;
  if (step.staging.has_value()) {
    ledger_.list(Location::pinned_host());
  }
  Arrival* arrival = nullptr;  // of a copy that can still fail
  for (const Transition& each : step.transitions()) {
    if (each.kind != TransitionKind::kRelease) {
      if (each.temporary) {
        continue;
      }
      publish_made(step, each, trash);
      if (made.fails_later) {
        arrivals_.splice(arrivals_.end(), step.arrival);
        arrival = &arrivals_.back();
        arrival->handle = step.handle;
        arrival->at = each.to;
        arrival->from = each.from;
        arrival->path = made.path;
        arrival->fence = made.fence;
        arrival->overwrites = each.kind == TransitionKind::kRefresh;
      }
    } else if (each.temporary) {
      release_temporary(step, each, releases);
    } else {
      MaterializationPtr given_up = detach(record, each.from, step.leave);
      report.gave_up_stale_ = given_up->stale;
      if (arrival != nullptr && arrival->from == each.from) {
        record.find(arrival->at)->replaces = true;
        depart(step, std::move(given_up), *arrival, trash);
      } else {
        give_up(record, std::move(given_up), step.leave, std::move(made.escape_watch), releases);
      }
    }
  }
  ++version_;
  TransitionRecord& entry = step.entry;
  entry.bytes = step.verdict.bytes;
  entry.path = made.path;
  entry.waited |= made.blocked;
  trace_.append(entry, made.fence, plan);
  report.record_ = std::move(entry);
  if (made.fails_later) {
    report.state_ = shared_from_this();
  }
  report.fence_ = std::move(made.fence);
}

void ManagerState::publish_no_op(Step& step, const PlanName& plan, ActionReport& report) {
  step.entry.host_end_ns = step.entry.host_start_ns;
  trace_.append(step.entry, nullptr, plan);
  report.record_ = std::move(step.entry);
}

void ManagerState::note_verdict(Step& step) {
  step.entry.reason = step.verdict.reason;
  step.entry.source = step.verdict.source;
  step.entry.destination = step.verdict.destination;
}

ActionReport ManagerState::carry_out_discard(Lock& lock, Trash& trash, Step& step,
                                             const PlanName& plan) {
  std::vector<Release> releases;
  std::vector<FencePtr> watches;
  std::vector<Leave> leaves;
  ValueRecord& record = *step.record;
  try {
    watches = watch_escapes(lock, record);
    leaves = prepare_end(record, watches, trash, releases);
  } catch (...) {
    append_failed(step.entry, plan);
    throw;
  }
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    give_up(record, detach(record, record.first->location, leaves[i]), leaves[i],
            std::move(watches[i]), releases);
  }
  end_value(record, trash);
  failures_.erase(step.handle.id());
  ++version_;
  step.entry.host_end_ns = now_ns();
  trace_.append(step.entry, nullptr, plan);
  ActionReport report;
  report.record_ = std::move(step.entry);
  run_releases(lock, releases);
  return report;
}

}  // namespace residency
