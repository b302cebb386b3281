#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sys/uio.h>

#include "residency/aten/tensor_block.h"
#include "residency/core/backend.h"
#include "residency/core/export.h"

namespace residency {

/// What the torch backend needs of `cuda:N` and of page-locked host memory. Implemented by
/// `residency::cuda`; without it the backend has neither.
///
/// Thread-safe as `Backend` is. Every call leaves the caller's current device and stream as they
/// were, and none waits on the host for a device unless it says so. What comes behind a fence that
/// is not `Fence::on_stream`, a thread's, waits on the host for that.
class RESIDENCY_API DeviceLayer {
 public:
  DeviceLayer();
  DeviceLayer(const DeviceLayer&) = delete;
  DeviceLayer& operator=(const DeviceLayer&) = delete;
  virtual ~DeviceLayer();

  /// In a forked child of the process that made it, where devices do not exist and threads that
  /// held the layer's mutexes neither, and once the process exits, when static objects that CUDA
  /// code needs are gone. What is asked there gets the answer of a layer with nothing
  /// in it, what is given up is left alone, and all else throws `ForkError`; nothing waits.
  [[nodiscard]] bool is_orphan() const noexcept;

  /// Empty when the location exists here; otherwise why not. Pure query.
  [[nodiscard]] virtual std::string why_unavailable(Location at) const = 0;
  /// As `Backend::is_lost`, of a device.
  [[nodiscard]] virtual bool is_lost(Location device) const = 0;
  /// As `Backend::check_answers`.
  virtual void check_answers(Location device) = 0;
  /// How many bytes more page-locked memory can take: in slabs that are there, and in what the
  /// limits of the process let be locked; may stop counting where `wanted` is served. None: no
  /// limit.
  [[nodiscard]] virtual std::optional<SpareBytes> lockable_bytes(const Growth& wanted) const = 0;
  /// What a packed value takes there. Pure query.
  [[nodiscard]] virtual Bytes occupied_bytes(const TensorLayout& layout, Location at) const = 0;

  /// As `Backend::predict_segments`.
  [[nodiscard]] virtual SegmentBytes predict_segments(Location at,
                                                      std::span<const MemoryStep> steps) const = 0;
  /// Page-locked memory that the staged copies of a device share. Pure query.
  [[nodiscard]] virtual Bytes staging_bytes() const = 0;
  /// While it is held, that memory of a device stays from when a copy first needs it. Pure query
  /// but for `ForkError`.
  [[nodiscard]] virtual std::shared_ptr<void> hold_staging(Location device) = 0;

  /// Until what it returns dies, staged copies at the device that are ahead of need leave the
  /// buffers to one that is not. Throws `ForkError`.
  [[nodiscard]] virtual std::shared_ptr<void> announce_staged(Location device) = 0;

  struct Room {
    std::shared_ptr<TensorBlock> block;
    /// The first write into the block must come after these.
    std::vector<FencePtr> after;
  };
  /// A pack, not initialized, in memory that earlier users may not have finished with. Where there
  /// is no free memory the host may wait: for slabs that are unlocked, and for the copies of what
  /// the allocator plugin evicts. Throws `c10::OutOfMemoryError`, `PageLockError`, `CaptureError`,
  /// `DeviceLostError`, `UnavailableError`.
  [[nodiscard]] virtual Room allocate(std::shared_ptr<const TensorLayout> layout, Location at) = 0;
  /// Throws `CaptureError` with `what` while the calling thread captures a graph, on a current
  /// stream of its or on `stream`: then nothing is freed, page-locked or waited for.
  virtual void refuse_while_capturing(Location at, const std::optional<Stream>& stream,
                                      std::string_view what) const = 0;
  struct LastUses {
    std::vector<FencePtr> last_uses;
    /// Somebody besides the manager has the memory, and may use it until it is freed, on the stream
    /// that is current then.
    bool used_by_others = false;
  };
  /// Says, before a block of `allocate` is destroyed, what its memory was used for. False, and
  /// nothing was noted, for other blocks, which must be kept until those uses are over.
  [[nodiscard]] virtual bool end_use(const TensorBlock& block, const LastUses& uses) = 0;

  /// Copies between two blocks of which each is at a device or in page-locked memory, and at least
  /// one at a device: into a new pack, or into `overwrite`. Enqueued on the request's stream, or on
  /// the layer's own of the device and direction, behind `source_ready` and `overwrite_after`;
  /// ahead of need by `pace`, or when its fence is waited for. How `overwrite_after` ended does not
  /// matter; where `source_ready` has failed so does the copy. Throws, with nothing of it in
  /// flight, what `allocate` throws, and `TransferError`; `std::invalid_argument` for a stream that
  /// is none.
  [[nodiscard]] virtual CopyResult copy(const CopyRequest& request, const TensorBlock& source,
                                        std::shared_ptr<TensorBlock> overwrite) = 0;
  /// As `Backend::copy_all`: several such copies of `TensorBlock`s into new packs, on the layer's
  /// own stream.
  [[nodiscard]] virtual std::exception_ptr copy_all(std::span<const CopyRequest> requests,
                                                    std::vector<CopyResult>& results) = 0;
  /// Enqueues what there is room for of a copy of which `copy` was told that it is ahead of need,
  /// by its fence (`CopyResult::put_off`): in chunks, 16 MiB unless the layer was made otherwise,
  /// of which two at most are outstanding in one direction of a device, in the order of the first
  /// calls; or all that is left, `at_once`. False: to be called again, until it is true.
  [[nodiscard]] virtual bool pace(Fence& copy, bool at_once) noexcept = 0;

  /// What is asked of a transfer while it goes on.
  struct Signals {
    bool needed_now = true;            ///< somebody waits for it
    const std::atomic<bool>& abandon;  ///< it is to end early, with an error
  };
  /// The other end of a staged copy.
  struct HostEnd {
    /// Fills buffers with the next bytes of the value's storages, in the layout's order, or takes
    /// the next ones out of them.
    std::function<void(const std::vector<iovec>&)> transfer;
    bool is_slow = false;  ///< the buffers are left to others now and then
  };
  /// How far a staged copy is.
  struct Progress {
    Bytes done;
    /// From the first copy to the last on the device, with what it waited for the host in between;
    /// none where a device could not say.
    std::optional<std::int64_t> device_ns = 0;
  };
  /// Copies to a device, or from it, in chunks through page-locked buffers. Waits on the host until
  /// it has arrived: for a worker. Goes on after the bytes that are `done`, to the end when it is
  /// needed now and the host's end is not slow; otherwise for a chunk at most, and not at all while
  /// others use the buffers that are needed more. False: to be called again. Throws, with nothing
  /// of it in flight, also what `transfer` throws, and `CaptureError` while `stream` is captured.
  [[nodiscard]] virtual bool copy_staged(const TensorBlock& on_device, bool to_device,
                                         const HostEnd& host, const std::optional<Stream>& stream,
                                         Progress& progress, const Signals& signals) = 0;

  /// The calling thread's. Throws `ForkError`.
  [[nodiscard]] virtual Stream current_stream(Location device) const = 0;
  /// A fence behind the stream's work so far; done where the device is lost and does none. For a
  /// stream that was destroyed the host waits for the device. Throws `CaptureError`, `ForkError`,
  /// `UnavailableError`, `std::invalid_argument` for a stream that is none.
  [[nodiscard]] virtual FencePtr record_use(const Stream& stream) = 0;
  /// Makes the stream go on only after the fence. Throws `CaptureError`, `DeviceLostError`,
  /// `ForkError`, `UnavailableError`, and why the fence has failed.
  virtual void wait(const Stream& stream, const FencePtr& fence) = 0;

  /// Asks the manager for memory of devices that others need, while the allocator plugin is
  /// installed.
  virtual void attach(std::weak_ptr<Reclaimer> reclaimer) = 0;

  struct Usage {
    Bytes live;       ///< ranges in use
    Bytes peak_live;  ///< the most since `reset_peaks`
    Bytes segments;   ///< taken from the caching allocator, or page-locked
  };
  /// Zeros where nothing was taken, and for an orphan.
  [[nodiscard]] virtual Usage usage(Location at) const = 0;
  /// Sets every location's peak to what is in use now.
  virtual void reset_peaks() = 0;
  /// Gives segments that hold nothing, and memory for staging that nobody holds, back to the
  /// system. False: some are still in use, by what is in flight, and stay.
  virtual bool trim() noexcept = 0;

 protected:
  void refuse_in_forked_child() const;

 private:
  const std::uint64_t generation_;
};

}  // namespace residency
