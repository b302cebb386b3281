// A model-based random test: random operations on random worlds, each compared with a reference
// that was written from the rules of SEMANTICS.md and shares no code with the planner or ledger.
//
//   residency_random_model [--seed N] [--ops N]
//
// prints the seed, and on a failure the seed, the operation's number and the last operations.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "residency/core/errors.h"
#include "residency/core/manager.h"
#include "residency/core/warning.h"
#include "tests/fake/fake_backend.h"

namespace residency {
namespace {

using fake::FakeBackend;
using fake::FakeBlock;
using fake::FakeView;

// ------------------------------------------------------------------------------------------------
// The reference: plain maps, straightforward rules.

struct Copy {
  std::int64_t charge = 0;
  std::uint64_t seed = 0;
  bool stale = false;
  bool uncertain = false;  // arriving on a path that can fail
  int leases = 0;
  int holds = 0;
  int token = 0;             // a reference outside the manager
  bool written = false;      // on a stream: its bytes may be arriving still
  bool loaded_here = false;  // by its source: a transfer that is under way to here is an older one
};

struct Value {
  Handle handle;
  ValueSpec spec;
  std::uint64_t seed = 0;
  std::optional<Location> source;
  bool dirty = false;
  bool discarded = false;
  bool write_leased = false;
  std::map<Location, Copy> copies;

  [[nodiscard]] int num_leases() const {
    int sum = 0;
    for (const auto& [location, copy] : copies) {
      sum += copy.leases;
    }
    return sum;
  }
  [[nodiscard]] bool reloadable() const { return source && !dirty; }
};

struct Escaped {
  Location location;
  std::int64_t charge = 0;
  int token = 0;
};

struct Reserved {
  int id = 0;
  MemoryReservation fields;
};

struct Reference {
  std::vector<Value> values;
  std::map<Location, std::int64_t> budgets;
  std::vector<Reserved> reservations;
  std::vector<Escaped> escaped;
  std::vector<Location> listed;
  std::map<Location, std::int64_t> temporary;
  std::map<Location, std::int64_t> peak_used;
  std::map<Location, std::int64_t> peak_charged;

  [[nodiscard]] std::int64_t used(Location at) const {
    std::int64_t sum = 0;
    for (const auto& value : values) {
      if (const auto it = value.copies.find(at); it != value.copies.end()) {
        sum += it->second.charge;
      }
    }
    for (const auto& each : escaped) {
      sum += each.location == at ? each.charge : 0;
    }
    if (const auto it = temporary.find(at); it != temporary.end()) {
      sum += it->second;
    }
    return sum;
  }
  [[nodiscard]] std::int64_t escaped_at(Location at) const {
    std::int64_t sum = 0;
    for (const auto& each : escaped) {
      sum += each.location == at ? each.charge : 0;
    }
    return sum;
  }
  [[nodiscard]] std::int64_t reserved(Location at) const {
    std::int64_t sum = 0;
    for (const auto& each : reservations) {
      sum += each.fields.location == at ? each.fields.nbytes.count() : 0;
    }
    return sum;
  }
  [[nodiscard]] bool fits(Location at, std::int64_t more) const {
    const auto it = budgets.find(at);
    return it == budgets.end() || used(at) + reserved(at) + more <= it->second;
  }
  void note_peaks(Location at) {
    peak_used[at] = std::max(peak_used[at], used(at));
    peak_charged[at] = std::max(peak_charged[at], used(at) + reserved(at));
  }
  void list(Location at) {
    if (std::find(listed.begin(), listed.end(), at) == listed.end()) {
      listed.push_back(at);
    }
  }
};

struct Step {
  Reason reason = Reason::kAlreadyResident;
  std::optional<Location> read = std::nullopt;      // the copy whose bytes travel
  std::optional<Location> given_up = std::nullopt;  // by a move
  std::optional<Location> to = std::nullopt;
  std::int64_t bytes = 0;
  int num_copies = 0;
  int num_reconstructs = 0;

  [[nodiscard]] bool refused() const { return outcome_of(reason) == Outcome::kRefused; }
  [[nodiscard]] bool changes() const { return outcome_of(reason) == Outcome::kChange; }
};

std::int64_t rounded(std::int64_t bytes, std::int64_t to) {
  return (bytes + to - 1) / to * to;
}

std::int64_t charge_at(const ValueSpec& spec, Location at) {
  const std::int64_t bytes = spec.storage_bytes.count();
  switch (at.kind()) {
    case LocationKind::kPageableHost: return rounded(bytes, 64);
    case LocationKind::kPinnedHost: return bytes;
    case LocationKind::kCuda: return rounded(bytes, 512);
    case LocationKind::kDisk: return rounded(bytes + 128, 4096);
  }
  return 0;
}

bool may_fail_later(Location from, Location to) {
  if (from.is_disk() || to.is_disk()) {
    return true;
  }
  const auto pageable = Location::pageable_host();
  return (from == pageable && to.is_cuda()) || (from.is_cuda() && to == pageable);
}

class Rules {
 public:
  Rules(const Reference& state, const std::set<Location>& available, bool strict)
      : state_(state), available_(available), strict_(strict) {}

  [[nodiscard]] static int rank(Location location) {
    switch (location.kind()) {
      case LocationKind::kPinnedHost: return 0;
      case LocationKind::kPageableHost: return 1;
      case LocationKind::kCuda: return 2;
      case LocationKind::kDisk: return 3;
    }
    return 4;
  }

  /// Rule 19: by link order, then by index or name; never by what time has completed.
  static std::optional<Location> cheapest(const Value& value, std::optional<Location> except) {
    std::optional<Location> best;
    const auto key = [&](Location at) { return std::make_pair(rank(at), to_string(at)); };
    for (const auto& [at, copy] : value.copies) {
      if (!copy.stale && at != except && (!best || key(at) < key(*best))) {
        best = at;
      }
    }
    return best;
  }

  [[nodiscard]] Step refuse(Reason reason) const { return {.reason = reason}; }

  [[nodiscard]] std::optional<Reason> why_not_given_up(const Value& value, Location at) const {
    const Copy& copy = value.copies.at(at);
    if (copy.leases != 0 || copy.holds != 0) {
      return Reason::kProtected;
    }
    if (strict_ && copy.token != 0) {
      return Reason::kShared;
    }
    return std::nullopt;
  }

  [[nodiscard]] Step ensure(const Value& value, Location at) const {
    if (value.discarded) return refuse(Reason::kDiscardedHandle);
    if (!available_.contains(at)) return refuse(Reason::kLocationUnavailable);
    const auto here = value.copies.find(at);
    if (here != value.copies.end() && !here->second.stale) {
      return {.reason = Reason::kAlreadyResident, .to = at};
    }
    const auto read = cheapest(value, at);
    if (here != value.copies.end()) {
      return refresh(value, *read, at);
    }
    if (!value.copies.empty() && value.spec.mode == ReplicaMode::kExclusive) {
      return refuse(Reason::kExclusiveElsewhere);
    }
    return read ? admitted(value, copy(value, *read, at)) : admitted(value, load(value, at));
  }

  [[nodiscard]] Step move(const Value& value, Location to, std::optional<Location> from) const {
    if (value.discarded) return refuse(Reason::kDiscardedHandle);
    if (!available_.contains(to) || (from && !available_.contains(*from))) {
      return refuse(Reason::kLocationUnavailable);
    }
    if (from && !value.copies.contains(*from)) return refuse(Reason::kFromLocationAbsent);
    const auto here = value.copies.find(to);
    const bool good = here != value.copies.end() && !here->second.stale;
    if (from == to) return {.reason = Reason::kSameLocation, .to = to};
    std::optional<Location> give = from;
    if (!give) {
      give = cheapest(value, to);
    }
    if (!give) {
      for (const auto& [at, other] : value.copies) {  // only stale ones are left
        if (at != to) {
          give = at;
          break;
        }
      }
    }
    if (!give) {
      if (good) return {.reason = Reason::kAlreadyResident, .to = to};
      return admitted(value, load(value, to));
    }
    if (good) {
      if (const auto why = why_not_given_up(value, *give)) return refuse(*why);
      return {.reason = Reason::kReleased, .given_up = give, .to = to};
    }
    const Location read = value.copies.at(*give).stale ? *cheapest(value, to) : *give;
    Step step = here != value.copies.end() ? refresh(value, read, to) : copy(value, read, to);
    if (step.refused()) return step;
    if (const auto why = why_not_given_up(value, *give)) return refuse(*why);
    step.given_up = give;
    return admitted(value, step);
  }

  [[nodiscard]] Step drop(const Value& value, Location at) const {
    if (value.discarded) return refuse(Reason::kDiscardedHandle);
    if (!available_.contains(at)) return refuse(Reason::kLocationUnavailable);
    if (!value.copies.contains(at)) return {.reason = Reason::kAlreadyAbsent};
    if (const auto why = why_not_given_up(value, at)) return refuse(*why);
    if (!value.copies.at(at).stale && !value.reloadable() && !cheapest(value, at)) {
      return refuse(Reason::kLastMaterialization);
    }
    return {.reason = Reason::kReleased, .given_up = at};
  }

  [[nodiscard]] Step discard(const Value& value) const {
    if (value.discarded) return refuse(Reason::kDiscardedHandle);
    for (const auto& [at, copy] : value.copies) {
      if (const auto why = why_not_given_up(value, at)) return refuse(*why);
    }
    return {.reason = Reason::kDiscarded};
  }

 private:
  [[nodiscard]] Step copy(const Value& value, Location from, Location to) const {
    if (value.write_leased) return refuse(Reason::kProtected);
    return {.reason = Reason::kCopied,
            .read = from,
            .to = to,
            .bytes = charge_at(value.spec, to),
            .num_copies = 1};
  }
  [[nodiscard]] Step refresh(const Value& value, Location from, Location to) const {
    if (value.write_leased || value.copies.at(to).leases != 0) return refuse(Reason::kProtected);
    return {.reason = Reason::kRefreshed,
            .read = from,
            .to = to,
            .bytes = value.copies.at(to).charge,
            .num_copies = 1};
  }
  [[nodiscard]] Step load(const Value& value, Location to) const {
    if (!value.reloadable()) return refuse(Reason::kNothingToCopy);
    if (!available_.contains(*value.source)) return refuse(Reason::kLocationUnavailable);
    return {.reason = Reason::kLoaded,
            .read = value.source,
            .to = to,
            .bytes = charge_at(value.spec, to),
            .num_copies = *value.source == to ? 0 : 1,
            .num_reconstructs = 1};
  }
  [[nodiscard]] Step admitted(const Value& value, Step step) const {
    if (step.refused() || step.reason == Reason::kRefreshed) return step;
    if (step.reason == Reason::kLoaded && *step.read != *step.to &&
        !state_.fits(*step.read, charge_at(value.spec, *step.read))) {
      return refuse(Reason::kOverBudget);
    }
    return state_.fits(*step.to, step.bytes) ? step : refuse(Reason::kOverBudget);
  }

  const Reference& state_;
  const std::set<Location>& available_;
  bool strict_;
};

// ------------------------------------------------------------------------------------------------
// The driver.

struct Failure {
  std::string what;
};

[[noreturn]] void fail(const std::string& what) {
  throw Failure{what};
}

void require(bool condition, const std::string& what) {
  if (!condition) {
    fail(what);
  }
}

struct Outcome_ {
  bool ok = true;
  ErrorCode code = ErrorCode::kBudget;
  bool argument = false;
  bool injected = false;
  std::string text;
};

/// Stands for std::invalid_argument among the codes.
constexpr auto kArgument = static_cast<ErrorCode>(255);

ErrorCode code_of(Reason reason) {
  switch (reason) {
    case Reason::kForeignHandle:
    case Reason::kUnknownHandle:
    case Reason::kDiscardedHandle: return ErrorCode::kHandle;
    case Reason::kLocationUnavailable:
    case Reason::kNothingToCopy:
    case Reason::kFromLocationAbsent: return ErrorCode::kUnavailable;
    case Reason::kExclusiveElsewhere:
    case Reason::kLastMaterialization: return ErrorCode::kOwnership;
    case Reason::kProtected:
    case Reason::kShared: return ErrorCode::kInUse;
    case Reason::kOverBudget: return ErrorCode::kBudget;
    case Reason::kTransferFailed: return ErrorCode::kTransfer;
    default: return ErrorCode::kPlan;
  }
}

struct RefLease {
  Lease lease;
  std::vector<std::size_t> values;
  Location at;
  bool write = false;
  Stream stream;
};

struct RefHold {
  Hold hold;
  std::vector<std::size_t> values;
  Location at;
};

struct Holds {
  std::vector<RefHold> all;
  [[nodiscard]] bool empty() const { return all.empty(); }
  [[nodiscard]] std::size_t size() const { return all.size(); }
  RefHold& operator[](std::size_t i) { return all[i]; }
  std::vector<RefHold>::iterator begin() { return all.begin(); }
  void erase(std::vector<RefHold>::iterator it) { all.erase(it); }
  void push_back(RefHold hold) { all.push_back(std::move(hold)); }
  void clear_all() {
    for (auto& each : all) {
      each.hold.release();
    }
    all.clear();
  }
};

class Run {
 public:
  Run(std::uint64_t seed, std::uint64_t world_seed, std::uint64_t first_op)
      : random_(world_seed), seed_(seed), op_(first_op) {
    make_world();
  }

  std::deque<std::string> log;
  std::uint64_t op() const { return op_; }
  std::string state() const {
    return manager_ && !manager_->closed() ? to_string(manager_->snapshot()) : std::string();
  }

  void run(std::uint64_t num_ops) {
    for (std::uint64_t i = 0; i < num_ops; ++i) {
      ++op_;
      step();
      compare();
    }
    finish();
  }

 private:
  std::uint64_t below(std::uint64_t n) { return n == 0 ? 0 : random_() % n; }
  bool chance(std::uint64_t percent) { return below(100) < percent; }

  template <class... Parts>
  void note(const Parts&... parts) {
    std::string text = std::to_string(op_) + ":";
    ((text += " ", text += to_text(parts)), ...);
    log.push_back(std::move(text));
    if (log.size() > 20) {
      log.pop_front();
    }
  }
  static std::string to_text(const char* text) { return text; }
  static std::string to_text(const std::string& text) { return text; }
  static std::string to_text(Location location) { return to_string(location); }
  static std::string to_text(const std::optional<Location>& location) {
    return location ? to_string(*location) : "-";
  }
  template <class Number>
  requires std::is_arithmetic_v<Number>
  static std::string to_text(Number number) { return std::to_string(number); }

  void make_world() {
    fake::FakeOptions fake_options;
    fake_options.seed = random_();
    fake_options.num_devices = 1 + static_cast<int>(below(2));
    fake_options.on_violation = [this](const std::string& what) {
      // Not thrown: it may come from a destructor or a noexcept call.
      std::printf("FAILED with --seed %llu, operation %llu: the fake backend says: %s\n",
                  static_cast<unsigned long long>(seed_), static_cast<unsigned long long>(op_),
                  what.c_str());
      for (const auto& line : log) {
        std::printf("  %s\n", line.c_str());
      }
      std::fflush(stdout);
      std::abort();
    };
    immediate_ = chance(35);
    fake_options.completion = immediate_ ? fake::Completion::kImmediate : fake::Completion::kRandom;
    const Location all[] = {Location::pageable_host(), Location::pinned_host(),
                            Location::cuda(0),         Location::cuda(1),
                            Location::disk("a"),       Location::disk("b")};
    ManagerOptions options;
    options.trace_capacity = chance(50) ? 4096 : below(20);
    strict_ = chance(25);
    options.strict_aliases = strict_;
    const std::size_t num_disks = below(3);
    max_values_ = 5 + below(36);
    for (std::size_t i = 0; i < 6; ++i) {
      const Location at = all[i];
      const bool exists = at.is_cuda()   ? at.cuda_index() < fake_options.num_devices
                          : at.is_disk() ? i - 4 < num_disks
                                         : i == 0 || chance(85);
      if (!exists) {
        if (!at.is_disk()) {
          fake_options.unavailable.insert(at);
        }
        continue;
      }
      available_.insert(at);
      std::optional<std::int64_t> budget;
      if (chance(75)) {
        budget = static_cast<std::int64_t>(below(2000 * max_values_ / 2 + 1));
        reference_.budgets[at] = *budget;
      }
      const auto limit = budget ? std::optional(Bytes(*budget)) : std::nullopt;
      if (at.is_disk()) {
        options.disks.push_back({.name = at.disk_name(), .directory = "/nowhere", .budget = limit});
      } else if (budget || chance(50)) {
        options.budgets.push_back({at, limit});
      }
      locations_.push_back(at);
    }
    for (std::size_t i = options.budgets.size(); i > 1; --i) {
      std::swap(options.budgets[i - 1], options.budgets[below(i)]);
    }
    backend_ = std::make_shared<FakeBackend>(fake_options);
    manager_ = Manager::create(options, backend_);
    reference_.listed = manager_->locations();
    require(reference_.listed.size() >= options.budgets.size(), "budgeted locations are listed");
    for (std::size_t i = 0; i < options.budgets.size(); ++i) {
      require(reference_.listed[i] == options.budgets[i].location, "in the order given");
    }
    backend_->set_current_stream(Location::cuda(0), 7);
    note("world: immediate", immediate_, "strict", strict_, "locations", locations_.size());
    for (std::size_t i = 0; i < max_values_ / 2; ++i) {
      op_adopt_or_register();
    }
  }

  void finish() {
    note("finish");
    if (chance(50)) {
      while (!leases_.empty()) {
        end_lease(0, true);
      }
      holds_.clear_all();
      while (!reservations_.empty()) {
        op_unreserve();
      }
      tokens_.clear();
      reference_.escaped.clear();
      manager_->close({.force = true});
    } else {
      backend_->allow_views_to_outlive_blocks();
      manager_->close({.wait = chance(50), .force = true});
      require(manager_->closed(), "closed");
      backend_->complete_all();
      for (auto& lease : leases_) {
        lease.lease.release();
      }
      leases_.clear();
      holds_.clear_all();
      for (auto& [id, reservation] : reservations_) {
        reservation.release();
      }
      reservations_.clear();
    }
    manager_.reset();
    backend_->complete_all();
    tokens_.clear();
    for (const Location at : locations_) {
      require(backend_->live_bytes(at) == Bytes(),
              "after the end " + to_string(backend_->live_bytes(at)) + " live at " + to_string(at));
    }
    require(backend_->violations().empty(), "violations");
  }

  // --- comparing ---------------------------------------------------------------------------------

  void settle_arrivals() {
    for (auto& value : reference_.values) {
      for (auto& [at, copy] : value.copies) {
        if (copy.uncertain &&
            backend_->transfer_status(value.handle, at) != FenceStatus::kPending) {
          copy.uncertain = false;
        }
      }
    }
  }

  void compare() {
    try {
      manager_->audit();
    } catch (const std::logic_error& error) {
      fail(std::string("audit: ") + error.what());
    }
    const Snapshot snapshot = manager_->snapshot();
    require(snapshot.state_version >= version_, "the version fell");
    version_ = snapshot.state_version;
    std::vector<const Value*> expected;
    for (const auto& value : reference_.values) {
      expected.push_back(&value);
    }
    require(snapshot.values.size() == expected.size(),
            "values: " + std::to_string(snapshot.values.size()) + " instead of " +
                std::to_string(expected.size()));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      compare(snapshot.values[i], *expected[i]);
    }
    require(manager_->locations() == reference_.listed, "the list of locations differs");
    require(snapshot.locations.size() == reference_.listed.size(), "listed locations");
    for (const auto& location : snapshot.locations) {
      compare(location);
    }
    require(snapshot.reservations.size() == reference_.reservations.size(), "reservations");
    for (std::size_t i = 0; i < snapshot.reservations.size(); ++i) {
      require(snapshot.reservations[i].reservation == reference_.reservations[i].fields,
              "a reservation differs");
    }
    require(snapshot.num_leases == leases_.size(), "number of leases");
    require(snapshot.num_holds == holds_.size(), "number of holds");
    require(snapshot.num_scopes == num_scopes_, "number of scopes");
    for (const auto& at : locations_) {
      if (immediate_) {
        require(backend_->live_bytes(at).count() == reference_.used(at),
                "live bytes of the backend at " + to_string(at));
      }
    }
  }

  void compare(const ValueSnapshot& got, const Value& want) {
    const std::string name = to_string(want.handle);
    require(got.handle == want.handle, name + ": order of values");
    require(got.discarded == want.discarded, name + ": discarded");
    require(got.write_leased == want.write_leased, name + ": write leased");
    require(want.discarded || got.has_source == want.source.has_value(), name + ": has_source");
    require(got.materializations.size() == want.copies.size(),
            name + ": " + std::to_string(got.materializations.size()) +
                " materializations instead of " + std::to_string(want.copies.size()));
    auto it = want.copies.begin();
    for (const auto& each : got.materializations) {
      const auto& [at, copy] = *it++;
      const std::string where = name + " at " + to_string(at);
      require(each.location == at, where + ": there is one at " + to_string(each.location));
      require(each.stale == copy.stale, where + ": stale");
      require(each.charged_bytes == Bytes(copy.charge), where + ": charge");
      require(each.num_leases == static_cast<std::uint32_t>(copy.leases), where + ": leases");
      require(each.num_holds == static_cast<std::uint32_t>(copy.holds), where + ": holds");
      // What its source made is not on its way, unless a rollback has copied it back since.
      const bool pending = backend_->transfer_status(want.handle, at) == FenceStatus::kPending;
      const bool either = copy.stale || copy.written || (copy.loaded_here && pending);
      require((each.state == MaterializationState::kArriving) == pending || either,
              where + ": state is " + std::string(to_string(each.state)));
    }
  }

  void compare(const LocationSnapshot& got) {
    const Location at = got.location;
    const std::string name = to_string(at);
    const auto budget = reference_.budgets.find(at);
    require(
        got.budget == (budget == reference_.budgets.end() ? std::nullopt
                                                          : std::optional(Bytes(budget->second))),
        name + ": budget");
    require(got.used == Bytes(reference_.used(at)),
            name + ": used " + std::to_string(got.used.count()) + " instead of " +
                std::to_string(reference_.used(at)));
    require(got.reserved == Bytes(reference_.reserved(at)), name + ": reserved");
    require(got.escaped == Bytes(reference_.escaped_at(at)), name + ": escaped");
    // The backend counts device memory as free in device order, where the ledger says retiring
    // for the source of a transfer that may still fail.
    require(got.used + got.retiring == backend_->live_bytes(at),
            name + ": used " + std::to_string(got.used.count()) + " + retiring " +
                std::to_string(got.retiring.count()) + " but " +
                std::to_string(backend_->live_bytes(at).count()) + " are live");
    if (got.budget) {
      require(got.used + got.reserved + got.retiring <= *got.budget, name + ": over the budget");
    }
    require(got.peak_used >= got.used && got.peak_charged >= got.used + got.reserved,
            name + ": a peak is below the present");
  }

  // --- calling -----------------------------------------------------------------------------------

  template <class Call>
  Outcome_ attempt(const Call& call) {
    Outcome_ outcome;
    try {
      call();
      return outcome;
    } catch (const Error& error) {
      outcome.code = error.code();
      outcome.text = error.what();
    } catch (const fake::InjectedFault& error) {
      outcome.injected = true;
      outcome.text = error.what();
    } catch (const std::invalid_argument& error) {
      outcome.argument = true;
      outcome.text = error.what();
    }
    outcome.ok = false;
    require(!outcome.text.empty(), "an error without a message");
    return outcome;
  }

  void expect_code(const Outcome_& outcome, ErrorCode code) {
    require(!outcome.ok, "expected " + std::string(to_string(code)) + ", but it succeeded");
    require(!outcome.argument && !outcome.injected && outcome.code == code,
            "expected " + std::string(to_string(code)) + ", got " + outcome.text);
  }
  void expect_ok(const Outcome_& outcome) {
    require(outcome.ok, "expected success, got " + outcome.text);
  }

  /// Runs `call` and checks that the version rose exactly when something changed.
  template <class Call>
  Outcome_ versioned(bool changes, const Call& call) {
    const std::uint64_t before = manager_->state_version();
    const Outcome_ outcome = attempt(call);
    const std::uint64_t after = manager_->state_version();
    if (changes) {
      require(after > before,
              "something changed, but the version did not rise; error: " + outcome.text);
    } else {
      require(after == before, "nothing changed, but the version rose");
    }
    return outcome;
  }

  // --- effects on the reference ------------------------------------------------------------------

  void give_up(Reference& state, Value& value, Location at) {
    const Copy copy = value.copies.at(at);
    value.copies.erase(at);
    if (copy.token != 0) {
      state.escaped.push_back({at, copy.charge, copy.token});
    }
  }

  void apply(Reference& state, Value& value, const Step& step) {
    switch (step.reason) {
      case Reason::kCopied:
      case Reason::kRefreshed: {
        Copy& target = value.copies[*step.to];
        if (step.reason == Reason::kCopied) {
          target.charge = step.bytes;
          // The whole charge is at both ends while the action runs.
          state.note_peaks(*step.to);
          state.list(*step.to);
        }
        target.stale = false;
        target.loaded_here = false;
        target.seed = value.copies.at(*step.read).seed;
        target.uncertain = !immediate_ && may_fail_later(*step.read, *step.to);
        if (step.given_up) {
          give_up(state, value, *step.given_up);
        }
        break;
      }
      case Reason::kLoaded: {
        value.copies[*step.to] = {.charge = step.bytes,
                                  .seed = value.seed,
                                  .uncertain = !immediate_ && *step.read != *step.to &&
                                               may_fail_later(*step.read, *step.to),
                                  .loaded_here = *step.read == *step.to};
        if (*step.read != *step.to) {
          state.temporary[*step.read] = charge_at(value.spec, *step.read);
          state.note_peaks(*step.read);
          state.temporary.clear();
        }
        state.note_peaks(*step.to);
        state.list(*step.to);
        break;
      }
      case Reason::kReleased: give_up(state, value, *step.given_up); break;
      case Reason::kDiscarded:
        while (!value.copies.empty()) {
          give_up(state, value, value.copies.begin()->first);
        }
        value.discarded = true;
        break;
      case Reason::kAlreadyResident:
      case Reason::kSameLocation: state.list(*step.to); break;
      default: break;
    }
  }

  struct Chosen {
    ResidencyAction action;
    std::size_t value = 0;
  };

  Step plan(const Reference& state, const Chosen& chosen) {
    const Rules rules(state, available_, strict_);
    const Value& value = state.values[chosen.value];
    return std::visit(
        Overloaded{
            [&](const EnsureResident& a) { return rules.ensure(value, a.location); },
            [&](const MoveResident& a) { return rules.move(value, a.to, a.from_location); },
            [&](const DropResident& a) { return rules.drop(value, a.location); },
            [&](const DiscardValue&) { return rules.discard(value); },
        },
        chosen.action);
  }

  // --- choosing ----------------------------------------------------------------------------------

  Location any_location() {
    if (chance(2)) {
      return chance(50) ? Location::cuda(5) : Location::disk("absent");
    }
    return locations_[below(locations_.size())];
  }
  std::size_t any_value() { return below(reference_.values.size()); }
  /// A place where the value is, when it is anywhere.
  Location place_of(const Value& value) {
    if (value.copies.empty() || chance(10)) {
      return any_location();
    }
    auto it = value.copies.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(below(value.copies.size())));
    return it->first;
  }

  Chosen any_action(bool may_discard = true) {
    const std::size_t index = any_value();
    const Value& value = reference_.values[index];
    switch (below(may_discard ? 23 : 22)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
      case 7: return {EnsureResident{value.handle, any_location()}, index};
      case 8:
      case 9:
      case 10:
      case 11:
      case 12:
      case 13:
      case 14:
      case 15: {
        MoveResident move{value.handle, any_location()};
        if (chance(40)) {
          move.from_location = place_of(value);
        }
        return {move, index};
      }
      case 22: return {DiscardValue{value.handle}, index};
      default: return {DropResident{value.handle, place_of(value)}, index};
    }
  }

  // --- operations --------------------------------------------------------------------------------

  void step() {
    settle_arrivals();
    if (reference_.values.empty()) {
      op_adopt_or_register();
      return;
    }
    switch (below(40)) {
      case 0:
      case 1: return op_adopt_or_register();
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
      case 7:
      case 8:
      case 9:
      case 10: return op_direct();
      case 11:
      case 12:
      case 13: return op_execute();
      case 14:
      case 15: return op_scope();
      case 16:
      case 17:
      case 18: return op_acquire();
      case 19: return op_borrow();
      case 20:
      case 21:
      case 22: return op_end_lease();
      case 23: return op_hold();
      case 24:
      case 25: return op_unhold();
      case 26: return op_reserve();
      case 27:
      case 28: return op_unreserve();
      case 29: return op_budget();
      case 30: return op_share();
      case 31: return op_unshare();
      case 32: return op_take();
      case 33: return op_forget();
      case 34: return op_undeclared_write();
      case 35: return op_late_failure();
      case 36: return op_fault();
      case 37: return op_explain();
      case 38: return op_foreign();
      default: return op_read_only();
    }
  }

  void op_adopt_or_register() {
    if (reference_.values.size() >= max_values_) {
      return op_forget();
    }
    const std::int64_t sizes[] = {0, 1, 64, 511, 512, 513, 1000, 2048, 4000};
    Value value;
    value.seed = next_seed_++;
    const bool from_source = chance(40);
    value.spec = fake::make_spec(
        sizes[below(9)], chance(60) ? ReplicaMode::kReplicable : ReplicaMode::kExclusive,
        from_source ? Recoverability::kReconstructible : Recoverability::kMustPreserve,
        chance(40) ? Mutability::kMutable : Mutability::kImmutable);
    Location at = locations_[below(locations_.size())];
    if (from_source) {
      if (chance(10)) {
        at = any_location();
      }
      note("register_source at", at, value.spec.storage_bytes.count());
      auto source = std::make_shared<fake::FakeSource>(backend_, at, value.spec, value.seed);
      const bool possible = available_.contains(at);
      const auto outcome = versioned(
          possible, [&] { value.handle = manager_->register_source(source, value.spec, at); });
      if (!possible) {
        return expect_code(outcome, ErrorCode::kUnavailable);
      }
      expect_ok(outcome);
      value.source = at;
      reference_.list(at);
      reference_.values.push_back(value);
      return;
    }
    if (at.is_disk()) {
      at = Location::pageable_host();
    }
    const std::int64_t charge = charge_at(value.spec, at);
    note("adopt at", at, value.spec.storage_bytes.count());
    auto block = backend_->make_block(at, value.spec, value.seed);
    int token = 0;
    if (charge != 0 && chance(15)) {  // the caller keeps its tensor
      token = next_token_++;
      tokens_[token] = block->share();
    }
    const bool possible = reference_.fits(at, charge);
    const auto outcome =
        versioned(possible, [&] { value.handle = manager_->adopt(std::move(block), value.spec); });
    block.reset();
    if (!possible) {
      tokens_.erase(token);
      return expect_code(outcome, ErrorCode::kBudget);
    }
    expect_ok(outcome);
    value.copies[at] = {.charge = charge, .seed = value.seed, .token = token};
    reference_.list(at);
    reference_.values.push_back(value);
  }

  ActionReport call(const ResidencyAction& action, const ActionOptions& options) {
    if (chance(30)) {
      return manager_->apply(action, options);
    }
    return std::visit(
        Overloaded{
            [&](const EnsureResident& a) {
              return manager_->ensure(a.handle, a.location, options);
            },
            [&](const MoveResident& a) {
              return manager_->move(a.handle, a.to, a.from_location, options);
            },
            [&](const DropResident& a) { return manager_->drop(a.handle, a.location); },
            [&](const DiscardValue& a) { return manager_->discard(a.handle); },
        },
        action);
  }

  void check_record(const TransitionRecord& record, const ResidencyAction& action,
                    const Step& step) {
    require(record.reason == step.reason, "reason " + std::string(to_string(record.reason)) +
                                              " instead of " + std::string(to_string(step.reason)));
    require(record.action == kind_of(action), "kind of action");
    require(record.handle == handle_of(action), "handle");
    require(record.bytes == Bytes(step.bytes), "bytes of the record");
    require(!record.failed, "failed");
    if (step.reason == Reason::kCopied || step.reason == Reason::kRefreshed ||
        step.reason == Reason::kLoaded) {
      require(record.destination == step.to, "destination of the record");
      require(record.source == (step.given_up ? step.given_up : step.read),
              "source of the record: " + to_text(record.source));
    }
    if (step.reason == Reason::kReleased) {
      require(record.source == step.given_up, "released source: " + to_text(record.source));
    }
  }

  void op_direct() {
    const Chosen chosen = any_action();
    ActionOptions options;
    options.may_block = !chance(10);
    const Step expected = plan(reference_, chosen);
    note(to_string(chosen.action), options.may_block ? "" : "(may not block)", "->",
         std::string(to_string(expected.reason)));
    const std::uint64_t before = manager_->state_version();
    ActionReport report;
    const auto outcome = attempt([&] { report = call(chosen.action, options); });
    const std::uint64_t after = manager_->state_version();
    if (!outcome.ok && !options.may_block && !expected.refused()) {
      // It lacked retiring bytes or waited for an arrival, which only the backend knows.
      require(!immediate_, "refused to block where nothing is in flight: " + outcome.text);
      require(after == before, "a refusal changed the version");
      return;
    }
    require((after > before) == expected.changes(), "the version rose wrongly");
    if (expected.refused()) {
      expect_code(outcome, code_of(expected.reason));
      return;
    }
    expect_ok(outcome);
    check_record(report.record(), chosen.action, expected);
    apply(reference_, reference_.values[chosen.value], expected);
    if (chance(10)) {
      report.wait();
      require(report.done(), "done after wait");
    }
  }

  std::vector<Chosen> any_actions(std::size_t most) {
    std::vector<Chosen> actions;
    const std::size_t n = below(most + 1);
    for (std::size_t i = 0; i < n; ++i) {
      // Repeating a value makes plans whose actions depend on each other.
      actions.push_back(any_action(chance(20)));
      if (i > 0 && chance(40)) {
        actions.back() = actions[below(i)];
        const Value& value = reference_.values[actions.back().value];
        if (chance(50)) {
          actions.back().action = MoveResident{value.handle, any_location()};
        } else {
          actions.back().action = DropResident{value.handle, place_of(value)};
        }
      }
    }
    return actions;
  }

  static ActionList list_of(const std::vector<Chosen>& chosen) {
    ActionList actions;
    for (const auto& each : chosen) {
      actions.push_back(each.action);
    }
    return actions;
  }

  struct Simulated {
    Reference state;
    std::vector<Step> steps;
    bool feasible = true;
    std::size_t failed = 0;  // index in the list
  };

  Simulated simulate(Reference state, const std::vector<Chosen>& actions) {
    Simulated simulated{std::move(state), {}, true, 0};
    simulate_into(simulated, actions);
    return simulated;
  }
  void simulate_into(Simulated& simulated, const std::vector<Chosen>& actions) {
    for (std::size_t i = 0; i < actions.size(); ++i) {
      const Step step = plan(simulated.state, actions[i]);
      simulated.steps.push_back(step);
      if (step.refused()) {
        simulated.feasible = false;
        simulated.failed = i;
        return;
      }
      apply(simulated.state, simulated.state.values[actions[i].value], step);
    }
  }

  Reference start_of_peaks() {
    Reference state = reference_;
    state.peak_used.clear();
    state.peak_charged.clear();
    for (const Location at : locations_) {
      state.note_peaks(at);
    }
    return state;
  }

  void check_explained(const std::vector<ExplainedAction>& explained, std::size_t offset,
                       const std::vector<Chosen>& actions, const Simulated& simulated,
                       std::size_t steps_offset, Phase phase) {
    for (std::size_t i = 0; i < actions.size() && offset + i < explained.size(); ++i) {
      const auto& each = explained[offset + i];
      const Step& step = simulated.steps[steps_offset + i];
      require(each.phase == phase && each.index == i && each.action == actions[i].action,
              "explained action " + std::to_string(i) + " is another one");
      require(each.verdict.reason == step.reason,
              "explain says " + std::string(to_string(each.verdict.reason)) + " to " +
                  to_string(actions[i].action) + " instead of " +
                  std::string(to_string(step.reason)));
      require(!describe(each.verdict).empty(), "a verdict without a sentence");
      if (!step.refused()) {
        require(each.verdict.bytes == Bytes(step.bytes), "explained bytes");
        if (step.changes() && step.reason != Reason::kDiscarded) {
          require(each.verdict.source == (step.given_up ? step.given_up : step.read),
                  "explained source " + to_text(each.verdict.source) + " of " +
                      to_string(actions[i].action));
        }
      }
    }
  }

  void check_peaks(const Explanation& explanation, const Reference& simulated) {
    for (const auto& each : explanation.locations) {
      const Location at = each.location;
      const std::string name = to_string(at);
      require(each.used_before == Bytes(reference_.used(at)), name + ": used_before");
      require(each.used_after == Bytes(simulated.used(at)), name + ": used_after");
      require(each.escaped_after == Bytes(simulated.escaped_at(at)), name + ": escaped_after");
      const auto used = simulated.peak_used.find(at);
      if (used != simulated.peak_used.end()) {
        require(each.peak_used == Bytes(used->second),
                name + ": predicted peak " + std::to_string(each.peak_used.count()) +
                    " instead of " + std::to_string(used->second));
        require(each.peak_charged == Bytes(simulated.peak_charged.at(at)),
                name + ": predicted charged peak");
      }
    }
  }

  void check_measured(const Explanation& explanation, bool escapes) {
    const Snapshot snapshot = manager_->snapshot();
    for (const auto& each : explanation.locations) {
      const auto* measured = snapshot.find(each.location);
      if (measured == nullptr) {
        require(each.peak_used == Bytes(), "predicted bytes at a place never used");
        continue;
      }
      const std::string name = to_string(each.location);
      require(measured->peak_used == each.peak_used,
              name + ": predicted peak " + std::to_string(each.peak_used.count()) + ", measured " +
                  std::to_string(measured->peak_used.count()));
      require(measured->peak_charged == each.peak_charged,
              name + ": predicted charged peak " + std::to_string(each.peak_charged.count()) +
                  ", measured " + std::to_string(measured->peak_charged.count()));
      if (immediate_ && !escapes) {
        require(backend_->peak_bytes(each.location) == each.peak_used,
                name + ": predicted peak " + std::to_string(each.peak_used.count()) +
                    ", the backend measured " +
                    std::to_string(backend_->peak_bytes(each.location).count()));
      }
    }
  }

  void op_execute() {
    const auto actions = any_actions(6);
    const ActionList list = list_of(actions);
    std::string text;
    for (const auto& action : list) {
      text += "[" + to_string(action) + "] ";
    }
    note("execute", text);
    const Simulated simulated = simulate(start_of_peaks(), actions);
    const Explanation explanation = manager_->explain(list);
    require(explanation.feasible == simulated.feasible,
            "explain: " + (explanation.feasible ? "feasible" : explanation.infeasible_because));
    require(explanation.infeasible_because.empty() == simulated.feasible, "infeasible_because");
    require(explanation.actions.size() == simulated.steps.size(), "explain stops elsewhere");
    check_explained(explanation.actions, 0, actions, simulated, 0, Phase::kExecute);
    if (simulated.feasible) {
      check_peaks(explanation, simulated.state);
    }
    manager_->reset_peaks();
    backend_->reset_peaks();
    bool changes = false;
    for (const Step& step : simulated.steps) {
      changes = changes || step.changes();
    }
    ExecuteOptions options;
    options.name = "random";
    if (chance(30)) {
      options.expected_state_version = manager_->state_version();
    }
    options.on_failure = chance(50) ? OnFailure::kKeep : OnFailure::kRollback;
    PlanReport report;
    if (!simulated.feasible) {
      const std::uint64_t before = manager_->state_version();
      try {
        report = manager_->execute(list, options);
        fail("an infeasible plan was executed");
      } catch (const PlanError& error) {
        require(error.index == simulated.failed && error.phase == Phase::kExecute,
                "PlanError names action " + std::to_string(error.index));
        require(error.verdict.reason == simulated.steps.back().reason, "PlanError's reason");
      }
      require(manager_->state_version() == before, "a refused plan changed the version");
      return;
    }
    expect_ok(versioned(changes, [&] { report = manager_->execute(list, options); }));
    require(report.size() == actions.size(), "one entry per action");
    for (std::size_t i = 0; i < actions.size(); ++i) {
      check_record(report[i], actions[i].action, simulated.steps[i]);
      const auto& verdict = explanation.actions[i].verdict;
      require(report[i].source == verdict.source && report[i].destination == verdict.destination &&
                  report[i].bytes == verdict.bytes,
              "executed step differs from the explained one");
    }
    require(report.moved_bytes() == explanation.moved_bytes(), "moved bytes");
    const bool escapes = simulated.state.escaped.size() != reference_.escaped.size();
    commit(simulated.state);
    check_measured(explanation, escapes);
  }

  void commit(const Reference& state) {
    reference_ = state;
    settle_arrivals();
  }

  void op_scope() {
    const auto reclaim = any_actions(2);
    const auto enter = any_actions(3);
    const auto exit = any_actions(2);
    std::vector<MemoryReservation> reservations;
    for (std::uint64_t i = below(3); i > 0; --i) {
      reservations.push_back({any_location(), Bytes(static_cast<std::int64_t>(below(3000))),
                              "scope " + std::to_string(i)});
    }
    const ResidencyPlan resident({.name = "scope",
                                  .reclaim = list_of(reclaim),
                                  .reservations = reservations,
                                  .enter = list_of(enter),
                                  .exit = list_of(exit)});
    std::string text = to_string(resident);
    std::replace(text.begin(), text.end(), '\n', ';');
    note("scope", text);
    require(ResidencyPlan::from_json(resident.to_json()) == resident, "JSON round trip");

    Simulated simulated{start_of_peaks(), {}, true, 0};
    Phase failed_phase = Phase::kReclaim;
    simulate_into(simulated, reclaim);
    if (simulated.feasible) {
      failed_phase = Phase::kReserve;
      for (std::size_t i = 0; i < reservations.size(); ++i) {
        const auto& each = reservations[i];
        if (!available_.contains(each.location) ||
            !simulated.state.fits(each.location, each.nbytes.count())) {
          simulated.feasible = false;
          simulated.failed = i;
          break;
        }
        simulated.state.reservations.push_back({next_id_++, each});
        simulated.state.note_peaks(each.location);
        simulated.state.list(each.location);
      }
    }
    if (simulated.feasible) {
      failed_phase = Phase::kEnter;
      simulate_into(simulated, enter);
    }
    const Reference entered = simulated.state;
    if (simulated.feasible) {
      failed_phase = Phase::kExit;
      simulate_into(simulated, exit);
    }
    const auto without_reservations = [num = reference_.reservations.size()](Reference state) {
      state.reservations.resize(num);
      return state;
    };

    const Explanation explanation = manager_->explain(resident);
    require(explanation.feasible == simulated.feasible,
            "explain: " + (explanation.feasible ? "feasible" : explanation.infeasible_because));
    if (simulated.feasible) {
      require(explanation.actions.size() == simulated.steps.size(), "explained actions");
      check_explained(explanation.actions, 0, reclaim, simulated, 0, Phase::kReclaim);
      check_explained(explanation.actions, reclaim.size(), enter, simulated, reclaim.size(),
                      Phase::kEnter);
      check_explained(explanation.actions, reclaim.size() + enter.size(), exit, simulated,
                      reclaim.size() + enter.size(), Phase::kExit);
      check_peaks(explanation, without_reservations(simulated.state));
    }
    manager_->reset_peaks();
    backend_->reset_peaks();
    ScopeOptions options;
    options.on_failure = chance(50) ? OnFailure::kKeep : OnFailure::kRollback;
    Scope scope = manager_->scope(resident, options);
    if (!simulated.feasible) {
      const std::uint64_t before = manager_->state_version();
      try {
        scope.enter();
        fail("an infeasible scope was entered");
      } catch (const PlanError& error) {
        require(error.index == simulated.failed && error.phase == failed_phase,
                "PlanError names " + std::string(to_string(error.phase)) + " " +
                    std::to_string(error.index) + " instead of " +
                    std::string(to_string(failed_phase)) + " " + std::to_string(simulated.failed));
      }
      require(manager_->state_version() == before, "a refused scope changed the version");
      scope.close();
      return;
    }
    scope.enter();
    ++num_scopes_;
    const Reference before = reference_;
    commit(entered);
    compare();
    const bool escapes = simulated.state.escaped.size() != before.escaped.size();
    if (chance(60) || num_scopes_ > 3) {
      scope.close();
      --num_scopes_;
      commit(without_reservations(simulated.state));
      require(scope.report().size() == simulated.steps.size(), "entries of the scope's report");
      reference_without_scope_reservations_check(scope, reservations);
      check_measured(explanation, escapes);
      return;
    }
    // A body that does something else; the exit actions meet whatever it left.
    for (std::uint64_t i = 1 + below(2); i > 0; --i) {
      ++op_;
      step();
      compare();
    }
    settle_arrivals();
    bool still_there = true;
    for (const auto& each : exit) {
      bool found = false;
      for (const auto& value : reference_.values) {
        found = found || value.handle == handle_of(each.action);
      }
      still_there = still_there && found;
    }
    std::vector<Chosen> rebound;
    std::vector<Chosen> leading;
    for (const auto& each : exit) {
      for (std::size_t i = 0; i < reference_.values.size(); ++i) {
        if (reference_.values[i].handle == handle_of(each.action)) {
          rebound.push_back({each.action, i});
        }
      }
      if (rebound.size() == leading.size() + 1 &&
          leading.size() == static_cast<std::size_t>(&each - exit.data())) {
        leading = rebound;
      }
    }
    // The actions before the first on a value that was forgotten.
    const Simulated exiting = simulate(reference_, leading);
    if (!still_there) {
      rebound.clear();
    }
    note("close scope");
    const Simulated closing = simulate(reference_, rebound);
    try {
      scope.close();
      require(closing.feasible && still_there, "a closing scope passed over an impossible action");
    } catch (const PlanExecutionError& error) {
      require(error.phase == Phase::kExit, "phase of the failed exit");
      if (still_there) {
        require(!closing.feasible && error.index == closing.failed,
                "exit action " + std::to_string(error.index) + " failed: " + error.what());
      } else {
        --num_scopes_;
        remove_scope_reservations(entered, before);
        resync(exiting.state);
        return;
      }
    }
    --num_scopes_;
    if (options.on_failure == OnFailure::kRollback && !closing.feasible) {
      remove_scope_reservations(entered, before);
      resync(closing.state);
      return;
    }
    commit(closing.state);
    remove_scope_reservations(entered, before);
  }

  void remove_scope_reservations(const Reference& entered, const Reference& before) {
    std::set<int> ids;
    for (std::size_t i = before.reservations.size(); i < entered.reservations.size(); ++i) {
      ids.insert(entered.reservations[i].id);
    }
    std::erase_if(reference_.reservations,
                  [&](const Reserved& each) { return ids.contains(each.id); });
  }

  void reference_without_scope_reservations_check(const Scope& scope,
                                                  const std::vector<MemoryReservation>& wanted) {
    require(scope.closed(), "closed");
    const auto& uses = scope.report().reservations();
    require(uses.size() == wanted.size(), "reservations of the report");
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      require(uses[i].reservation == wanted[i] && !uses[i].physical, "reservation of the report");
    }
  }

  /// Takes the manager's word for where things are (after a rollback that could not restore
  /// everything), but not for what they contain.
  void resync(const Reference& furthest) {
    const Snapshot snapshot = manager_->snapshot();
    // What was given up while others kept its memory alive has escaped, whatever was undone.
    reference_.escaped = furthest.escaped;
    std::set<int> gone;
    for (const auto& each : furthest.escaped) {
      gone.insert(each.token);
    }
    for (auto& value : reference_.values) {
      const auto* got = snapshot.find(value.handle);
      require(got != nullptr, "a value was lost");
      std::map<Location, Copy> copies;
      for (const auto& each : got->materializations) {
        const auto old = value.copies.find(each.location);
        Copy copy = old != value.copies.end() ? old->second : Copy{};
        copy.charge = each.charged_bytes.count();
        copy.stale = each.stale;
        if (!each.stale) {
          copy.seed = value.seed;
        }
        if (gone.contains(copy.token)) {
          copy.token = 0;
        }
        copies[each.location] = copy;
      }
      require(!copies.empty() || value.reloadable() || got->discarded,
              "a must-preserve value was lost");
      value.copies = copies;
      value.discarded = got->discarded;
    }
    reference_.listed = manager_->locations();
    settle_arrivals();
  }

  void op_explain() {
    const auto actions = any_actions(5);
    note("explain only");
    const Simulated simulated = simulate(start_of_peaks(), actions);
    const auto trace = manager_->trace().size();
    Explanation explanation;
    expect_ok(versioned(false, [&] { explanation = manager_->explain(list_of(actions)); }));
    require(explanation.feasible == simulated.feasible, "feasible");
    require(explanation.actions.size() == simulated.steps.size(), "explain stops elsewhere");
    require(manager_->trace().size() == trace, "explain wrote a trace");
    require(!to_string(explanation).empty(), "text");
    check_explained(explanation.actions, 0, actions, simulated, 0, Phase::kExecute);
    const auto stale = attempt([&] {
      static_cast<void>(manager_->explain(list_of(actions), manager_->state_version() + 1));
    });
    expect_code(stale, ErrorCode::kStaleState);
  }

  // Leases.

  std::vector<std::size_t> any_values(Location at, std::size_t most) {
    std::vector<std::size_t> chosen;
    const std::size_t n = 1 + below(most);
    for (std::size_t i = 0; i < n; ++i) {
      std::size_t index = any_value();
      for (int tries = 0; tries < 5 && !reference_.values[index].copies.contains(at); ++tries) {
        index = any_value();
      }
      chosen.push_back(index);
    }
    return chosen;
  }

  std::vector<Handle> handles_of(const std::vector<std::size_t>& values) {
    std::vector<Handle> handles;
    for (const auto index : values) {
      handles.push_back(reference_.values[index].handle);
    }
    return handles;
  }

  /// The errors that an acquire of these may raise; empty when it must succeed.
  std::set<ErrorCode> why_not_acquired(const Reference& state,
                                       const std::vector<std::size_t>& values, Location at,
                                       bool write) {
    std::set<ErrorCode> why;
    if (at.is_disk()) {
      why.insert(kArgument);
    }
    if (!available_.contains(at)) {
      why.insert(ErrorCode::kUnavailable);
    }
    for (const auto index : values) {
      const Value& value = state.values[index];
      if (value.discarded) {
        why.insert(ErrorCode::kHandle);
        continue;
      }
      const auto it = value.copies.find(at);
      if (it == value.copies.end() || it->second.stale) {
        why.insert(ErrorCode::kUnavailable);
      }
      if (value.write_leased || (write && value.num_leases() != 0)) {
        why.insert(ErrorCode::kInUse);
      }
      if (write && value.spec.mutability == Mutability::kImmutable) {
        why.insert(kArgument);
      }
    }
    return why;
  }

  void begin_lease(Lease lease, std::vector<std::size_t> values, Location at, bool write,
                   std::optional<Stream> stream) {
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    require(lease.handles().size() == values.size(), "duplicates collapse");
    require(lease.active() && lease.location() == at, "an active lease at its location");
    for (const auto index : values) {
      Value& value = reference_.values[index];
      value.copies.at(at).leases += 1;
      value.write_leased = value.write_leased || write;
    }
    leases_.push_back({std::move(lease), values, at, write, stream.value_or(current_stream(at))});
    use(leases_.back());
  }

  FakeBlock& block_of(const RefLease& lease, std::size_t index) {
    auto& view = dynamic_cast<FakeView&>(lease.lease.view(reference_.values[index].handle));
    return view.block();
  }

  void use(const RefLease& lease) {
    for (const auto index : lease.values) {
      Value& value = reference_.values[index];
      FakeBlock& block = block_of(lease, index);
      Copy& copy = value.copies.at(lease.at);
      if (lease.at.is_cuda()) {
        backend_->launch_read(lease.stream, block, copy.seed);
        if (lease.write && chance(70)) {
          copy.seed = value.seed = next_seed_++;
          backend_->launch_write(lease.stream, block, copy.seed);
          backend_->launch_read(lease.stream, block, copy.seed);
        }
      } else {
        require(block.holds(copy.seed),
                to_string(value.handle) + ": other bytes at " + to_string(lease.at));
        if (lease.write && chance(70)) {
          backend_->complete_all();
          copy.seed = value.seed = next_seed_++;
          block.write(copy.seed);
        }
      }
    }
  }

  static Stream current_stream(Location at) { return {at, at == Location::cuda(0) ? 7 : 0}; }

  std::optional<Stream> any_stream(Location at) {
    if (!at.is_cuda() || chance(50)) {
      return std::nullopt;
    }
    return Stream{at, static_cast<std::int64_t>(below(3))};
  }

  void op_acquire() {
    const Location at = any_location();
    const bool write = chance(25);
    const auto values = any_values(at, write ? 2 : 4);
    note("acquire", write ? "write" : "read", "at", at, "of", values.size(), "values, first",
         to_string(reference_.values[values[0]].handle));
    const auto why_not = why_not_acquired(reference_, values, at, write);
    AcquireOptions options;
    options.access = write ? Access::kWrite : Access::kRead;
    options.stream = any_stream(at);
    std::optional<Lease> lease;
    const auto outcome = versioned(why_not.empty(), [&] {
      lease.emplace(manager_->acquire(handles_of(values), at, options));
    });
    if (!why_not.empty()) {
      require(!outcome.ok, "acquired what must not be acquired");
      require(why_not.contains(outcome.argument ? kArgument : outcome.code),
              "acquire: " + outcome.text);
      return;
    }
    expect_ok(outcome);
    begin_lease(std::move(*lease), values, at, write, options.stream);
  }

  void op_borrow() {
    const Location at = any_location();
    const bool write = chance(20);
    auto values = any_values(at, 3);
    note("borrow", write ? "write" : "read", "at", at, "of", values.size(), "values, first",
         to_string(reference_.values[values[0]].handle));
    std::sort(values.begin(), values.end());
    values.erase(std::unique(values.begin(), values.end()), values.end());
    std::vector<Chosen> ensures;
    for (const auto index : values) {
      ensures.push_back({EnsureResident{reference_.values[index].handle, at}, index});
    }
    const Simulated simulated = simulate(start_of_peaks(), ensures);
    std::set<ErrorCode> why_not;
    if (!simulated.feasible) {
      why_not.insert(code_of(simulated.steps.back().reason));
      // Several things may be wrong at once.
      for (auto code : why_not_acquired(reference_, values, at, write)) {
        if (code != ErrorCode::kUnavailable) {
          why_not.insert(code);
        }
      }
    } else {
      why_not = why_not_acquired(simulated.state, values, at, write);
    }
    AcquireOptions options;
    options.access = write ? Access::kWrite : Access::kRead;
    options.stream = any_stream(at);
    std::optional<Lease> lease;
    const auto outcome = versioned(
        why_not.empty(), [&] { lease.emplace(manager_->borrow(handles_of(values), at, options)); });
    if (!why_not.empty()) {
      require(!outcome.ok, "borrowed what must not be borrowed");
      require(why_not.contains(outcome.argument ? kArgument : outcome.code),
              "borrow: " + outcome.text);
      return;
    }
    expect_ok(outcome);
    commit(simulated.state);
    require(lease->transitions().size() == values.size(), "a borrow reports its transitions");
    begin_lease(std::move(*lease), values, at, write, options.stream);
  }

  void end_lease(std::size_t position, bool wait) {
    RefLease ended = std::move(leases_[position]);
    leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(position));
    const auto outcome = versioned(true, [&] { ended.lease.release(wait); });
    expect_ok(outcome);
    require(!ended.lease.active(), "a released lease is not active");
    const Handle first = ended.lease.handles()[0];
    expect_code(attempt([&] { static_cast<void>(ended.lease.view(first)); }),
                ErrorCode::kLifetimeClosed);
    for (const auto index : ended.values) {
      Value& value = reference_.values[index];
      value.copies.at(ended.at).leases -= 1;
      if (ended.write) {
        value.write_leased = false;
        value.copies.at(ended.at).written = ended.at.is_cuda();
        value.dirty = true;
        for (auto& [at, copy] : value.copies) {
          copy.stale = copy.stale || at != ended.at;
        }
      }
    }
    expect_ok(versioned(false, [&] { ended.lease.release(); }));
  }

  void op_end_lease() {
    if (leases_.empty()) {
      return;
    }
    const bool wait = chance(20);
    note("release lease", wait ? "waiting" : "");
    end_lease(below(leases_.size()), wait);
  }

  void op_hold() {
    const Location at = any_location();
    const auto values = any_values(at, 3);
    note("hold at", at);
    std::set<ErrorCode> why_not;
    if (!available_.contains(at)) {
      why_not.insert(ErrorCode::kUnavailable);
    }
    for (const auto index : values) {
      const Value& value = reference_.values[index];
      if (value.discarded) {
        why_not.insert(ErrorCode::kHandle);
      } else if (!value.copies.contains(at) || value.copies.at(at).stale) {
        why_not.insert(ErrorCode::kUnavailable);
      }
    }
    std::optional<Hold> hold;
    const auto outcome =
        versioned(why_not.empty(), [&] { hold.emplace(manager_->hold(handles_of(values), at)); });
    if (!why_not.empty()) {
      require(!outcome.ok && why_not.contains(outcome.code), "hold: " + outcome.text);
      return;
    }
    expect_ok(outcome);
    std::set<std::size_t> unique(values.begin(), values.end());
    for (const auto index : unique) {
      reference_.values[index].copies.at(at).holds += 1;
    }
    holds_.push_back({std::move(*hold), {unique.begin(), unique.end()}, at});
  }

  void op_unhold() {
    if (holds_.empty()) {
      return;
    }
    note("release hold");
    const std::size_t position = below(holds_.size());
    RefHold ended = std::move(holds_[position]);
    holds_.erase(holds_.begin() + static_cast<std::ptrdiff_t>(position));
    expect_ok(versioned(true, [&] { ended.hold.release(); }));
    expect_ok(versioned(false, [&] { ended.hold.release(); }));
    for (const auto index : ended.values) {
      reference_.values[index].copies.at(ended.at).holds -= 1;
    }
  }

  void op_reserve() {
    const Location at = any_location();
    const auto nbytes = static_cast<std::int64_t>(below(4) == 0 ? 0 : below(5000));
    note("reserve", nbytes, "at", at);
    const bool exists = available_.contains(at);
    const bool possible = exists && reference_.fits(at, nbytes);
    const MemoryReservation fields{at, Bytes(nbytes), "random"};
    std::optional<Reservation> reservation;
    const auto outcome =
        versioned(possible, [&] { reservation.emplace(manager_->reserve(fields)); });
    if (!possible) {
      return expect_code(outcome, exists ? ErrorCode::kBudget : ErrorCode::kUnavailable);
    }
    expect_ok(outcome);
    require(!reservation->physical(), "accounting only");
    reference_.list(at);
    reference_.reservations.push_back({next_id_, fields});
    reservations_.emplace_back(next_id_++, std::move(*reservation));
  }

  void op_unreserve() {
    if (reservations_.empty()) {
      return;
    }
    note("release reservation");
    const std::size_t position = below(reservations_.size());
    auto [id, reservation] = std::move(reservations_[position]);
    reservations_.erase(reservations_.begin() + static_cast<std::ptrdiff_t>(position));
    expect_ok(versioned(true, [&] { reservation.release(); }));
    expect_ok(versioned(false, [&] { reservation.release(); }));
    std::erase_if(reference_.reservations, [&](const Reserved& each) { return each.id == id; });
  }

  void op_budget() {
    const Location at = locations_[below(locations_.size())];
    std::optional<Bytes> budget;
    if (chance(85)) {
      const std::int64_t taken = reference_.used(at) + reference_.reserved(at);
      switch (below(4)) {
        case 0: budget = Bytes(taken); break;
        case 1: budget = Bytes(std::max<std::int64_t>(0, taken - 1)); break;
        default: budget = Bytes(taken + static_cast<std::int64_t>(below(8000))); break;
      }
    }
    note("set_budget", at, budget ? budget->count() : -1);
    const bool possible =
        !budget || budget->count() >= reference_.used(at) + reference_.reserved(at);
    const auto old = reference_.budgets.find(at);
    const std::int64_t had = old == reference_.budgets.end() ? -1 : old->second;
    const std::uint64_t before = manager_->state_version();
    // Retiring bytes may lie above a lowered budget for a while; that would blur the comparison.
    backend_->complete_all();
    const auto outcome = attempt([&] { manager_->set_budget(at, budget); });
    if (!possible) {
      require(manager_->state_version() == before, "a refused budget changed the version");
      return expect_code(outcome, ErrorCode::kBudget);
    }
    expect_ok(outcome);
    const bool listed = std::find(reference_.listed.begin(), reference_.listed.end(), at) !=
                        reference_.listed.end();
    require(
        (manager_->state_version() > before) == ((budget ? budget->count() : -1) != had || !listed),
        "the version rose wrongly with a budget");
    if (budget) {
      reference_.budgets[at] = budget->count();
    } else {
      reference_.budgets.erase(at);
    }
    reference_.listed = manager_->locations();
  }

  // Aliases, writes, ends.

  void op_share() {
    if (leases_.empty()) {
      return;
    }
    const RefLease& lease = leases_[below(leases_.size())];
    const std::size_t index = lease.values[0];
    Copy& copy = reference_.values[index].copies.at(lease.at);
    if (copy.token != 0 || lease.at.is_disk() || copy.charge == 0) {
      return;
    }
    note("share", to_string(reference_.values[index].handle), "at", lease.at);
    copy.token = next_token_++;
    tokens_[copy.token] = block_of(lease, index).share();
  }

  void op_unshare() {
    if (tokens_.empty()) {
      return;
    }
    auto it = tokens_.begin();
    std::advance(it, static_cast<std::ptrdiff_t>(below(tokens_.size())));
    const int token = it->first;
    note("unshare", token);
    // The last device uses end first: a tensor's memory goes when nobody keeps it.
    backend_->complete_all();
    tokens_.erase(it);
    drop_token(reference_, token);
  }

  static void drop_token(Reference& state, int token) {
    std::erase_if(state.escaped, [&](const Escaped& each) { return each.token == token; });
    for (auto& value : state.values) {
      for (auto& [at, copy] : value.copies) {
        if (copy.token == token) {
          copy.token = 0;
        }
      }
    }
  }

  void op_take() {
    const std::size_t index = any_value();
    Value& value = reference_.values[index];
    for (const auto& [at, copy] : value.copies) {
      if (copy.token != 0) {
        return;
      }
    }
    std::optional<Location> at;
    if (chance(50)) {
      at = place_of(value);
    }
    // From a disk it is a move to memory before; value_test.cpp has that.
    const std::optional<Location> read = at ? at : Rules::cheapest(value, std::nullopt);
    if (read && read->is_disk()) {
      return;
    }
    note("take", to_string(value.handle), at);
    std::set<ErrorCode> why_not;
    if (value.discarded) {
      why_not.insert(ErrorCode::kHandle);
    }
    if (at && (!value.copies.contains(*at) || value.copies.at(*at).stale)) {
      why_not.insert(ErrorCode::kUnavailable);
    }
    if (value.copies.empty()) {
      why_not.insert(ErrorCode::kUnavailable);
    }
    for (const auto& [location, copy] : value.copies) {
      if (copy.leases != 0 || copy.holds != 0) {
        why_not.insert(ErrorCode::kInUse);
      }
    }
    BlockPtr block;
    const auto outcome =
        versioned(why_not.empty(), [&] { block = manager_->take(value.handle, at); });
    if (!why_not.empty()) {
      require(!outcome.ok && why_not.contains(outcome.code), "take: " + outcome.text);
      return;
    }
    expect_ok(outcome);
    const Location from = at ? *at : *Rules::cheapest(value, std::nullopt);
    require(block != nullptr && block->location() == from,
            "the taken block lies at " + to_string(block->location()));
    auto& taken = dynamic_cast<FakeBlock&>(*block);
    require(taken.holds(value.seed), "other bytes were taken");
    value.copies.clear();
    value.discarded = true;
    block.reset();
  }

  void op_forget() {
    note("forget_discarded");
    std::size_t expected = 0;
    for (const auto& value : reference_.values) {
      expected += value.discarded ? 1 : 0;
    }
    require(manager_->forget_discarded() == expected, "forgotten values");
    std::vector<std::size_t> position(reference_.values.size());
    std::size_t next = 0;
    Handle forgotten;
    for (std::size_t i = 0; i < position.size(); ++i) {
      position[i] = next;
      if (reference_.values[i].discarded) {
        forgotten = reference_.values[i].handle;
      } else {
        ++next;
      }
    }
    std::erase_if(reference_.values, [](const Value& value) { return value.discarded; });
    for (auto& lease : leases_) {
      for (auto& index : lease.values) {
        index = position[index];
      }
    }
    for (auto& hold : holds_.all) {
      for (auto& index : hold.values) {
        index = position[index];
      }
    }
    if (expected != 0) {
      try {
        manager_->drop(forgotten, Location::pageable_host());
        fail("a forgotten handle was accepted");
      } catch (const HandleError& error) {
        require(error.reason == Reason::kUnknownHandle, "a forgotten handle is unknown");
      }
    }
  }

  void op_undeclared_write() {
    // Under a read lease of one value that nobody else leases at that place.
    for (std::size_t position = 0; position < leases_.size(); ++position) {
      RefLease& lease = leases_[position];
      if (lease.write || lease.values.size() != 1) {
        continue;
      }
      Value& value = reference_.values[lease.values[0]];
      Copy& copy = value.copies.at(lease.at);
      if (copy.leases != 1 || copy.stale || value.spec.storage_bytes == Bytes()) {
        continue;
      }
      note("undeclared write of", to_string(value.handle), "at", lease.at);
      backend_->complete_all();
      settle_arrivals();
      FakeBlock& block = block_of(lease, lease.values[0]);
      copy.seed = next_seed_++;
      block.write(copy.seed);
      RefLease ended = std::move(lease);
      leases_.erase(leases_.begin() + static_cast<std::ptrdiff_t>(position));
      try {
        ended.lease.release();
        fail("an undeclared write was not reported");
      } catch (const UndeclaredWriteError& error) {
        require(error.handle == value.handle && error.field == "data", "names the field");
      }
      require(!ended.lease.active(), "the lease ends first");
      copy.leases -= 1;
      copy.written = ended.at.is_cuda();
      value.seed = copy.seed;
      value.dirty = true;
      for (auto& [at, other] : value.copies) {
        other.stale = other.stale || at != ended.at;
      }
      return;
    }
  }

  void op_late_failure() {
    // One copy on a path that can fail, made to fail, and then touched in one of several ways.
    const Chosen chosen = any_action(false);
    const Step expected = plan(reference_, chosen);
    Value& value = reference_.values[chosen.value];
    if (expected.num_copies != 1 || expected.reason == Reason::kRefreshed ||
        !may_fail_later(*expected.read, *expected.to) ||
        (expected.given_up && value.copies.at(*expected.given_up).token != 0)) {
      return;
    }
    note("late failure of", to_string(chosen.action));
    backend_->complete_all();
    settle_arrivals();
    const Step settled = plan(reference_, chosen);
    if (settled.num_copies != 1 || settled.reason == Reason::kRefreshed ||
        !may_fail_later(*settled.read, *settled.to)) {
      return;
    }
    const Reference before = reference_;
    std::string where;
    for (const auto& [at, copy] : value.copies) {
      where += to_string(at) + (copy.stale ? " stale, " : ", ");
    }
    note("it is at", where, std::string(to_string(settled.reason)), "reads", settled.read,
         "gives up", settled.given_up);
    backend_->fail(fake::Call::kTransfer, 1);
    ActionReport report;
    expect_ok(attempt([&] { report = call(chosen.action, {}); }));
    require(backend_->fault_happened(), "the transfer was to fail");
    backend_->clear_faults();
    backend_->complete_all();
    require(backend_->transfer_status(value.handle, *settled.to) == FenceStatus::kFailed, "failed");
    const std::uint64_t how = below(4);
    note("touched by", how);
    const auto touch = [&] {
      switch (how) {
        case 0: report.wait(); break;
        case 1: manager_->ensure(value.handle, *settled.to); break;
        case 2: manager_->drop(value.handle, *settled.to); break;
        default: {
          const Handle handles[] = {value.handle};
          if (settled.to->is_disk()) {
            static_cast<void>(manager_->hold(handles, *settled.to));
          } else {
            static_cast<void>(manager_->acquire(handles, *settled.to));
          }
        }
      }
    };
    try {
      touch();
      fail("a failed transfer was not reported");
    } catch (const TransferError& error) {
      require(error.handle == value.handle && error.cause != nullptr && can_fail_later(error.path),
              "fields of the TransferError");
    }
    reference_ = before;
    reference_.list(*settled.to);
    if (settled.given_up) {
      // A stale one was not the source of the transfer, and is worth nothing.
      Value& failed = reference_.values[chosen.value];
      if (failed.copies.at(*settled.given_up).stale) {
        failed.copies.erase(*settled.given_up);
      }
    }
    report.wait();  // told once
  }

  void op_fault() {
    // The n-th copy, reconstruction or load fails at once.
    const fake::Call kinds[] = {fake::Call::kCopy, fake::Call::kReconstruct, fake::Call::kLoad};
    const fake::Call kind = kinds[below(3)];
    const auto counted = [&](const Step& step) {
      return static_cast<std::uint64_t>(kind == fake::Call::kCopy ? step.num_copies
                                                                  : step.num_reconstructs);
    };
    if (chance(40)) {
      const Chosen chosen = any_action(false);
      const Step step = plan(reference_, chosen);
      if (counted(step) == 0) {
        return;
      }
      note("fault in", std::string(fake::to_string(kind)), "of", to_string(chosen.action));
      backend_->fail(kind, 1);
      const auto outcome = versioned(false, [&] { call(chosen.action, {}); });
      backend_->clear_faults();
      require(outcome.injected, "the fault reaches a direct caller: " + outcome.text);
      const auto trace = manager_->trace(1);
      if (manager_->options().trace_capacity != 0) {
        require(trace.size() == 1 && trace[0].failed && !trace[0].failure.empty() &&
                    trace[0].handle == handle_of(chosen.action),
                "a failed attempt is in the trace");
      }
      return;
    }
    const auto actions = any_actions(6);
    const Simulated simulated = simulate(start_of_peaks(), actions);
    if (!simulated.feasible) {
      return;
    }
    std::uint64_t total = 0;
    for (const Step& step : simulated.steps) {
      total += counted(step);
    }
    if (total == 0) {
      return;
    }
    const std::uint64_t n = 1 + below(total);
    std::uint64_t so_far = 0;
    std::size_t failing = 0;
    while (so_far + counted(simulated.steps[failing]) < n) {
      so_far += counted(simulated.steps[failing++]);
    }
    ExecuteOptions options;
    options.on_failure = chance(50) ? OnFailure::kKeep : OnFailure::kRollback;
    std::string text;
    for (const auto& action : list_of(actions)) {
      text += "[" + to_string(action) + "] ";
    }
    note("fault in", std::string(fake::to_string(kind)), n, "of a plan, action", failing,
         options.on_failure == OnFailure::kKeep ? "keep" : "roll back", text);
    const Reference before = reference_;
    const std::vector<Chosen> done(actions.begin(),
                                   actions.begin() + static_cast<std::ptrdiff_t>(failing));
    const Reference furthest = simulate(start_of_peaks(), done).state;
    backend_->fail(kind, n);
    bool restored = false;
    try {
      static_cast<void>(manager_->execute(list_of(actions), options));
      fail("an injected fault was swallowed");
    } catch (const PlanExecutionError& error) {
      require(error.phase == Phase::kExecute && error.index == failing,
              "PlanExecutionError names action " + std::to_string(error.index) + " instead of " +
                  std::to_string(failing));
      require(error.cause != nullptr && !error.failed.empty(), "cause and name of the failed one");
      require(error.completed.size() == failing, "the report lists what was completed");
      restored = error.state_restored;
    }
    backend_->clear_faults();
    if (options.on_failure == OnFailure::kKeep) {
      require(restored == !changed(simulated.steps, failing), "state_restored");
      commit(furthest);
      return;
    }
    if (restored) {
      reference_ = before;
      reference_.listed = manager_->locations();
      settle_arrivals();
      refresh_uncertain_after_rollback();
    } else {
      reference_.listed = manager_->locations();
      resync(furthest);
    }
  }

  static bool changed(const std::vector<Step>& steps, std::size_t count) {
    return std::any_of(steps.begin(), steps.begin() + static_cast<std::ptrdiff_t>(count),
                       [](const Step& step) { return step.changes(); });
  }

  /// A rollback copies back, so that what was settled may be arriving again.
  void refresh_uncertain_after_rollback() {
    backend_->complete_all();
    settle_arrivals();
  }

  void op_foreign() {
    note("foreign and unknown handles");
    const Value& value = reference_.values[any_value()];
    const Handle foreign(value.handle.id() + (std::int64_t{1} << Handle::kValueBits));
    const Handle unknown(value.handle.id() + (std::int64_t{1} << 20));
    const Handle other_type(value.handle.id(), ValueType("others"));
    for (const Handle& handle : {foreign, unknown, other_type, Handle()}) {
      expect_code(versioned(false, [&] { manager_->ensure(handle, locations_[0]); }),
                  ErrorCode::kHandle);
    }
    const ActionList list = {EnsureResident{foreign, locations_[0]}};
    const Explanation explanation = manager_->explain(list);
    require(!explanation.feasible && explanation.actions.size() == 1 &&
                explanation.actions[0].verdict.reason == Reason::kForeignHandle,
            "explain of a foreign handle");
  }

  void op_read_only() {
    note("reading");
    expect_ok(versioned(false, [&] {
      static_cast<void>(manager_->trace());
      static_cast<void>(to_string(manager_->snapshot()));
      static_cast<void>(manager_->locations());
      if (chance(20)) {
        manager_->synchronize();
        require(backend_->queued_transfers().empty(), "synchronize left a copy in flight");
      }
    }));
  }

  std::mt19937_64 random_;
  std::uint64_t seed_;
  std::uint64_t op_;
  std::uint64_t version_ = 0;
  bool immediate_ = false;
  bool strict_ = false;
  std::size_t max_values_ = 5;
  std::uint64_t next_seed_ = 1;
  int next_id_ = 1;
  int next_token_ = 1;
  std::uint32_t num_scopes_ = 0;
  std::set<Location> available_;
  std::vector<Location> locations_;
  Reference reference_;
  std::shared_ptr<FakeBackend> backend_;
  std::map<int, std::shared_ptr<void>> tokens_;
  std::shared_ptr<Manager> manager_;
  std::vector<RefLease> leases_;
  Holds holds_;
  std::vector<std::pair<int, Reservation>> reservations_;
};

int run_all(std::uint64_t seed, std::uint64_t ops) {
  set_warning_handler([](std::string_view) {});  // rollbacks that cannot restore everything
  std::printf("random_model: --seed %llu --ops %llu\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(ops));
  std::fflush(stdout);
  constexpr std::uint64_t kOpsPerWorld = 2000;
  std::uint64_t done = 0;
  for (std::uint64_t world = 0; done < ops; ++world) {
    Run* run = nullptr;
    std::string what;
    try {
      run = new Run(seed, seed + world * 0x9E3779B97F4A7C15ULL, done);
      run->run(std::min(kOpsPerWorld, ops - done));
      done = std::max(run->op(), done + 1);
      delete run;
      continue;
    } catch (const Failure& failure) {
      what = failure.what;
    } catch (const std::exception& error) {
      what = std::string("unexpected exception: ") + error.what();
    }
    std::printf("FAILED with --seed %llu, world %llu, operation %llu: %s\n",
                static_cast<unsigned long long>(seed), static_cast<unsigned long long>(world),
                static_cast<unsigned long long>(run ? run->op() : done), what.c_str());
    if (run != nullptr) {
      for (const auto& line : run->log) {
        std::printf("  %s\n", line.c_str());
      }
      std::printf("%s", run->state().c_str());
    }
    std::fflush(stdout);
    std::_Exit(1);  // the world is left as it is: its guards would meet a state not understood
  }
  std::printf("random_model: %llu operations, no difference\n",
              static_cast<unsigned long long>(done));
  return 0;
}

}  // namespace
}  // namespace residency

int main(int argc, char** argv) {
  std::uint64_t seed = std::random_device{}();
  std::uint64_t ops = 100'000;
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--seed") == 0) {
      seed = std::strtoull(argv[i + 1], nullptr, 10);
    } else if (std::strcmp(argv[i], "--ops") == 0) {
      ops = std::strtoull(argv[i + 1], nullptr, 10);
    } else {
      std::fprintf(stderr, "usage: %s [--seed N] [--ops N]\n", argv[0]);
      return 2;
    }
  }
  return residency::run_all(seed, ops);
}
