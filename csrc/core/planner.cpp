#include "planner.h"

#include <algorithm>
#include <tuple>

namespace residency {
namespace {

std::size_t link_rank(const ManagerOptions& options, LocationKind kind) noexcept {
  const auto& order = options.link_order;
  const auto found = std::ranges::find(order, kind);
  return found != order.end() ? static_cast<std::size_t>(found - order.begin())
                              : order.size() + static_cast<std::size_t>(kind);
}

/// Builds one verdict, which is fresh at first. Checks read top to bottom as the rules do; the
/// first refusal wins.
class Plan {
 public:
  Plan(World& world, const Handle& handle, Verdict& verdict)
      : world_(world), value_(world.value(handle)), verdict_(verdict) {}

  void refuse(Reason reason) {
    verdict_.reason = reason;
    verdict_.bytes = verdict_.staging = Bytes();
    verdict_.num_transitions = 0;
    verdict_.waits = false;
  }
  void no_op(Reason reason) { verdict_.reason = reason; }

  /// True when the value cannot be touched at all; `verdict_` says why.
  bool is_refused() {
    if (value_.record == nullptr) {
      refuse(value_.why_not);
      return true;
    }
    if (value_.record->has_failure) {
      refuse(Reason::kTransferFailed);
      return true;
    }
    return false;
  }
  /// What a lost device has can still be given up, but nothing else is done there.
  bool is_unavailable(Location location, bool is_needed = true) {
    if (world_.backend().why_unavailable(location).empty() &&
        !(is_needed && world_.backend().is_lost(location))) {
      return false;
    }
    verdict_.source.reset();
    verdict_.destination = location;
    refuse(Reason::kLocationUnavailable);
    return true;
  }

  void ensure(Location at) {
    if (is_refused() || is_unavailable(at)) {
      return;
    }
    verdict_.destination = at;
    const Residence* target = value_.find(at);
    if (target != nullptr && target->is_good()) {
      return no_op(Reason::kAlreadyResident);
    }
    const Residence* source = cheapest_source(world_, value_, at);
    if (target != nullptr) {
      refresh(*target, source);
      admit();
      return;
    }
    if (!value_.residences.empty() && spec().mode == ReplicaMode::kExclusive) {
      verdict_.source = value_.residences.begin()->location;
      return refuse(Reason::kExclusiveElsewhere);
    }
    if (source != nullptr) {
      copy(*source, at);
    } else {
      load(at);
    }
    admit();
  }

  void move(Location to, std::optional<Location> from) {
    if (is_refused() || is_unavailable(to) ||
        (from && is_unavailable(*from, /*is_needed=*/false))) {
      return;
    }
    verdict_.destination = to;
    verdict_.source = from;
    if (from && value_.find(*from) == nullptr) {
      return refuse(Reason::kFromLocationAbsent);
    }
    const Residence* target = value_.find(to);
    const bool target_is_good = target != nullptr && target->is_good();
    if (from == to) {
      return no_op(Reason::kSameLocation);
    }
    const Residence* given_up = from ? value_.find(*from) : selected_source(to);
    if (given_up == nullptr) {
      if (target_is_good) {
        return no_op(Reason::kAlreadyResident);
      }
      load(to);
      admit();
      return;
    }
    if (target_is_good) {
      verdict_.reason = Reason::kReleased;
    } else {
      const Residence* read = given_up->is_good() ? given_up : cheapest_source(world_, value_, to);
      if (target != nullptr) {
        refresh(*target, read);
      } else if (read != nullptr) {
        copy(*read, to);
      } else {
        refuse_nothing_to_copy();
      }
    }
    release(*given_up);
    admit();
  }

  void drop(Location at) {
    if (is_refused() || is_unavailable(at, /*is_needed=*/false)) {
      return;
    }
    const Residence* given_up = value_.find(at);
    if (given_up == nullptr) {
      verdict_.source = at;
      return no_op(Reason::kAlreadyAbsent);
    }
    verdict_.reason = Reason::kReleased;
    release(*given_up);
  }

  void discard() {
    if (is_refused()) {
      return;
    }
    verdict_.reason = Reason::kDiscarded;
    for (const Residence& each : value_.residences) {
      verdict_.source = each.location;
      if (!may_give_up(each)) {
        return;
      }
      verdict_.waits |= each.uncertain;
    }
    verdict_.source.reset();
  }

 private:
  [[nodiscard]] const ValueSpec& spec() const noexcept { return value_.record->spec; }

  void add(const Transition& transition) {
    verdict_.transitions[verdict_.num_transitions++] = transition;
  }

  /// The materialization that a move to `to` gives up when it is not told which.
  const Residence* selected_source(Location to) const {
    if (const Residence* good = cheapest_source(world_, value_, to)) {
      return good;
    }
    const Residence* stale = nullptr;
    for (const Residence& each : value_.residences) {
      if (each.location != to && (stale == nullptr || each.location < stale->location)) {
        stale = &each;
      }
    }
    return stale;
  }

  void refuse_nothing_to_copy() {
    for (const Residence& each : value_.residences) {
      if (each.lost) {
        verdict_.source = each.location;
      }
    }
    refuse(Reason::kNothingToCopy);
  }

  // Steps of an action, in order. Each does nothing once a step before it has refused.

  /// A move that can still fail may bring its source back, where this action makes a copy too.
  void wait_for_departures() {
    for (const Residence& each : value_.residences) {
      verdict_.waits |= each.uncertain && each.replaces;
    }
  }

  /// Whether a copy out of the source can be made only once that is there: when it may still not
  /// come, or a thread brings it, which the device cannot wait for.
  [[nodiscard]] bool is_waited_for(const Residence& source, Location to) const {
    return source.uncertain ||
           (source.arrives_by_worker && goes_on_stream(world_.backend(), source.location, to));
  }

  void copy(const Residence& source, Location to) {
    verdict_.source = source.location;
    wait_for_departures();
    if (value_.record->write_leased) {
      refuse_write_leased();
      return;
    }
    verdict_.reason = Reason::kCopied;
    verdict_.bytes = world_.backend().occupied_bytes(spec(), to);
    verdict_.waits |= is_waited_for(source, to);
    add({.kind = TransitionKind::kCopy,
         .from = source.location,
         .to = to,
         .charge = verdict_.bytes});
  }

  void refresh(const Residence& target, const Residence* source) {
    if (source == nullptr) {
      refuse_nothing_to_copy();
      return;
    }
    if (value_.record->write_leased) {
      refuse_write_leased();
      return;
    }
    if (target.num_leases != 0) {
      verdict_.source = target.location;
      refuse_protected(target);
      return;
    }
    verdict_.source = source->location;
    verdict_.reason = Reason::kRefreshed;
    verdict_.bytes = target.charge;
    // A thread that still copies out of the target must not see the new bytes, nor must there be
    // two arrivals of one materialization.
    verdict_.waits |= is_waited_for(*source, target.location) || target.uncertain ||
                      target.put_off || target.read_by_copy;
    wait_for_departures();
    add({.kind = TransitionKind::kRefresh, .from = source->location, .to = target.location});
  }

  void load(Location to) {
    if (!value_.record->can_be_made_again()) {
      refuse_nothing_to_copy();
      return;
    }
    wait_for_departures();
    const Location at = value_.record->source_location;
    const Backend& backend = world_.backend();
    verdict_.source = at;
    verdict_.reason = Reason::kLoaded;
    verdict_.bytes = backend.occupied_bytes(spec(), to);
    if (at == to) {
      add({.kind = TransitionKind::kReconstruct, .from = at, .to = at, .charge = verdict_.bytes});
      return;
    }
    if (is_unavailable(at)) {
      return;
    }
    const Bytes charge = backend.occupied_bytes(spec(), at);
    add({.kind = TransitionKind::kReconstruct,
         .from = at,
         .to = at,
         .charge = charge,
         .temporary = true});
    add({.kind = TransitionKind::kCopy, .from = at, .to = to, .charge = verdict_.bytes});
    add({.kind = TransitionKind::kRelease,
         .from = at,
         .to = at,
         .charge = charge,
         .temporary = true});
  }

  /// Nothing is copied while somebody writes. The one that is written is leased, and no other can
  /// be.
  void refuse_write_leased() {
    refuse(Reason::kProtected);
    for (const Residence& each : value_.residences) {
      if (each.num_leases != 0) {
        verdict_.source = each.location;
        refuse_protected(each);
      }
    }
  }
  void refuse_protected(const Residence& residence) {
    verdict_.protection = {residence.num_leases, residence.num_holds, residence.num_pending};
    refuse(Reason::kProtected);
  }

  [[nodiscard]] bool is_shared(const Residence& residence) const {
    return residence.block != nullptr && world_.backend().is_shared(*residence.block);
  }

  bool may_give_up(const Residence& residence) {
    if (residence.is_protected()) {
      refuse_protected(residence);
      return false;
    }
    if (world_.options().strict_aliases && is_shared(residence)) {
      refuse(Reason::kShared);
      return false;
    }
    return true;
  }

  /// Gives up a residence, behind the copy that this action makes, if it makes one.
  void release(const Residence& residence) {
    if (!verdict_.feasible()) {
      return;
    }
    verdict_.source = residence.location;
    if (!may_give_up(residence)) {
      return;
    }
    const bool makes_a_copy = verdict_.num_transitions != 0;
    if (!makes_a_copy && !residence.stale) {
      bool settled = false;
      bool uncertain = false;
      for (const Residence& each : value_.residences) {
        if (each.location != residence.location && each.is_good()) {
          (each.uncertain ? uncertain : settled) = true;
        }
      }
      if (!settled && !uncertain && !value_.record->can_be_made_again()) {
        refuse(Reason::kLastMaterialization);
        return;
      }
      // Until an arrival has succeeded it is no copy to rely on.
      verdict_.waits |= !settled && uncertain;
    }
    verdict_.waits |= residence.uncertain;
    add({.kind = TransitionKind::kRelease,
         .from = residence.location,
         .to = residence.location,
         .charge = residence.charge,
         .escapes = is_shared(residence)});
  }

  /// Checks all charges of the action at once, before anything is done.
  void admit() {
    for (std::size_t i = 0; i < verdict_.num_transitions; ++i) {
      const Transition& each = verdict_.transitions[i];
      if (each.kind == TransitionKind::kReconstruct || each.kind == TransitionKind::kCopy) {
        admit(world_.account(each.to), {.values = each.charge});
      }
    }
    if (verdict_.feasible()) {
      admit_staging();
    }
  }
  void admit(const Account& account, const Growth& growth) {
    if (account.lacking(growth) == Bytes()) {
      return;
    }
    verdict_.shortfall = account.shortfall(growth);
    verdict_.waits = true;
    if (account.lacking_for_good(growth) != Bytes()) {
      refuse(Reason::kOverBudget);
    }
  }
  void admit_staging() {
    const auto staging = staging_use(world_.backend(), verdict_);
    if (staging.has_value() && world_.account(staging->device).num_staged == 0) {
      verdict_.staging = staging->nbytes;
      admit(world_.account(Location::pinned_host()), {.staging = staging->nbytes});
    }
  }

  World& world_;
  const ValueView& value_;
  Verdict& verdict_;
};

}  // namespace

namespace {

template <class Filter>
const Residence* cheapest(const World& world, const ValueView& value, const Filter& may_be) {
  const Residence* best = nullptr;
  const auto rank = [&](const Residence& each) {
    return std::tuple(link_rank(world.options(), each.location.kind()), each.location);
  };
  for (const Residence& each : value.residences) {
    if (each.is_good() && may_be(each) && (best == nullptr || rank(each) < rank(*best))) {
      best = &each;
    }
  }
  return best;
}

}  // namespace

const Residence* cheapest_source(const World& world, const ValueView& value,
                                 std::optional<Location> except) {
  return cheapest(world, value, [&](const Residence& each) { return each.location != except; });
}

const Residence* cheapest_in_memory(const World& world, const ValueView& value) {
  return cheapest(world, value, [](const Residence& each) { return !each.location.is_disk(); });
}

std::optional<StagingUse> staging_use(const Backend& backend, const Verdict& verdict) {
  for (std::size_t i = 0; i < verdict.num_transitions; ++i) {
    const Transition& each = verdict.transitions[i];
    if (each.kind == TransitionKind::kCopy || each.kind == TransitionKind::kRefresh) {
      const Bytes nbytes = backend.staging_bytes(each.from, each.to);
      return nbytes != Bytes()
                 ? std::optional(StagingUse{each.to.is_cuda() ? each.to : each.from, nbytes})
                 : std::nullopt;
    }
  }
  return std::nullopt;
}

Verdict plan_action(World& world, const ResidencyAction& action) {
  Verdict verdict;
  Plan plan(world, handle_of(action), verdict);
  std::visit(Overloaded{
                 [&](const EnsureResident& ensure) { plan.ensure(ensure.location); },
                 [&](const MoveResident& move) { plan.move(move.to, move.from_location); },
                 [&](const DropResident& drop) { plan.drop(drop.location); },
                 [&](const DiscardValue&) { plan.discard(); },
             },
             action);
  return verdict;
}

Verdict plan_reservation(World& world, Location location, Bytes nbytes) {
  Verdict verdict;
  verdict.reason = Reason::kReleased;
  verdict.destination = location;
  if (!world.backend().why_unavailable(location).empty()) {
    verdict.reason = Reason::kLocationUnavailable;
    return verdict;
  }
  const Account& account = world.account(location);
  const Bytes lacking = account.over_budget(nbytes);
  if (lacking > account.retiring) {
    verdict.reason = Reason::kOverBudget;
    verdict.shortfall = account.shortfall({.values = nbytes});
    return verdict;
  }
  verdict.waits = lacking > Bytes();
  verdict.shortfall = verdict.waits ? account.shortfall({.values = nbytes}) : Shortfall();
  return verdict;
}

}  // namespace residency
