// Sixteen threads of random operations. Failures depend on timing as well as on the seed, so a run
// is replayed by its seed many times rather than once: RESIDENCY_SEED=N.

#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <shared_mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fixture.h"

namespace residency::test {
namespace {

constexpr int kNumThreads = 16;
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kNumOperations = 1500;  // of each thread
#else
constexpr int kNumOperations = 8000;
#endif

std::uint64_t chosen_seed() {
  const char* given = std::getenv("RESIDENCY_SEED");
  const std::uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 0) : std::random_device{}();
  std::printf("RESIDENCY_SEED=%llu\n", static_cast<unsigned long long>(seed));
  return seed;
}

/// What both kinds of backend offer to the threads.
struct Workshop {
  virtual ~Workshop() = default;
  virtual BlockPtr make_block(Location at, const ValueSpec& spec, std::uint64_t seed) = 0;
  virtual std::shared_ptr<Source> make_source(Location at, const ValueSpec& spec,
                                              std::uint64_t seed) = 0;
  /// Reads (or writes) what a lease shows, as its user would.
  virtual bool holds(const Lease& lease, const Handle& handle, std::uint64_t seed) = 0;
  virtual void write(const Lease& lease, const Handle& handle, std::uint64_t seed) = 0;
  virtual void inject_a_fault(std::uint64_t random) = 0;
};

// --- The fake backend, whose worker completes what is queued in any legal order

struct FakeWorkshop : Workshop {
  explicit FakeWorkshop(std::shared_ptr<FakeBackend> given) : backend(std::move(given)) {}
  BlockPtr make_block(Location at, const ValueSpec& spec, std::uint64_t seed) override {
    return backend->make_block(at, spec, seed);
  }
  std::shared_ptr<Source> make_source(Location at, const ValueSpec& spec,
                                      std::uint64_t seed) override {
    return std::make_shared<FakeSource>(backend, at, spec, seed);
  }
  bool holds(const Lease& lease, const Handle& handle, std::uint64_t seed) override {
    FakeBlock& block = dynamic_cast<FakeView&>(lease.view(handle)).block();
    if (lease.location().is_cuda()) {
      backend->launch_read({lease.location(), 0}, block, seed);  // checks when it is its turn
      return true;
    }
    return block.holds(seed);
  }
  void write(const Lease& lease, const Handle& handle, std::uint64_t seed) override {
    FakeBlock& block = dynamic_cast<FakeView&>(lease.view(handle)).block();
    if (lease.location().is_cuda()) {
      backend->launch_write({lease.location(), 0}, block, seed);
    } else {
      block.write(seed);
    }
  }
  void inject_a_fault(std::uint64_t random) override {
    if (random % 2 == 0) {
      backend->fail(Call::kTransfer, 1 + random % 5);
    } else {
      backend->fail(Call::kCopy, 1 + random % 50);
    }
  }
  std::shared_ptr<FakeBackend> backend;
};

// --- A backend that shares nothing with the threads but a stack without a lock
//
// The fake's own mutex orders everything that happens in it, and so hides what the core forgot to
// order. Here, fences are completed by a thread that the others meet at one atomic pointer only.

struct LooseBlock : Block {
  LooseBlock(Location at, Bytes nbytes) : at(at), nbytes(nbytes) {}
  [[nodiscard]] Location location() const override { return at; }
  [[nodiscard]] Bytes logical_bytes() const override { return nbytes; }
  [[nodiscard]] const Layout* layout() const override { return nullptr; }
  [[nodiscard]] AddressRanges address_ranges() const override {
    const auto begin = reinterpret_cast<std::uintptr_t>(&content);
    AddressRanges ranges;
    ranges.push_back({begin, begin + sizeof content});
    return ranges;
  }
  Location at;
  Bytes nbytes;
  // Not atomic: whoever reads it must have been ordered behind whoever wrote it.
  std::uint64_t content = 0;
};

struct LooseView : View {
  explicit LooseView(LooseBlock& block) : block(block) {}
  LooseBlock& block;
};

struct LooseBackend : Backend {
  struct Job {
    std::shared_ptr<LooseBlock> source;
    std::shared_ptr<LooseBlock> destination;
    std::vector<FencePtr> after;
    FencePtr fence;
    bool fails = false;
    Job* next = nullptr;
  };

  LooseBackend() : thread([this] { run(); }) {}
  ~LooseBackend() override { close(true); }

  void open(ManagerId, const ManagerOptions&) override {}
  void close(bool) noexcept override {
    stopped.store(true);
    if (thread.joinable()) {
      thread.join();
    }
  }
  [[nodiscard]] std::string why_unavailable(Location location) const override {
    return location.is_cuda() && location.cuda_index() > 1 ? "there are two" : "";
  }
  [[nodiscard]] Bytes occupied_bytes(const ValueSpec& spec, Location location) const override {
    return spec.storage_bytes.rounded_up(location.is_cuda() ? 512 : 64);
  }
  [[nodiscard]] TransferPath path(Location from, Location to) const override {
    return from.is_disk() || to.is_disk()         ? TransferPath::kFile
           : from == kPageable || to == kPageable ? TransferPath::kStaged
                                                  : TransferPath::kDirect;
  }
  [[nodiscard]] bool reuses_in_device_order(Location location) const override {
    return location.is_cuda();
  }
  [[nodiscard]] bool is_shared(const Block&) const override { return false; }

  [[nodiscard]] CopyResult copy(const CopyRequest& request) override {
    auto* job = new Job;
    job->source = std::static_pointer_cast<LooseBlock>(request.source);
    job->destination = request.overwrite
                           ? std::static_pointer_cast<LooseBlock>(request.overwrite)
                           : std::make_shared<LooseBlock>(request.to, request.spec->storage_bytes);
    job->after = request.overwrite_after;
    job->after.push_back(request.source_ready);
    job->fence = std::make_shared<Fence>();
    const TransferPath way = path(request.from, request.to);
    job->fails = can_fail_later(way) && num_copies.fetch_add(1) % 50 == 49;
    CopyResult result{job->destination, job->fence, way};
    push(job);
    return result;
  }
  [[nodiscard]] BlockPtr reconstruct(Source& source, const ValueSpec&, Location) override {
    return source.load();
  }
  void release(BlockPtr block, std::vector<FencePtr> after) noexcept override {
    // Kept until its users have finished, by a job that does nothing.
    auto* job = new Job;
    job->destination = std::static_pointer_cast<LooseBlock>(std::move(block));
    job->after = std::move(after);
    push(job);
  }
  [[nodiscard]] FencePtr watch_escape(const Block&) override { return nullptr; }
  void begin_access(Block&, Access, const std::optional<Stream>&, std::span<const FencePtr> after,
                    bool) override {
    for (const FencePtr& fence : after) {
      if (fence) {
        fence->wait();
      }
    }
  }
  [[nodiscard]] std::optional<std::string> end_access(Block&, Access, bool) override {
    return std::nullopt;
  }
  [[nodiscard]] std::unique_ptr<View> open_view(Block& block) override {
    return std::make_unique<LooseView>(static_cast<LooseBlock&>(block));
  }
  [[nodiscard]] Stream current_stream(Location location) override { return {location, 0}; }
  [[nodiscard]] FencePtr record_use(const Stream&) override {
    auto* job = new Job;
    job->fence = std::make_shared<Fence>();
    const FencePtr fence = job->fence;
    push(job);
    return fence;
  }

  void push(Job* job) {
    job->next = top.load(std::memory_order_relaxed);
    while (!top.compare_exchange_weak(job->next, job, std::memory_order_release,
                                      std::memory_order_relaxed)) {
    }
  }
  void run() {
    std::vector<std::unique_ptr<Job>> waiting;
    while (true) {
      const bool last = stopped.load();
      for (Job* job = top.exchange(nullptr, std::memory_order_acquire); job != nullptr;) {
        Job* next = job->next;
        waiting.emplace_back(job);
        job = next;
      }
      std::erase_if(waiting, [](const std::unique_ptr<Job>& job) {
        for (const FencePtr& fence : job->after) {
          if (fence && fence->poll() == FenceStatus::kPending) {
            return false;
          }
        }
        if (job->source && !job->fails) {
          job->destination->content = job->source->content;
        }
        job->source = nullptr;
        job->destination = nullptr;
        if (job->fence && job->fails) {
          job->fence->fail(std::make_exception_ptr(std::runtime_error("injected")));
        } else if (job->fence) {
          job->fence->complete(1);
        }
        return true;
      });
      if (last && waiting.empty()) {
        return;
      }
      std::this_thread::yield();
    }
  }

  std::atomic<Job*> top{nullptr};
  std::atomic<bool> stopped{false};
  std::atomic<std::uint64_t> num_copies{0};
  std::thread thread;
};

struct LooseSource : Source {
  LooseSource(Location at, Bytes nbytes, std::uint64_t seed) : at(at), nbytes(nbytes), seed(seed) {}
  [[nodiscard]] std::shared_ptr<Block> load() override {
    auto block = std::make_shared<LooseBlock>(at, nbytes);
    block->content = seed;
    return block;
  }
  Location at;
  Bytes nbytes;
  std::uint64_t seed;
};

struct LooseWorkshop : Workshop {
  BlockPtr make_block(Location at, const ValueSpec& spec, std::uint64_t seed) override {
    auto block = std::make_shared<LooseBlock>(at, spec.storage_bytes);
    block->content = seed;
    return block;
  }
  std::shared_ptr<Source> make_source(Location at, const ValueSpec& spec,
                                      std::uint64_t seed) override {
    return std::make_shared<LooseSource>(at, spec.storage_bytes, seed);
  }
  bool holds(const Lease& lease, const Handle& handle, std::uint64_t seed) override {
    return dynamic_cast<LooseView&>(lease.view(handle)).block.content == seed;
  }
  void write(const Lease& lease, const Handle& handle, std::uint64_t seed) override {
    dynamic_cast<LooseView&>(lease.view(handle)).block.content = seed;
  }
  void inject_a_fault(std::uint64_t) override {}
};

// --- The threads

struct SharedValue {
  Handle handle;
  std::uint64_t seed = 0;  // of what it holds; a mutable value's changes under its write lease
  bool is_mutable = false;
};

/// Values that every thread works on. A thread that ends one puts another in its place.
class Pool {
 public:
  SharedValue pick(std::mt19937_64& random) {
    const std::shared_lock lock(mutex_);
    return values_[random() % values_.size()];
  }
  void add(SharedValue value) {
    const std::unique_lock lock(mutex_);
    values_.push_back(value);
  }
  void replace(const Handle& old, SharedValue value) {
    const std::unique_lock lock(mutex_);
    for (SharedValue& each : values_) {
      if (each.handle == old) {
        each = value;
        return;
      }
    }
  }

 private:
  std::shared_mutex mutex_;
  std::vector<SharedValue> values_;
};

class Stress {
 public:
  Stress(std::shared_ptr<Manager> manager, std::unique_ptr<Workshop> workshop, std::uint64_t seed)
      : manager_(std::move(manager)), workshop_(std::move(workshop)), seed_(seed) {}

  void run() {
    std::mt19937_64 random(seed_);
    for (int i = 0; i < 24; ++i) {
      pool_.add(make_value(random));
    }
    std::vector<std::thread> threads;
    for (int i = 0; i < kNumThreads; ++i) {
      threads.emplace_back([this, i] { work(seed_ + 1 + static_cast<std::uint64_t>(i)); });
    }
    for (auto& thread : threads) {
      thread.join();
    }
  }

  [[nodiscard]] int num_completed() const { return num_completed_; }
  [[nodiscard]] int num_refused() const { return num_refused_; }

 private:
  static constexpr std::array<const Location*, 5> kPlaces = {&kPageable, &kPinned, &kCuda0, &kCuda1,
                                                             &kDisk};
  static Location any_place(std::mt19937_64& random) { return *kPlaces[random() % 5]; }
  static Location readable_place(std::mt19937_64& random) { return *kPlaces[random() % 4]; }

  SharedValue make_value(std::mt19937_64& random) {
    const auto nbytes = static_cast<std::int64_t>(64 + random() % 1024);
    SharedValue value;
    value.seed = 1000 + random() % 100000;
    value.is_mutable = random() % 4 == 0;
    const auto mode = random() % 3 == 0 ? kExclusive : kReplicable;
    const auto mutability = value.is_mutable ? kMutable : kImmutable;
    if (random() % 2 == 0) {
      auto spec = make_spec(nbytes, mode, kReconstructible, mutability);
      const Location at = random() % 2 == 0 ? kPageable : kPinned;
      value.handle =
          manager_->register_source(workshop_->make_source(at, spec, value.seed), spec, at);
    } else {
      auto spec = make_spec(nbytes, mode, kMustPreserve, mutability);
      value.handle = manager_->adopt(
          workshop_->make_block(random() % 2 == 0 ? kPageable : kCuda0, spec, value.seed), spec);
    }
    return value;
  }

  void work(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < kNumOperations; ++i) {
      try {
        one_operation(random);
        ++num_completed_;
      } catch (const Error&) {
        ++num_refused_;  // somebody else was in the way
      } catch (const fake::InjectedFault&) {
        ++num_refused_;
      } catch (const std::invalid_argument&) {
        ++num_refused_;  // a write lease on what is immutable
      } catch (const std::exception& error) {
        ADD_FAILURE() << "seed " << seed << ", operation " << i << ": " << error.what();
        return;
      }
    }
  }

  void read(Lease& lease, const SharedValue& value) {
    if (!value.is_mutable) {
      EXPECT_TRUE(workshop_->holds(lease, value.handle, value.seed)) << to_string(value.handle);
    }
  }

  void one_operation(std::mt19937_64& random) {
    const SharedValue value = pool_.pick(random);
    const Handle handle = value.handle;
    const std::array one = {handle};
    const ActionOptions options{.may_block = random() % 4 != 0};
    switch (random() % 24) {
      case 0:
      case 1:
      case 2:
      case 3: manager_->ensure(handle, any_place(random), options); break;
      case 4:
      case 5:
      case 6: manager_->move(handle, any_place(random), std::nullopt, options); break;
      case 7: manager_->move(handle, any_place(random), any_place(random), options); break;
      case 8:
      case 9: manager_->drop(handle, any_place(random)); break;
      case 10: manager_->ensure(handle, any_place(random), options).wait(); break;
      case 11:
      case 12: {
        Lease lease = manager_->acquire(one, readable_place(random));
        read(lease, value);
        lease.release(random() % 2 == 0);
        break;
      }
      case 13:
      case 14: {
        const SharedValue second = pool_.pick(random);
        const std::array two = {handle, second.handle};
        Lease lease = manager_->borrow(two, readable_place(random));
        read(lease, value);
        read(lease, second);
        lease.release();
        break;
      }
      case 15: {
        Lease lease = manager_->acquire(one, readable_place(random), {.access = Access::kWrite});
        workshop_->write(lease, handle, random());
        lease.release();
        break;
      }
      case 16: {
        Hold held = manager_->hold(one, any_place(random));
        const Snapshot snapshot = manager_->snapshot();
        EXPECT_GE(snapshot.num_holds, 1U);
        held.release();
        break;
      }
      case 17: {
        Reservation reservation = manager_->reserve(
            {any_place(random), Bytes(static_cast<std::int64_t>(random() % 4096)), "headroom"});
        reservation.release();
        break;
      }
      case 18: {
        const ActionList actions = {EnsureResident{handle, any_place(random)},
                                    MoveResident{pool_.pick(random).handle, any_place(random)},
                                    DropResident{handle, any_place(random)}};
        (void)manager_->explain(actions);
        manager_->execute(
            actions, {.on_failure = random() % 2 == 0 ? OnFailure::kRollback : OnFailure::kKeep});
        break;
      }
      case 19:
        manager_->with(ResidencyPlan({.name = "scope",
                                      .reservations = {{any_place(random), 512_B, "of the scope"}},
                                      .enter = {EnsureResident{handle, any_place(random)}},
                                      .exit = {DropResident{handle, any_place(random)}}}),
                       [&](Scope&) { (void)manager_->state_version(); });
        break;
      case 20:  // no audit: a charge precedes what it is for
        (void)manager_->trace(16);
        (void)manager_->locations();
        break;
      case 21: {
        if (random() % 2 == 0) {
          manager_->discard(handle);
        } else {
          (void)manager_->take(handle);
        }
        pool_.replace(handle, make_value_in_any_case(random));
        if (random() % 2 == 0) {
          (void)manager_->forget_discarded();
        }
        break;
      }
      case 22:
        manager_->set_budget(
            any_place(random),
            random() % 4 == 0
                ? std::nullopt
                : std::optional(Bytes(static_cast<std::int64_t>(6000 + random() % 20000))));
        break;
      default:
        if (random() % 16 == 0) {
          workshop_->inject_a_fault(random());
        } else {
          manager_->reset_peaks();
        }
        break;
    }
  }

  /// The pool must not hold what has ended for ever, and a budget may stand in the way.
  SharedValue make_value_in_any_case(std::mt19937_64& random) {
    while (true) {
      try {
        return make_value(random);
      } catch (const BudgetError&) {
        continue;  // half of the values need no room
      }
    }
  }

  std::shared_ptr<Manager> manager_;
  std::unique_ptr<Workshop> workshop_;
  std::uint64_t seed_;
  Pool pool_;
  std::atomic<int> num_completed_{0};
  std::atomic<int> num_refused_{0};
};

ManagerOptions stress_options() {
  ManagerOptions options;
  options.budgets = {{kPageable, 16_KiB}, {kPinned, 12_KiB}, {kCuda0, 16_KiB}, {kCuda1, 12_KiB}};
  options.disks = {{.name = "nvme", .directory = "/nowhere", .budget = std::nullopt}};
  options.trace_capacity = 256;
  return options;
}

void expect_quiet(Manager& manager) {
  manager.synchronize();
  EXPECT_NO_THROW(manager.audit());
  const Snapshot snapshot = manager.snapshot();
  EXPECT_EQ(snapshot.num_leases, 0U);
  EXPECT_EQ(snapshot.num_holds, 0U);
  EXPECT_EQ(snapshot.num_scopes, 0U);
  EXPECT_TRUE(snapshot.reservations.empty());
  for (const LocationSnapshot& each : snapshot.locations) {
    EXPECT_EQ(each.reserved, Bytes());
    EXPECT_EQ(each.retiring, Bytes()) << to_string(each.location);
    EXPECT_EQ(each.arriving, Bytes());
  }
}

TEST(ThreadStress, RandomOperationsOnTheFakeBackend) {
  const Warnings warnings;  // a rollback that others got in the way of warns
  const std::uint64_t seed = chosen_seed();
  const auto backend = std::make_shared<FakeBackend>(
      fake::FakeOptions{.seed = seed, .completion = fake::Completion::kThreaded});
  const auto manager = Manager::create(stress_options(), backend);
  Stress stress(manager, std::make_unique<FakeWorkshop>(backend), seed);
  stress.run();
  backend->clear_faults();
  expect_quiet(*manager);
  EXPECT_GT(stress.num_completed(), stress.num_refused() / 4) << "it mostly tests refusals";
  manager->close({.force = true});
  for (const Location at : {kPageable, kPinned, kCuda0, kCuda1, kDisk}) {
    EXPECT_EQ(backend->live_bytes(at), Bytes()) << to_string(at);
  }
  EXPECT_TRUE(backend->violations().empty());
}

TEST(ThreadStress, FencesThatComeFromAThreadWithoutLocks) {
  const Warnings warnings;
  const std::uint64_t seed = chosen_seed();
  const auto backend = std::make_shared<LooseBackend>();
  const auto manager = Manager::create(stress_options(), backend);
  Stress stress(manager, std::make_unique<LooseWorkshop>(), seed);
  stress.run();
  expect_quiet(*manager);
  EXPECT_GT(stress.num_completed(), stress.num_refused() / 4) << "it mostly tests refusals";
  manager->close({.force = true});
}

TEST(ThreadStress, CloseByForceInTheMiddle) {
  const Warnings warnings;
  const std::uint64_t seed = chosen_seed();
  for (std::uint64_t round = 0; round < 20; ++round) {
    const auto backend = std::make_shared<FakeBackend>(
        fake::FakeOptions{.seed = seed + round, .completion = fake::Completion::kThreaded});
    backend->allow_views_to_outlive_blocks();
    const auto manager = Manager::create(stress_options(), backend);
    std::vector<Handle> handles;
    for (int i = 0; i < 4; ++i) {
      const auto spec = make_spec(100);
      handles.push_back(manager->adopt(backend->make_block(kPageable, spec, 1), spec));
    }
    std::vector<std::thread> threads;
    for (std::uint64_t i = 0; i < 8; ++i) {
      threads.emplace_back([&, i] {
        std::mt19937_64 random(seed + 100 * round + i);
        try {
          while (true) {
            const std::array one = {handles[random() % handles.size()]};
            try {
              switch (random() % 4) {
                case 0: manager->ensure(one[0], kCuda0); break;
                case 1: manager->move(one[0], random() % 2 == 0 ? kPageable : kPinned); break;
                case 2: {
                  Lease lease = manager->borrow(one, random() % 2 == 0 ? kCuda1 : kPinned);
                  lease.release();
                  break;
                }
                default: {
                  Hold held = manager->hold(one, kPinned);
                  Reservation reservation = manager->reserve({kPinned, 8_B, "headroom"});
                  break;  // both are destroyed while active, perhaps after the close
                }
              }
            } catch (const ClosedError&) {
              throw;
            } catch (const Error&) {
              continue;
            }
          }
        } catch (const ClosedError&) {
          return;
        }
      });
    }
    std::mt19937_64 random(seed + round);
    for (std::uint64_t i = random() % 2000; i > 0; --i) {
      (void)manager->state_version();
    }
    manager->close({.force = true});
    for (auto& thread : threads) {
      thread.join();
    }
    EXPECT_TRUE(backend->violations().empty());
    for (const Location at : {kPageable, kPinned, kCuda0, kCuda1}) {
      EXPECT_EQ(backend->live_bytes(at), Bytes()) << to_string(at);
    }
  }
}

}  // namespace
}  // namespace residency::test
