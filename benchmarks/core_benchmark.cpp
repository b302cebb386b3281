// The control plane: what the manager itself costs, with a backend that does nothing.
//
// Times are wall time, the median over batches of equal work. Where a target compares a manager of
// 1,000,000 values with one of 10, batches of both alternate in one loop.

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>
#include <malloc.h>

#include "residency/core/manager.h"
#include "timing.h"

namespace {

using namespace residency;
using namespace residency::literals;

constexpr std::size_t kSmallCount = 10;
constexpr std::size_t kLargeCount = 1'000'000;
constexpr std::size_t kHotCount = 1'000;
constexpr Bytes kValueBytes = 4_KiB;

Location device() {
  static const Location location = Location::cuda(0);
  return location;
}

class NullBlock final : public Block {
 public:
  explicit NullBlock(Location location) noexcept : location_(location) {}
  [[nodiscard]] Location location() const override { return location_; }
  [[nodiscard]] Bytes logical_bytes() const override { return kValueBytes; }
  [[nodiscard]] const Layout* layout() const override { return nullptr; }
  [[nodiscard]] AddressRanges address_ranges() const override { return {}; }

 private:
  Location location_;
};

class NullSource final : public Source {
 public:
  [[nodiscard]] std::shared_ptr<Block> load() override {
    return std::make_shared<NullBlock>(Location::pageable_host());
  }
};

/// Every location exists, every copy is complete when it returns, and no byte exists.
class NullBackend final : public Backend {
 public:
  void open(ManagerId, const ManagerOptions&) override {}
  void close(bool) noexcept override {}
  [[nodiscard]] std::string why_unavailable(Location) const override { return {}; }
  [[nodiscard]] Bytes occupied_bytes(const ValueSpec& spec, Location) const override {
    return spec.storage_bytes;
  }
  [[nodiscard]] TransferPath path(Location, Location) const override {
    return TransferPath::kDirect;
  }
  [[nodiscard]] bool reuses_in_device_order(Location location) const override {
    return location.is_cuda();
  }
  [[nodiscard]] bool is_shared(const Block&) const override { return false; }
  [[nodiscard]] CopyResult copy(const CopyRequest& request) override {
    CopyResult result;
    result.block = request.overwrite ? request.overwrite : std::make_shared<NullBlock>(request.to);
    return result;
  }
  [[nodiscard]] BlockPtr reconstruct(Source& source, const ValueSpec&, Location) override {
    return source.load();
  }
  void release(BlockPtr, std::vector<FencePtr>) noexcept override {}
  [[nodiscard]] FencePtr watch_escape(const Block&) override { return nullptr; }
  void begin_access(Block&, Access, const std::optional<Stream>&, std::span<const FencePtr>,
                    bool) override {}
  [[nodiscard]] std::optional<std::string> end_access(Block&, Access, bool) override {
    return std::nullopt;
  }
  [[nodiscard]] std::unique_ptr<View> open_view(Block&) override {
    return std::make_unique<View>();
  }
};

ValueSpec replicable_spec() {
  return {.logical_bytes = kValueBytes,
          .storage_bytes = kValueBytes,
          .layout = nullptr,
          .mode = ReplicaMode::kReplicable,
          .recoverability = Recoverability::kReconstructible};
}

std::shared_ptr<Manager> make_manager() {
  ManagerOptions options;
  options.budgets = {
      {Location::pageable_host(), 64_GiB}, {Location::pinned_host(), 64_GiB}, {device(), 64_GiB}};
  return Manager::create(std::move(options), std::make_shared<NullBackend>());
}

/// A manager and its handles, each resident in pageable host memory.
struct World {
  explicit World(std::size_t count) : manager(make_manager()) {
    handles.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      handles.push_back(
          manager->register_source(std::make_shared<NullSource>(), replicable_spec()));
      manager->ensure(handles.back(), Location::pageable_host());
    }
  }
  std::shared_ptr<Manager> manager;
  std::vector<Handle> handles;
};

World& small_world() {
  static World world(kSmallCount);
  return world;
}

World& large_world() {
  static World world(kLargeCount);
  return world;
}

/// `count` handles drawn uniformly from the large world; always the same ones for one seed.
std::vector<Handle> draw(std::size_t count, std::uint64_t seed) {
  const std::vector<Handle>& all = large_world().handles;
  std::mt19937_64 random(seed);
  std::uniform_int_distribution<std::size_t> any(0, all.size() - 1);
  std::vector<Handle> drawn(count);
  std::generate(drawn.begin(), drawn.end(), [&] { return all[any(random)]; });
  return drawn;
}

/// The hot set: distinct handles, scattered over the large world.
const std::vector<Handle>& hot_handles() {
  static const std::vector<Handle> hot = [] {
    std::vector<Handle> distinct;
    std::mt19937_64 random(1);
    std::sample(large_world().handles.begin(), large_world().handles.end(),
                std::back_inserter(distinct), kHotCount, random);
    std::shuffle(distinct.begin(), distinct.end(), random);
    return distinct;
  }();
  return hot;
}

/// Gives one handle after the other, round and round.
class Cycle {
 public:
  explicit Cycle(std::vector<Handle> handles) : handles_(std::move(handles)) {}
  const Handle& next() noexcept {
    if (position_ == handles_.size()) {
      position_ = 0;
    }
    return handles_[position_++];
  }

 private:
  std::vector<Handle> handles_;
  std::size_t position_ = 0;
};

void report_ratio(benchmark::State& state, const Timing& large, const Timing& small) {
  state.counters["value"] = large.median() / small.median();
  state.counters["us"] = large.median();
  state.counters["us_with_10"] = small.median();
}

// --- no-op ensure ------------------------------------------------------------------------------

constexpr std::size_t kEnsuresPerBatch = 1'000;

void ensure_batch(World& world, Cycle& cycle) {
  for (std::size_t i = 0; i < kEnsuresPerBatch; ++i) {
    benchmark::DoNotOptimize(world.manager->ensure(cycle.next(), Location::pageable_host()));
  }
}

void noop_ensure(benchmark::State& state) {
  World& world = small_world();
  Cycle cycle(world.handles);
  Timing timing;
  for (auto _ : state) {
    timing.measure(kEnsuresPerBatch, [&] { ensure_batch(world, cycle); });
  }
  state.counters["value"] = timing.median();
}
BENCHMARK(noop_ensure)->Name("core/noop_ensure_us")->UseRealTime();

void noop_ensure_hot(benchmark::State& state) {
  Cycle small(small_world().handles);
  Cycle large(hot_handles());
  Timing small_timing;
  Timing large_timing;
  for (auto _ : state) {
    small_timing.measure(kEnsuresPerBatch, [&] { ensure_batch(small_world(), small); });
    large_timing.measure(kEnsuresPerBatch, [&] { ensure_batch(large_world(), large); });
  }
  report_ratio(state, large_timing, small_timing);
}
BENCHMARK(noop_ensure_hot)->Name("core/noop_ensure_1m_hot_ratio")->UseRealTime();

void noop_ensure_random(benchmark::State& state) {
  // As many draws as values, so that a handle has long left the caches when it comes again.
  Cycle cycle(draw(kLargeCount, 2));
  Timing timing;
  for (auto _ : state) {
    timing.measure(kEnsuresPerBatch, [&] { ensure_batch(large_world(), cycle); });
  }
  state.counters["value"] = timing.median();
}
BENCHMARK(noop_ensure_random)->Name("core/noop_ensure_1m_random_us_per_action")->UseRealTime();

// --- scope -------------------------------------------------------------------------------------

constexpr std::size_t kEnsuresPerScope = 100;

ResidencyPlan scope_plan(Cycle& cycle) {
  ActionList enter;
  for (std::size_t i = 0; i < kEnsuresPerScope; ++i) {
    enter.push_back(EnsureResident{cycle.next(), Location::pageable_host()});
  }
  return ResidencyPlan({.name = "layer",
                        .reservations = {{device(), 1_MiB, "activations"}},
                        .enter = std::move(enter)});
}

std::vector<ResidencyPlan> scope_plans(std::vector<Handle> handles, std::size_t count) {
  Cycle cycle(std::move(handles));
  std::vector<ResidencyPlan> plans;
  plans.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    plans.push_back(scope_plan(cycle));
  }
  return plans;
}

/// One use of the plan, which stays with the caller: copying it counts.
void use_scope(World& world, const ResidencyPlan& plan) {
  Scope scope = world.manager->scope(plan);
  scope.enter();
  scope.close();
  benchmark::DoNotOptimize(scope.report().size());
}

void scope_100(benchmark::State& state) {
  World& world = small_world();
  const std::vector<ResidencyPlan> plans = scope_plans(world.handles, 1);
  Timing timing;
  for (auto _ : state) {
    timing.measure(1, [&] { use_scope(world, plans.front()); });
  }
  state.counters["value"] = timing.median();
}
BENCHMARK(scope_100)->Name("core/scope_100_us")->UseRealTime();

void scope_100_hot(benchmark::State& state) {
  const std::vector<ResidencyPlan> small =
      scope_plans(small_world().handles, kHotCount / kEnsuresPerScope);
  const std::vector<ResidencyPlan> large = scope_plans(hot_handles(), kHotCount / kEnsuresPerScope);
  Timing small_timing;
  Timing large_timing;
  for (auto _ : state) {
    small_timing.measure(small.size(), [&] {
      for (const ResidencyPlan& plan : small) use_scope(small_world(), plan);
    });
    large_timing.measure(large.size(), [&] {
      for (const ResidencyPlan& plan : large) use_scope(large_world(), plan);
    });
  }
  report_ratio(state, large_timing, small_timing);
}
BENCHMARK(scope_100_hot)->Name("core/scope_100_1m_hot_ratio")->UseRealTime();

void scope_100_random(benchmark::State& state) {
  constexpr std::size_t kPlans = 4'096;
  const std::vector<ResidencyPlan> plans = scope_plans(draw(kPlans * kEnsuresPerScope, 3), kPlans);
  Timing timing;
  std::size_t next = 0;
  for (auto _ : state) {
    timing.measure(kEnsuresPerScope, [&] { use_scope(large_world(), plans[next]); });
    next = (next + 1) % plans.size();
  }
  state.counters["value"] = timing.median();
}
BENCHMARK(scope_100_random)->Name("core/scope_100_1m_random_us_per_action")->UseRealTime();

// --- explain -----------------------------------------------------------------------------------

constexpr std::size_t kActionsPerPlan = 1'000;

/// Ensures, moves and drops, a quarter each of: a copy to the device, a drop, a move back, a no-op.
/// With few handles every value goes through all of them again and again.
ResidencyPlan cycling_plan(const std::vector<Handle>& handles) {
  ActionList actions;
  while (actions.size() < kActionsPerPlan) {
    const auto for_each = [&](auto&& action_on) {
      for (const Handle& handle : handles) {
        if (actions.size() < kActionsPerPlan) actions.push_back(action_on(handle));
      }
    };
    for_each([](const Handle& h) { return EnsureResident{h, device()}; });
    for_each([](const Handle& h) { return DropResident{h, Location::pageable_host()}; });
    for_each([](const Handle& h) { return MoveResident{h, Location::pageable_host()}; });
    for_each([](const Handle& h) { return EnsureResident{h, Location::pageable_host()}; });
  }
  return ResidencyPlan({.name = "cycling", .enter = std::move(actions)});
}

/// The same kinds of action in the same numbers, each on the next handle: all distinct, or nearly.
ResidencyPlan spreading_plan(Cycle& cycle) {
  ActionList actions;
  while (actions.size() < kActionsPerPlan) {
    actions.push_back(EnsureResident{cycle.next(), device()});
    actions.push_back(DropResident{cycle.next(), Location::pageable_host()});
    actions.push_back(MoveResident{cycle.next(), device()});
    actions.push_back(EnsureResident{cycle.next(), Location::pageable_host()});
  }
  return ResidencyPlan({.name = "spreading", .enter = std::move(actions)});
}

void explain_once(World& world, const ResidencyPlan& plan) {
  benchmark::DoNotOptimize(world.manager->explain(plan).moved_bytes());
}

/// A plan that stopped early would be a benchmark of something else.
bool check_feasible(benchmark::State& state, World& world, const ResidencyPlan& plan) {
  const Explanation explanation = world.manager->explain(plan);
  if (!explanation.feasible) {
    state.SkipWithError(explanation.infeasible_because.c_str());
  }
  return explanation.feasible;
}

void explain_1000(benchmark::State& state) {
  World& world = small_world();
  const ResidencyPlan plan = cycling_plan(world.handles);
  if (!check_feasible(state, world, plan)) return;
  Timing timing;
  for (auto _ : state) {
    timing.measure(1, [&] { explain_once(world, plan); });
  }
  state.counters["value"] = timing.median();
}
BENCHMARK(explain_1000)->Name("core/explain_1000_us")->UseRealTime();

void explain_1000_hot(benchmark::State& state) {
  const ResidencyPlan small = cycling_plan(small_world().handles);
  Cycle cycle(hot_handles());
  const ResidencyPlan large = spreading_plan(cycle);
  if (!check_feasible(state, small_world(), small)) return;
  if (!check_feasible(state, large_world(), large)) return;
  Timing small_timing;
  Timing large_timing;
  for (auto _ : state) {
    small_timing.measure(1, [&] { explain_once(small_world(), small); });
    large_timing.measure(1, [&] { explain_once(large_world(), large); });
  }
  report_ratio(state, large_timing, small_timing);
}
BENCHMARK(explain_1000_hot)->Name("core/explain_1000_1m_hot_ratio")->UseRealTime();

void explain_1000_random(benchmark::State& state) {
  constexpr std::size_t kPlans = 400;
  Cycle cycle(draw(kPlans * kActionsPerPlan, 4));
  std::vector<ResidencyPlan> plans;
  for (std::size_t i = 0; i < kPlans; ++i) {
    plans.push_back(spreading_plan(cycle));
  }
  if (!check_feasible(state, large_world(), plans.front())) return;
  Timing timing;
  std::size_t next = 0;
  for (auto _ : state) {
    timing.measure(kActionsPerPlan, [&] { explain_once(large_world(), plans[next]); });
    next = (next + 1) % plans.size();
  }
  state.counters["value"] = timing.median();
}
BENCHMARK(explain_1000_random)->Name("core/explain_1000_1m_random_us_per_action")->UseRealTime();

// --- snapshot ----------------------------------------------------------------------------------

/// Making the snapshot and destroying it.
void snapshot_10k(benchmark::State& state) {
  World world(10'000);
  Timing timing;
  for (auto _ : state) {
    timing.measure(1, [&] { benchmark::DoNotOptimize(world.manager->snapshot().values.data()); });
  }
  state.counters["value"] = timing.median() / 1e3;
}
BENCHMARK(snapshot_10k)->Name("core/snapshot_10k_ms")->UseRealTime()->Unit(benchmark::kMillisecond);

// --- memory ------------------------------------------------------------------------------------

/// Anonymous memory that the process really occupies, in whole pages: heap and mappings alike, once
/// the heap has given back every page without a live object.
std::int64_t occupied_bytes() {
  malloc_trim(0);
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    if (std::int64_t kilobytes = 0; word == "RssAnon:" && status >> kilobytes) {
      return kilobytes * 1024;
    }
  }
  throw std::runtime_error("/proc/self/status has no RssAnon");
}

double per_value(std::int64_t bytes) {
  return static_cast<double>(bytes) / static_cast<double>(kLargeCount);
}

/// All that the process grew by while the values were registered: the manager's record, its share
/// of tables with what they have touched of their spare capacity, and the Source object itself (one
/// for each value, without fields, in a shared pointer's block). The caller's handle is not in it.
void bytes_per_source_value(benchmark::State& state) {
  for (auto _ : state) {
    const std::shared_ptr<Manager> manager = make_manager();
    std::vector<std::shared_ptr<Source>> sources(kLargeCount);  // touches its pages
    const std::int64_t start = occupied_bytes();
    for (std::shared_ptr<Source>& source : sources) source = std::make_shared<NullSource>();
    const std::int64_t source_bytes = occupied_bytes() - start;
    for (const std::shared_ptr<Source>& source : sources) {
      benchmark::DoNotOptimize(manager->register_source(source, replicable_spec()));
    }
    state.counters["value"] = per_value(occupied_bytes() - start);
    state.counters["of_it_source"] = per_value(source_bytes);
  }
}
BENCHMARK(bytes_per_source_value)
    ->Name("core/bytes_per_source_value")
    ->Iterations(1)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

void register_and_discard(Manager& manager, std::size_t count) {
  std::vector<Handle> handles;
  handles.reserve(count);
  const std::shared_ptr<Source> source = std::make_shared<NullSource>();
  for (std::size_t i = 0; i < count; ++i) {
    handles.push_back(manager.register_source(source, replicable_spec()));
  }
  for (const Handle& handle : handles) manager.discard(handle);
  manager.forget_discarded();
}

/// What the process grew by over 1,000,000 values that were registered, discarded and forgotten: in
/// small groups beside ten values that stay, and all at once. The larger of both counts, to a tenth
/// of a byte: a page is 0.004 bytes a value.
void bytes_per_forgotten_value(benchmark::State& state) {
  constexpr std::size_t kGroup = 1'000;
  for (auto _ : state) {
    const World world(kSmallCount);
    Manager& manager = *world.manager;
    // The trace is bounded and fills up to its capacity first.
    for (int i = 0; i < 10; ++i) register_and_discard(manager, kGroup);
    const std::int64_t start = occupied_bytes();
    for (std::size_t i = 0; i < kLargeCount / kGroup; ++i) register_and_discard(manager, kGroup);
    const std::int64_t after_groups = occupied_bytes();
    register_and_discard(manager, kLargeCount);
    const std::int64_t after_many = occupied_bytes();
    const double in_groups = per_value(after_groups - start);
    const double at_once = per_value(after_many - after_groups);
    state.counters["in_groups"] = in_groups;
    state.counters["at_once"] = at_once;
    state.counters["value"] = std::max(0.0, std::round(10 * std::max(in_groups, at_once)) / 10);
  }
}
BENCHMARK(bytes_per_forgotten_value)
    ->Name("core/bytes_per_forgotten_value")
    ->Iterations(1)
    ->UseRealTime()
    ->Unit(benchmark::kMillisecond);

}  // namespace

BENCHMARK_MAIN();
