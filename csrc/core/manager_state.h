#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "fork.h"
#include "ledger.h"
#include "make_room.h"
#include "node_pool.h"
#include "planner.h"
#include "residency/core/errors.h"
#include "residency/core/manager.h"
#include "trace.h"
#include "value_table.h"
#include "world.h"

namespace residency {

/// What is taken out of the state under the mutex and destroyed after it: a tensor's destructor may
/// take the GIL, a source may be a Python object.
struct Trash {
  std::vector<std::shared_ptr<const void>> objects;
  std::vector<MaterializationPtr> materializations;

  /// Room for so many more: adding them cannot fail then.
  void make_room(std::size_t num_objects, std::size_t num_materializations = 0) {
    make_room_in(objects, num_objects);
    make_room_in(materializations, num_materializations);
  }
};

/// A lease's share of one value.
struct LeasedValue {
  ValueRecord* record = nullptr;
  Materialization* materialization = nullptr;  // stays where it is while it is leased
  BlockPtr block;
  std::unique_ptr<View> view;
  std::optional<std::string> written;  // as it ended: the field that was, without being declared
};

struct LeaseState {
  std::shared_ptr<ManagerState> manager;
  std::vector<Handle> handles;
  std::vector<LeasedValue> values;  // parallel to handles
  Location location;
  Access access = Access::kRead;
  PlanReport transitions;
  std::mutex
      mutex;  // guards views and blocks; neither it nor the manager's is taken inside the other
  std::atomic<std::size_t> next_view{0};  // readers mostly go through a lease in its order
  std::vector<Stream> streams;            // guarded by the manager's mutex
  std::vector<std::uint32_t> num_added;   // parallel: calls that each was added by, or is being
  std::atomic<bool> ended{false};
  std::unique_ptr<LeaseState> next;  // of those that nobody could end
};

struct HoldState {
  std::shared_ptr<ManagerState> manager;
  std::vector<Handle> handles;
  std::vector<Materialization*> materializations;
  Location location;
  std::atomic<bool> ended{false};
};

struct ReservationState {
  std::shared_ptr<ManagerState> manager;
  MemoryReservation fields;
  std::uint64_t number = 0;
  bool physical = false;
  std::atomic<bool> ended{false};
};

struct ScopeState {
  std::shared_ptr<ManagerState> manager;
  ResidencyPlan plan;
  ScopeOptions options;
  std::shared_ptr<const std::string> plan_name;
  bool attempted = false;
  bool entered = false;
  bool closed = false;
  std::vector<Reservation> reservations;
  PlanReport report;
};

/// Everything that a manager is. Leases, holds, scopes and reservations share it and may outlive
/// the Manager, after which it is closed.
///
/// Note [Calls outside the mutex]
/// Whatever may block, allocate device memory, call back or destroy a tensor happens inside an
/// `Unlocked` section. Before it, the call has taken the *turn* of the value that it works on
/// (`Turn`), so the value cannot change under it, and has charged what it is about to make; after
/// it the result is committed, or the charges are undone. `close` waits until no section is open.
///
/// Note [Commits cannot fail]
/// A copy that was made and is then lost track of would be a lost value, so from the first change
/// to the state on nothing allocates: what that takes (`Leave`, nodes of lists, room in vectors) is
/// had before. When there is no memory for it, nothing has changed.
class ManagerState final : public std::enable_shared_from_this<ManagerState>, public Reclaimer {
 public:
  using Lock = std::unique_lock<std::mutex>;

  ManagerState(ManagerId id, ManagerOptions options, std::shared_ptr<Backend> backend);
  ~ManagerState() override;

  [[nodiscard]] ManagerId id() const noexcept { return id_; }
  [[nodiscard]] bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }
  [[nodiscard]] Backend& backend() const noexcept { return *backend_; }
  [[nodiscard]] const ManagerOptions& options() const noexcept { return options_; }

  // Values (values.cpp)
  [[nodiscard]] Handle register_source(std::shared_ptr<Source> source, const ValueSpec& spec,
                                       Location at, ValueType type);
  [[nodiscard]] Handle adopt(BlockPtr block, const ValueSpec& spec, ValueType type, FencePtr ready);
  [[nodiscard]] Handle adopt(const std::function<CopyResult()>& make, Location at,
                             const ValueSpec& spec, ValueType type);
  [[nodiscard]] BlockPtr take(const Handle& handle, std::optional<Location> at);
  std::size_t forget_discarded();
  [[nodiscard]] ValueSpec spec(const Handle& handle);

  // Actions and plans (actions.cpp, execute.cpp)
  ActionReport apply(const ResidencyAction& action, const ActionOptions& options);
  PlanReport execute(std::span<const ResidencyAction> actions, const ExecuteOptions& options);
  PlanReport prefetch(std::span<const Handle> handles, Location at);
  [[nodiscard]] Explanation explain(const ResidencyPlan* plan,
                                    std::span<const ResidencyAction> actions,
                                    std::optional<std::uint64_t> expected_state_version);
  [[nodiscard]] Scope scope(ResidencyPlan plan, ScopeOptions options);
  void enter(ScopeState& scope);
  void close(ScopeState& scope);
  void abandon(ScopeState& scope) noexcept;

  // Guards (lease.cpp, hold.cpp, reservation.cpp)
  [[nodiscard]] Lease acquire(std::span<const Handle> handles, Location at,
                              const AcquireOptions& options);
  [[nodiscard]] Lease borrow(std::span<const Handle> handles, Location at,
                             const AcquireOptions& options);
  [[nodiscard]] View& view(LeaseState& lease, const Handle& handle);
  void add_stream(LeaseState& lease, const Stream& stream);
  void release(LeaseState& lease, bool wait);
  void end_accesses(LeaseState& lease, std::span<const Stream> streams,
                    std::vector<FencePtr>& last_uses, std::exception_ptr& failure);
  [[nodiscard]] FencePtr join(Block& block, const Stream& stream, std::span<const FencePtr> uses);
  void keep(std::unique_ptr<LeaseState> lease) noexcept;
  [[nodiscard]] Hold hold(std::span<const Handle> handles, Location at);
  void release(HoldState& hold);
  [[nodiscard]] Reservation reserve(MemoryReservation reservation, bool require_physical,
                                    bool may_block = true);
  void release(ReservationState& reservation);

  // Memory pressure (reclaim.cpp)
  [[nodiscard]] std::vector<Evictable> evictable(Location from) override;
  [[nodiscard]] std::vector<Holder> holders(Location at) override;
  [[nodiscard]] bool evict(const Handle& handle, Location from,
                           const std::string& why) noexcept override;

  /// Throws `ReentrancyError` inside the load of a source of this manager, on the same thread.
  void check_not_loading() const;

  // The rest (manager_state.cpp, waiting.cpp, closing.cpp, audit.cpp)
  void set_budget(Location location, std::optional<Bytes> budget);
  void reset_peaks();
  [[nodiscard]] std::vector<Location> locations();
  [[nodiscard]] Snapshot snapshot();
  [[nodiscard]] std::vector<TransitionRecord> trace(std::optional<std::size_t> limit);
  [[nodiscard]] std::uint64_t state_version();
  void synchronize();
  void wait_for(const Handle& handle, const FencePtr& fence);
  void close(const CloseOptions& options);
  void close_without_waiting() noexcept;
  void audit();

  // Fork support (registry.cpp): the child must find the mutex in a known state.
  void lock_for_fork() { mutex_.lock(); }
  void unlock_after_fork() { mutex_.unlock(); }

 private:
  using PlanName = Trace::PlanName;

  /// Opens the mutex for the section's life. See Note [Calls outside the mutex].
  class Unlocked;
  /// The right to change one value. Taken and given back under the mutex.
  class Turn;
  /// The same for several values at once.
  class Turns;
  struct Waiter {
    std::condition_variable granted_changed;
    bool granted = false;
  };

  /// An arrival that can still fail, with the source that it is to replace, if any.
  struct Arrival {
    Handle handle;
    Location at;
    Location from;
    TransferPath path = TransferPath::kNone;
    FencePtr fence;
    bool overwrites = false;  // a stale materialization; on failure it is stale again
    MaterializationPtr departing;
    AddressRanges departing_ranges;
    std::optional<bool> failed = {};  // once it is certain, and the ledger knows
    FencePtr escape_watch;            // of the departing one, when others keep its memory alive
  };
  /// Bytes given up that something still reads.
  struct Retiring {
    Location location;
    Bytes bytes;
    std::vector<FencePtr> until;
    BlockPtr block = nullptr;  // null where the backend keeps it
  };
  /// Bytes given up whose memory others keep alive.
  struct Escaped {
    Handle handle;
    Location location;
    Bytes bytes;
    FencePtr until;
    AddressRanges ranges;
  };
  /// A block to hand to the backend once the mutex is open.
  struct Release {
    BlockPtr block;
    std::vector<FencePtr> after;
  };
  struct Failure {
    TransferPath path = TransferPath::kNone;
    FencePtr fence;
    Location from;
    Location at;
  };
  struct OpenReservation {
    MemoryReservation fields;
    std::shared_ptr<void> headroom;
  };
  /// What it takes to give up a materialization. See Note [Commits cannot fail].
  struct Leave {
    AddressRanges ranges;
    MaterializationPtr outside;    // for one that stands in its record
    std::vector<FencePtr> after;   // room for all that may be pending
    std::list<Retiring> retiring;  // one, with that room too
    std::list<Escaped> escaped;    // one
  };
  /// What an action works on, as it was when the action began.
  struct Inputs {
    BlockPtr source;
    FencePtr source_ready;
    BlockPtr overwrite;
    std::vector<FencePtr> overwrite_after;
    BlockPtr given_up;
    bool given_up_is_read = false;
    std::vector<Location> relied_on;  // devices that alone have the value then
  };
  /// What an action brought about, still to be published.
  struct Made {
    MaterializationPtr arriving;  // null when nothing was made or it was overwritten
    FencePtr fence;
    TransferPath path = TransferPath::kNone;
    bool blocked = false;
    bool fails_later = false;  // or may
    BlockPtr temporary;
    FencePtr escape_watch;  // of the materialization given up
  };
  /// One action on its way: planned and charged under the mutex, made in the open, published under
  /// the mutex.
  struct Step {
    Handle handle;
    ValueRecord* record = nullptr;
    Verdict verdict;
    TransitionRecord entry;
    std::uint32_t content_epoch = 0;  // when it was planned
    std::optional<StagingUse> staging = {};
    Inputs inputs;
    Made made;
    Leave leave;                 // of what is given up
    std::list<Arrival> arrival;  // one, of a copy that can still fail

    [[nodiscard]] std::span<const Transition> transitions() const noexcept {
      return {verdict.transitions.data(), verdict.num_transitions};
    }
  };
  /// Several steps that are made at once, and the room for that, kept from one time to the next.
  struct Together {
    std::vector<Step> steps;
    std::optional<Location> from;  // of those that copy
    std::optional<Location> to;
    std::vector<CopyRequest> requests;
    std::vector<CopyResult> results;
    std::vector<Release> releases;
  };

  // All of these are called under the mutex. What settles, waits for or changes materializations is
  // in settling.cpp, waiting.cpp and materializations.cpp.
  void start_call(Lock& lock);
  void end_orphans(Lock& lock) noexcept;
  void check_open() const;
  void check_available(Location location) const;
  void check_not_managed(const AddressRanges& ranges) const;
  [[nodiscard]] bool is_good(const Materialization& materialization) const {
    return !materialization.stale && !materialization.has_failed() &&
           !backend_->is_lost(materialization.location);
  }
  void settle(Trash& trash, const ValueRecord* own = nullptr);
  void settle_oldest(Trash& trash);
  [[nodiscard]] bool settle_retiring(Retiring& retiring, Trash& trash);
  [[nodiscard]] std::vector<FencePtr> watch_escapes(Lock& lock, const ValueRecord& record);
  [[nodiscard]] bool settle_arrival(Arrival& arrival, Trash& trash, const ValueRecord* own);
  void account_for_end(Arrival& arrival, Trash& trash);
  void throw_failure_of(ValueRecord& record, const Handle& handle);
  [[noreturn]] void throw_refusal(const Verdict& verdict, const Handle& handle,
                                  const std::string& action);
  [[nodiscard]] ValueRecord& resolve(const Handle& handle) const;
  [[nodiscard]] ValueRecord* take_turn(Lock& lock, const Handle& handle, bool may_block = true);
  void end_turn(ValueRecord& record) noexcept;
  void refuse_pending_in_forked_child(const std::vector<FencePtr>& fences) const;
  void wait_on(Lock& lock, const std::vector<FencePtr>& fences);
  void make_certain(Lock& lock, const std::vector<FencePtr>& arrivals);
  void make_certain(Lock& lock, Trash& trash, ValueRecord& record);
  static void poll_arrivals(const ValueRecord& record);
  [[nodiscard]] std::vector<FencePtr> pending_work() const;
  [[nodiscard]] std::vector<FencePtr> fences_to_wait_for(const ValueRecord* record,
                                                         const Verdict& verdict) const;
  void admit(Lock& lock, Trash& trash, Location location, Bytes nbytes, bool may_block);
  [[nodiscard]] static MaterializationPtr adoptable(const BlockPtr& block, const ValueSpec& spec,
                                                    FencePtr ready);
  [[nodiscard]] Handle add_adopted(MaterializationPtr& materialization, const ValueSpec& spec,
                                   ValueType type);
  Materialization* link(ValueRecord& record, MaterializationPtr materialization) noexcept;
  [[nodiscard]] static Leave leave_of(const Materialization& materialization, bool escapes);
  [[nodiscard]] MaterializationPtr detach(ValueRecord& record, Location location,
                                          Leave& leave) noexcept;
  void give_up(ValueRecord& record, MaterializationPtr given_up, Leave& leave,
               FencePtr escape_watch, std::vector<Release>& releases) noexcept;
  void note_escaped(const Handle& handle, const Materialization& given_up, FencePtr until,
                    Leave& leave) noexcept;
  void note_retiring(Location location, Bytes bytes, const std::vector<FencePtr>& until,
                     Leave& leave) noexcept;
  [[nodiscard]] bool is_reused_at_once(Location location, std::span<const FencePtr> after) const;
  [[nodiscard]] std::list<Escaped>::iterator find_escaped(Location at, const AddressRanges& ranges);
  [[nodiscard]] std::vector<Leave> prepare_end(const ValueRecord& record,
                                               std::span<const FencePtr> watches, Trash& trash,
                                               std::vector<Release>& releases);
  void end_value(ValueRecord& record, Trash& trash) noexcept;
  void mark_others_stale(ValueRecord& record, const Materialization* good);
  void run_releases(Lock& lock, std::vector<Release>& releases);

  // actions.cpp
  ActionReport perform(const ResidencyAction& action, const ActionOptions& options, Phase phase,
                       const PlanName& plan, bool pin = false);
  ActionReport perform_in_turn(Lock& lock, Trash& trash, const ResidencyAction& action,
                               const ActionOptions& options, Step& step, const PlanName& plan,
                               bool pin);
  [[nodiscard]] static bool may_come_behind_hints(const ValueRecord& record,
                                                  const ResidencyAction& action,
                                                  const ActionOptions& options);
  [[nodiscard]] static Verdict would_block(Verdict verdict);
  void append_failed(TransitionRecord& entry, const PlanName& plan) noexcept;

  // reclaim.cpp
  struct Leaving {
    std::optional<ResidencyAction> action = std::nullopt;
    Bytes cost = {};
    std::string_view why_not = {};  // when there is no action
  };
  [[nodiscard]] Leaving way_out(const ValueRecord& record, const Materialization& leaving);

  // carry_out.cpp
  ActionReport carry_out(Lock& lock, Trash& trash, Step& step, const ActionOptions& options,
                         const PlanName& plan);
  ActionReport carry_out_discard(Lock& lock, Trash& trash, Step& step, const PlanName& plan);
  static void note_verdict(Step& step);
  void charge(Step& step);
  void uncharge(const Step& step) noexcept;
  [[nodiscard]] std::vector<Location> relied_on_without(const ValueRecord& record,
                                                        const Materialization& given_up,
                                                        const Verdict& verdict) const;
  void check_one_answers(std::span<const Location> devices);
  void collect_inputs(const ValueRecord& record, const Verdict& verdict, Inputs& inputs) const;
  [[nodiscard]] BlockPtr reconstruct(const ValueRecord& record, const Handle& handle, Location at);
  [[nodiscard]] static CopyRequest request_of(const Step& step, Inputs&& inputs,
                                              const Transition& copy);
  void make(Step& step, const Inputs& inputs, const ActionOptions& options);
  static void keep_made(Step& step, BlockPtr& block);
  void unmake(Made& made, BlockPtr block);
  void prepare(Step& step, Trash& trash, std::vector<Release>& releases);
  void publish(Step& step, Trash& trash, std::vector<Release>& releases, const PlanName& plan,
               ActionReport& report) noexcept;
  void publish_no_op(Step& step, const PlanName& plan, ActionReport& report);
  void publish_made(Step& step, const Transition& transition, Trash& trash) noexcept;
  void release_temporary(Step& step, const Transition& transition,
                         std::vector<Release>& releases) noexcept;
  void depart(Step& step, MaterializationPtr given_up, Arrival& arrival, Trash& trash) noexcept;

  void register_ranges(const AddressRanges& ranges);
  void unregister_ranges(const AddressRanges& ranges) noexcept;

  struct Simulated {
    bool feasible = true;
    Phase phase = Phase::kExecute;
    std::size_t index = 0;
    Verdict verdict;
  };
  [[nodiscard]] Simulated simulate(World& world, Phase phase,
                                   std::span<const ResidencyAction> actions, Explanation* out,
                                   bool may_block);
  [[nodiscard]] Simulated simulate(World& world, const ResidencyPlan& plan, Explanation* out,
                                   bool may_block);
  [[nodiscard]] Simulated simulate_reservations(World& world, const ResidencyPlan& plan,
                                                Explanation* out, bool may_block);
  [[nodiscard]] World::Limits limits_of_growth(Lock& lock, const World& world);
  template <class Simulate>
  [[nodiscard]] Simulated simulate_within_limits(Lock& lock, std::size_t num_actions,
                                                 const Simulate& simulate);
  [[nodiscard]] std::vector<PredictedLocation> predicted_locations(const World& world) const;
  [[nodiscard]] std::optional<SegmentBytes> predicted_segments(const World& world,
                                                               const Account& account) const;
  [[noreturn]] void throw_plan_error(const std::string& plan, const Simulated& failed,
                                     const std::string& what);
  void check_version(const std::string& plan, std::optional<std::uint64_t> expected) const;

  struct RunOptions {
    OnFailure on_failure = OnFailure::kKeep;
    bool may_block = true;
    std::span<const Stream> streams = {};
    /// Called once an action has failed, before anything is undone.
    std::function<void()> when_failed = {};
  };
  // together.cpp
  void perform_next(PlanReport& report, std::span<const ResidencyAction> actions,
                    const RunOptions& options, Phase phase, const PlanName& plan,
                    Together& together, bool pin = false);
  [[nodiscard]] bool copy_together(PlanReport& report, std::span<const ResidencyAction> actions,
                                   const RunOptions& options, Phase phase, const PlanName& plan,
                                   Together& together, bool pin);
  [[nodiscard]] bool may_join(const Together& together, const Verdict& verdict,
                              const RunOptions& options) const;
  [[nodiscard]] bool join(Together& together, Turns& turns, const ResidencyAction& action,
                          const RunOptions& options);
  [[nodiscard]] std::size_t request_all(Together& together, std::exception_ptr& failure) noexcept;
  [[nodiscard]] std::size_t make_together(Together& together, std::exception_ptr& failure) noexcept;
  [[nodiscard]] std::size_t publish_together(PlanReport& report, Together& together,
                                             std::size_t num_made, Trash& trash,
                                             const PlanName& plan, bool pin,
                                             std::exception_ptr& failure) noexcept;
  void undo_unpublished(Lock& lock, std::span<Step> steps);

  void run_phase(PlanReport& report, std::span<const ResidencyAction> actions, Phase phase,
                 const PlanName& plan, const RunOptions& options, std::size_t rollback_from);
  [[nodiscard]] static bool changed_nothing(const PlanReport& report, std::size_t from);
  [[nodiscard]] bool roll_back(const PlanReport& report, std::size_t from, Phase phase,
                               const PlanName& plan);
  [[nodiscard]] bool undo(const TransitionRecord& done, bool gave_up_stale, Phase phase,
                          const PlanName& plan);

  [[nodiscard]] Lease lease_what_is_there(std::string_view call, std::span<const Handle> handles,
                                          Location at, const AcquireOptions& options);
  [[nodiscard]] bool lease_would_wait(const ValueRecord& record, const Verdict& verdict,
                                      Location at, Access access) const;
  [[nodiscard]] std::unique_ptr<LeaseState> protect_for_lease(
      Lock& lock, Trash& trash, std::string_view call, std::span<const Handle> handles, Location at,
      const AcquireOptions& options, Turns& turns);
  void end_protection(LeaseState& lease);
  [[nodiscard]] std::vector<ValueRecord*> resolve_all(Lock& lock, Trash& trash,
                                                      std::span<const Handle> handles,
                                                      std::vector<Handle>& unique, Turns& turns,
                                                      bool may_block = true);

  /// The streams of the leases that a close ends, and what is used on them.
  struct CutShort {
    struct Use {
      Stream stream;
      FencePtr fence;  // null: it could not be recorded
    };
    std::vector<Use> uses;
    std::vector<std::pair<Materialization*, std::size_t>> used;  // by which of the uses
  };
  [[nodiscard]] CutShort leases_cut_short();
  void record_last_uses(Lock& lock, CutShort& leases) noexcept;
  void tear_down(Lock& lock, bool wait) noexcept;
  void give_back_at_close(Materialization& materialization) noexcept;
  [[nodiscard]] bool is_forked() const noexcept;

  const ManagerId id_;
  const ManagerOptions options_;
  const std::shared_ptr<Backend> backend_;
  const std::uint64_t fork_generation_;

  std::mutex mutex_;
  // Everything below is guarded by mutex_; closed_ may be read without it.
  std::atomic<bool> closed_{false};
  bool torn_down_ = false;
  // Once closed, where it has to be left as it is for ever, and another of these.
  std::shared_ptr<ManagerState> itself_;
  ManagerState* kept_before_ = nullptr;
  std::uint64_t version_ = 0;
  ValueTable values_;
  Ledger ledger_;
  World present_;  // plans direct calls: nothing is ever simulated in it
  Trace trace_;
  // begin -> end. What a transfer has freed may be allocated again before it is settled: then two
  // begin at the same address for a moment.
  NodePool range_nodes_;
  using Ranges = std::pmr::multimap<std::uintptr_t, std::uintptr_t>;
  Ranges managed_ranges_{&range_nodes_};
  // The last that was registered began here, and this is the next to begin.
  std::uintptr_t last_range_begin_ = 0;
  Ranges::iterator next_range_ = managed_ranges_.end();
  std::list<Arrival> arrivals_;
  std::list<Retiring> retiring_;
  std::list<Escaped> escaped_;
  std::unordered_map<std::int64_t, std::list<Failure>> failures_;  // told oldest first
  std::unordered_map<ValueRecord*, std::deque<Waiter*>> waiters_;
  std::map<std::uint64_t, OpenReservation> reservations_;
  std::uint64_t next_reservation_ = 1;
  std::uint32_t next_visit_ = 1;
  std::uint32_t num_unlocked_ = 0;
  std::condition_variable all_locked_;
  std::unordered_set<LeaseState*> leases_;  // active ones
  /// Destroyed while active, when the backend could not say when their uses end (a stream was being
  /// captured): what they lease stays protected until it can, or the manager closes.
  std::unique_ptr<LeaseState> orphans_;  // the last of them
  std::uint32_t num_leases_ = 0;
  std::uint32_t num_holds_ = 0;
  std::uint32_t num_scopes_ = 0;
};

/// The one that the manager makes for staged copies.
[[nodiscard]] inline MemoryReservation staging_reservation(Bytes nbytes) {
  return {Location::pinned_host(), nbytes, "staging"};
}

/// Steady clock, nanoseconds.
[[nodiscard]] std::int64_t now_ns() noexcept;

inline bool ManagerState::is_forked() const noexcept {
  return fork_generation_ != residency::fork_generation();
}

class ManagerState::Unlocked {
 public:
  Unlocked(ManagerState& state, Lock& lock) : state_(state), lock_(lock) {
    ++state_.num_unlocked_;
    lock_.unlock();
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked() {
    lock_.lock();
    if (--state_.num_unlocked_ == 0) {
      state_.all_locked_.notify_all();
    }
  }

 private:
  ManagerState& state_;
  Lock& lock_;
};

class ManagerState::Turn {
 public:
  Turn(ManagerState& state, ValueRecord* record) noexcept : state_(state), record_(record) {}
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() {
    if (record_ != nullptr) {
      state_.end_turn(*record_);
    }
  }

 private:
  ManagerState& state_;
  ValueRecord* record_;
};

/// Whoever waits for a second turn while it has one waits in the order of handles, so that no two
/// calls wait for each other.
class ManagerState::Turns {
 public:
  explicit Turns(ManagerState& state) noexcept : state_(state) {}
  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;
  ~Turns() { end(); }

  void make_room(std::size_t num_more) { make_room_in(records_, num_more); }
  /// Takes over a turn that was taken. There must be room.
  void add(ValueRecord* record) noexcept { records_.push_back(record); }
  /// Takes the turn of a record that nobody has, or that is among these.
  void take_idle(ValueRecord& record) {
    if (!record.busy) {
      records_.push_back(&record);
      record.busy = true;
    }
  }
  void end() noexcept {
    for (ValueRecord* record : records_) {
      state_.end_turn(*record);
    }
    records_.clear();
  }

 private:
  ManagerState& state_;
  std::vector<ValueRecord*> records_;
};

}  // namespace residency
