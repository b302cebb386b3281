#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <unordered_set>

#include <fmt/format.h>

#include "guard.h"
#include "manager_state.h"
#include "planner.h"

namespace residency {
namespace {

void check_lease_arguments(std::string_view call, std::span<const Handle> handles, Location at,
                           const AcquireOptions& options) {
  if (handles.empty()) {
    throw std::invalid_argument(fmt::format("{}: the list of handles is empty", call));
  }
  if (at.is_disk()) {
    throw std::invalid_argument(
        fmt::format("{}: nothing can be read in place at {}; lease it at a host or device location",
                    call, to_string(at)));
  }
  if (options.stream && !at.is_cuda()) {
    throw std::invalid_argument(
        fmt::format("{}: a lease at {} takes no stream", call, to_string(at)));
  }
  if (options.stream && options.stream->device != at) {
    throw std::invalid_argument(fmt::format("{}: the stream belongs to {}, the lease is at {}",
                                            call, to_string(options.stream->device),
                                            to_string(at)));
  }
}

/// Throws when the value cannot be leased like this, wherever it is.
void check_access(std::string_view call, const ValueRecord& record, const Handle& handle,
                  Access access) {
  const bool excluded = access == Access::kWrite ? record.num_leases != 0 : record.write_leased;
  if (excluded) {
    throw InUseError({.num_leases = record.num_leases},
                     fmt::format("{}: {} has {} lease(s) and a write lease excludes every other "
                                 "one; release first",
                                 call, to_string(handle), record.num_leases));
  }
  if (access == Access::kWrite && record.spec.mutability != Mutability::kMutable) {
    throw std::invalid_argument(
        fmt::format("{}: {} is immutable and cannot be leased for writing; register it as mutable",
                    call, to_string(handle)));
  }
}

/// What the accesses of a lease come after, value by value: the arrival, and for a write whatever
/// else is pending.
class AccessOrder {
 public:
  explicit AccessOrder(const LeaseState& lease) {
    fences_.reserve(lease.values.size());
    ends_.reserve(lease.values.size());
    for (const LeasedValue& each : lease.values) {
      const FencePtr ready = each.materialization->ready();
      fences_.push_back(ready);
      if (lease.access == Access::kWrite) {
        each.materialization->for_each_pending([&](const FencePtr& fence) {
          if (fence != ready) {
            fences_.push_back(fence);
          }
        });
      }
      ends_.push_back(fences_.size());
    }
  }
  [[nodiscard]] const std::vector<FencePtr>& all() const noexcept { return fences_; }
  [[nodiscard]] std::span<const FencePtr> operator[](std::size_t value) const {
    const std::size_t begin = value == 0 ? 0 : ends_[value - 1];
    return std::span(fences_).subspan(begin, ends_[value] - begin);
  }

 private:
  std::vector<FencePtr> fences_;
  std::vector<std::size_t> ends_;
};

}  // namespace

/// The records of `handles`, duplicates collapsed. None of them is busy, or all of them are by
/// `turns`. Throws for a handle that is not good and for a failure that nobody was told yet.
std::vector<ValueRecord*> ManagerState::resolve_all(Lock& lock, Trash& trash,
                                                    std::span<const Handle> handles,
                                                    std::vector<Handle>& unique, Turns& turns,
                                                    bool may_block) {
  check_open();
  std::vector<ValueRecord*> records;
  records.reserve(handles.size());
  unique.clear();
  unique.reserve(handles.size());
  const std::uint32_t visit = next_visit_++;
  bool busy = false;
  for (const Handle& handle : handles) {
    ValueRecord& record = resolve(handle);
    busy |= record.busy;
    if (record.visit != visit) {
      record.visit = visit;
      records.push_back(&record);
      unique.push_back(handle);
    }
  }
  if (busy) {
    turns.make_room(unique.size());
    std::vector<Handle> sorted = unique;
    std::ranges::sort(sorted);
    for (const Handle& handle : sorted) {
      if (ValueRecord* record = take_turn(lock, handle, may_block)) {
        turns.add(record);
        settle(trash, record);
      }
    }
    // A record may have become another value's meanwhile, but not one whose turn is ours.
    std::ranges::transform(unique, records.begin(),
                           [&](const Handle& handle) { return &resolve(handle); });
  }
  for (std::size_t i = 0; i < records.size(); ++i) {
    throw_failure_of(*records[i], unique[i]);
  }
  return records;
}

std::unique_ptr<LeaseState> ManagerState::protect_for_lease(
    Lock& lock, Trash& trash, std::string_view call, std::span<const Handle> handles, Location at,
    const AcquireOptions& options, Turns& turns) {
  const Access access = options.access;
  auto lease = std::make_unique<LeaseState>();
  lease->manager = shared_from_this();
  lease->location = at;
  lease->access = access;
  settle(trash);
  const std::vector<ValueRecord*> records =
      resolve_all(lock, trash, handles, lease->handles, turns, options.may_block);
  lease->values.resize(records.size());
  for (std::size_t i = 0; i < records.size(); ++i) {
    ValueRecord& record = *records[i];
    Materialization* materialization = record.find(at);
    if (materialization != nullptr && materialization->has_failed()) {
      std::rethrow_exception(materialization->ready()->error());
    }
    if (materialization == nullptr || materialization->stale) {
      throw UnavailableError(fmt::format(
          "{}: {} has no {}materialization at {}; ensure it there first, or borrow it", call,
          to_string(lease->handles[i]), materialization != nullptr ? "good " : "", to_string(at)));
    }
    check_access(call, record, lease->handles[i], access);
    lease->values[i].record = &record;
    lease->values[i].materialization = materialization;
    lease->values[i].block = materialization->block;
  }
  lease->streams.reserve(1);
  lease->num_added.reserve(1);
  leases_.insert(lease.get());
  for (const LeasedValue& each : lease->values) {
    ++each.materialization->num_leases;
    ++each.record->num_leases;
    each.record->write_leased = access == Access::kWrite;
  }
  ++num_leases_;
  return lease;
}

void ManagerState::end_protection(LeaseState& lease) {
  if (closed()) {
    return;  // closing has ended everything, and the materializations are gone
  }
  for (const LeasedValue& each : lease.values) {
    --each.materialization->num_leases;
    --each.record->num_leases;
    each.record->write_leased = false;
  }
  leases_.erase(&lease);
  --num_leases_;
}

Lease ManagerState::acquire(std::span<const Handle> handles, Location at,
                            const AcquireOptions& options) {
  check_not_loading();
  check_lease_arguments("acquire", handles, at, options);
  return lease_what_is_there("acquire", handles, at, options);
}

Lease ManagerState::lease_what_is_there(std::string_view call, std::span<const Handle> handles,
                                        Location at, const AcquireOptions& options) {
  Trash trash;
  std::unique_ptr<LeaseState> lease;
  Lock lock(mutex_);
  start_call(lock);
  check_available(at);
  Turns turns(*this);
  lease = protect_for_lease(lock, trash, call, handles, at, options, turns);
  std::exception_ptr failure;
  std::size_t num_begun = 0;
  std::optional<Stream> stream;
  try {
    // What comes first: the arrival, and before a write whoever still reads the bytes. The host
    // waits for it at host locations, and for what no stream can wait for.
    const AccessOrder order(*lease);
    std::vector<FencePtr> host_waits;
    for (const FencePtr& fence : order.all()) {
      if (fence && (!at.is_cuda() || !fence->on_stream())) {
        host_waits.push_back(fence);
      }
    }
    std::vector<FencePtr> put_off;
    for (const LeasedValue& each : lease->values) {
      if (each.materialization->is_uncertain()) {  // should it fail, nobody takes it away meanwhile
        turns.take_idle(*each.record);
      }
      if (each.materialization->is_put_off()) {
        put_off.push_back(each.materialization->ready());
      }
    }
    if (!options.may_block && any_pending(host_waits)) {
      throw UnavailableError(fmt::format(
          "{}: not all of it is ready at {}, and it may not wait there (may_block = false)", call,
          to_string(at)));
    }
    if (!host_waits.empty()) {
      wait_on(lock, host_waits);
    }
    if (!put_off.empty()) {
      make_certain(lock, put_off);
    }
    for (const std::vector<FencePtr>& fences : {host_waits, put_off}) {
      if (std::ranges::find(fences, FenceStatus::kFailed, &Fence::poll) != fences.end()) {
        throw UnavailableError(  // replaced by its own error below, unless another call was told it
            fmt::format("{}: a transfer to {} failed", call, to_string(at)));
      }
    }
    // What is written from now on has a fence of its own, which no arrival may clear.
    for (const LeasedValue& each : lease->values) {
      if (each.materialization->is_uncertain()) {
        settle(trash, each.record);
      }
    }
    turns.end();
    const Unlocked unlocked(*this, lock);
    if (at.is_cuda()) {
      stream = options.stream ? options.stream : backend_->current_stream(at);
    }
    for (; num_begun < lease->values.size(); ++num_begun) {
      backend_->begin_access(*lease->values[num_begun].block, options.access, stream,
                             order[num_begun], options_.checksum_leases);
    }
  } catch (...) {
    failure = std::current_exception();
  }
  if (!failure) {
    if (stream) {
      lease->streams.push_back(*stream);
      lease->num_added.push_back(1);
    }
    ++version_;
    return Lease(std::move(lease));
  }
  {
    const Unlocked unlocked(*this, lock);
    for (std::size_t i = 0; i < num_begun; ++i) {
      try {
        (void)backend_->end_access(*lease->values[i].block, options.access,
                                   options_.checksum_leases);
      } catch (...) {
        // The first failure is the one to tell.
      }
    }
  }
  end_protection(*lease);
  lease->ended.store(true, std::memory_order_release);
  if (!closed()) {
    // While the turns are ours: whoever is next would take a failure away from this call.
    for (const LeasedValue& each : lease->values) {
      settle(trash, each.record);
    }
  }
  turns.end();
  if (!closed()) {
    for (const Handle& handle : lease->handles) {
      if (ValueRecord* record = values_.find(handle).record) {
        throw_failure_of(*record, handle);
      }
    }
  }
  std::rethrow_exception(failure);
}

/// Whether the host has to wait for a lease of what an ensure brings: it uses the bytes itself, or
/// no stream can be made to wait for an arrival, or for what a write must come after.
bool ManagerState::lease_would_wait(const ValueRecord& record, const Verdict& verdict, Location at,
                                    Access access) const {
  bool waits = false;
  const auto add = [&](const FencePtr& fence) {
    waits |= is_pending(fence) && (!at.is_cuda() || !fence->on_stream());
  };
  const Materialization* there = record.find(at);
  if (there != nullptr && access == Access::kWrite) {
    there->for_each_pending(add);
  } else if (there != nullptr && verdict.no_op()) {
    add(there->ready());
  }
  const std::span transitions(verdict.transitions.data(), verdict.num_transitions);
  return waits || std::ranges::any_of(transitions, [&](const Transition& each) {
           return (each.kind == TransitionKind::kCopy || each.kind == TransitionKind::kRefresh) &&
                  (!at.is_cuda() || can_fail_later(backend_->path(each.from, each.to)));
         });
}

Lease ManagerState::borrow(std::span<const Handle> handles, Location at,
                           const AcquireOptions& options) {
  check_not_loading();
  check_lease_arguments("borrow", handles, at, options);
  PlanReport report;
  report.plan_ = "borrow";
  const auto name = std::make_shared<const std::string>(report.plan_);
  std::vector<ResidencyAction> ensures;
  ensures.reserve(handles.size());
  std::unordered_set<Handle> seen;
  for (const Handle& handle : handles) {
    if (seen.insert(handle).second) {
      ensures.emplace_back(EnsureResident{handle, at});
    }
  }
  {
    Trash trash;
    const Lock lock(mutex_);
    check_open();
    settle(trash);
    // Whatever can be refused is, before anything is brought here for nothing.
    World world(values_, ledger_, *backend_, options_);
    Explanation explanation;
    const Simulated simulated =
        simulate(world, Phase::kExecute, ensures, &explanation, options.may_block);
    if (!simulated.feasible) {
      throw_refusal(simulated.verdict, handle_of(ensures[simulated.index]),
                    to_string(ensures[simulated.index]));
    }
    for (const ExplainedAction& each : explanation.actions) {
      const Handle& handle = handle_of(each.action);
      const ValueRecord& record = *values_.find(handle).record;
      check_access("borrow", record, handle, options.access);
      if (!options.may_block && lease_would_wait(record, each.verdict, at, options.access)) {
        throw_refusal(would_block(each.verdict), handle, to_string(each.action));
      }
    }
  }
  // What was brought here stays until the lease has it, or everything is undone.
  const auto unpin = [&] {
    const Lock lock(mutex_);
    for (std::size_t i = 0; i < report.size(); ++i) {
      if (ValueRecord* record = values_.find(handle_of(ensures[i])).record) {
        --record->num_pins;  // no record once it has closed
      }
    }
  };
  report.entries_.reserve(ensures.size());
  try {
    Together together;
    while (report.size() != ensures.size()) {
      perform_next(report, std::span(ensures).subspan(report.size()),
                   {.may_block = options.may_block}, Phase::kExecute, name, together, /*pin=*/true);
    }
    Lease lease = lease_what_is_there("borrow", handles, at, options);
    unpin();
    lease.state_->transitions = std::move(report);
    return lease;
  } catch (...) {
    if (!closed()) {
      unpin();
      (void)roll_back(report, 0, Phase::kExecute, name);
    }
    throw;
  }
}

View& ManagerState::view(LeaseState& lease, const Handle& handle) {
  check_open();
  const std::size_t count = lease.handles.size();
  const std::size_t first = lease.next_view.load(std::memory_order_relaxed);
  for (std::size_t i = 0; i < count && !lease.ended.load(std::memory_order_acquire); ++i) {
    const std::size_t position = first + i < count ? first + i : first + i - count;
    if (lease.handles[position] == handle) {
      lease.next_view.store(position + 1 < count ? position + 1 : 0, std::memory_order_relaxed);
      LeasedValue& value = lease.values[position];
      const std::lock_guard guard(lease.mutex);
      if (lease.ended.load(std::memory_order_acquire)) {
        break;
      }
      if (!value.view) {
        value.view = backend_->open_view(*value.block);
      }
      return *value.view;
    }
  }
  if (lease.ended.load(std::memory_order_acquire)) {
    throw LifetimeClosedError(
        fmt::format("the lease at {} has been released", to_string(lease.location)));
  }
  if (handle.manager() != id_) {
    throw HandleError(handle, Reason::kForeignHandle, id_);
  }
  throw std::invalid_argument(
      fmt::format("view: {} is not among the {} value(s) of the lease at {}", to_string(handle),
                  count, to_string(lease.location)));
}

void ManagerState::add_stream(LeaseState& lease, const Stream& stream) {
  check_not_loading();
  if (stream.device != lease.location) {
    throw std::invalid_argument("add_stream: the stream belongs to " + to_string(stream.device) +
                                ", the lease is at " + to_string(lease.location));
  }
  if (lease.ended.load(std::memory_order_acquire)) {
    throw LifetimeClosedError("add_stream: the lease has been released");
  }
  check_open();
  Lock lock(mutex_);
  check_open();
  // A release that has begun has read the streams, and would not record the use of this one.
  if (lease.ended.load(std::memory_order_acquire) || !leases_.contains(&lease)) {
    throw LifetimeClosedError("add_stream: the lease has been released");
  }
  const AccessOrder order(lease);
  const auto position = [&] {
    return static_cast<std::size_t>(std::ranges::find(lease.streams, stream) -
                                    lease.streams.begin());
  };
  if (position() == lease.streams.size()) {
    make_room_in(lease.num_added, 1);
    lease.streams.push_back(stream);  // before it waits: a release meanwhile records its use too
    lease.num_added.push_back(0);
  }
  // Another call that adds it may not have come so far, or may fail: each has it wait.
  ++lease.num_added[position()];
  try {
    const Unlocked unlocked(*this, lock);
    const std::lock_guard guard(lease.mutex);
    for (std::size_t i = 0; i < lease.values.size() && lease.values[i].block; ++i) {
      backend_->begin_access(*lease.values[i].block, lease.access, stream, order[i], false);
    }
  } catch (...) {
    if (const std::size_t i = position(); --lease.num_added[i] == 0) {
      lease.streams.erase(lease.streams.begin() + static_cast<std::ptrdiff_t>(i));
      lease.num_added.erase(lease.num_added.begin() + static_cast<std::ptrdiff_t>(i));
    }
    throw;
  }
}

/// A fence behind all that the stream has to do and behind `uses`; the host does not wait.
FencePtr ManagerState::join(Block& block, const Stream& stream, std::span<const FencePtr> uses) {
  if (!uses.empty()) {
    backend_->begin_access(block, Access::kRead, stream, uses, false);
  }
  return backend_->record_use(stream);
}

/// Records the last uses, then ends what was begun for each value. Runs in the open. Throws what
/// recording throws; `failure` gets the rest.
void ManagerState::end_accesses(LeaseState& lease, std::span<const Stream> streams,
                                std::vector<FencePtr>& last_uses, std::exception_ptr& failure) {
  std::vector<std::unique_ptr<View>> views;  // die without the mutex: a tensor may take the GIL
  views.reserve(lease.values.size());
  const std::lock_guard guard(lease.mutex);
  // The first stream comes last: for a writer it has waited for the others by then, so that one
  // fence says when the bytes are there.
  for (std::size_t i = streams.size(); i-- > 0;) {
    last_uses.push_back(i == 0 && lease.access == Access::kWrite
                            ? join(*lease.values[0].block, streams[0], last_uses)
                            : backend_->record_use(streams[i]));
  }
  bool is_written = false;
  for (LeasedValue& each : lease.values) {
    try {
      if (auto field = backend_->end_access(*each.block, lease.access, options_.checksum_leases)) {
        each.written = std::move(field);
      }
    } catch (...) {
      failure = std::current_exception();
    }
    is_written |= each.written.has_value();
  }
  for (LeasedValue& each : lease.values) {
    views.push_back(std::move(each.view));  // before the protection ends: then blocks go at once
  }
  if (is_written && lease.access == Access::kRead && last_uses.size() > 1) {
    // Nobody said which stream would write, so none has waited for the others.
    last_uses.push_back(join(*lease.values[0].block, streams[0], last_uses));
  }
}

void ManagerState::release(LeaseState& lease, bool wait) {
  if (lease.ended.load(std::memory_order_acquire)) {
    return;
  }
  if (wait && lease.location.is_cuda() && !closed()) {
    backend_->check_may_wait();
  }
  // What the lease is then the last to refer to dies without a mutex: a tensor may take the GIL.
  struct Dying {
    std::unique_ptr<View> view;
    BlockPtr block;
  };
  std::vector<Dying> dying;
  dying.reserve(lease.values.size());
  if (lease.ended.exchange(true, std::memory_order_acq_rel)) {
    return;
  }
  std::vector<FencePtr> last_uses;
  std::exception_ptr failure;
  {
    Lock lock(mutex_);
    const auto make_room = [&] {
      for (const LeasedValue& each : lease.values) {
        each.materialization->make_room_for_last_uses(last_uses.capacity());
      }
    };
    // Nothing would be ordered behind a use that is not recorded: when it cannot be, the lease goes
    // on, and can be released again.
    try {
      if (!closed()) {
        const std::vector<Stream> streams =
            lease.streams;  // an add_stream may be failing meanwhile
        last_uses.reserve(streams.empty() ? 0 : streams.size() + 1);
        make_room();
        const Unlocked unlocked(*this, lock);
        end_accesses(lease, streams, last_uses, failure);
      }
      if (!closed()) {
        make_room();  // others may have taken it
      }
    } catch (...) {
      lease.ended.store(false, std::memory_order_release);
      throw;
    }
    if (!closed()) {
      const auto accept_write = [&](const LeasedValue& each) {
        mark_others_stale(*each.record, each.materialization);
        if (!last_uses.empty()) {
          each.materialization->set_ready(last_uses.back());  // whoever reads next waits for it
          each.materialization->fails_later = false;          // acquire has waited for the arrival
        }
      };
      for (const LeasedValue& each : lease.values) {
        for (const FencePtr& fence : last_uses) {
          each.materialization->add_last_use(fence);
        }
        if (lease.access == Access::kWrite || each.written.has_value()) {
          accept_write(each);
        }
      }
      end_protection(lease);
      ++version_;
    }
  }
  {
    const std::lock_guard guard(lease.mutex);
    for (LeasedValue& each : lease.values) {
      dying.push_back({std::move(each.view), std::move(each.block)});
    }
  }
  dying.clear();
  if (wait) {
    wait_all(last_uses);
  }
  for (std::size_t i = 0; i < lease.values.size(); ++i) {
    if (!lease.values[i].written.has_value()) {
      continue;
    }
    const std::string& field = *lease.values[i].written;
    const Handle& handle = lease.handles[i];
    throw UndeclaredWriteError(
        handle, field,
        fmt::format("field '{}' of {} was written, through some alias of it, without a write lease "
                    "since its bytes were last known; its other materializations are stale now. "
                    "Acquire a write lease on a mutable value to write",
                    field, to_string(handle)));
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
}

void ManagerState::keep(std::unique_ptr<LeaseState> lease) noexcept {
  const Lock lock(mutex_);
  if (!closed()) {
    lease->manager.reset();  // we own it now, and would own ourselves
    lease->next = std::move(orphans_);
    orphans_ = std::move(lease);
  }
}

/// What a call begins with, once it has the mutex. May open it.
void ManagerState::start_call(Lock& lock) {
  end_orphans(lock);
  check_open();
}

/// Another try for those that could not be ended when they were destroyed. Opens the mutex.
void ManagerState::end_orphans(Lock& lock) noexcept {
  if (closed()) {
    return;  // it has ended them, or is at it with the mutex open
  }
  std::unique_ptr<LeaseState> left = std::move(orphans_);
  while (left != nullptr) {
    std::unique_ptr<LeaseState> each = std::exchange(left, std::move(left->next));
    lock.unlock();
    bool has_ended = true;
    try {
      release(*each, /*wait=*/false);
    } catch (const UndeclaredWriteError&) {
      // Nobody is left to be told; the others are stale.
    } catch (...) {
      has_ended = each->ended.load();
    }
    if (has_ended) {
      each = nullptr;
    } else {
      keep(std::move(each));
    }
    lock.lock();
  }
}

// --- The public face

std::string in_words(const LeaseState& lease) {
  return fmt::format("a lease of {} value(s) at {}", lease.handles.size(),
                     to_string(lease.location));
}

Lease::Lease(std::unique_ptr<LeaseState> state) noexcept : state_(std::move(state)) {}
Lease::Lease(Lease&&) noexcept = default;
Lease& Lease::operator=(Lease&& other) noexcept {
  const Lease ended(std::move(*this));
  state_ = std::move(other.state_);
  return *this;
}
Lease::~Lease() {
  abandon_guard(state_, /*wait=*/false);
  if (active()) {
    const std::shared_ptr<ManagerState> manager = state_->manager;
    manager->keep(std::move(state_));
  }
}
std::span<const Handle> Lease::handles() const noexcept {
  return state_->handles;
}
Location Lease::location() const noexcept {
  return state_->location;
}
Access Lease::access() const noexcept {
  return state_->access;
}
bool Lease::active() const noexcept {
  return is_active(state_);
}
const PlanReport& Lease::transitions() const noexcept {
  return state_->transitions;
}
View& Lease::view(const Handle& handle) const {
  state_->manager->check_not_loading();
  return state_->manager->view(*state_, handle);
}
void Lease::add_stream(const Stream& stream) {
  state_->manager->add_stream(*state_, stream);
}
void Lease::release(bool wait) {
  release_guard(state_, wait);
}

}  // namespace residency
