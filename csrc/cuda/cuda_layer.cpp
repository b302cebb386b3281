#include "residency/cuda/cuda_layer.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <utility>

#include <ATen/cuda/PeerToPeerAccess.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "csrc/cuda/copy_batch.h"
#include "csrc/cuda/device_segments.h"
#include "csrc/cuda/event_fence.h"
#include "csrc/cuda/nvtx_range.h"
#include "csrc/cuda/on_device.h"
#include "csrc/cuda/paced_copy.h"
#include "csrc/cuda/page_locked_segments.h"
#include "csrc/cuda/range_memory.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/staging.h"
#include "csrc/cuda/streams.h"
#include "csrc/cuda/tenants.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

void refuse_captured(cudaStream_t stream, Location device, std::string_view what) {
  if (is_capturing(stream, device)) {
    throw CaptureError(
        fmt::format("{}: a stream of {} is being captured into a graph", what, to_string(device)));
  }
}

Bytes range_bytes(Bytes nbytes, Location at) {
  return at.is_cuda() ? nbytes.rounded_up(DeviceSegments::kAlignment.count())
                      : PageLockedSegments::range_bytes(nbytes);
}

/// Adds what a copy consists of. Returns its bytes.
std::size_t add_pieces(const TensorBlock& source, const TensorBlock& target, Pieces& pieces) {
  const TensorLayout& layout = *source.tensor_layout();
  std::size_t num_bytes = 0;
  const auto add = [&](void* to, const void* from, std::size_t nbytes) {
    if (nbytes != 0) {
      pieces.push_back({static_cast<std::byte*>(to), static_cast<const std::byte*>(from), nbytes});
      num_bytes += nbytes;
    }
  };
  if (source.is_packed() && target.is_packed()) {
    add(target.pack_data(), source.pack_data(),
        static_cast<std::size_t>(layout.packed_bytes().count()));
    return num_bytes;
  }
  for (const std::uint32_t i : layout.order()) {
    add(target.storage_data(i), source.storage_data(i),
        static_cast<std::size_t>(layout.storages()[i].count()));
  }
  return num_bytes;
}

Bytes total_of(const std::vector<iovec>& runs) {
  Bytes total;
  for (const iovec& run : runs) {
    total += Bytes(static_cast<std::int64_t>(run.iov_len));
  }
  return total;
}

/// The next bytes of the runs, `most` at most.
std::vector<iovec> next_of(const std::vector<iovec>& runs, Bytes done, Bytes most) {
  std::vector<iovec> next;
  auto to_skip = static_cast<std::size_t>(done.count());
  auto room = static_cast<std::size_t>(most.count());
  for (const iovec& run : runs) {
    const std::size_t skipped = std::min(to_skip, run.iov_len);
    to_skip -= skipped;
    const std::size_t nbytes = std::min(room, run.iov_len - skipped);
    room -= nbytes;
    if (nbytes != 0) {
      next.push_back({static_cast<std::byte*>(run.iov_base) + skipped, nbytes});
    }
  }
  return next;
}

/// Nothing need wait for it.
bool is_over(const FencePtr& fence) noexcept {
  return fence == nullptr || fence->poll() == FenceStatus::kDone;
}

/// Copies on their way onto a stream, with one fence behind them.
struct Enqueuing {
  DeviceStreams& streams;
  Location device;
  std::optional<Peers> peers = std::nullopt;
  Pieces pieces = {};
  c10::SmallVector<FencePtr, 4> sources = {};  ///< should one have failed, so do the copies
  c10::SmallVector<FencePtr, 4> after = {};    ///< however they end
  bool blocked = false;

  /// Many copies of one call often come behind the same few fences.
  static void add_fence(c10::SmallVectorImpl<FencePtr>& to, const FencePtr& fence);
  /// Nothing has to come before it that only the host can wait for.
  [[nodiscard]] bool can_wait_on_stream() const;
  /// Throws with nothing of it in flight.
  std::shared_ptr<EventFence> enqueue_on(cudaStream_t stream);
};

void Enqueuing::add_fence(c10::SmallVectorImpl<FencePtr>& to, const FencePtr& fence) {
  constexpr std::size_t kLookedAt = 8;
  auto* const first = to.end() - std::min(to.size(), kLookedAt);
  if (std::find(first, to.end(), fence) == to.end()) {
    to.push_back(fence);
  }
}

bool Enqueuing::can_wait_on_stream() const {
  const auto needs_host = [](const FencePtr& fence) {
    return is_pending(fence) && !fence->on_stream();
  };
  return std::none_of(sources.begin(), sources.end(), needs_host) &&
         std::none_of(after.begin(), after.end(), needs_host);
}

std::shared_ptr<EventFence> Enqueuing::enqueue_on(cudaStream_t stream) {
  const RelaxedCapture relaxed;
  for (const FencePtr& fence : sources) {
    blocked |= wait_on_stream(stream, fence, device);
  }
  for (const FencePtr& fence : after) {
    blocked |= come_after(stream, fence, device);
  }
  const cudaEvent_t begin = streams.events->take();
  if (const cudaError_t error = cudaEventRecord(begin, stream); error != cudaSuccess) {
    streams.events->give_back(begin);
    throw_cuda_error(error, device, "cudaEventRecord");
  }
  auto fence = EventFence::prepare(streams.events, stream, begin);
  const auto check = [&](cudaError_t error, const char* call) {
    if (error != cudaSuccess) {
      drain(stream, device);
      throw_cuda_error(error, device, call);
    }
  };
  check(enqueue_copies(pieces, peers, stream), "cudaMemcpyAsync");
  check(fence->record(), "cudaEventRecord");
  return fence;
}

/// For what is done besides the stream in question: the caller's current streams at the current
/// device and at `at` are those that a capture would be of. Where there is no context yet there is
/// no capture, and none is to be made by asking.
void refuse_while_caller_captures(Location at, std::string_view what) {
  if (c10::cuda::device_count() == 0) {
    return;
  }
  c10::DeviceIndex ordinal = 0;
  const cudaError_t answer = c10::cuda::GetDevice(&ordinal);
  if (answer != cudaSuccess) {
    (void)cudaGetLastError();
    if (is_lost(answer)) {
      return;  // what a lost device captured is lost too; which one it is will turn out
    }
    throw UnavailableError(fmt::format("{}: cudaGetDevice failed: {} ({})", what,
                                       cudaGetErrorString(answer), cudaGetErrorName(answer)));
  }
  const Location current = Location::cuda(ordinal);
  const auto refuse_at = [&](Location device) {
    if (!c10::cuda::hasPrimaryContext(index_of(device))) {
      return;
    }
    refuse_captured(c10::cuda::getCurrentCUDAStream(index_of(device)).stream(), device, what);
  };
  refuse_at(current);
  if (at.is_cuda() && at != current) {
    refuse_at(at);
  }
}

/// Where the devices can: copies then need no detour through host memory. PyTorch keeps in mind
/// what it has enabled.
void let_reach_each_other(const Peers& peers) noexcept {
  try {
    const RelaxedCapture relaxed;
    (void)at::cuda::get_p2p_access(static_cast<c10::DeviceIndex>(peers.from),
                                   static_cast<c10::DeviceIndex>(peers.to));
  } catch (const std::exception&) {
    (void)cudaGetLastError();  // without it they are slower
  }
}

/// Where copies between two locations go. Its device is the current one until it ends.
class Route {
 public:
  /// Throws `CaptureError`.
  Route(Location from, Location to) : to_device_(to.is_cuda()), device_(to_device_ ? to : from) {
    refuse_while_caller_captures(device_, "nothing is moved");
    // Also where c10 says that it is the current one: c10 puts off going back to a device that has
    // no context yet, and CUDA is then still at another.
    current_.emplace(device_);
    streams_ = &streams_of(device_);
    if (from.is_cuda() && to.is_cuda() && from != to) {
      peers_ = Peers{from.cuda_index(), to.cuda_index()};
      let_reach_each_other(*peers_);
    }
  }
  [[nodiscard]] Location device() const noexcept { return device_; }
  [[nodiscard]] TransferPath path() const noexcept {
    return peers_.has_value() ? TransferPath::kPeer : TransferPath::kDirect;
  }
  [[nodiscard]] const Lane& lane() const noexcept {
    return to_device_ ? streams_->in : streams_->out;
  }
  [[nodiscard]] AheadLane& ahead_lane() const noexcept {
    return to_device_ ? streams_->ahead_in : streams_->ahead_out;
  }
  [[nodiscard]] const char* label() const noexcept {
    return peers_.has_value() ? "residency::copy between devices" : lane().label;
  }
  [[nodiscard]] Enqueuing begin() const { return {*streams_, device_, peers_}; }

 private:
  bool to_device_;
  Location device_;
  std::optional<OnDevice> current_;
  DeviceStreams* streams_ = nullptr;
  std::optional<Peers> peers_;
};

[[noreturn]] void throw_transfer_error(const CopyRequest& request, TransferPath path,
                                       const std::exception& cause) {
  throw TransferError(request.value, path, std::current_exception(),
                      fmt::format("{} from {} to {}: {}", to_string(request.value),
                                  to_string(request.from), to_string(request.to), cause.what()));
}

/// Copies that wait to be enqueued together.
class Gathered {
 public:
  Gathered(const Route& route, std::size_t num_requests, std::vector<CopyResult>& results)
      : route_(route), results_(results), copies_(route.begin()) {
    copies_.pieces.reserve(num_requests);
    blocks_.reserve(num_requests);
  }

  [[nodiscard]] bool empty() const noexcept { return blocks_.empty(); }
  /// Whether one of so many bytes may share a fence with these, which the first of them waits for
  /// as the last does: if they are few, and no less free to begin.
  [[nodiscard]] bool has_room(Bytes nbytes, bool waits) const noexcept {
    constexpr auto kMost = Bytes(std::int64_t{1} << 20);  // 20 us at 50 GB/s
    return waits == waits_ && nbytes <= kMost.saturating_sub(nbytes_);
  }
  /// What they come behind by now.
  [[nodiscard]] std::span<const FencePtr> after() const noexcept {
    return {copies_.after.data(), copies_.after.size()};
  }
  void add(const CopyRequest& request, DeviceLayer::Room room, bool waits);
  /// Adds their results. Throws with none of them in flight.
  void enqueue();

 private:
  const Route& route_;
  std::vector<CopyResult>& results_;  // has room
  Enqueuing copies_;
  const CopyRequest* first_ = nullptr;
  std::vector<std::pair<std::shared_ptr<TensorBlock>, std::size_t>> blocks_;  // with their bytes
  Bytes nbytes_;
  bool waits_ = false;
};

void Gathered::add(const CopyRequest& request, DeviceLayer::Room room, bool waits) {
  const auto& source = static_cast<const TensorBlock&>(*request.source);
  if (waits) {
    for (const FencePtr& fence : room.after) {
      Enqueuing::add_fence(copies_.after, fence);
    }
    Enqueuing::add_fence(copies_.sources, request.source_ready);
  }
  Pieces pieces;
  const std::size_t num_bytes = add_pieces(source, *room.block, pieces);
  if (blocks_.size() == blocks_.capacity()) {
    blocks_.reserve(2 * blocks_.size() + 1);
  }
  copies_.pieces.append(pieces.begin(), pieces.end());  // all or none: what follows cannot fail
  if (empty()) {
    first_ = &request;
    waits_ = waits;
  }
  nbytes_ += Bytes(static_cast<std::int64_t>(num_bytes));
  blocks_.emplace_back(std::move(room.block), num_bytes);
}

void Gathered::enqueue() {
  if (empty()) {
    return;
  }
  auto blocks = std::exchange(blocks_, {});
  nbytes_ = Bytes();
  // First what can fail, as nothing may once they are under way.
  const auto parts = blocks.size() > 1 ? std::make_shared<FenceParts>(blocks.size()) : nullptr;
  std::shared_ptr<EventFence> fence;
  try {
    fence = copies_.enqueue_on(route_.lane().stream);
  } catch (const UnavailableError& error) {
    throw_transfer_error(*first_, route_.path(), error);
  }
  copies_.pieces.clear();
  copies_.sources.clear();
  copies_.after.clear();
  const bool blocked = std::exchange(copies_.blocked, false);
  if (parts != nullptr) {
    parts->set_whole(fence);
  }
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    auto& [block, num_bytes] = blocks[i];
    results_.push_back({std::move(block),
                        parts != nullptr ? parts->part(i, num_bytes) : FencePtr(fence),
                        route_.path(), blocked});
  }
}

class CudaLayer final : public DeviceLayer, public std::enable_shared_from_this<CudaLayer> {
 public:
  explicit CudaLayer(const CudaLayerOptions& options) : options_(options) {}
  [[nodiscard]] std::string why_unavailable(Location at) const override;
  [[nodiscard]] bool is_lost(Location device) const override { return is_known_lost(device); }
  void check_answers(Location device) override;
  [[nodiscard]] std::optional<SpareBytes> lockable_bytes(const Growth& wanted) const override;
  [[nodiscard]] Bytes occupied_bytes(const TensorLayout& layout, Location at) const override;
  [[nodiscard]] SegmentBytes predict_segments(Location at,
                                              std::span<const MemoryStep> steps) const override;
  [[nodiscard]] Bytes staging_bytes() const override { return Staging::kRingBytes; }
  [[nodiscard]] std::shared_ptr<void> hold_staging(Location device) override {
    refuse_in_forked_child();
    return staging_of(device);
  }
  [[nodiscard]] std::shared_ptr<void> announce_staged(Location device) override {
    refuse_in_forked_child();
    return Staging::announce(staging_of(device));
  }
  [[nodiscard]] Room allocate(std::shared_ptr<const TensorLayout> layout, Location at) override;
  void refuse_while_capturing(Location at, const std::optional<Stream>& stream,
                              std::string_view what) const override;
  [[nodiscard]] bool end_use(const TensorBlock& block, const LastUses& uses) override;
  [[nodiscard]] CopyResult copy(const CopyRequest& request, const TensorBlock& source,
                                std::shared_ptr<TensorBlock> overwrite) override;
  [[nodiscard]] std::exception_ptr copy_all(std::span<const CopyRequest> requests,
                                            std::vector<CopyResult>& results) override;
  [[nodiscard]] bool pace(Fence& copy, bool at_once) noexcept override;
  [[nodiscard]] bool copy_staged(const TensorBlock& on_device, bool to_device, const HostEnd& host,
                                 const std::optional<Stream>& stream, Progress& progress,
                                 const Signals& signals) override;
  [[nodiscard]] Stream current_stream(Location device) const override;
  [[nodiscard]] FencePtr record_use(const Stream& stream) override;
  void wait(const Stream& stream, const FencePtr& fence) override;
  void attach(std::weak_ptr<Reclaimer> reclaimer) override;
  [[nodiscard]] Usage usage(Location at) const override;
  void reset_peaks() override;
  bool trim() noexcept override;

 private:
  /// `memory` is that of the location.
  [[nodiscard]] static Room take_room(std::shared_ptr<const TensorLayout> layout, Location at,
                                      RangeMemory& memory, std::span<const FencePtr> pending = {});
  [[nodiscard]] static std::shared_ptr<RangeMemory> make_memory(Location at);
  [[nodiscard]] std::shared_ptr<RangeMemory> memory_at(Location at);
  [[nodiscard]] std::shared_ptr<RangeMemory> find_memory(Location at) const;
  [[nodiscard]] std::vector<std::shared_ptr<RangeMemory>> all_memory() const;
  [[nodiscard]] std::shared_ptr<Staging> staging_of(Location device);
  static std::size_t slot_of(Location at) {
    return at.is_cuda() ? 1 + static_cast<std::size_t>(at.cuda_index()) : 0;
  }

  const CudaLayerOptions options_;
  mutable std::mutex mutex_;
  std::array<std::shared_ptr<Staging>, kMaxDevices> staging_;  // of each device
  std::array<std::shared_ptr<RangeMemory>, 1 + kMaxDevices>
      memories_;  // page-locked, then by device
};

std::string CudaLayer::why_unavailable(Location at) const {
  const int num_devices = c10::cuda::device_count();
  if (at.is_cuda() && at.cuda_index() >= num_devices) {
    return fmt::format("{} device(s) are visible", num_devices);
  }
  if (num_devices == 0) {
    return "page-locked memory is for copies to a device, and none is visible";
  }
  return {};
}

void CudaLayer::check_answers(Location device) {
  if (is_known_lost(device)) {
    throw DeviceLostError(device, to_string(device) + " was lost");
  }
  refuse_in_forked_child();
  const DeviceStreams* streams = find_streams(device);
  if (streams == nullptr) {
    return;  // nothing of ours was given to it
  }
  const OnDevice current(device);
  const RelaxedCapture relaxed;
  if (const cudaError_t error = cudaStreamQuery(streams->arena); error != cudaErrorNotReady) {
    check_cuda(error, device, "cudaStreamQuery");
  }
  (void)cudaGetLastError();  // "not ready" too would be found by whoever asks next
}

std::optional<SpareBytes> CudaLayer::lockable_bytes(const Growth& wanted) const {
  const Usage now = usage(Location::pinned_host());
  const Bytes in_slabs = now.segments - now.live;
  if (wanted.staging == Bytes() && wanted.values <= in_slabs) {
    return SpareBytes{in_slabs, Bytes()};  // to ask the system costs more than a plan
  }
  const std::optional<Bytes> lockable = PageLockedSegments::lockable_bytes();
  return lockable.has_value() ? std::optional(SpareBytes{in_slabs, *lockable}) : std::nullopt;
}

Bytes CudaLayer::occupied_bytes(const TensorLayout& layout, Location at) const {
  return range_bytes(layout.packed_bytes(), at);
}

std::shared_ptr<RangeMemory> CudaLayer::find_memory(Location at) const {
  const std::lock_guard lock(mutex_);
  return memories_[slot_of(at)];
}

std::shared_ptr<RangeMemory> CudaLayer::memory_at(Location at) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<RangeMemory>& memory = memories_[slot_of(at)];
  if (memory == nullptr) {
    memory = make_memory(at);
  }
  return memory;
}

std::shared_ptr<Staging> CudaLayer::staging_of(Location device) {
  const std::lock_guard lock(mutex_);
  std::shared_ptr<Staging>& staging = staging_.at(static_cast<std::size_t>(device.cuda_index()));
  if (staging == nullptr) {
    staging = std::make_shared<Staging>();
  }
  return staging;
}

std::shared_ptr<RangeMemory> CudaLayer::make_memory(Location at) {
  return at.is_cuda() ? std::make_shared<RangeMemory>(std::make_unique<DeviceSegments>(at),
                                                      DeviceSegments::kAlignment)
                      : std::make_shared<RangeMemory>(std::make_unique<PageLockedSegments>(),
                                                      PageLockedSegments::kAlignment);
}

SegmentBytes CudaLayer::predict_segments(Location at, std::span<const MemoryStep> steps) const {
  if (is_orphan()) {
    return {};
  }
  const auto memory = find_memory(at);
  return (memory != nullptr ? memory : make_memory(at))->predict(steps);
}

DeviceLayer::Room CudaLayer::allocate(std::shared_ptr<const TensorLayout> layout, Location at) {
  refuse_in_forked_child();
  refuse_while_caller_captures(at, "no memory is taken");
  return take_room(std::move(layout), at, *memory_at(at));
}

DeviceLayer::Room CudaLayer::take_room(std::shared_ptr<const TensorLayout> layout, Location at,
                                       RangeMemory& memory, std::span<const FencePtr> pending) {
  const c10::Device torch_device =
      at.is_cuda() ? c10::Device(c10::kCUDA, index_of(at)) : c10::Device(c10::kCPU);
  const Bytes nbytes = layout->packed_bytes();
  if (nbytes == Bytes()) {
    return {TensorBlock::pack(std::move(layout), at, at::DataPtr(nullptr, torch_device)), {}};
  }
  RangeMemory::Allocation allocation = memory.allocate(range_bytes(nbytes, at), pending);
  return {TensorBlock::pack(std::move(layout), at, std::move(allocation.memory)),
          std::move(allocation.after)};
}

void CudaLayer::refuse_while_capturing(Location at, const std::optional<Stream>& stream,
                                       std::string_view what) const {
  if (is_orphan()) {
    return;
  }
  refuse_while_caller_captures(at, what);
  if (stream.has_value()) {
    refuse_captured(handle_of(*stream), stream->device, what);
  }
}

bool CudaLayer::end_use(const TensorBlock& block, const LastUses& uses) {
  return (block.is_packed() && block.pack_data() == nullptr) || RangeMemory::end_use(block, uses);
}

CopyResult CudaLayer::copy(const CopyRequest& request, const TensorBlock& source,
                           std::shared_ptr<TensorBlock> overwrite) {
  refuse_in_forked_child();
  const Route route(request.from, request.to);
  Room room = overwrite != nullptr
                  ? Room{std::move(overwrite), request.overwrite_after}
                  : take_room(source.tensor_layout(), request.to, *memory_at(request.to));
  CopyResult result;
  result.path = route.path();
  Enqueuing copy = route.begin();
  (void)add_pieces(source, *room.block, copy.pieces);
  copy.after.append(room.after.begin(), room.after.end());
  copy.sources.push_back(request.source_ready);
  try {
    const NvtxRange range(route.label());
    if (request.ahead_of_need && !request.stream.has_value() && !copy.pieces.empty() &&
        copy.can_wait_on_stream()) {
      result.put_off = true;
      result.ready = std::make_shared<PacedCopy>(
          copy.streams.events, route.ahead_lane(), route.lane().stream, std::move(copy.pieces),
          request.source_ready, std::vector<FencePtr>(copy.after.begin(), copy.after.end()),
          copy.peers, static_cast<std::size_t>(options_.prefetch_chunk.count()));
    } else if (request.stream.has_value()) {
      const cudaStream_t stream = handle_of(*request.stream);
      refuse_captured(stream, route.device(), "nothing is moved");
      result.ready = copy.enqueue_on(stream);
    } else {
      result.ready = copy.enqueue_on(route.lane().stream);
    }
  } catch (const UnavailableError& error) {
    throw_transfer_error(request, result.path, error);
  }
  result.blocked = copy.blocked;
  result.block = std::move(room.block);
  return result;
}

std::exception_ptr CudaLayer::copy_all(std::span<const CopyRequest> requests,
                                       std::vector<CopyResult>& results) {
  std::exception_ptr failure;
  try {
    refuse_in_forked_child();
    results.reserve(results.size() + requests.size());  // nothing may fail once one is enqueued
    const Route route(requests.front().from, requests.front().to);
    const auto memory = memory_at(requests.front().to);
    const NvtxRange range(route.label());
    Gathered gathered(route, requests.size(), results);
    try {
      for (const CopyRequest& request : requests) {
        const auto& layout = static_cast<const TensorBlock&>(*request.source).tensor_layout();
        Room room = take_room(layout, request.to, *memory, gathered.after());
        const bool waits = !is_over(request.source_ready) || !room.after.empty();
        if (!gathered.empty() && !gathered.has_room(layout->packed_bytes(), waits)) {
          gathered.enqueue();
        }
        gathered.add(request, std::move(room), waits);
      }
    } catch (...) {
      failure = std::current_exception();
    }
    gathered.enqueue();  // they come before what has failed
  } catch (...) {
    failure = std::current_exception();
  }
  return failure;
}

bool CudaLayer::pace(Fence& copy, bool at_once) noexcept {
  auto* paced = dynamic_cast<PacedCopy*>(&copy);
  return paced == nullptr || paced->pace(at_once);
}

bool CudaLayer::copy_staged(const TensorBlock& on_device, bool to_device, const HostEnd& host,
                            const std::optional<Stream>& stream, Progress& progress,
                            const Signals& signals) {
  const Location device = on_device.location();
  const OnDevice current(device);
  const DeviceStreams& streams = streams_of(device);
  const NvtxRange range(to_device ? "residency::staged copy to device"
                                  : "residency::staged copy from device");
  Staging::Direction direction;
  direction.device = device;
  direction.to_device = to_device;
  direction.stream = stream.has_value() ? handle_of(*stream)
                     : to_device        ? streams.staged_in
                                        : streams.staged_out;
  if (stream.has_value()) {
    refuse_captured(direction.stream, device, "nothing is moved");
  }
  direction.events = streams.events.get();
  direction.may_fill_gaps = on_device.is_packed();
  direction.gives_way = !signals.needed_now;
  const std::vector<iovec> runs = on_device.storages();
  const bool in_chunks = direction.gives_way || host.is_slow;
  const std::vector<iovec> chunk =
      next_of(runs, progress.done, in_chunks ? options_.prefetch_chunk : total_of(runs));
  std::optional<std::int64_t> device_ns;
  if (!staging_of(device)->copy(chunk, host.transfer, direction, signals.abandon, device_ns)) {
    return false;
  }
  if (progress.device_ns.has_value() && device_ns.has_value()) {
    *progress.device_ns += *device_ns;
  } else {
    progress.device_ns.reset();
  }
  progress.done += total_of(chunk);
  return progress.done == total_of(runs);
}

Stream CudaLayer::current_stream(Location device) const {
  refuse_in_forked_child();
  return current_stream_of(device);
}

FencePtr CudaLayer::record_use(const Stream& stream) {
  refuse_in_forked_child();
  try {
    if (FencePtr fence = record_stream(stream); fence != nullptr) {
      return fence;
    }
  } catch (const DeviceLostError&) {
    return Fence::done();  // it uses nothing any more
  }
  throw CaptureError(
      fmt::format("no use is recorded: a stream of {} is being captured into a graph",
                  to_string(stream.device)));
}

void CudaLayer::wait(const Stream& stream, const FencePtr& fence) {
  if (fence == nullptr || fence->poll() == FenceStatus::kDone) {
    return;
  }
  refuse_in_forked_child();
  const cudaStream_t handle = handle_of(stream);
  const OnDevice current(stream.device);
  refuse_captured(handle, stream.device, "what is not ready cannot be waited for");
  const RelaxedCapture relaxed;
  (void)wait_on_stream(handle, fence, stream.device);
}

void CudaLayer::attach(std::weak_ptr<Reclaimer> reclaimer) {
  add_tenant(
      [weak = weak_from_this()](Location at) {
        const std::shared_ptr<CudaLayer> layer = weak.lock();
        return layer != nullptr && !layer->is_orphan() ? layer->find_memory(at) : nullptr;
      },
      std::move(reclaimer));
}

DeviceLayer::Usage CudaLayer::usage(Location at) const {
  const auto memory = is_orphan() ? nullptr : find_memory(at);
  return memory != nullptr ? memory->usage() : Usage{};
}

std::vector<std::shared_ptr<RangeMemory>> CudaLayer::all_memory() const {
  std::vector<std::shared_ptr<RangeMemory>> found;
  if (is_orphan()) {
    return found;
  }
  const std::lock_guard lock(mutex_);
  std::copy_if(memories_.begin(), memories_.end(), std::back_inserter(found),
               [](const auto& memory) { return memory != nullptr; });
  return found;
}

void CudaLayer::reset_peaks() {
  for (const auto& memory : all_memory()) {
    memory->reset_peak();
  }
}

bool CudaLayer::trim() noexcept {
  if (is_orphan()) {
    return true;
  }
  try {
    refuse_while_caller_captures(Location::pinned_host(), "nothing is trimmed");
  } catch (const CaptureError&) {
    return false;
  } catch (...) {
    // It is not known, and the calls that free say so themselves.
  }
  bool is_trimmed = true;
  for (const auto& memory : all_memory()) {
    is_trimmed &= memory->trim();
  }
  for (std::shared_ptr<Staging>& each : staging_) {
    std::shared_ptr<Staging> unheld;  // dies after the lock
    const std::lock_guard lock(mutex_);
    if (each.use_count() == 1) {  // under the mutex it becomes no more
      unheld = std::move(each);
    }
  }
  return is_trimmed;
}

}  // namespace

std::shared_ptr<DeviceLayer> make_cuda_layer(const CudaLayerOptions& options) {
  if (options.prefetch_chunk <= Bytes()) {
    throw std::invalid_argument(
        fmt::format("make_cuda_layer: a prefetch_chunk of {} B", options.prefetch_chunk.count()));
  }
  return std::make_shared<CudaLayer>(options);
}

}  // namespace residency
