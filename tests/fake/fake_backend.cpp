#include "tests/fake/fake_backend.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>

#include "residency/core/errors.h"
#include "residency/core/manager.h"
#include "residency/core/options.h"
#include "tests/fake/lock_probe.h"

namespace residency::fake {

namespace {

constexpr std::uint8_t kPoison = 0xDB;

std::uint8_t byte_of(std::uint64_t seed, std::size_t index) {
  std::uint64_t x = seed * 0x9E3779B97F4A7C15ULL + (index >> 3) + 1;
  x ^= x >> 31;
  x *= 0xBF58476D1CE4E5B9ULL;
  x ^= x >> 29;
  return static_cast<std::uint8_t>(x >> ((index & 7U) * 8U));
}

void fill(std::vector<std::uint8_t>& bytes, std::uint64_t seed) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = byte_of(seed, i);
  }
}

bool filled(const std::vector<std::uint8_t>& bytes, std::uint64_t seed) {
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (bytes[i] != byte_of(seed, i)) {
      return false;
    }
  }
  return true;
}

}  // namespace

/// The bytes of one block. Guarded by the world's mutex.
struct Memory {
  std::uint64_t id = 0;
  Location location;
  Bytes storage;
  Bytes occupied;
  std::uintptr_t begin = 0;
  std::vector<std::uint8_t> bytes;
  bool ready = false;     // its bytes have been written
  bool released = false;  // given to Backend::release
  bool block_alive = true;
  bool accounted = true;             // counted in live_bytes
  bool gone = false;                 // poisoned
  std::uint64_t external = 0;        // references outside the manager
  std::atomic<bool> shared = false;  // external > 0, readable without the mutex
  std::uint64_t views = 0;
  std::vector<std::shared_ptr<Operation>> users;  // queued operations that touch it
  FencePtr escape;
  std::vector<std::string> fields;
  std::vector<std::uint64_t> versions;
  std::vector<std::uint64_t> known_versions;
  std::vector<std::uint8_t> checksum;  // the bytes as the first checking access found them
  std::uint64_t checksum_accesses = 0;
};

enum class Kind : std::uint8_t { kTransfer, kRead, kWrite, kMark };

/// Queued work.
struct Operation {
  std::uint64_t id = 0;
  Kind kind = Kind::kTransfer;
  std::shared_ptr<Memory> source;
  std::shared_ptr<Memory> destination;
  std::vector<std::shared_ptr<Operation>> after;
  FencePtr fence;
  TransferView transfer;
  bool fails = false;
  bool done = false;
  std::uint64_t seed = 0;
};

using OperationPtr = std::shared_ptr<Operation>;

class World : public std::enable_shared_from_this<World> {
 public:
  explicit World(FakeOptions given) : options(std::move(given)), random(options.seed) {}

  using Lock = std::unique_lock<std::mutex>;

  FakeOptions options;
  mutable std::mutex mutex;
  std::condition_variable changed;
  std::mt19937_64 random;
  Completion completion = options.completion;
  bool waits_block = false;
  bool views_may_outlive = false;
  bool opened = false;
  bool closed = false;
  std::set<Location> disks;
  std::uint64_t next_id = 1;
  std::uint64_t num_running = 0;  // operations whose fences are being completed right now
  std::uintptr_t next_address = 0x10000;
  std::vector<OperationPtr> queue;
  std::map<std::pair<Location, std::int64_t>, OperationPtr> stream_tail;
  std::map<std::pair<Handle, Location>, std::pair<OperationPtr, FencePtr>> newest;
  std::map<Location, std::optional<SpareBytes>> spare;
  struct Retired {
    BlockPtr block;
    std::vector<FencePtr> after;
  };
  std::vector<Retired> retired;
  std::map<Location, std::int64_t> live;
  std::map<Location, std::int64_t> peak;
  std::map<Location, std::int64_t> headroom;
  std::map<Location, std::int64_t> current_stream;
  std::array<std::uint64_t, kNumCalls> calls{};
  std::array<std::uint64_t, kNumCalls> fail_at{};
  std::uint64_t fallible_calls = 0;
  std::uint64_t fail_any_at = 0;
  bool fault_happened = false;
  std::vector<std::string> violations;
  std::shared_ptr<LockProbe> lock_probe;
  mutable std::mutex probe_mutex;
  std::thread worker;
  bool worker_stopped = false;

  void violation(Lock& lock, const std::string& message) {
    violations.push_back(message);
    const auto handler = options.on_violation;
    lock.unlock();
    if (handler) {
      handler(message);
    } else {
      std::fprintf(stderr, "fake backend (seed %llu): %s\n",
                   static_cast<unsigned long long>(options.seed), message.c_str());
      std::abort();
    }
    lock.lock();
  }

  std::int64_t granularity(Location location) const {
    if (const auto it = options.granularity.find(location); it != options.granularity.end()) {
      return it->second;
    }
    switch (location.kind()) {
      case LocationKind::kPageableHost: return 64;
      case LocationKind::kPinnedHost: return 1;
      case LocationKind::kCuda: return 512;
      case LocationKind::kDisk: return 4096;
    }
    return 1;
  }

  Bytes occupied(Bytes storage, Location location) const {
    if (location.is_disk()) {
      return (storage + Bytes(128)).rounded_up(granularity(location));
    }
    return storage.rounded_up(granularity(location));
  }

  std::shared_ptr<Memory> allocate(Location at, Bytes storage, const Layout* layout, Bytes charge) {
    if (const auto it = options.capacity.find(at); it != options.capacity.end()) {
      if (Bytes(live[at]) + charge > it->second) {
        throw OutOfMemory("fake: " + residency::to_string(charge) + " do not fit at " +
                          residency::to_string(at));
      }
    }
    auto memory = std::make_shared<Memory>();
    memory->id = next_id++;
    memory->location = at;
    memory->storage = storage;
    memory->occupied = charge;
    memory->begin = next_address;
    next_address += (static_cast<std::uintptr_t>(storage.count()) / 512 + 2) * 512;
    memory->bytes.assign(std::min(static_cast<std::size_t>(storage.count()), FakeBlock::kRealBytes),
                         kPoison);
    if (const auto* fields = dynamic_cast<const FakeLayout*>(layout)) {
      for (const auto& field : fields->fields()) {
        memory->fields.push_back(field.name);
      }
    }
    if (memory->fields.empty()) {
      memory->fields.emplace_back("data");
    }
    memory->versions.assign(memory->fields.size(), 0);
    memory->known_versions = memory->versions;
    live[at] += charge.count();
    peak[at] = std::max(peak[at], live[at]);
    return memory;
  }

  void count(Lock& lock, Call call) {
    const auto index = static_cast<std::size_t>(call);
    ++calls[index];
    bool fails = fail_at[index] != 0 && --fail_at[index] == 0;
    if (call != Call::kRelease && call != Call::kTransfer) {
      ++fallible_calls;
      fails = (fail_any_at != 0 && --fail_any_at == 0) || fails;
    }
    if (fails) {
      fault_happened = true;
      if (call != Call::kTransfer) {
        lock.unlock();
        throw InjectedFault("injected fault in " + std::string(to_string(call)));
      }
    }
  }

  void check_open(Lock& lock, std::string_view what) {
    if (closed) {
      violation(lock, std::string(what) + " after Backend::close");
    } else if (!opened) {
      violation(lock, std::string(what) + " before Backend::open");
    }
  }

  void ask_probe(std::string_view what) {
    std::shared_ptr<LockProbe> probe;
    {
      const std::lock_guard guard(probe_mutex);
      probe = lock_probe;
    }
    if (probe && !probe->answers()) {
      Lock lock(mutex);
      violation(lock, std::string(what) + " was called with the manager's mutex held");
    }
  }

  static bool runnable(const Operation& operation) {
    return std::all_of(operation.after.begin(), operation.after.end(),
                       [](const OperationPtr& other) { return other->done; });
  }

  /// Operations whose completion the completion of `roots` implies.
  static std::vector<const Operation*> closure(const std::vector<OperationPtr>& roots) {
    std::vector<const Operation*> found;
    std::vector<const Operation*> open;
    for (const auto& root : roots) {
      open.push_back(root.get());
    }
    while (!open.empty()) {
      const Operation* operation = open.back();
      open.pop_back();
      if (std::find(found.begin(), found.end(), operation) != found.end()) {
        continue;
      }
      found.push_back(operation);
      for (const auto& other : operation->after) {
        open.push_back(other.get());
      }
    }
    return found;
  }

  OperationPtr operation_of(const FencePtr& fence) const {
    if (!fence) {
      return nullptr;
    }
    for (const auto& operation : queue) {
      if (operation->fence == fence) {
        return operation;
      }
    }
    return nullptr;
  }

  std::vector<OperationPtr> operations_of(const std::vector<FencePtr>& fences) const {
    std::vector<OperationPtr> found;
    for (const auto& fence : fences) {
      if (auto operation = operation_of(fence)) {
        found.push_back(std::move(operation));
      }
    }
    return found;
  }

  /// A use of `memory` that none of `roots` waits for, in words; empty when there is none.
  std::string uncovered_use(const Memory& memory, const std::vector<OperationPtr>& roots,
                            bool writers_only) const {
    const auto covered = closure(roots);
    for (const auto& user : memory.users) {
      if (user->done || std::find(covered.begin(), covered.end(), user.get()) != covered.end()) {
        continue;
      }
      if (writers_only && user->destination.get() != &memory) {
        continue;
      }
      switch (user->kind) {
        case Kind::kTransfer:
          return "a queued copy " + residency::to_string(user->transfer.from) + " -> " +
                 residency::to_string(user->transfer.to) + " of " +
                 residency::to_string(user->transfer.value);
        case Kind::kRead: return "a kernel that reads it";
        case Kind::kWrite: return "a kernel that writes it";
        case Kind::kMark: break;
      }
    }
    return {};
  }

  void enqueue(const OperationPtr& operation) {
    operation->id = next_id++;
    std::erase_if(operation->after,
                  [](const OperationPtr& other) { return !other || other->done; });
    for (const auto& memory : {operation->source, operation->destination}) {
      if (memory) {
        memory->users.push_back(operation);
      }
    }
    queue.push_back(operation);
    changed.notify_all();
  }

  void put_on_stream(const OperationPtr& operation, const Stream& stream) {
    auto& tail = stream_tail[{stream.device, stream.id}];
    operation->after.push_back(tail);
    tail = operation;
  }

  /// Does the work of one runnable operation. Drops the mutex while fences complete, because
  /// blocks may die with them.
  void run(Lock& lock, const OperationPtr& operation) {
    operation->done = true;
    std::erase(queue, operation);
    for (const auto& memory : {operation->source, operation->destination}) {
      if (memory) {
        std::erase(memory->users, operation);
      }
    }
    operation->after.clear();
    if (operation->source && operation->kind != Kind::kWrite) {
      const Memory& source = *operation->source;
      if (source.gone) {
        violation(lock, "work of " + residency::to_string(operation->transfer.value) +
                            " reads freed memory at " + residency::to_string(source.location));
      } else if (!source.ready) {
        violation(lock, "work of " + residency::to_string(operation->transfer.value) +
                            " reads bytes at " + residency::to_string(source.location) +
                            " before they are ready");
      }
    }
    std::exception_ptr error;
    switch (operation->kind) {
      case Kind::kTransfer:
        if (operation->fails) {
          error = std::make_exception_ptr(InjectedFault("injected fault in a transfer"));
        } else {
          if (operation->destination->gone) {
            violation(lock, "a copy writes freed memory");
          }
          operation->destination->bytes = operation->source->bytes;
          operation->destination->ready = true;
        }
        break;
      case Kind::kRead:
        if (!filled(operation->source->bytes, operation->seed)) {
          violation(lock, "a kernel read other bytes at " +
                              residency::to_string(operation->source->location) +
                              " than those of seed " + std::to_string(operation->seed));
        }
        break;
      case Kind::kWrite:
        if (operation->destination->gone) {
          violation(lock, "a kernel writes freed memory");
        }
        fill(operation->destination->bytes, operation->seed);
        break;
      case Kind::kMark: break;
    }
    const FencePtr fence = std::move(operation->fence);
    operation->fence = nullptr;
    operation->source = nullptr;
    operation->destination = nullptr;
    ++num_running;
    lock.unlock();
    if (fence) {
      if (error) {
        fence->fail(error);
      } else {
        fence->complete(1000);
      }
    }
    lock.lock();
    --num_running;
    changed.notify_all();
    reap(lock);
  }

  OperationPtr pick(const std::function<bool(const Operation&)>& wanted) {
    std::vector<OperationPtr> candidates;
    for (const auto& operation : queue) {
      if (runnable(*operation) && wanted(*operation)) {
        candidates.push_back(operation);
      }
    }
    if (candidates.empty()) {
      return nullptr;
    }
    return candidates[random() % candidates.size()];
  }

  bool run_one(Lock& lock) {
    const auto operation = pick([](const Operation&) { return true; });
    if (!operation) {
      return false;
    }
    run(lock, operation);
    return true;
  }

  void run_all(Lock& lock) {
    while (run_one(lock)) {
    }
  }

  /// As run_all, and waits for what other threads are running.
  void drain(Lock& lock) {
    run_all(lock);
    while (num_running != 0 || !queue.empty()) {
      changed.wait_until(lock, std::chrono::system_clock::now() + std::chrono::milliseconds(10));
      run_all(lock);
    }
    reap(lock);
  }

  /// Completes what the operation depends on, in any legal order, and the operation.
  void run_until(Lock& lock, const OperationPtr& target) {
    while (!target->done) {
      const auto needed = closure({target});
      const auto operation = pick([&](const Operation& other) {
        return std::find(needed.begin(), needed.end(), &other) != needed.end();
      });
      if (!operation) {
        // Another thread runs a part of it right now.
        changed.wait_until(lock, std::chrono::system_clock::now() + std::chrono::milliseconds(10));
        continue;
      }
      run(lock, operation);
    }
  }

  /// A point where queued work may complete.
  void progress(Lock& lock) {
    if (completion == Completion::kRandom) {
      while (random() % 3 == 0 && run_one(lock)) {
      }
    } else if (completion == Completion::kImmediate) {
      run_all(lock);
    }
    reap(lock);
  }

  /// Frees released blocks behind whose uses everything has completed.
  void reap(Lock& lock) {
    std::vector<BlockPtr> dead;
    std::erase_if(retired, [&](Retired& entry) {
      for (const auto& fence : entry.after) {
        if (fence->poll() == FenceStatus::kPending) {
          return false;
        }
      }
      dead.push_back(std::move(entry.block));
      return true;
    });
    if (!dead.empty()) {
      lock.unlock();
      dead.clear();
      lock.lock();
    }
  }

  void take_out(Memory& memory) {
    if (memory.accounted) {
      memory.accounted = false;
      live[memory.location] -= memory.occupied.count();
    }
  }

  /// The last reference on the block has gone.
  void block_died(const std::shared_ptr<Memory>& memory) {
    Lock lock(mutex);
    if (const auto use = uncovered_use(*memory, {}, false); !use.empty()) {
      violation(lock, "block at " + residency::to_string(memory->location) + " was freed while " +
                          use + " is queued");
    }
    if (memory->views != 0 && !views_may_outlive) {
      violation(lock, "block at " + residency::to_string(memory->location) +
                          " was freed while a view of it is open");
    }
    memory->block_alive = false;
    free_if_unused(lock, memory);
  }

  void free_if_unused(Lock& lock, const std::shared_ptr<Memory>& memory) {
    if (memory->block_alive || memory->external != 0 || memory->gone) {
      return;
    }
    memory->gone = true;
    std::fill(memory->bytes.begin(), memory->bytes.end(), kPoison);
    take_out(*memory);
    if (const FencePtr escape = std::move(memory->escape)) {
      memory->escape = nullptr;
      lock.unlock();
      escape->complete();
      lock.lock();
    }
  }

  void end_share(const std::shared_ptr<Memory>& memory) {
    Lock lock(mutex);
    --memory->external;
    memory->shared.store(memory->external != 0, std::memory_order_release);
    if (memory->external == 0 && memory->released && reuses_at_once(memory->location)) {
      take_out(*memory);
    }
    free_if_unused(lock, memory);
  }

  static bool reuses_at_once(Location location) {
    return location.is_cuda() || location.kind() == LocationKind::kPinnedHost;
  }

  void start_worker() {
    worker = std::thread([this] {
      Lock lock(mutex);
      while (!worker_stopped) {
        if (!run_one(lock)) {
          changed.wait(lock);
        } else if (random() % 4 == 0) {
          lock.unlock();
          std::this_thread::yield();
          lock.lock();
        }
      }
    });
  }

  void stop_worker() {
    std::thread stopped;
    {
      const Lock lock(mutex);
      worker_stopped = true;
      stopped = std::move(worker);
    }
    changed.notify_all();
    if (stopped.joinable()) {
      stopped.join();
    }
  }
};

namespace {

/// The completion of queued work. Waiting for it makes it happen.
class OperationFence : public Fence {
 public:
  OperationFence(std::weak_ptr<World> world, bool on_stream)
      : world_(std::move(world)), on_stream_(on_stream) {}
  void bind(const OperationPtr& operation) { operation_ = operation; }
  [[nodiscard]] bool on_stream() const noexcept override { return on_stream_; }
  void wait() override {
    const auto world = world_.lock();
    const auto operation = operation_.lock();
    if (world) {
      world->ask_probe("Fence::wait");
    }
    if (world && operation && poll() == FenceStatus::kPending) {
      World::Lock lock(world->mutex);
      if (world->completion != Completion::kThreaded && !world->waits_block) {
        world->run_until(lock, operation);
      }
    }
    Fence::wait();
  }
  std::optional<std::int64_t> elapsed_ns() const override { return Fence::elapsed_ns(); }

 private:
  const std::weak_ptr<World> world_;
  const bool on_stream_;
  std::weak_ptr<Operation> operation_;
};

/// The end of memory that others keep alive; nobody may wait for that.
class EscapeFence : public Fence {
 public:
  explicit EscapeFence(std::weak_ptr<World> world) : world_(std::move(world)) {}
  void wait() override {
    if (const auto world = world_.lock(); world && poll() == FenceStatus::kPending) {
      World::Lock lock(world->mutex);
      world->violation(lock, "the host waits for memory that somebody else keeps alive");
    }
    Fence::wait();
  }

 private:
  std::weak_ptr<World> world_;
};

std::shared_ptr<OperationFence> make_fence(const std::shared_ptr<World>& world,
                                           const OperationPtr& operation, bool on_stream) {
  auto fence = std::make_shared<OperationFence>(world, on_stream);
  fence->bind(operation);
  operation->fence = fence;
  return fence;
}

FakeBlock& own(Block& block) {
  return dynamic_cast<FakeBlock&>(block);
}
const FakeBlock& own(const Block& block) {
  return dynamic_cast<const FakeBlock&>(block);
}

}  // namespace

std::string_view to_string(Call call) {
  switch (call) {
    case Call::kOpen: return "open";
    case Call::kCopy: return "copy";
    case Call::kReconstruct: return "reconstruct";
    case Call::kLoad: return "load";
    case Call::kWatchEscape: return "watch_escape";
    case Call::kBeginAccess: return "begin_access";
    case Call::kEndAccess: return "end_access";
    case Call::kOpenView: return "open_view";
    case Call::kCurrentStream: return "current_stream";
    case Call::kRecordUse: return "record_use";
    case Call::kMakeHeadroom: return "make_headroom";
    case Call::kRelease: return "release";
    case Call::kTransfer: return "transfer";
  }
  return "?";
}

bool FakeLayout::equals(const Layout& other) const {
  const auto* same = dynamic_cast<const FakeLayout*>(&other);
  return same != nullptr && same->fields_ == fields_;
}

std::string FakeLayout::describe() const {
  std::string text;
  for (const auto& field : fields_) {
    text += (text.empty() ? "" : ", ") + field.name + ":" + std::to_string(field.nbytes);
  }
  return text;
}

ValueSpec make_spec(std::int64_t nbytes, ReplicaMode mode, Recoverability recoverability,
                    Mutability mutability) {
  return make_spec({{"data", nbytes}}, 0, mode, recoverability, mutability);
}

ValueSpec make_spec(std::vector<FakeLayout::Field> fields, std::int64_t shared_bytes,
                    ReplicaMode mode, Recoverability recoverability, Mutability mutability) {
  ValueSpec spec;
  std::int64_t total = 0;
  for (const auto& field : fields) {
    total += field.nbytes;
  }
  spec.logical_bytes = Bytes(total);
  spec.storage_bytes = Bytes(total - shared_bytes);
  spec.layout = std::make_shared<FakeLayout>(std::move(fields));
  spec.mode = mode;
  spec.recoverability = recoverability;
  spec.mutability = mutability;
  return spec;
}

FakeBlock::FakeBlock(std::shared_ptr<World> world, std::shared_ptr<Memory> memory,
                     const ValueSpec& spec)
    : world_(std::move(world)),
      memory_(std::move(memory)),
      logical_(spec.logical_bytes),
      layout_(spec.layout) {}

FakeBlock::~FakeBlock() {
  world_->ask_probe("the destructor of a block");
  world_->block_died(memory_);
}

Location FakeBlock::location() const {
  return memory_->location;
}

AddressRanges FakeBlock::address_ranges() const {
  AddressRanges ranges;
  if (!memory_->location.is_disk() && memory_->storage != Bytes()) {
    ranges.push_back(
        {memory_->begin, memory_->begin + static_cast<std::uintptr_t>(memory_->storage.count())});
  }
  return ranges;
}

bool FakeBlock::holds(std::uint64_t seed) const {
  World::Lock lock(world_->mutex);
  if (memory_->gone) {
    world_->violation(lock, "freed memory was read");
  } else if (!memory_->ready) {
    world_->violation(lock, "bytes at " + residency::to_string(memory_->location) +
                                " were read before they are ready");
  } else {
    for (const auto& user : memory_->users) {
      if (user->destination == memory_) {
        world_->violation(lock, "bytes at " + residency::to_string(memory_->location) +
                                    " were read while queued work overwrites them");
        break;
      }
    }
  }
  return filled(memory_->bytes, seed);
}

void FakeBlock::write(std::uint64_t seed, std::string_view field, bool seen) {
  World::Lock lock(world_->mutex);
  if (memory_->gone) {
    world_->violation(lock, "freed memory was written");
  }
  for (const auto& user : memory_->users) {
    if (user->source == memory_) {
      world_->violation(lock, "bytes were written while a queued copy reads them");
      break;
    }
  }
  fill(memory_->bytes, seed);
  if (seen) {
    for (std::size_t i = 0; i < memory_->fields.size(); ++i) {
      if (memory_->fields[i] == field) {
        ++memory_->versions[i];
      }
    }
  }
}

std::shared_ptr<void> FakeBlock::share() {
  const std::lock_guard lock(world_->mutex);
  ++memory_->external;
  memory_->shared.store(true, std::memory_order_release);
  return {memory_.get(), [world = world_, memory = memory_](void*) { world->end_share(memory); }};
}

std::optional<std::string> FakeBlock::take_undeclared_write() {
  const std::lock_guard lock(world_->mutex);
  std::optional<std::string> written;
  for (std::size_t i = 0; i < memory_->fields.size(); ++i) {
    if (memory_->versions[i] != memory_->known_versions[i] && !written) {
      written = memory_->fields[i];
    }
  }
  memory_->known_versions = memory_->versions;
  return written;
}

FakeView::FakeView(FakeBlock& block)
    : block_(block), world_(block.world()), memory_(block.memory()) {
  const std::lock_guard lock(world_->mutex);
  ++memory_->views;
}

FakeView::~FakeView() {
  const std::lock_guard lock(world_->mutex);
  --memory_->views;
}

FakeBackend::FakeBackend(FakeOptions options)
    : world_(std::make_shared<World>(std::move(options))) {
  if (world_->completion == Completion::kThreaded) {
    world_->start_worker();
  }
}

FakeBackend::~FakeBackend() {
  world_->stop_worker();
  World::Lock lock(world_->mutex);
  world_->drain(lock);
}

void FakeBackend::open(ManagerId /*manager*/, const ManagerOptions& options) {
  World::Lock lock(world_->mutex);
  if (world_->opened) {
    world_->violation(lock, "Backend::open twice");
  }
  world_->count(lock, Call::kOpen);
  world_->opened = true;
  for (const auto& disk : options.disks) {
    world_->disks.insert(Location::disk(disk.name));
  }
}

void FakeBackend::attach(std::weak_ptr<Reclaimer> reclaimer) {
  reclaimer_ = std::move(reclaimer);
}

std::shared_ptr<Reclaimer> FakeBackend::reclaimer() const {
  return reclaimer_.lock();
}

void FakeBackend::close(bool wait) noexcept {
  probe("Backend::close");
  World::Lock lock(world_->mutex);
  if (world_->closed) {
    world_->violation(lock, "Backend::close twice");
  }
  if (wait) {
    world_->drain(lock);
    for (const auto& entry : world_->retired) {
      world_->violation(lock, "at close a block at " +
                                  residency::to_string(entry.block->location()) +
                                  " still waits for its last use");
      break;
    }
  }
  world_->closed = true;
}

std::string FakeBackend::why_unavailable(Location location) const {
  // The options are constant after open, so that this query takes no lock.
  if (world_->options.unavailable.contains(location)) {
    return "the fake was told that it does not exist";
  }
  if (location.is_cuda() && location.cuda_index() >= world_->options.num_devices) {
    return "there are " + std::to_string(world_->options.num_devices) + " devices";
  }
  if (location.is_disk() && !world_->disks.contains(location)) {
    return "no such disk was declared";
  }
  return {};
}

Bytes FakeBackend::occupied_bytes(const ValueSpec& spec, Location location) const {
  return world_->occupied(spec.storage_bytes, location);
}

TransferPath FakeBackend::path(Location from, Location to) const {
  if (from.is_disk() || to.is_disk()) {
    return TransferPath::kFile;
  }
  if (from.is_cuda() && to.is_cuda()) {
    return TransferPath::kPeer;
  }
  if ((from.is_cuda() && to.kind() == LocationKind::kPageableHost) ||
      (to.is_cuda() && from.kind() == LocationKind::kPageableHost)) {
    return TransferPath::kStaged;
  }
  return TransferPath::kDirect;
}

bool FakeBackend::reuses_in_device_order(Location location) const {
  return World::reuses_at_once(location);
}

bool FakeBackend::is_shared(const Block& block) const {
  return own(block).memory()->shared.load(std::memory_order_acquire);
}

Bytes FakeBackend::staging_bytes(Location from, Location to) const {
  return path(from, to) == TransferPath::kStaged ? world_->options.staging : Bytes();
}

CopyResult FakeBackend::copy(const CopyRequest& request) {
  probe("Backend::copy");
  World::Lock lock(world_->mutex);
  world_->check_open(lock, "copy");
  world_->progress(lock);
  world_->count(lock, Call::kCopy);
  const TransferPath way = path(request.from, request.to);
  FakeBlock& source = own(*request.source);
  if (source.location() != request.from) {
    world_->violation(lock, "copy from another location than that of its source block");
  }
  if (source.memory()->released) {
    world_->violation(lock, "copy from a block that was released");
  }
  if (!why_unavailable(request.to).empty()) {
    world_->violation(
        lock, "copy to a location that does not exist: " + residency::to_string(request.to));
  }
  if (request.stream && request.stream->device != request.to &&
      request.stream->device != request.from) {
    world_->violation(lock, "copy on a stream of a device that takes no part in it");
  }
  const auto before = world_->operations_of({request.source_ready});
  for (const auto& operation : before) {
    if (operation->kind == Kind::kTransfer && can_fail_later(operation->transfer.path)) {
      world_->violation(lock, "copy from a block whose arrival can still fail");
    }
  }
  if (request.source_ready && request.source_ready->poll() == FenceStatus::kFailed) {
    world_->violation(lock, "copy from a block whose arrival failed");
  }
  if (const auto use = world_->uncovered_use(*source.memory(), before, true); !use.empty()) {
    world_->violation(lock, "copy reads " + residency::to_string(request.value) + " at " +
                                residency::to_string(request.from) + " without waiting for " + use);
  }
  auto operation = std::make_shared<Operation>();
  operation->source = source.memory();
  operation->transfer = {request.value, request.from, request.to, way};
  operation->after = before;
  BlockPtr block;
  if (request.overwrite) {
    FakeBlock& target = own(*request.overwrite);
    if (target.location() != request.to) {
      world_->violation(lock, "overwrite of a block at another location");
    }
    auto behind = world_->operations_of(request.overwrite_after);
    behind.insert(behind.end(), before.begin(), before.end());
    if (const auto use = world_->uncovered_use(*target.memory(), behind, false); !use.empty()) {
      world_->violation(lock, "copy overwrites " + residency::to_string(request.value) + " at " +
                                  residency::to_string(request.to) + " without waiting for " + use);
    }
    operation->destination = target.memory();
    operation->after.insert(operation->after.end(), behind.begin(), behind.end());
    block = request.overwrite;
  } else {
    const Bytes charge = occupied_bytes(*request.spec, request.to);
    auto memory = world_->allocate(request.to, request.spec->storage_bytes,
                                   request.spec->layout.get(), charge);
    operation->destination = memory;
    lock.unlock();
    block = std::make_shared<FakeBlock>(world_, std::move(memory), *request.spec);
    lock.lock();
  }
  if (can_fail_later(way)) {
    const bool had_happened = world_->fault_happened;
    world_->fault_happened = false;
    world_->count(lock, Call::kTransfer);
    operation->fails = world_->fault_happened;
    world_->fault_happened = world_->fault_happened || had_happened;
  }
  if (request.stream) {
    world_->put_on_stream(operation, *request.stream);
  }
  const bool on_stream = (request.from.is_cuda() || request.to.is_cuda()) && !can_fail_later(way);
  const FencePtr fence = make_fence(world_, operation, on_stream);
  world_->enqueue(operation);
  world_->newest[{request.value, request.to}] = {operation, fence};
  CopyResult result;
  result.block = block;
  result.path = way;
  result.ready = fence;
  const bool host_copy = request.from.is_host() && request.to.is_host();
  if (world_->completion == Completion::kImmediate) {
    world_->run_until(lock, operation);
  } else if (host_copy && !request.stream && World::runnable(*operation) &&
             world_->completion != Completion::kThreaded) {
    world_->run(lock, operation);
  }
  if (fence->poll() == FenceStatus::kDone && world_->random() % 2 == 0) {
    result.ready = nullptr;
  }
  return result;
}

BlockPtr FakeBackend::reconstruct(Source& source, const ValueSpec& spec, Location at) {
  probe("Backend::reconstruct");
  {
    World::Lock lock(world_->mutex);
    world_->check_open(lock, "reconstruct");
    world_->progress(lock);
    world_->count(lock, Call::kReconstruct);
  }
  BlockPtr block = source.load();
  if (!block) {
    throw MaterializationError("fake: the source gave no block");
  }
  auto* made = dynamic_cast<FakeBlock*>(block.get());
  if (made == nullptr || made->world() != world_) {
    throw MaterializationError("fake: the source gave a block of another backend");
  }
  if (made->location() != at) {
    throw MaterializationError("fake: expected a block at " + residency::to_string(at) +
                               ", the source gave one at " +
                               residency::to_string(made->location()));
  }
  if (is_shared(*made) || block.use_count() != 1) {
    throw MaterializationError("fake: the source keeps a reference on its block");
  }
  static_cast<void>(spec);
  return block;
}

std::optional<SpareBytes> FakeBackend::spare_bytes(Location location, const Growth& /*wanted*/) {
  probe("Backend::spare_bytes");
  const std::lock_guard lock(world_->mutex);
  const auto found = world_->spare.find(location);
  return found != world_->spare.end() ? found->second : std::nullopt;
}

void FakeBackend::set_spare_bytes(Location location, std::optional<SpareBytes> bytes) {
  const std::lock_guard lock(world_->mutex);
  world_->spare[location] = bytes;
}

void FakeBackend::release(BlockPtr block, std::vector<FencePtr> after) noexcept {
  probe("Backend::release");
  World::Lock lock(world_->mutex);
  world_->check_open(lock, "release");
  world_->count(lock, Call::kRelease);
  FakeBlock& released = own(*block);
  const auto memory = released.memory();
  if (memory->released) {
    world_->violation(lock,
                      "double release of a block at " + residency::to_string(memory->location));
    return;
  }
  memory->released = true;
  if (memory->views != 0 && !world_->views_may_outlive) {
    world_->violation(lock, "release of a block while a view of it is open");
  }
  std::erase(after, nullptr);
  if (const auto use = world_->uncovered_use(*memory, world_->operations_of(after), false);
      !use.empty()) {
    world_->violation(lock, "block at " + residency::to_string(memory->location) +
                                " was released without waiting for " + use);
  }
  const bool in_device_order = std::ranges::all_of(
      after, [](const FencePtr& fence) { return !is_pending(fence) || fence->on_stream(); });
  if (World::reuses_at_once(memory->location) && in_device_order && memory->external == 0) {
    world_->take_out(*memory);
  }
  world_->retired.push_back({std::move(block), std::move(after)});
  world_->progress(lock);
}

FencePtr FakeBackend::watch_escape(const Block& block) {
  probe("Backend::watch_escape");
  World::Lock lock(world_->mutex);
  world_->check_open(lock, "watch_escape");
  world_->count(lock, Call::kWatchEscape);
  const auto memory = own(block).memory();
  if (memory->external == 0) {
    return nullptr;
  }
  if (!memory->escape) {
    memory->escape = std::make_shared<EscapeFence>(world_);
  }
  return memory->escape;
}

void FakeBackend::begin_access(Block& block, Access /*access*/, const std::optional<Stream>& stream,
                               std::span<const FencePtr> after, bool checksum) {
  probe("Backend::begin_access");
  World::Lock lock(world_->mutex);
  world_->check_open(lock, "begin_access");
  world_->progress(lock);
  world_->count(lock, Call::kBeginAccess);
  const auto memory = own(block).memory();
  if (memory->released) {
    world_->violation(lock, "access to a block that was released");
  }
  const auto before = world_->operations_of({after.begin(), after.end()});
  if (const auto use = world_->uncovered_use(*memory, before, true);
      !use.empty() && use.starts_with("a queued copy")) {
    world_->violation(lock, "access without waiting for " + use);
  }
  if (stream) {
    if (stream->device != memory->location) {
      world_->violation(lock, "access on a stream of another device");
    }
    auto wait = std::make_shared<Operation>();
    wait->kind = Kind::kMark;
    wait->after = before;
    world_->put_on_stream(wait, *stream);
    world_->enqueue(wait);
  }
  if (checksum && memory->checksum_accesses++ == 0) {
    memory->checksum = memory->bytes;
  }
  world_->progress(lock);
}

std::optional<std::string> FakeBackend::end_access(Block& block, Access access, bool checksum) {
  probe("Backend::end_access");
  FakeBlock& accessed = own(block);
  World::Lock lock(world_->mutex);
  world_->check_open(lock, "end_access");
  world_->progress(lock);
  world_->count(lock, Call::kEndAccess);
  const auto memory = accessed.memory();
  if (memory->released) {
    world_->violation(lock, "end of access to a block that was released");
  }
  bool differs = false;
  if (checksum && memory->checksum_accesses > 0) {
    differs = memory->checksum != memory->bytes;
    memory->checksum = memory->bytes;
    --memory->checksum_accesses;
  }
  lock.unlock();
  auto written = accessed.take_undeclared_write();
  if (!written && differs) {
    written = memory->fields.front();
  }
  return access == Access::kWrite ? std::nullopt : written;
}

std::unique_ptr<View> FakeBackend::open_view(Block& block) {
  probe("Backend::open_view");
  {
    World::Lock lock(world_->mutex);
    world_->check_open(lock, "open_view");
    world_->count(lock, Call::kOpenView);
    if (own(block).memory()->released) {
      world_->violation(lock, "view of a block that was released");
    }
  }
  return std::make_unique<FakeView>(own(block));
}

Stream FakeBackend::current_stream(Location location) {
  probe("Backend::current_stream");
  World::Lock lock(world_->mutex);
  world_->check_open(lock, "current_stream");
  world_->count(lock, Call::kCurrentStream);
  return {location, world_->current_stream[location]};
}

FencePtr FakeBackend::record_use(const Stream& stream) {
  probe("Backend::record_use");
  World::Lock lock(world_->mutex);
  world_->check_open(lock, "record_use");
  world_->count(lock, Call::kRecordUse);
  auto mark = std::make_shared<Operation>();
  mark->kind = Kind::kMark;
  world_->put_on_stream(mark, stream);
  FencePtr fence = make_fence(world_, mark, /*on_stream=*/true);
  world_->enqueue(mark);
  world_->progress(lock);
  return fence;
}

std::shared_ptr<void> FakeBackend::make_headroom(Location location, Bytes nbytes,
                                                 std::string_view /*label*/) {
  probe("Backend::make_headroom");
  World::Lock lock(world_->mutex);
  world_->check_open(lock, "make_headroom");
  world_->count(lock, Call::kMakeHeadroom);
  if (!world_->options.physical_headroom.contains(location)) {
    return nullptr;
  }
  world_->headroom[location] += nbytes.count();
  return {world_.get(), [world = world_, location, nbytes](void*) {
            world->ask_probe("the destructor of headroom");
            const std::lock_guard guard(world->mutex);
            world->headroom[location] -= nbytes.count();
          }};
}

std::shared_ptr<FakeBlock> FakeBackend::make_block(Location at, const ValueSpec& spec,
                                                   std::uint64_t seed) {
  World::Lock lock(world_->mutex);
  auto memory = world_->allocate(at, spec.storage_bytes, spec.layout.get(),
                                 world_->occupied(spec.storage_bytes, at));
  fill(memory->bytes, seed);
  memory->ready = true;
  lock.unlock();
  return std::make_shared<FakeBlock>(world_, std::move(memory), spec);
}

std::shared_ptr<FakeBlock> FakeBackend::make_overlapping_block(const FakeBlock& other,
                                                               std::int64_t offset,
                                                               const ValueSpec& spec) {
  auto block = make_block(other.location(), spec, 0);
  block->memory()->begin = other.memory()->begin + static_cast<std::uintptr_t>(offset);
  return block;
}

void FakeBackend::set_completion(Completion completion) {
  const std::lock_guard lock(world_->mutex);
  world_->completion = completion;
}

void FakeBackend::set_waits_block(bool block) {
  const std::lock_guard lock(world_->mutex);
  world_->waits_block = block;
}

void FakeBackend::allow_views_to_outlive_blocks() {
  const std::lock_guard lock(world_->mutex);
  world_->views_may_outlive = true;
}

bool FakeBackend::complete_one() {
  World::Lock lock(world_->mutex);
  return world_->run_one(lock);
}

bool FakeBackend::complete(const Handle& value, Location to) {
  World::Lock lock(world_->mutex);
  const auto operation = world_->pick([&](const Operation& other) {
    return other.kind == Kind::kTransfer && other.transfer.value == value &&
           other.transfer.to == to;
  });
  if (!operation) {
    return false;
  }
  world_->run(lock, operation);
  return true;
}

void FakeBackend::complete_all() {
  World::Lock lock(world_->mutex);
  world_->drain(lock);
}

std::size_t FakeBackend::num_queued() const {
  const std::lock_guard lock(world_->mutex);
  return world_->queue.size();
}

std::vector<TransferView> FakeBackend::queued_transfers() const {
  const std::lock_guard lock(world_->mutex);
  std::vector<TransferView> transfers;
  for (const auto& operation : world_->queue) {
    if (operation->kind == Kind::kTransfer) {
      transfers.push_back(operation->transfer);
    }
  }
  return transfers;
}

FenceStatus FakeBackend::transfer_status(const Handle& value, Location to) const {
  const std::lock_guard lock(world_->mutex);
  const auto it = world_->newest.find({value, to});
  return it == world_->newest.end() ? FenceStatus::kDone : it->second.second->poll();
}

void FakeBackend::set_current_stream(Location device, std::int64_t id) {
  const std::lock_guard lock(world_->mutex);
  world_->current_stream[device] = id;
}

void FakeBackend::launch_read(const Stream& stream, FakeBlock& block, std::uint64_t seed) {
  World::Lock lock(world_->mutex);
  auto operation = std::make_shared<Operation>();
  operation->kind = Kind::kRead;
  operation->source = block.memory();
  operation->seed = seed;
  world_->put_on_stream(operation, stream);
  world_->enqueue(operation);
  world_->progress(lock);
}

void FakeBackend::launch_write(const Stream& stream, FakeBlock& block, std::uint64_t seed) {
  World::Lock lock(world_->mutex);
  auto operation = std::make_shared<Operation>();
  operation->kind = Kind::kWrite;
  operation->destination = block.memory();
  operation->seed = seed;
  for (auto& version : block.memory()->versions) {
    ++version;
  }
  world_->put_on_stream(operation, stream);
  world_->enqueue(operation);
  world_->progress(lock);
}

void FakeBackend::fail(Call call, std::uint64_t n) {
  const std::lock_guard lock(world_->mutex);
  world_->fail_at[static_cast<std::size_t>(call)] = n;
  world_->fault_happened = false;
}

void FakeBackend::fail_any(std::uint64_t n) {
  const std::lock_guard lock(world_->mutex);
  world_->fail_any_at = n;
  world_->fault_happened = false;
}

void FakeBackend::clear_faults() {
  const std::lock_guard lock(world_->mutex);
  world_->fail_at = {};
  world_->fail_any_at = 0;
}

bool FakeBackend::fault_happened() const {
  const std::lock_guard lock(world_->mutex);
  return world_->fault_happened;
}

std::uint64_t FakeBackend::num_calls(Call call) const {
  const std::lock_guard lock(world_->mutex);
  return world_->calls[static_cast<std::size_t>(call)];
}

std::uint64_t FakeBackend::num_calls_that_can_fail() const {
  const std::lock_guard lock(world_->mutex);
  return world_->fallible_calls;
}

void FakeBackend::reset_calls() {
  const std::lock_guard lock(world_->mutex);
  world_->calls = {};
  world_->fallible_calls = 0;
}

void FakeBackend::count_call(Call call) {
  World::Lock lock(world_->mutex);
  world_->count(lock, call);
}

Bytes FakeBackend::live_bytes(Location location) const {
  const std::lock_guard lock(world_->mutex);
  const auto it = world_->live.find(location);
  return it == world_->live.end() ? Bytes() : Bytes(it->second);
}

Bytes FakeBackend::peak_bytes(Location location) const {
  const std::lock_guard lock(world_->mutex);
  const auto it = world_->peak.find(location);
  return it == world_->peak.end() ? Bytes() : Bytes(it->second);
}

void FakeBackend::reset_peaks() {
  const std::lock_guard lock(world_->mutex);
  world_->peak = world_->live;
}

Bytes FakeBackend::headroom_bytes(Location location) const {
  const std::lock_guard lock(world_->mutex);
  const auto it = world_->headroom.find(location);
  return it == world_->headroom.end() ? Bytes() : Bytes(it->second);
}

std::vector<std::string> FakeBackend::violations() const {
  const std::lock_guard lock(world_->mutex);
  return world_->violations;
}

bool FakeBackend::closed() const {
  const std::lock_guard lock(world_->mutex);
  return world_->closed;
}

void FakeBackend::probe_lock(const std::shared_ptr<Manager>& manager,
                             std::chrono::milliseconds patience) {
  auto probe = manager ? std::make_shared<LockProbe>(manager, patience) : nullptr;
  {
    const std::lock_guard guard(world_->probe_mutex);
    world_->lock_probe.swap(probe);
  }
}

void FakeBackend::probe(std::string_view what) const {
  world_->ask_probe(what);
}

FakeSource::FakeSource(std::shared_ptr<FakeBackend> backend, Location at, ValueSpec spec,
                       std::uint64_t seed)
    : backend_(backend), at_(at), spec_(std::move(spec)), seed_(seed) {}

FakeSource::~FakeSource() {
  if (const auto backend = backend_.lock()) {
    backend->probe("the destructor of a source");
  }
}

std::shared_ptr<Block> FakeSource::load() {
  ++num_loads;
  const auto backend = backend_.lock();
  if (!backend) {
    throw std::runtime_error("the backend has gone");
  }
  backend->probe("Source::load");
  if (before_load) {
    before_load();
  }
  backend->count_call(Call::kLoad);
  if (instead) {
    return instead();
  }
  return backend->make_block(at_, spec_, seed_);
}

}  // namespace residency::fake
