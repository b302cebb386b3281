#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "residency/core/address_range.h"
#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/fence.h"
#include "residency/core/handle.h"
#include "residency/core/location.h"
#include "residency/core/reclaim.h"
#include "residency/core/source.h"
#include "residency/core/spec.h"
#include "residency/core/stream.h"

namespace residency {

struct ManagerOptions;

/// The memory (or file) of one materialization, as the backend keeps it. The core owns it through
/// shared pointers, hands it back to the backend, and never looks at its bytes.
///
/// Its methods are pure queries, callable from several threads. Destroying the last reference frees
/// the memory; the core never does that under its mutex.
class RESIDENCY_API Block {
 public:
  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  virtual ~Block();
  [[nodiscard]] virtual Location location() const = 0;
  [[nodiscard]] virtual Bytes logical_bytes() const = 0;
  [[nodiscard]] virtual const Layout* layout() const = 0;
  /// The addresses of its storages, the same for its life; empty for files and for zero-byte
  /// values. Called under the manager's mutex.
  [[nodiscard]] virtual AddressRanges address_ranges() const = 0;
};
using BlockPtr = std::shared_ptr<Block>;

/// What a lease shows of a block (for the torch backend: shallow copies of its tensors). The lease
/// opens and ends it on one thread at a time; the backend says who may use it in between.
class RESIDENCY_API View {
 public:
  View() = default;
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  virtual ~View();
};

/// How bytes travel.
enum class TransferPath : std::uint8_t {
  kNone,    ///< nothing was copied
  kDirect,  ///< one stream-ordered or host copy
  kPeer,    ///< device to device
  kStaged,  ///< chunks through page-locked buffers on a worker
  kFile,    ///< to or from a file, on a worker
  kSource,  ///< produced by a Source
};
[[nodiscard]] RESIDENCY_API std::string_view to_string(TransferPath path);

enum class Access : std::uint8_t { kRead, kWrite };
[[nodiscard]] RESIDENCY_API std::string_view to_string(Access access);

struct CopyRequest {
  Handle value;
  const ValueSpec* spec = nullptr;
  BlockPtr source;
  Location from;
  Location to;
  /// The copy reads `source` behind this fence; null when it is ready.
  FencePtr source_ready;
  /// When set, the copy overwrites this (stale) block at `to` instead of allocating a new one, and
  /// does so behind `overwrite_after`.
  BlockPtr overwrite;
  std::vector<FencePtr> overwrite_after;
  /// The stream to copy on, given by the caller; otherwise the backend's own.
  std::optional<Stream> stream;
  /// Nobody waits for it yet: copies that are asked for later may pass it.
  bool ahead_of_need = false;
};

/// One step of a plan in the memory of one location.
struct MemoryStep {
  bool takes = false;  ///< otherwise it gives back
  Bytes nbytes;
  const Block* block = nullptr;  ///< given back; null: it is what an earlier step has taken
  std::size_t taken_by = 0;      ///< the number of that step
};

/// What a location takes from the system as a whole and divides among values.
struct SegmentBytes {
  Bytes before;
  Bytes peak;
  Bytes after;
  /// Given up by the plan in memory of somebody else (adopted, or made by a source before): it is
  /// in no segment, and whoever made it frees it once its last uses are over.
  Bytes outside;
  friend bool operator==(const SegmentBytes&, const SegmentBytes&) = default;
};

/// What a location is to hold more of.
struct Growth {
  Bytes values{};
  Bytes staging{};  ///< buffers that staged copies go through
};

/// What a location can take more.
struct SpareBytes {
  Bytes in_segments{};  ///< free in what was taken from the system already: for values alone
  Bytes in_system{};    ///< for values and buffers
};

struct CopyResult {
  /// The new block (or `overwrite`).
  BlockPtr block;
  /// Completed by the copy; null when the copy was complete on return.
  FencePtr ready;
  TransferPath path = TransferPath::kDirect;
  /// The call waited for the copy although its path is an asynchronous one.
  bool blocked = false;
  /// The copy is not given to the device yet: until `ready`, a fence on a stream, is certain, it
  /// can fail as those can on the paths that can fail later.
  bool put_off = false;
};

/// What a manager needs from the world: memory, copies, fences. Implemented by the torch backend
/// and by the seeded fake of the tests; both pass one conformance suite.
///
/// Thread-safe: every method may be called from several threads at once, but for one value from
/// one thread at a time. Methods marked *pure query* are called under the manager's mutex: they
/// do not block, allocate, lock anything that is held while allocating, or call back. All others
/// are called without any lock held and may throw; a method that throws has changed nothing.
class RESIDENCY_API Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend();

  /// Called once by `Manager::create`, with the id of the manager that it serves from then on.
  /// Refuses what can never work (an unwritable disk directory) with a typed error.
  virtual void open(ManagerId manager, const ManagerOptions& options) = 0;
  /// Called once after that: the manager, to be asked when memory runs out.
  virtual void attach(std::weak_ptr<Reclaimer> reclaimer);
  /// Called once when the manager has closed and every block was released; `wait` asks to wait
  /// for outstanding work and to join workers.
  virtual void close(bool wait) noexcept = 0;

  /// Empty when the location exists here; otherwise why not. Pure query.
  [[nodiscard]] virtual std::string why_unavailable(Location location) const = 0;
  /// Whether the location is a device that is known to be lost, and what lies there with it. Pure
  /// query.
  [[nodiscard]] virtual bool is_lost(Location location) const;
  /// Asks a device whether it still answers, without waiting for its work. Throws
  /// `DeviceLostError`.
  virtual void check_answers(Location location);
  /// Throws `CaptureError` where the calling thread must not wait for a device. Asked before the
  /// manager waits for fences, with its mutex held or not: as a pure query, but that it throws.
  virtual void check_may_wait() const;
  /// What the packed value will really occupy at the location, rounded as the location rounds.
  /// Pure query, and constant for one spec and location.
  [[nodiscard]] virtual Bytes occupied_bytes(const ValueSpec& spec, Location location) const = 0;
  /// The path that a copy will take. Pure query. Copies on `kStaged` and `kFile` can fail after
  /// `copy` returned, and those that were put off (`CopyResult::put_off`); all others cannot.
  [[nodiscard]] virtual TransferPath path(Location from, Location to) const = 0;
  /// True where freed memory may be reused at once because later work is ordered behind earlier
  /// uses by the device (CUDA); false where bytes stay in use until fences complete. Pure query.
  [[nodiscard]] virtual bool reuses_in_device_order(Location location) const = 0;
  /// True when somebody besides the manager and its leases keeps the block's memory alive (a
  /// caller's tensor, autograd), so that releasing it would not free it. Pure query.
  [[nodiscard]] virtual bool is_shared(const Block& block) const = 0;
  /// Page-locked memory that copies between the two go through, the same for all of one device;
  /// zero when none. Pure query.
  [[nodiscard]] virtual Bytes staging_bytes(Location from, Location to) const;
  /// What the steps, in this order, would do to the segments of a location; none where memory is
  /// not taken in segments. Pure query but for its own bookkeeping, which it puts back; O(steps).
  [[nodiscard]] virtual std::optional<SegmentBytes> predict_segments(
      Location location, std::span<const MemoryStep> steps) const;

  /// How many bytes more the location can take now, as far as the system has limits that are known
  /// beforehand; may stop counting where `wanted` is served. None: not known. Called when a plan
  /// makes the location hold more, without any lock held; may read files.
  [[nodiscard]] virtual std::optional<SpareBytes> spare_bytes(Location location,
                                                              const Growth& wanted);

  /// Enqueues a copy into a new block at `request.to` (or into `request.overwrite`), ordered behind
  /// the fences of the request by the device or a worker: on asynchronous paths the host does not
  /// wait. Throws when the memory cannot be had (`std::bad_alloc`, c10's out-of-memory error,
  /// `StorageError`, `PageLockError`), when a file cannot be read back (`MaterializationError`) or
  /// the device is lost (`DeviceLostError`); the source is then as it was.
  [[nodiscard]] virtual CopyResult copy(const CopyRequest& request) = 0;
  /// The same for several between the same two locations, none of which overwrites a block or comes
  /// ahead of need: enqueued together where that is cheaper, in no order among themselves. Appends
  /// their results, in the order of the requests, up to the first that fails; what it threw is
  /// returned, null when all went well. Those after it were not begun.
  [[nodiscard]] virtual std::exception_ptr copy_all(std::span<const CopyRequest> requests,
                                                    std::vector<CopyResult>& results);
  /// Calls `source.load()` and makes sure that the result is a block of this backend that is
  /// complete, is not shared, and lies at `at`; otherwise `MaterializationError`. The manager
  /// compares logical bytes and layout with the spec.
  [[nodiscard]] virtual BlockPtr reconstruct(Source& source, const ValueSpec& spec,
                                             Location at) = 0;
  /// Gives up a block whose memory may be reused once the `after` fences have completed. Where
  /// the location reuses in device order the backend orders that on the device; elsewhere the
  /// backend keeps the block until they completed.
  virtual void release(BlockPtr block, std::vector<FencePtr> after) noexcept = 0;
  /// Asked before a block is given up: a fence that is done when the memory of a shared block has
  /// really gone; null when the block is not shared. Throws when it cannot be given up now
  /// (`CaptureError`).
  [[nodiscard]] virtual FencePtr watch_escape(const Block& block) = 0;

  /// Prepares a read or write of `block` by a lease; with `stream` makes the stream wait for
  /// `after` (the host does not wait, except for fences that are not `on_stream`). Null fences are
  /// done. With `checksum` remembers the bytes.
  virtual void begin_access(Block& block, Access access, const std::optional<Stream>& stream,
                            std::span<const FencePtr> after, bool checksum) = 0;
  /// Ends it. Returns the name of a field that was written without being declared, if any; the
  /// block's contents as they are now become the known ones.
  [[nodiscard]] virtual std::optional<std::string> end_access(Block& block, Access access,
                                                              bool checksum) = 0;
  /// What a lease shows of the block.
  [[nodiscard]] virtual std::unique_ptr<View> open_view(Block& block) = 0;

  /// The stream that a lease at this device location uses when none is given: the calling thread's
  /// current one. Throws `std::invalid_argument` at a location without streams.
  [[nodiscard]] virtual Stream current_stream(Location location);
  /// A fence behind all work enqueued on the stream so far. The host does not wait. Throws
  /// `std::invalid_argument` at a location without streams, `DeviceLostError`.
  [[nodiscard]] virtual FencePtr record_use(const Stream& stream);

  /// Makes `nbytes` of real headroom at the location and holds it until the returned object dies;
  /// null where nothing can be made physical (then a reservation is accounting only).
  [[nodiscard]] virtual std::shared_ptr<void> make_headroom(Location location, Bytes nbytes,
                                                            std::string_view label);
};

/// True for the paths on which a copy can fail after it was enqueued; one that was put off can on
/// any, until it is.
[[nodiscard]] constexpr bool can_fail_later(TransferPath path) noexcept {
  return path == TransferPath::kStaged || path == TransferPath::kFile;
}

}  // namespace residency
