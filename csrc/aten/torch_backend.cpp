#include "residency/aten/torch_backend.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <functional>
#include <list>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string_view>
#include <thread>
#include <typeinfo>
#include <utility>

#include <fmt/format.h>

#include "csrc/aten/file_tier.h"
#include "csrc/aten/profiler_range.h"
#include "csrc/aten/storage_cursor.h"
#include "csrc/aten/transfer_worker.h"
#include "csrc/core/fork.h"
#include "csrc/core/keep_for_ever.h"
#include "residency/aten/tensor_block.h"
#include "residency/core/errors.h"
#include "residency/core/options.h"

namespace residency {
namespace {

// dynamic_cast would be a third of the cost of a lease.
template <class Derived>
Derived* as(Block* block) noexcept {
  return block != nullptr && typeid(*block) == typeid(Derived) ? static_cast<Derived*>(block)
                                                               : nullptr;
}
template <class Derived>
const Derived* as(const Block* block) noexcept {
  return as<Derived>(const_cast<Block*>(block));
}
template <class Derived>
std::shared_ptr<Derived> as(const BlockPtr& block) noexcept {
  return std::shared_ptr<Derived>(block, as<Derived>(block.get()));
}

[[noreturn]] void throw_foreign_block() {
  throw MaterializationError(
      "the block was not made by the torch backend: expected a TensorBlock or a value on disk");
}

TensorBlock& accessible(Block& block) {
  if (auto* tensors = as<TensorBlock>(&block); tensors != nullptr) {
    return *tensors;
  }
  if (const auto* file = as<FileBlock>(&block); file != nullptr) {
    throw UnavailableError(fmt::format(
        "a value at {} lies in a file and cannot be accessed there; bring it to memory first",
        to_string(file->location())));
  }
  throw_foreign_block();
}

const TensorLayout* layout_of(const ValueSpec& spec) noexcept {
  const Layout* layout = spec.layout.get();
  return layout != nullptr && typeid(*layout) == typeid(TensorLayout)
             ? static_cast<const TensorLayout*>(layout)
             : nullptr;
}

// Waits on a worker's thread; whatever the transfer depends on was asked for earlier.
void wait_for(const FencePtr& fence) {
  if (fence == nullptr) {
    return;
  }
  fence->wait();
  if (fence->poll() == FenceStatus::kFailed) {
    if (const auto error = fence->error(); error != nullptr) {
      std::rethrow_exception(error);
    }
    throw MaterializationError("the transfer that this one reads from has failed");
  }
}

/// Where memory is reused in the order of the device.
bool is_device_tier(Location location) noexcept {
  return location.is_cuda() || location == Location::pinned_host();
}

/// The others need a thread.
bool goes_on_stream(Location from, Location to) noexcept {
  return is_device_tier(from) && is_device_tier(to) && (from.is_cuda() || to.is_cuda());
}

/// What a transfer comes behind.
struct Before {
  FencePtr source;              ///< should that have failed, so does the transfer
  std::vector<FencePtr> users;  ///< of the memory that it goes to, however they end
};

/// What a worker may do for a transfer.
struct Terms {
  FileIo& io;
  bool may_wait;  ///< on the host, for what comes before it
  const std::atomic<bool>& needed_now;
  const std::atomic<bool>& abandon;
  std::optional<std::int64_t>& device_ns;  ///< set where a device did it

  /// Whether all that comes before it is over. Throws why that failed.
  [[nodiscard]] bool is_turn(const Before& before) const {
    if (!may_wait && (is_pending(before.source) || any_pending(before.users))) {
      return false;
    }
    wait_all(before.users);
    wait_for(before.source);
    return true;
  }
};

/// Memory of the host, or a file, as one end of a transfer: gives or takes a value's bytes from the
/// first to the last.
struct HostSide {
  std::function<void(const std::vector<iovec>&, const Terms&)> transfer;
  std::function<void()> finish = [] {};
  bool is_slow = false;
};

HostSide reading(const TensorBlock& memory) {
  return {[cursor = StorageCursor(memory.storages())](const auto& buffers, const Terms&) mutable {
    cursor.read(buffers);
  }};
}

HostSide writing(const TensorBlock& memory) {
  return {[cursor = StorageCursor(memory.storages())](const auto& buffers, const Terms&) mutable {
    cursor.write(buffers);
  }};
}

HostSide reading(std::shared_ptr<const FileBlock> file) {
  const auto reader = std::make_shared<FileTier::Reader>(std::move(file));
  return {[reader](const auto& buffers, const Terms& terms) {
            reader->read(buffers, terms.abandon, terms.io);
          },
          [reader] { reader->finish(); }, /*is_slow=*/true};
}

HostSide writing(std::shared_ptr<FileBlock> file) {
  const auto writer = std::make_shared<FileTier::Writer>(std::move(file));
  return {[writer](const auto& buffers, const Terms& terms) {
            writer->write(buffers, terms.abandon, terms.io);
          },
          [writer] { writer->finish(); }, /*is_slow=*/true};
}

void transfer_all(const HostSide& end, const TensorBlock& memory, const Terms& terms) {
  end.transfer(memory.storages(), terms);
  end.finish();
}

/// A copy through page-locked buffers, and how far it is.
class StagedCopy {
 public:
  /// `announced`: while it lives others know that this one is needed.
  StagedCopy(std::shared_ptr<DeviceLayer> devices, std::optional<Stream> stream,
             std::shared_ptr<void> announced)
      : devices_(std::move(devices)), stream_(stream), announced_(std::move(announced)) {}

  // Each goes as far as it can, and says whether that was to the end.
  template <class Host>
  [[nodiscard]] bool to_device(const TensorBlock& device, const Host& host, const Terms& terms) {
    if (!host_.has_value()) {
      host_ = reading(host);
    }
    return go_on(device, true, terms);
  }
  template <class Host>
  [[nodiscard]] bool from_device(const TensorBlock& device, const Host& host, const Terms& terms) {
    if (!host_.has_value()) {
      host_ = writing(host);
    }
    return go_on(device, false, terms);
  }

 private:
  [[nodiscard]] bool go_on(const TensorBlock& device, bool to_device, const Terms& terms) {
    const DeviceLayer::HostEnd end{
        [&](const std::vector<iovec>& buffers) { host_->transfer(buffers, terms); },
        host_->is_slow};
    for (Bytes before = progress_.done;; before = progress_.done) {
      if (devices_->copy_staged(device, to_device, end, stream_, progress_,
                                {.needed_now = terms.needed_now, .abandon = terms.abandon})) {
        host_->finish();
        terms.device_ns = progress_.device_ns;
        return true;
      }
      if (progress_.done == before) {
        return false;
      }
    }
  }

  std::shared_ptr<DeviceLayer> devices_;
  std::optional<Stream> stream_;
  std::shared_ptr<void> announced_;
  DeviceLayer::Progress progress_;
  std::optional<HostSide> host_;  // once it has begun
};

bool engine_is_blocking(FileEngine engine) {
  const char* chosen = std::getenv("RESIDENCY_FILE_ENGINE");
  return engine == FileEngine::kBlocking ||
         (chosen != nullptr && std::string_view(chosen) == "blocking");
}

}  // namespace

struct TorchBackend::State {
  TorchBackendOptions options;
  const std::uint64_t generation = device_generation();
  bool opened = false;
  bool closed = false;
  bool waited = false;  // as it closed, for all that was under way
  // Fixed between open and close.
  std::vector<std::shared_ptr<FileTier>> disks;
  std::shared_ptr<TransferGroup> transfers = std::make_shared<TransferGroup>();

  struct Retiring {
    BlockPtr block;
    std::vector<FencePtr> after;
  };
  // Shared with the workers, which look for what has completed after each transfer.
  struct Retirement {
    std::mutex mutex;
    std::list<Retiring> blocks;
    // Lets the many calls with nothing retiring pass without the mutex.
    std::atomic<bool> any{false};
    const std::uint64_t generation = device_generation();

    /// Takes both, unless it throws.
    void add(BlockPtr& block, std::vector<FencePtr>& after) {
      const std::lock_guard lock(mutex);
      Retiring& entry = blocks.emplace_back();
      entry.block = std::move(block);
      entry.after = std::move(after);
      any.store(true, std::memory_order_release);
    }
    // Blocks die outside the mutex.
    void free_completed() {
      if (!any.load(std::memory_order_acquire) || generation != device_generation()) {
        return;
      }
      std::list<Retiring> dead;
      const std::lock_guard lock(mutex);
      for (auto next = blocks.begin(); next != blocks.end();) {
        const auto each = next++;
        if (!any_pending(each->after)) {
          dead.splice(dead.end(), blocks, each);
        }
      }
      any.store(!blocks.empty(), std::memory_order_release);
    }
    std::list<Retiring> take_all() {
      const std::lock_guard lock(mutex);
      return std::exchange(blocks, {});
    }
  };
  std::shared_ptr<Retirement> retirement = std::make_shared<Retirement>();

  std::mutex worker_mutex;
  std::array<std::shared_ptr<TransferWorker>, TransferWorker::kNumKinds> workers;
  // By device: the manager books the buffers of its staged copies until it closes.
  std::mutex staging_mutex;
  std::map<Location, std::shared_ptr<void>> staging;

  [[nodiscard]] FileTier* find_disk(Location location) const noexcept {
    for (const auto& disk : disks) {
      if (disk->location() == location) {
        return disk.get();
      }
    }
    return nullptr;
  }

  /// A transfer on a worker's thread. False: it cannot go on yet, and is to be called again.
  using Transfer = std::function<bool(const Terms&)>;
  struct Job;
  void submit(TransferWorker::Kind kind, TransferWorker::Work work);
  [[nodiscard]] std::shared_ptr<TransferWorker> worker_of(TransferWorker::Kind kind);
  FencePtr start(TransferWorker::Kind kind, Transfer transfer);
  /// The same ahead of need, until somebody waits for it: then the worker of that kind takes it.
  FencePtr start_ahead(TransferWorker::Kind when_needed, Transfer transfer);

  /// In a forked child, where the threads that held its mutexes and those that copy do not exist.
  [[nodiscard]] bool is_orphan() const noexcept { return generation != device_generation(); }
  [[nodiscard]] DeviceLayer& devices() const noexcept { return *options.devices; }
  /// The block to overwrite, if it can be.
  [[nodiscard]] static std::shared_ptr<TensorBlock> overwritten(const CopyRequest& request,
                                                                const TensorLayout& layout);
  /// New memory at a location, or the block to overwrite there.
  [[nodiscard]] DeviceLayer::Room room_for(const CopyRequest& request,
                                           const std::shared_ptr<const TensorLayout>& layout);
  CopyResult copy_on_stream(const CopyRequest& request, const TensorBlock& source);
  /// What is copied; one of the two.
  struct Origin {
    std::shared_ptr<TensorBlock> memory;
    std::shared_ptr<FileBlock> file;
    [[nodiscard]] const std::shared_ptr<const TensorLayout>& layout() const noexcept {
      return memory != nullptr ? memory->tensor_layout() : file->tensor_layout();
    }
  };
  CopyResult copy_by_thread(const CopyRequest& request, const Origin& origin);
  CopyResult copy_to_file(const CopyRequest& request, const Origin& origin, FileTier& disk);
  CopyResult copy_to_memory(const CopyRequest& request, const Origin& origin);
  /// Goes as far as it can, and says whether that was to the end.
  using Copying = std::function<bool(StagedCopy& staged, const Terms& terms)>;
  [[nodiscard]] FencePtr start(const CopyRequest& request, Before before, Copying copying);
  /// Before a copy that may go through the buffers of a device.
  void hold_staging(const CopyRequest& request);
  /// Whether nothing is under way that needs this backend or its devices, and no memory is locked.
  [[nodiscard]] bool has_ended() noexcept {
    retirement->free_completed();
    const bool locks_memory =
        options.devices != nullptr &&
        (!staging.empty() || options.devices->usage(Location::pinned_host()).segments != Bytes());
    return !retirement->any && transfers->is_idle() && !locks_memory;
  }
  /// Ends what can be by now: on a thread of ours, as that may wait for devices. Whether all is.
  [[nodiscard]] bool end() noexcept {
    retirement->free_completed();
    if (retirement->any || !transfers->is_idle()) {
      return false;
    }
    staging.clear();  // nobody else has the backend any more
    const bool is_trimmed = options.devices == nullptr || options.devices->trim();
    return is_trimmed || options.devices.use_count() > 1;  // the others will
  }
  /// Has a thread keep it until then.
  static void leave_behind(std::unique_ptr<State> state) noexcept;
  /// Has a copy ahead of need enqueued little by little.
  void pace(const FencePtr& copy) noexcept;
  /// A complete copy at the same location. Waits on the host.
  [[nodiscard]] std::shared_ptr<TensorBlock> clone(const TensorBlock& block);
};

/// A transfer on its way. One worker at a time is at it, with the mutex held.
struct TorchBackend::State::Job {
  Job(Transfer made, std::shared_ptr<TransferGroup> of, std::shared_ptr<Retirement> retiring)
      : transfer(std::move(made)), group(std::move(of)), retirement(std::move(retiring)) {}

  Transfer transfer;  // empty when it has ended
  const std::shared_ptr<TransferGroup> group;
  const std::shared_ptr<Retirement> retirement;
  const std::shared_ptr<WorkerFence> fence = std::make_shared<WorkerFence>();
  std::atomic<bool> needed_now{false};
  std::mutex mutex;
  std::chrono::nanoseconds elapsed{};       // of the worker
  std::optional<std::int64_t> device_ns{};  // of the device, where one did it

  static TransferWorker::Work to_the_end(std::shared_ptr<Job> job) {
    return [job = std::move(job)](FileIo& io) {
      const std::lock_guard lock(job->mutex);
      return job->go_on(io, /*may_wait=*/true);
    };
  }

  /// Whether it has ended.
  bool go_on(FileIo& io, bool may_wait) {
    if (transfer == nullptr) {
      return true;
    }
    const auto begin = std::chrono::steady_clock::now();
    std::exception_ptr error;
    try {
      if (!transfer({io, may_wait, needed_now, group->abandoned(), device_ns})) {
        elapsed += std::chrono::steady_clock::now() - begin;
        return false;
      }
    } catch (...) {
      error = std::current_exception();
    }
    elapsed += std::chrono::steady_clock::now() - begin;
    {
      // The blocks that the transfer used are let go before anybody is told that it has ended.
      const WorkerFence::Ended ended(*fence);
      transfer = nullptr;
    }
    if (error != nullptr) {
      fence->fail(error);
    } else {
      fence->complete(device_ns.value_or(elapsed.count()));
    }
    retirement->free_completed();
    group->end();
    return true;
  }
};

std::shared_ptr<TransferWorker> TorchBackend::State::worker_of(TransferWorker::Kind kind) {
  const std::lock_guard lock(worker_mutex);
  std::shared_ptr<TransferWorker>& worker = workers[static_cast<std::size_t>(kind)];
  if (worker == nullptr) {
    worker = TransferWorker::shared(kind);
  }
  return worker;
}

void TorchBackend::State::submit(TransferWorker::Kind kind, TransferWorker::Work work) {
  const auto worker = worker_of(kind);
  transfers->begin();
  try {
    worker->submit(std::move(work));
  } catch (...) {
    transfers->end();
    throw;
  }
}

FencePtr TorchBackend::State::start(TransferWorker::Kind kind, Transfer transfer) {
  const auto job = std::make_shared<Job>(std::move(transfer), transfers, retirement);
  job->needed_now = true;
  submit(kind, Job::to_the_end(job));
  return job->fence;
}

FencePtr TorchBackend::State::start_ahead(TransferWorker::Kind when_needed, Transfer transfer) {
  const auto job = std::make_shared<Job>(std::move(transfer), transfers, retirement);
  job->fence->on_wait([job = std::weak_ptr(job), worker = std::weak_ptr(worker_of(when_needed))] {
    const auto needed = job.lock();
    const auto taker = worker.lock();
    if (needed == nullptr || taker == nullptr) {
      return;  // it has ended, or everything has
    }
    const bool is_first = !needed->needed_now.exchange(true);
    try {
      const TransferWorker::Work work = Job::to_the_end(needed);
      // A worker that waits comes to nothing that is behind it in its queue.
      if (!taker->run_here(work) && is_first) {
        taker->submit(work);
      }
    } catch (...) {
      // It keeps its place.
    }
  });
  submit(TransferWorker::Kind::kAhead, [job](FileIo& io) {
    const std::unique_lock lock(job->mutex, std::try_to_lock);
    // Or the other worker is at it, to the end.
    return !lock.owns_lock() || job->go_on(io, /*may_wait=*/false);
  });
  return job->fence;
}

std::shared_ptr<TensorBlock> TorchBackend::State::overwritten(const CopyRequest& request,
                                                              const TensorLayout& layout) {
  auto block = as<TensorBlock>(request.overwrite);
  if (block == nullptr || *block->tensor_layout() != layout) {
    throw_foreign_block();
  }
  block->check_intact();
  return block;
}

DeviceLayer::Room TorchBackend::State::room_for(const CopyRequest& request,
                                                const std::shared_ptr<const TensorLayout>& layout) {
  if (request.overwrite != nullptr) {
    return {overwritten(request, *layout), {}};
  }
  if (request.to == Location::pageable_host()) {
    return {TensorBlock::allocate(layout), {}};
  }
  return devices().allocate(layout, request.to);
}

CopyResult TorchBackend::State::copy_on_stream(const CopyRequest& request,
                                               const TensorBlock& source) {
  const auto block =
      request.overwrite != nullptr ? overwritten(request, *source.tensor_layout()) : nullptr;
  CopyResult result = devices().copy(request, source, block);
  if (block != nullptr) {
    block->count_overwrite();
  }
  return result;
}

void TorchBackend::State::hold_staging(const CopyRequest& request) {
  const Location device = request.to.is_cuda() ? request.to : request.from;
  if (!device.is_cuda()) {
    return;
  }
  devices().refuse_while_capturing(device, request.stream,
                                   "nothing is moved through page-locked buffers");
  const std::lock_guard lock(staging_mutex);
  if (std::shared_ptr<void>& held = staging[device]; held == nullptr) {
    held = devices().hold_staging(device);
  }
}

void TorchBackend::State::pace(const FencePtr& copy) noexcept {
  try {
    (void)start(TransferWorker::Kind::kPace, [copy, devices = options.devices](const Terms& terms) {
      return devices->pace(*copy, /*at_once=*/terms.abandon);
    });
  } catch (...) {
    // No thread for it: at once then, as those behind it wait until it is over.
    while (!options.devices->pace(*copy, /*at_once=*/true)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

std::shared_ptr<TensorBlock> TorchBackend::State::clone(const TensorBlock& block) {
  if (block.location() == Location::pageable_host()) {
    return block.clone();
  }
  CopyRequest request;
  request.from = request.to = block.location();
  if (block.location().is_cuda()) {
    CopyResult copied = copy_on_stream(request, block);
    wait_for(copied.ready);
    return as<TensorBlock>(copied.block);
  }
  DeviceLayer::Room room = devices().allocate(block.tensor_layout(), block.location());
  wait_all(room.after);
  block.copy_on_host(*room.block);
  return std::move(room.block);
}

TorchBackend::TorchBackend(TorchBackendOptions options) : state_(std::make_unique<State>()) {
  state_->options = std::move(options);
  if (state_->options.system_calls == nullptr) {
    state_->options.system_calls = std::make_shared<SystemCalls>();
  }
}

TorchBackend::~TorchBackend() {
  close(/*wait=*/false);
  if (state_->is_orphan()) {
    (void)state_.release();  // another thread may have been in the middle of changing it
  } else if (!state_->waited && !state_->has_ended()) {
    State::leave_behind(std::move(state_));  // unlocking pages waits for the device
  }
}

void TorchBackend::State::leave_behind(std::unique_ptr<State> state) noexcept {
  const std::shared_ptr<State> left = std::move(state);
  try {
    // The thread lives as long as the work, which holds it.
    const std::shared_ptr<TransferWorker> worker =
        TransferWorker::shared(TransferWorker::Kind::kLeftBehind);
    worker->submit([left, worker](FileIo&) { return left->end(); });
  } catch (...) {
    keep_for_ever(left);  // no thread for it: what is in use must not be freed
  }
}

void TorchBackend::open(ManagerId manager, const ManagerOptions& options) {
  if (state_->opened) {
    throw std::logic_error("TorchBackend: it already serves a manager; make one backend for each");
  }
  std::vector<std::shared_ptr<FileTier>> disks;
  for (const DiskTier& disk : options.disks) {
    disks.push_back(std::make_shared<FileTier>(state_->options.system_calls, disk, manager,
                                               !engine_is_blocking(state_->options.file_engine)));
  }
  state_->disks = std::move(disks);
  state_->opened = true;
}

void TorchBackend::attach(std::weak_ptr<Reclaimer> reclaimer) {
  if (state_->options.devices != nullptr) {
    state_->options.devices->attach(std::move(reclaimer));
  }
}

void TorchBackend::close(bool wait) noexcept {
  if (std::exchange(state_->closed, true)) {
    return;
  }
  const bool in_child = state_->is_orphan();
  if (wait && !in_child) {
    state_->transfers->wait_until_idle();
    for (const auto& retiring : state_->retirement->take_all()) {
      wait_all(retiring.after);
    }
  } else if (!in_child) {
    state_->transfers->abandon();
  }
  if (wait) {
    for (const auto& disk : state_->disks) {
      disk->remove();
    }
  }
  // Without waiting, what is still in flight removes its directory when it ends.
  state_->disks.clear();
  if (in_child) {
    return;  // the rest is the parent's
  }
  auto workers = std::exchange(state_->workers, {});
  if (wait) {
    for (auto& worker : workers) {
      TransferWorker::release_and_join(std::move(worker));
    }
    state_->staging.clear();
    if (state_->options.devices != nullptr) {
      (void)state_->devices().trim();
    }
    state_->waited = true;
  }
}

std::string TorchBackend::why_unavailable(Location location) const {
  switch (location.kind()) {
    case LocationKind::kPageableHost: return {};
    case LocationKind::kPinnedHost:
    case LocationKind::kCuda:
      return state_->options.devices != nullptr
                 ? state_->devices().why_unavailable(location)
                 : "devices and page-locked memory need the CUDA layer, which this backend does "
                   "not have (TorchBackendOptions::devices)";
    case LocationKind::kDisk:
      return state_->find_disk(location) != nullptr
                 ? std::string()
                 : "no disk of this name is declared in the manager's options";
  }
  return "the location is of an unknown kind";
}

void TorchBackend::check_available(Location location) const {
  if (const std::string why = why_unavailable(location); !why.empty()) {
    throw UnavailableError(fmt::format("{}: {}", to_string(location), why));
  }
}

Bytes TorchBackend::occupied_bytes(const ValueSpec& spec, Location location) const {
  const TensorLayout* layout = layout_of(spec);
  if (is_device_tier(location) && layout != nullptr && state_->options.devices != nullptr) {
    return state_->devices().occupied_bytes(*layout, location);
  }
  if (const FileTier* disk = location.is_disk() ? state_->find_disk(location) : nullptr;
      disk != nullptr && layout != nullptr) {
    return disk->occupied_bytes(*layout);
  }
  return layout != nullptr ? layout->packed_bytes()
                           : spec.storage_bytes.rounded_up(TensorLayout::kPackAlignment);
}

TransferPath TorchBackend::path(Location from, Location to) const {
  if (from.is_disk() || to.is_disk()) {
    return TransferPath::kFile;
  }
  if (from.is_cuda() && to.is_cuda()) {
    return TransferPath::kPeer;
  }
  // Within host memory one thread copies, and nothing can fail.
  const bool is_staged = (from.is_cuda() || to.is_cuda()) && !goes_on_stream(from, to);
  return is_staged ? TransferPath::kStaged : TransferPath::kDirect;
}

bool TorchBackend::is_lost(Location location) const {
  return location.is_cuda() && state_->options.devices != nullptr &&
         state_->devices().is_lost(location);
}

void TorchBackend::check_answers(Location location) {
  if (location.is_cuda() && state_->options.devices != nullptr) {
    state_->devices().check_answers(location);
  }
}

bool TorchBackend::reuses_in_device_order(Location location) const {
  return is_device_tier(location);
}

bool TorchBackend::is_shared(const Block& block) const {
  const auto* tensors = as<TensorBlock>(&block);
  return tensors != nullptr && tensors->is_shared();
}

Bytes TorchBackend::staging_bytes(Location from, Location to) const {
  const bool on_device = from.is_cuda() || to.is_cuda();
  return on_device && !goes_on_stream(from, to) && state_->options.devices != nullptr
             ? state_->devices().staging_bytes()
             : Bytes();
}

std::optional<SegmentBytes> TorchBackend::predict_segments(
    Location location, std::span<const MemoryStep> steps) const {
  return is_device_tier(location) && state_->options.devices != nullptr
             ? std::optional(state_->devices().predict_segments(location, steps))
             : std::nullopt;
}

std::optional<SpareBytes> TorchBackend::spare_bytes(Location location, const Growth& wanted) {
  return location == Location::pinned_host() && state_->options.devices != nullptr
             ? state_->devices().lockable_bytes(wanted)
             : std::nullopt;
}

CopyResult TorchBackend::copy(const CopyRequest& request) {
  const ProfilerRange range(request.from, request.to);
  if (state_->is_orphan()) {
    throw ForkError(
        "this process was forked from the one that made the manager; the threads and devices that "
        "copy exist only in the parent");
  }
  state_->retirement->free_completed();
  check_available(request.to);
  const State::Origin origin{as<TensorBlock>(request.source), as<FileBlock>(request.source)};
  if (origin.memory == nullptr && origin.file == nullptr) {
    throw_foreign_block();
  }
  if (origin.memory != nullptr) {
    origin.memory->check_intact();
  }
  if (goes_on_stream(request.from, request.to) && origin.memory != nullptr) {
    CopyResult result = state_->copy_on_stream(request, *origin.memory);
    if (result.put_off) {
      state_->pace(result.ready);
    }
    return result;
  }
  CopyResult result = state_->copy_by_thread(request, origin);
  result.path = path(request.from, request.to);
  return result;
}

CopyResult TorchBackend::State::copy_by_thread(const CopyRequest& request, const Origin& origin) {
  FileTier* to_disk = request.to.is_disk() ? find_disk(request.to) : nullptr;
  if (request.from == request.to && request.to.is_disk()) {
    throw std::logic_error(fmt::format("TorchBackend: a copy from {} to {} cannot be asked for",
                                       to_string(request.from), to_string(request.to)));
  }
  for (FileTier* disk : {to_disk, origin.file != nullptr ? origin.file->tier().get() : nullptr}) {
    if (disk != nullptr) {
      disk->refuse_in_forked_child();
    }
  }
  // What can be seen to be wrong now is better said now than by the fence.
  if (origin.file != nullptr && !is_pending(request.source_ready)) {
    wait_for(request.source_ready);
    origin.file->tier()->check(*origin.file);
  }
  hold_staging(request);
  return to_disk != nullptr ? copy_to_file(request, origin, *to_disk)
                            : copy_to_memory(request, origin);
}

FencePtr TorchBackend::State::start(const CopyRequest& request, Before before, Copying copying) {
  const bool is_ahead = request.ahead_of_need && !request.stream.has_value();
  const Location device = request.to.is_cuda() ? request.to : request.from;
  Transfer transfer =
      [copying = std::move(copying), before = std::move(before),
       staged =
           StagedCopy(options.devices, request.stream,
                      device.is_cuda() && !is_ahead ? devices().announce_staged(device) : nullptr),
       from = request.from, to = request.to](const Terms& terms) mutable {
        if (!terms.is_turn(before)) {
          return false;
        }
        const ProfilerRange range(from, to);
        return copying(staged, terms);
      };
  const auto kind = request.from.is_disk() || request.to.is_disk() ? TransferWorker::Kind::kDisk
                                                                   : TransferWorker::Kind::kStaging;
  return is_ahead ? start_ahead(kind, std::move(transfer)) : start(kind, std::move(transfer));
}

CopyResult TorchBackend::State::copy_to_file(const CopyRequest& request, const Origin& origin,
                                             FileTier& disk) {
  const auto file = request.overwrite != nullptr ? as<FileBlock>(request.overwrite)
                                                 : disk.make_file(origin.layout());
  if (file == nullptr || *file->tensor_layout() != *origin.layout()) {
    throw_foreign_block();
  }
  disk.make_file_again(*file);
  CopyResult result;
  result.ready = start(request, {request.source_ready, request.overwrite_after},
                       [origin, file](StagedCopy& staged, const Terms& terms) {
                         if (origin.file != nullptr) {
                           FileTier::copy(origin.file, file, terms.abandon, terms.io);
                         } else if (origin.memory->location().is_cuda()) {
                           return staged.from_device(*origin.memory, file, terms);
                         } else {
                           transfer_all(writing(file), *origin.memory, terms);
                         }
                         return true;
                       });
  result.block = file;
  return result;
}

CopyResult TorchBackend::State::copy_to_memory(const CopyRequest& request, const Origin& origin) {
  DeviceLayer::Room room = room_for(request, origin.layout());
  Before before{request.source_ready, request.overwrite_after};
  before.users.insert(before.users.end(), room.after.begin(), room.after.end());
  CopyResult result;
  result.ready = start(request, std::move(before),
                       [origin, target = room.block](StagedCopy& staged, const Terms& terms) {
                         if (target->location().is_cuda()) {
                           return origin.file != nullptr
                                      ? staged.to_device(*target, origin.file, terms)
                                      : staged.to_device(*target, *origin.memory, terms);
                         }
                         if (origin.file != nullptr) {
                           transfer_all(reading(origin.file), *target, terms);
                         } else if (origin.memory->location().is_cuda()) {
                           return staged.from_device(*origin.memory, *target, terms);
                         } else {
                           origin.memory->copy_on_host(*target);
                         }
                         return true;
                       });
  if (request.overwrite != nullptr) {
    // Autograd must not take the new bytes for those that it saved.
    room.block->count_overwrite();
  }
  result.block = std::move(room.block);
  return result;
}

std::exception_ptr TorchBackend::copy_all(std::span<const CopyRequest> requests,
                                          std::vector<CopyResult>& results) {
  const bool on_stream =
      std::all_of(requests.begin(), requests.end(), [](const CopyRequest& request) {
        return goes_on_stream(request.from, request.to) &&
               as<TensorBlock>(request.source.get()) != nullptr;
      });
  if (requests.empty() || !on_stream || state_->is_orphan()) {
    return Backend::copy_all(requests, results);
  }
  const ProfilerRange range(requests.front().from, requests.front().to);
  state_->retirement->free_completed();
  std::exception_ptr error;
  std::size_t num_good = 0;
  try {
    check_available(requests.front().to);
    for (; num_good < requests.size(); ++num_good) {
      static_cast<const TensorBlock&>(*requests[num_good].source).check_intact();
    }
  } catch (...) {
    error = std::current_exception();
  }
  if (num_good == 0) {
    return error;
  }
  const std::exception_ptr failed = state_->devices().copy_all(requests.first(num_good), results);
  return failed != nullptr ? failed : error;
}

BlockPtr TorchBackend::reconstruct(Source& source, const ValueSpec& spec, Location at) {
  check_available(at);
  const BlockPtr loaded = source.load();
  auto block = as<TensorBlock>(loaded);
  if (block == nullptr) {
    throw MaterializationError(
        fmt::format("{} gave {}: expected tensors at {}", source.describe(),
                    loaded == nullptr ? "nothing" : "a block that the torch backend cannot keep",
                    to_string(at)));
  }
  if (block->location() != at) {
    throw MaterializationError(fmt::format("{} gave a value at {}: it was registered at {}",
                                           source.describe(), to_string(block->location()),
                                           to_string(at)));
  }
  if (layout_of(spec) == nullptr) {
    throw MaterializationError(fmt::format(
        "{}: the value was registered without a layout of tensors, so nothing says what it must be",
        source.describe()));
  }
  if (at.is_cuda()) {
    wait_for(record_use(current_stream(at)));  // on which the source made it
  }
  // Memory that the source keeps a reference on would change under the manager's hands.
  const bool is_ours = !block->is_shared() && block->owns_memory();
  return is_ours ? block : state_->clone(*block);
}

void TorchBackend::release(BlockPtr block, std::vector<FencePtr> after) noexcept {
  const bool on_devices = block != nullptr && is_device_tier(block->location());
  try {
    if (state_->is_orphan()) {
      if (on_devices) {
        keep_for_ever(std::move(block));  // another's, or nobody's any more
      }
      return;
    }
    state_->retirement->free_completed();
    if (const auto* tensors = as<TensorBlock>(block.get());
        tensors != nullptr && on_devices && state_->options.devices != nullptr &&
        state_->devices().end_use(*tensors,
                                  {.last_uses = after, .used_by_others = tensors->is_shared()})) {
      return;
    }
    if (any_pending(after)) {
      state_->retirement->add(block, after);
      // The last fence may have completed between the two, with nobody left to look.
      state_->retirement->free_completed();
    }
  } catch (...) {
    // No memory to remember it with: wait instead.
    wait_all(after);
  }
}

FencePtr TorchBackend::watch_escape(const Block& block) {
  const auto* tensors = as<TensorBlock>(&block);
  if (tensors == nullptr) {
    return nullptr;
  }
  if (is_device_tier(tensors->location()) && state_->options.devices != nullptr) {
    state_->devices().refuse_while_capturing(tensors->location(), {}, "nothing is freed");
  }
  return tensors->watch_escape();
}

void TorchBackend::begin_access(Block& block, Access access, const std::optional<Stream>& stream,
                                std::span<const FencePtr> after, bool checksum) {
  TensorBlock& tensors = accessible(block);
  const bool on_device = tensors.location().is_cuda();
  if (stream.has_value() && !on_device) {
    throw std::invalid_argument("host memory is not accessed on a stream");
  }
  for (const FencePtr& fence : after) {
    if (on_device) {
      state_->devices().wait(stream.has_value() ? *stream : current_stream(tensors.location()),
                             fence);
    } else {
      wait_for(fence);
    }
  }
  tensors.check_intact();
  if (access == Access::kWrite && !tensors.tensor_layout()->detects_writes()) {
    throw MaterializationError(
        "the value has inference tensors, whose writes nobody could see; it cannot be written");
  }
  tensors.begin_access(checksum && !on_device);  // a comparison would wait for the device
}

std::optional<std::string> TorchBackend::end_access(Block& block, Access access, bool checksum) {
  TensorBlock& tensors = accessible(block);
  checksum = checksum && !tensors.location().is_cuda();
  if (access == Access::kWrite) {
    tensors.accept_contents(checksum);
    return std::nullopt;
  }
  return tensors.take_undeclared_write(checksum);
}

std::unique_ptr<View> TorchBackend::open_view(Block& block) {
  return accessible(block).open_view();
}

Stream TorchBackend::current_stream(Location location) {
  return location.is_cuda() && state_->options.devices != nullptr
             ? state_->devices().current_stream(location)
             : Backend::current_stream(location);
}

void TorchBackend::check_may_wait() const {
  if (state_->options.devices != nullptr) {
    state_->devices().refuse_while_capturing(Location::pinned_host(), {}, "nothing is waited for");
  }
}

FencePtr TorchBackend::record_use(const Stream& stream) {
  return stream.device.is_cuda() && state_->options.devices != nullptr
             ? state_->devices().record_use(stream)
             : Backend::record_use(stream);
}

bool io_uring_is_usable() noexcept {
  return ring_is_usable();
}

}  // namespace residency
