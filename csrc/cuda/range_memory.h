#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include <c10/core/Allocator.h>

#include "csrc/core/range_allocator.h"
#include "residency/aten/device_layer.h"
#include "residency/core/bytes.h"
#include "residency/core/fence.h"
#include "residency/core/stream.h"

namespace residency {

/// Where RangeMemory gets its segments. Called without any lock held.
class SegmentSource {
 public:
  SegmentSource() = default;
  SegmentSource(const SegmentSource&) = delete;
  SegmentSource& operator=(const SegmentSource&) = delete;
  virtual ~SegmentSource() = default;

  struct Segment {
    void* data = nullptr;
    /// What the first use must come after; null when nothing.
    FencePtr ready;
  };
  /// What to ask for when `request` bytes do not fit into the segments there are.
  [[nodiscard]] virtual Bytes segment_bytes(Bytes request, Bytes in_segments) const = 0;
  /// Throws when there is no memory.
  [[nodiscard]] virtual Segment make(Bytes nbytes) = 0;
  /// Gives a segment back, to be used by others only after the fences. Where empty segments are
  /// kept the host waits for these.
  virtual void give_back(void* data, Bytes nbytes, const std::vector<FencePtr>& after) noexcept = 0;
  [[nodiscard]] virtual c10::Device device() const = 0;
  /// On which the calling thread may have used memory that it frees now.
  [[nodiscard]] virtual std::vector<Stream> current_streams() = 0;
  /// A fence behind what a stream was given; null while it is being captured.
  [[nodiscard]] virtual FencePtr record(const Stream& stream) = 0;
  /// Waits on the host for that, where no fence was to be had. Whether it is over.
  [[nodiscard]] virtual bool wait_for_others() noexcept = 0;
  /// Whether a segment that has become empty is kept until `trim`.
  [[nodiscard]] virtual bool keeps_empty_segments() const = 0;
};

/// An arena: segments divided into ranges, each of which is used again in the order of the device,
/// behind the last uses of what lay there before.
///
/// Which addresses a sequence of calls gets depends on the calls alone and never on what the device
/// has finished. Thread-safe; ranges may be freed by any thread at any time (by the destructor of a
/// tensor), and keep the arena alive. In a forked child, where the mutex may be held for ever, only
/// what destroys and `trim` may be called: they leave the parent's memory alone.
class RangeMemory : public std::enable_shared_from_this<RangeMemory> {
 public:
  RangeMemory(std::unique_ptr<SegmentSource> source, Bytes alignment);
  ~RangeMemory();
  RangeMemory(const RangeMemory&) = delete;
  RangeMemory& operator=(const RangeMemory&) = delete;

  struct Allocation {
    at::DataPtr memory;
    /// Pending: the new user's writes come after these.
    std::vector<FencePtr> after;
  };
  /// Not initialized. Throws what the source throws. `nbytes` > 0. Of fences that are `pending` the
  /// device is not asked again.
  [[nodiscard]] Allocation allocate(Bytes nbytes, std::span<const FencePtr> pending = {});
  /// Says, before a block over such memory is destroyed, what its last uses were. Memory of which
  /// nobody says so counts as used by others. False for other blocks.
  [[nodiscard]] static bool end_use(const TensorBlock& block, DeviceLayer::LastUses uses);

  /// What the steps would do to the segments: goes through them in the books, and back.
  [[nodiscard]] SegmentBytes predict(std::span<const MemoryStep> steps);
  struct Emptiable {
    Bytes nbytes;                      ///< of the segment
    std::vector<std::size_t> leaving;  ///< positions among the beginnings: those in the segment
  };
  /// The segments in which nothing lies but ranges that begin at these addresses.
  [[nodiscard]] std::vector<Emptiable> emptiable(std::span<const std::uintptr_t> beginnings) const;
  /// Gives back every segment that is empty; but where that would wait on the host, none that is
  /// still in use by what is in flight. Whether none is left.
  bool trim() noexcept;
  [[nodiscard]] DeviceLayer::Usage usage() const;
  void reset_peak();

 private:
  /// A range in use: what its deleter is given.
  struct Live {
    std::shared_ptr<RangeMemory> memory = nullptr;  // while it is not spare
    Range range = {};
    DeviceLayer::LastUses uses = {.last_uses = {}, .used_by_others = true};  // under its mutex
    std::vector<Stream> streams = {};      // on which others used it, once it is set aside
    std::unique_ptr<Live> next = nullptr;  // of those that are set aside
  };
  /// Free memory, and what was pending there when it was freed.
  struct Freed {
    Bytes end;
    std::shared_ptr<const std::vector<FencePtr>> last_uses;
  };
  using Place = std::pair<std::uint32_t, Bytes>;  // segment, where it begins
  struct Segment {
    void* data = nullptr;
    Bytes nbytes;
  };
  struct Departing {
    Segment segment;
    std::vector<FencePtr> after;
  };

  static void free_context(void* live) noexcept;
  [[nodiscard]] static Live* live_of(const Block& block) noexcept;
  void free(std::unique_ptr<Live> live) noexcept;
  /// Adds fences behind what others did with it. False while that cannot be known: one of their
  /// streams is being captured.
  [[nodiscard]] bool add_uses_by_others(Live& live, std::vector<FencePtr>& fences) noexcept;
  void set_aside(std::unique_ptr<Live> live) noexcept;
  void free_what_is_set_aside() noexcept;
  void add_segment(Bytes nbytes);
  /// What is still to be done in the range.
  [[nodiscard]] std::vector<FencePtr> last_uses_in(const Range& range,
                                                   std::span<const FencePtr> pending);
  using FreedPieces = std::map<Place, Freed>;
  /// Leaves that, which `pending` says, to its new user. When it throws nothing has changed. Gives
  /// what is not needed any more, to die without the mutex.
  [[nodiscard]] std::vector<FreedPieces::node_type> forget_last_uses_in(
      const Range& range, std::span<const FencePtr> pending);
  using Pieces = std::pair<FreedPieces::iterator, FreedPieces::iterator>;
  [[nodiscard]] Pieces pieces_in(const Range& range);
  [[nodiscard]] std::vector<FencePtr> last_uses_in_segment(std::uint32_t number) const;
  [[nodiscard]] std::vector<Departing> remove_empty_segments(bool also_pending = true) noexcept;
  void give_back(std::vector<Departing> departing) noexcept;
  [[nodiscard]] std::vector<FreedPieces::node_type> take_finished();

  const std::unique_ptr<SegmentSource> source_;
  const std::uint64_t generation_;
  // Held for bookkeeping alone: no call to the source, and no fence destroyed, which may own
  // blocks.
  mutable std::mutex mutex_;
  RangeAllocator ranges_;
  Bytes peak_live_;
  std::vector<Segment> segments_;             // by number
  FreedPieces freed_;                         // disjoint, and disjoint from what is live
  std::size_t look_at_ = 64;                  // so many pieces: time to look which have finished
  std::vector<std::unique_ptr<Live>> spare_;  // of ranges that were freed
  // Freed on a stream that was being captured: only once that has ended is it known what was done
  // on it before. Until then the memory is in use.
  std::unique_ptr<Live> aside_;
  std::atomic<bool> any_aside_{false};
};

}  // namespace residency
