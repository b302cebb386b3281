#include "residency/cuda/cuda_layer.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <exception>
#include <iterator>
#include <mutex>
#include <utility>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/SmallVector.h>
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "csrc/cuda/copy_batch.h"
#include "csrc/cuda/copy_group.h"
#include "csrc/cuda/device_segments.h"
#include "csrc/cuda/event_fence.h"
#include "csrc/cuda/nvtx_range.h"
#include "csrc/cuda/paced_copy.h"
#include "csrc/cuda/page_locked_segments.h"
#include "csrc/cuda/range_memory.h"
#include "csrc/cuda/runtime.h"
#include "csrc/cuda/staging.h"
#include "csrc/cuda/streams.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

cudaStream_t handle_of(const Stream& stream) {
  return c10::cuda::CUDAStream::unpack3(stream.id, index_of(stream.device), c10::DeviceType::CUDA)
      .stream();
}

void refuse_while_capturing(cudaStream_t stream, Location device, std::string_view what) {
  if (is_capturing(stream, device)) {
    throw CaptureError(
        fmt::format("{}: a stream of {} is being captured into a graph", what, to_string(device)));
  }
}

Bytes range_bytes(Bytes nbytes, Location at) {
  return at.is_cuda() ? nbytes.rounded_up(DeviceSegments::kAlignment.count())
                      : PageLockedSegments::range_bytes(nbytes);
}

Pieces pieces_of(const TensorBlock& source, const TensorBlock& target) {
  Pieces pieces;
  const TensorLayout& layout = *source.tensor_layout();
  if (source.is_packed() && target.is_packed()) {
    if (layout.packed_bytes() != Bytes()) {
      pieces.push_back({static_cast<std::byte*>(target.pack_data()),
                        static_cast<const std::byte*>(source.pack_data()),
                        static_cast<std::size_t>(layout.packed_bytes().count())});
    }
    return pieces;
  }
  for (const std::uint32_t i : layout.order()) {
    if (const auto nbytes = static_cast<std::size_t>(layout.storages()[i].count()); nbytes != 0) {
      pieces.push_back({static_cast<std::byte*>(target.storage_data(i)),
                        static_cast<const std::byte*>(source.storage_data(i)), nbytes});
    }
  }
  return pieces;
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

/// A copy on its way onto a stream.
struct Enqueuing {
  DeviceStreams& streams;
  Location device;
  Pieces pieces;
  c10::SmallVector<FencePtr, 4> after = {};
  std::optional<Peers> peers = std::nullopt;
  /// One piece of our own memory: more copies follow at once, and nothing can be wrong with it.
  bool may_be_put_off = false;
  bool blocked = false;

  /// Nothing has to come before it that only the host can wait for.
  [[nodiscard]] bool can_wait_on_stream() const;
  /// By itself. Throws with nothing of it in flight.
  FencePtr enqueue_on(cudaStream_t stream);
  /// On a stream of ours, perhaps in a group.
  FencePtr enqueue_on(Lane& lane);

 private:
  [[nodiscard]] bool is_free() const;
  [[nodiscard]] bool is_behind_all(cudaStream_t stream) const;
  void wait_on(cudaStream_t stream);
  FencePtr enqueue_behind(cudaStream_t stream);
  cudaEvent_t record_begin(cudaStream_t stream);
  void enqueue_pieces(cudaStream_t stream);
};

bool Enqueuing::can_wait_on_stream() const {
  return std::none_of(after.begin(), after.end(), [](const FencePtr& fence) {
    return is_pending(fence) && !fence->on_stream();
  });
}

/// Nothing has to come before it.
bool Enqueuing::is_free() const {
  return std::none_of(after.begin(), after.end(), [](const FencePtr& fence) {
    return fence != nullptr && fence->poll() != FenceStatus::kDone;
  });
}

/// The stream is behind whatever this one must come after.
bool Enqueuing::is_behind_all(cudaStream_t stream) const {
  return std::all_of(after.begin(), after.end(), [&](const FencePtr& fence) {
    const auto* in_stream = dynamic_cast<const StreamFence*>(fence.get());
    return fence == nullptr || (in_stream != nullptr && in_stream->stream() == stream) ||
           fence->poll() == FenceStatus::kDone;
  });
}

void Enqueuing::wait_on(cudaStream_t stream) {
  for (const FencePtr& fence : after) {
    blocked |= wait_on_stream(stream, fence, device);
  }
}

cudaEvent_t Enqueuing::record_begin(cudaStream_t stream) {
  const RelaxedCapture relaxed;
  const cudaEvent_t begin = streams.events->take();
  if (const cudaError_t error = cudaEventRecord(begin, stream); error != cudaSuccess) {
    streams.events->give_back(begin);
    throw_cuda_error(error, device, "cudaEventRecord");
  }
  return begin;
}

void Enqueuing::enqueue_pieces(cudaStream_t stream) {
  if (const cudaError_t error = enqueue_copies(pieces, peers, stream); error != cudaSuccess) {
    (void)cudaStreamSynchronize(stream);  // nothing of it may be in flight when this is told
    throw_cuda_error(error, device, "cudaMemcpyAsync");
  }
}

FencePtr Enqueuing::enqueue_on(cudaStream_t stream) {
  const RelaxedCapture relaxed;
  wait_on(stream);
  return enqueue_behind(stream);
}

FencePtr Enqueuing::enqueue_behind(cudaStream_t stream) {
  const auto fence = EventFence::prepare(streams.events, stream, record_begin(stream));
  enqueue_pieces(stream);
  if (const cudaError_t error = fence->record(); error != cudaSuccess) {
    (void)cudaStreamSynchronize(stream);
    throw_cuda_error(error, device, "cudaEventRecord");
  }
  return fence;
}

FencePtr Enqueuing::enqueue_on(Lane& lane) {
  std::size_t num_bytes = 0;
  for (const Piece& piece : pieces) {
    num_bytes += piece.nbytes;
  }
  std::shared_ptr<CopyGroup> group;  // dies after the lock
  const bool free = is_free();
  if (!free && !is_behind_all(lane.stream)) {
    const RelaxedCapture relaxed;
    {
      // Or what the group has so far would count as done only after the waits.
      const std::lock_guard lock(lane.mutex);
      group = lane.open;
      if (group != nullptr) {
        check_cuda(group->close(), device, "cudaEventRecord");
      }
    }
    wait_on(lane.stream);  // without the lock, as it may need that of another lane
  }
  const std::lock_guard lock(lane.mutex);
  group = lane.open;
  if (group != nullptr && !group->has_room(num_bytes)) {
    check_cuda(group->close(), device, "cudaEventRecord");
    group = nullptr;
  }
  const bool put_off = may_be_put_off && free;
  if (group != nullptr && !put_off) {
    // Those of a batch come in any order; this one may be behind one of them.
    check_cuda(group->start(), device, "cudaMemcpyBatchAsync");
  }
  const RelaxedCapture relaxed;
  if (group == nullptr) {
    if (num_bytes > CopyGroup::kMostBytes) {
      return enqueue_behind(lane.stream);
    }
    group = std::make_shared<CopyGroup>(streams.events, lane, record_begin(lane.stream));
  }
  FencePtr fence;
  if (put_off) {
    fence = group->put_off(pieces.front());
  } else {
    fence = group->join(num_bytes);  // first, as nothing may fail after the copy
    enqueue_pieces(lane.stream);
  }
  lane.open = std::move(group);
  return fence;
}

/// For what is done besides the stream in question: the caller's current streams at the current
/// device and at `at` are those that a capture would be of.
void refuse_while_caller_captures(Location at, std::string_view what,
                                  c10::DeviceIndex current_device = c10::cuda::current_device()) {
  const Location current = Location::cuda(current_device);
  const auto refuse_at = [&](Location device) {
    refuse_while_capturing(c10::cuda::getCurrentCUDAStream(index_of(device)).stream(), device,
                           what);
  };
  refuse_at(current);
  if (at.is_cuda() && at != current) {
    refuse_at(at);
  }
}

/// Of a copy ahead of need, after which others may have the buffers.
constexpr auto kStagedChunkBytes = Bytes(std::int64_t{16} << 20);

class CudaLayer final : public DeviceLayer {
 public:
  [[nodiscard]] std::string why_unavailable(Location at) const override;
  [[nodiscard]] std::optional<Bytes> lockable_bytes(Bytes wanted) const override;
  [[nodiscard]] Bytes occupied_bytes(const TensorLayout& layout, Location at) const override;
  [[nodiscard]] SegmentBytes predict_segments(Location at,
                                              std::span<const MemoryStep> steps) const override;
  [[nodiscard]] Bytes staging_bytes() const override { return Staging::kRingBytes; }
  [[nodiscard]] Room allocate(std::shared_ptr<const TensorLayout> layout, Location at) override;
  void check_may_free(Location at) const override {
    refuse_while_caller_captures(at, "nothing is freed");
  }
  [[nodiscard]] bool end_use(const TensorBlock& block, const LastUses& uses) override;
  [[nodiscard]] CopyResult copy(const CopyRequest& request, const TensorBlock& source,
                                std::shared_ptr<TensorBlock> overwrite) override;
  void flush() noexcept override;
  [[nodiscard]] bool pace(Fence& copy, bool at_once) noexcept override;
  [[nodiscard]] bool copy_staged(const TensorBlock& on_device, bool to_device, const HostEnd& host,
                                 const std::optional<Stream>& stream, Bytes& done,
                                 const Signals& signals) override;
  [[nodiscard]] Stream current_stream(Location device) const override;
  [[nodiscard]] FencePtr record_use(const Stream& stream) override;
  void wait(const Stream& stream, const FencePtr& fence) override;
  [[nodiscard]] Usage usage(Location at) const override;
  void reset_peaks() override;
  void trim() noexcept override;

 private:
  [[nodiscard]] Room take_room(std::shared_ptr<const TensorLayout> layout, Location at);
  [[nodiscard]] static std::shared_ptr<RangeMemory> make_memory(Location at);
  [[nodiscard]] std::shared_ptr<RangeMemory> memory_at(Location at);
  [[nodiscard]] std::shared_ptr<RangeMemory> find_memory(Location at) const;
  [[nodiscard]] std::vector<std::shared_ptr<RangeMemory>> all_memory() const;
  static std::size_t slot_of(Location at) {
    return at.is_cuda() ? 1 + static_cast<std::size_t>(at.cuda_index()) : 0;
  }

  std::array<Staging, kMaxDevices> staging_;  // of each device
  mutable std::mutex mutex_;
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

std::optional<Bytes> CudaLayer::lockable_bytes(Bytes wanted) const {
  const Usage now = usage(Location::pinned_host());
  const Bytes in_slabs = now.segments - now.live;
  if (in_slabs >= wanted) {
    return in_slabs;  // without asking the system, which costs more than a plan
  }
  const std::optional<Bytes> lockable = PageLockedSegments::lockable_bytes();
  return lockable.has_value() ? std::optional(in_slabs.saturating_add(*lockable)) : std::nullopt;
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

std::shared_ptr<RangeMemory> CudaLayer::make_memory(Location at) {
  return at.is_cuda() ? std::make_shared<RangeMemory>(std::make_unique<DeviceSegments>(at),
                                                      DeviceSegments::kAlignment)
                      : std::make_shared<RangeMemory>(std::make_unique<PageLockedSegments>(),
                                                      PageLockedSegments::kAlignment);
}

SegmentBytes CudaLayer::predict_segments(Location at, std::span<const MemoryStep> steps) const {
  const auto memory = find_memory(at);
  return (memory != nullptr ? memory : make_memory(at))->predict(steps);
}

DeviceLayer::Room CudaLayer::allocate(std::shared_ptr<const TensorLayout> layout, Location at) {
  refuse_while_caller_captures(at, "no memory is taken");
  return take_room(std::move(layout), at);
}

DeviceLayer::Room CudaLayer::take_room(std::shared_ptr<const TensorLayout> layout, Location at) {
  const c10::Device torch_device =
      at.is_cuda() ? c10::Device(c10::kCUDA, index_of(at)) : c10::Device(c10::kCPU);
  const Bytes nbytes = layout->packed_bytes();
  if (nbytes == Bytes()) {
    return {TensorBlock::pack(std::move(layout), at, at::DataPtr(nullptr, torch_device)), {}};
  }
  RangeMemory::Allocation allocation = memory_at(at)->allocate(range_bytes(nbytes, at));
  return {TensorBlock::pack(std::move(layout), at, std::move(allocation.memory)),
          std::move(allocation.after)};
}

bool CudaLayer::end_use(const TensorBlock& block, const LastUses& uses) {
  return (block.is_packed() && block.pack_data() == nullptr) || RangeMemory::end_use(block, uses);
}

CopyResult CudaLayer::copy(const CopyRequest& request, const TensorBlock& source,
                           std::shared_ptr<TensorBlock> overwrite) {
  const bool to_device = request.to.is_cuda();
  const Location device = to_device ? request.to : request.from;
  const c10::DeviceIndex current = c10::cuda::current_device();
  refuse_while_caller_captures(device, "nothing is moved", current);
  std::optional<c10::cuda::CUDAGuard> guard;
  if (current != index_of(device)) {  // it costs more than the question
    guard.emplace(index_of(device));
  }
  DeviceStreams& streams = streams_of(device);
  Room room = overwrite != nullptr ? Room{std::move(overwrite), request.overwrite_after}
                                   : take_room(source.tensor_layout(), request.to);
  CopyResult result;
  result.path = to_device && request.from.is_cuda() && request.from != request.to
                    ? TransferPath::kPeer
                    : TransferPath::kDirect;
  Enqueuing copy{streams, device, pieces_of(source, *room.block)};
  copy.after.append(room.after.begin(), room.after.end());
  copy.after.push_back(request.source_ready);
  if (result.path == TransferPath::kPeer) {
    copy.peers = Peers{request.from.cuda_index(), request.to.cuda_index()};
  }
  copy.may_be_put_off = !request.stream.has_value() && copy.pieces.size() == 1 &&
                        source.is_packed() && room.block->is_packed() && request.more_follow &&
                        !copy.peers.has_value();
  try {
    Lane& lane = to_device ? streams.in : streams.out;
    const NvtxRange range(copy.peers.has_value() ? "residency::copy between devices" : lane.label);
    if (request.ahead_of_need && !request.stream.has_value() && !copy.pieces.empty() &&
        copy.can_wait_on_stream()) {
      result.ready = std::make_shared<PacedCopy>(
          streams.events, to_device ? streams.ahead_in : streams.ahead_out, std::move(copy.pieces),
          std::vector<FencePtr>(copy.after.begin(), copy.after.end()), copy.peers);
    } else if (request.stream.has_value()) {
      const cudaStream_t stream = handle_of(*request.stream);
      refuse_while_capturing(stream, device, "nothing is moved");
      result.ready = copy.enqueue_on(stream);
    } else {
      result.ready = copy.enqueue_on(lane);
    }
  } catch (const UnavailableError& error) {
    throw TransferError(request.value, result.path, std::current_exception(),
                        fmt::format("{} from {} to {}: {}", to_string(request.value),
                                    to_string(request.from), to_string(request.to), error.what()));
  }
  result.blocked = copy.blocked;
  result.block = std::move(room.block);
  return result;
}

void CudaLayer::flush() noexcept {
  for (int index = 0; index < c10::cuda::device_count(); ++index) {
    if (DeviceStreams* streams = find_streams(Location::cuda(index)); streams != nullptr) {
      for (Lane* lane : {&streams->in, &streams->out}) {
        const std::lock_guard lock(lane->mutex);
        if (lane->open != nullptr) {
          (void)lane->open->start();  // if it fails, whoever waits for it will try again
        }
      }
    }
  }
}

bool CudaLayer::pace(Fence& copy, bool at_once) noexcept {
  auto* paced = dynamic_cast<PacedCopy*>(&copy);
  return paced == nullptr || paced->pace(at_once);
}

bool CudaLayer::copy_staged(const TensorBlock& on_device, bool to_device, const HostEnd& host,
                            const std::optional<Stream>& stream, Bytes& done,
                            const Signals& signals) {
  const Location device = on_device.location();
  const c10::cuda::CUDAGuard guard(index_of(device));
  const DeviceStreams& streams = streams_of(device);
  Staging::Direction direction;
  direction.device = device;
  direction.to_device = to_device;
  direction.stream = stream.has_value() ? handle_of(*stream)
                     : to_device        ? streams.staged_in
                                        : streams.staged_out;
  direction.events = streams.events.get();
  direction.may_fill_gaps = on_device.is_packed();
  direction.gives_way = !signals.needed_now;
  const std::vector<iovec> runs = on_device.storages();
  const bool in_chunks = direction.gives_way || host.is_slow;
  const std::vector<iovec> chunk =
      next_of(runs, done, in_chunks ? kStagedChunkBytes : total_of(runs));
  if (!staging_.at(static_cast<std::size_t>(device.cuda_index()))
           .copy(chunk, host.transfer, direction, signals.abandon)) {
    return false;
  }
  done += total_of(chunk);
  return done == total_of(runs);
}

Stream CudaLayer::current_stream(Location device) const {
  return {device, c10::cuda::getCurrentCUDAStream(index_of(device)).id()};
}

FencePtr CudaLayer::record_use(const Stream& stream) {
  const cudaStream_t handle = handle_of(stream);
  const c10::cuda::CUDAGuard guard(index_of(stream.device));
  try {
    refuse_while_capturing(handle, stream.device, "no use is recorded");
    const RelaxedCapture relaxed;
    return EventFence::record(streams_of(stream.device).events, handle);
  } catch (const DeviceLostError&) {
    auto done = std::make_shared<Fence>();  // it uses nothing any more
    done->complete();
    return done;
  }
}

void CudaLayer::wait(const Stream& stream, const FencePtr& fence) {
  if (fence == nullptr || fence->poll() == FenceStatus::kDone) {
    return;
  }
  const cudaStream_t handle = handle_of(stream);
  const c10::cuda::CUDAGuard guard(index_of(stream.device));
  refuse_while_capturing(handle, stream.device, "what is not ready cannot be waited for");
  const RelaxedCapture relaxed;
  (void)wait_on_stream(handle, fence, stream.device);
}

DeviceLayer::Usage CudaLayer::usage(Location at) const {
  const auto memory = find_memory(at);
  return memory != nullptr ? memory->usage() : Usage{};
}

std::vector<std::shared_ptr<RangeMemory>> CudaLayer::all_memory() const {
  std::vector<std::shared_ptr<RangeMemory>> found;
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

void CudaLayer::trim() noexcept {
  for (const auto& memory : all_memory()) {
    memory->trim();
  }
  for (Staging& staging : staging_) {
    staging.trim();
  }
}

}  // namespace

std::shared_ptr<DeviceLayer> make_cuda_layer() {
  return std::make_shared<CudaLayer>();
}

}  // namespace residency
