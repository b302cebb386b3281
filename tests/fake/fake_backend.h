#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "residency/core/backend.h"
#include "residency/core/bytes.h"
#include "residency/core/fence.h"
#include "residency/core/handle.h"
#include "residency/core/location.h"
#include "residency/core/source.h"
#include "residency/core/spec.h"
#include "residency/core/stream.h"

namespace residency {
class Manager;
}

namespace residency::fake {

struct Memory;
struct Operation;
class World;

/// What the fake throws where a test told it to fail.
class InjectedFault : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// What the fake throws when a location's physical capacity is used up.
class OutOfMemory : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// The kinds of calls that are counted and can be made to fail. `kTransfer` counts the copies that
/// can fail later, at their completion; `kLoad` is `FakeSource::load`; `kRelease` only counts.
enum class Call : std::uint8_t {
  kOpen,
  kCopy,
  kReconstruct,
  kLoad,
  kWatchEscape,
  kBeginAccess,
  kEndAccess,
  kOpenView,
  kCurrentStream,
  kRecordUse,
  kMakeHeadroom,
  kRelease,
  kTransfer,
};
inline constexpr std::size_t kNumCalls = 13;
[[nodiscard]] std::string_view to_string(Call call);

/// Who decides when queued work completes.
enum class Completion : std::uint8_t {
  kImmediate,  ///< every call completes its work before it returns
  kManual,     ///< the test, or a wait on a fence (which completes what the fence depends on)
  kRandom,     ///< as kManual, and any legal part of the queue at any backend call
  kThreaded,   ///< a background thread, in any legal order
};

struct FakeOptions {
  std::uint64_t seed = 1;
  int num_devices = 2;
  Completion completion = Completion::kManual;
  /// Locations that a manager must refuse. (Disks exist when the manager's options declare them.)
  std::set<Location> unavailable = {};
  /// Bytes that can really be allocated; none: any number.
  std::map<Location, Bytes> capacity = {};
  /// Where a reservation is backed by real headroom.
  std::set<Location> physical_headroom = {};
  /// Rounding of one block; the kinds' defaults are 64 (pageable), 1 (pinned), 512 (cuda), 4096
  /// plus a header of 128 bytes (disk).
  std::map<Location, std::int64_t> granularity = {};
  /// Page-locked memory that staged copies go through.
  Bytes staging = {};
  /// Called with each breach of the contract between core and backend. The default prints and
  /// aborts, since a breach means freed or unready memory was used.
  std::function<void(const std::string&)> on_violation = {};
};

/// Names and sizes of the fields of a fake value.
class FakeLayout : public Layout {
 public:
  struct Field {
    std::string name;
    std::int64_t nbytes = 0;
    friend bool operator==(const Field&, const Field&) = default;
  };
  explicit FakeLayout(std::vector<Field> fields) : fields_(std::move(fields)) {}
  [[nodiscard]] const std::vector<Field>& fields() const noexcept { return fields_; }
  [[nodiscard]] bool equals(const Layout& other) const override;
  [[nodiscard]] std::string describe() const override;

 private:
  std::vector<Field> fields_;
};

/// A value of one field `data`. Logical and storage bytes are equal.
[[nodiscard]] ValueSpec make_spec(std::int64_t nbytes, ReplicaMode mode = ReplicaMode::kReplicable,
                                  Recoverability recoverability = Recoverability::kMustPreserve,
                                  Mutability mutability = Mutability::kImmutable);
/// A value of several fields; `shared_bytes` of them are counted twice in the logical bytes.
[[nodiscard]] ValueSpec make_spec(std::vector<FakeLayout::Field> fields, std::int64_t shared_bytes,
                                  ReplicaMode mode, Recoverability recoverability,
                                  Mutability mutability);

/// Bytes in host memory that stand for a block anywhere. At most `kRealBytes` of them are real, so
/// that tests can use gigabytes; those are a function of a seed.
class FakeBlock : public Block {
 public:
  static constexpr std::size_t kRealBytes = 4096;

  FakeBlock(std::shared_ptr<World> world, std::shared_ptr<Memory> memory, const ValueSpec& spec);
  ~FakeBlock() override;
  [[nodiscard]] Location location() const override;
  [[nodiscard]] Bytes logical_bytes() const override { return logical_; }
  [[nodiscard]] const Layout* layout() const override { return layout_.get(); }
  [[nodiscard]] AddressRanges address_ranges() const override;

  /// True when all its bytes are those of the seed. A read before the bytes are there, or after
  /// they were freed, is a violation.
  [[nodiscard]] bool holds(std::uint64_t seed) const;
  /// Changes the bytes behind everybody's back, as a caller's alias of the tensor would. Counted
  /// by the field's version counter unless `seen` is false (a raw pointer).
  void write(std::uint64_t seed, std::string_view field = "data", bool seen = true);
  /// A reference held outside the manager (a caller's tensor, autograd).
  [[nodiscard]] std::shared_ptr<void> share();

  // For the fake and its tests only.
  [[nodiscard]] const std::shared_ptr<Memory>& memory() const noexcept { return memory_; }
  [[nodiscard]] const std::shared_ptr<World>& world() const noexcept { return world_; }
  [[nodiscard]] std::optional<std::string> take_undeclared_write();

 private:
  std::shared_ptr<World> world_;
  std::shared_ptr<Memory> memory_;
  Bytes logical_;
  std::shared_ptr<const Layout> layout_;
};

/// What a lease shows: the block itself, for as long as the lease lives.
class FakeView : public View {
 public:
  explicit FakeView(FakeBlock& block);
  ~FakeView() override;
  [[nodiscard]] FakeBlock& block() const noexcept { return block_; }
  [[nodiscard]] bool holds(std::uint64_t seed) const { return block_.holds(seed); }

 private:
  FakeBlock& block_;
  std::shared_ptr<World> world_;
  std::shared_ptr<Memory> memory_;
};

/// A transfer as the backend knows it.
struct TransferView {
  Handle value;
  Location from;
  Location to;
  TransferPath path = TransferPath::kDirect;
};

/// A backend without devices: every location is host memory, copies are queued and complete in any
/// legal order, calls can be made to fail, and everything that the core must not do is checked:
/// bytes read before they are ready, memory given up or overwritten while something that is not
/// waited for still uses it, double release, use after close, views that outlive their block.
///
/// Paths are those of a torch backend: pageable and page-locked host copy at once, page-locked to
/// and from devices directly, devices to devices as peers, pageable to and from devices staged,
/// disks through files. Thread-safe.
class FakeBackend : public Backend {
 public:
  explicit FakeBackend(FakeOptions options = {});
  ~FakeBackend() override;

  void open(ManagerId manager, const ManagerOptions& options) override;
  void attach(std::weak_ptr<Reclaimer> reclaimer) override;
  /// The manager, as it was attached.
  [[nodiscard]] std::shared_ptr<Reclaimer> reclaimer() const;
  void close(bool wait) noexcept override;
  [[nodiscard]] std::string why_unavailable(Location location) const override;
  [[nodiscard]] Bytes occupied_bytes(const ValueSpec& spec, Location location) const override;
  [[nodiscard]] TransferPath path(Location from, Location to) const override;
  [[nodiscard]] bool reuses_in_device_order(Location location) const override;
  [[nodiscard]] bool is_shared(const Block& block) const override;
  [[nodiscard]] Bytes staging_bytes(Location from, Location to) const override;
  [[nodiscard]] CopyResult copy(const CopyRequest& request) override;
  [[nodiscard]] BlockPtr reconstruct(Source& source, const ValueSpec& spec, Location at) override;
  [[nodiscard]] std::optional<SpareBytes> spare_bytes(Location location,
                                                      const Growth& wanted) override;
  void release(BlockPtr block, std::vector<FencePtr> after) noexcept override;
  [[nodiscard]] FencePtr watch_escape(const Block& block) override;
  void begin_access(Block& block, Access access, const std::optional<Stream>& stream,
                    std::span<const FencePtr> after, bool checksum) override;
  [[nodiscard]] std::optional<std::string> end_access(Block& block, Access access,
                                                      bool checksum) override;
  [[nodiscard]] std::unique_ptr<View> open_view(Block& block) override;
  [[nodiscard]] Stream current_stream(Location location) override;
  [[nodiscard]] FencePtr record_use(const Stream& stream) override;
  [[nodiscard]] std::shared_ptr<void> make_headroom(Location location, Bytes nbytes,
                                                    std::string_view label) override;

  /// A complete block of the caller's, to be adopted or returned by a source.
  [[nodiscard]] std::shared_ptr<FakeBlock> make_block(Location at, const ValueSpec& spec,
                                                      std::uint64_t seed);
  /// A block whose addresses start `offset` bytes into those of another.
  [[nodiscard]] std::shared_ptr<FakeBlock> make_overlapping_block(const FakeBlock& other,
                                                                  std::int64_t offset,
                                                                  const ValueSpec& spec);

  // Completion.
  void set_completion(Completion completion);
  /// While held nothing completes by itself and waits block until the test (from another thread)
  /// completes what they wait for.
  void set_waits_block(bool block);
  /// Completes one runnable operation, chosen by the seed; false when there is none.
  bool complete_one();
  /// Completes one runnable transfer of the value to the location; false when there is none.
  bool complete(const Handle& value, Location to);
  void complete_all();
  [[nodiscard]] std::size_t num_queued() const;
  /// The copies that are queued, oldest first.
  [[nodiscard]] std::vector<TransferView> queued_transfers() const;
  /// What the system lets the location hold more from now on; none: no limit.
  void set_spare_bytes(Location location, std::optional<SpareBytes> bytes);
  /// Where the newest copy of the value to the location stands.
  [[nodiscard]] FenceStatus transfer_status(const Handle& value, Location to) const;

  // Streams. A kernel reads (or writes) a block when the stream comes to it.
  void set_current_stream(Location device, std::int64_t id);
  /// Reads the block behind everything on the stream, and compares with the seed's bytes.
  void launch_read(const Stream& stream, FakeBlock& block, std::uint64_t seed);
  void launch_write(const Stream& stream, FakeBlock& block, std::uint64_t seed);

  // Faults.
  /// Fails the n-th call of the kind from now on (1: the next). Replaces an earlier order.
  void fail(Call call, std::uint64_t n);
  /// Fails the n-th call of any kind that can fail at call time (all but kRelease, kTransfer).
  void fail_any(std::uint64_t n);
  void clear_faults();
  /// Whether the ordered fault has happened.
  [[nodiscard]] bool fault_happened() const;
  [[nodiscard]] std::uint64_t num_calls(Call call) const;
  [[nodiscard]] std::uint64_t num_calls_that_can_fail() const;
  void reset_calls();
  /// Before a forced close, which ends leases whose views somebody may still hold.
  void allow_views_to_outlive_blocks();
  /// Called by `FakeSource::load`.
  void count_call(Call call);

  // What the backend itself measures, in rounded bytes, independent of any ledger.
  [[nodiscard]] Bytes live_bytes(Location location) const;
  [[nodiscard]] Bytes peak_bytes(Location location) const;
  void reset_peaks();
  [[nodiscard]] Bytes headroom_bytes(Location location) const;
  [[nodiscard]] std::vector<std::string> violations() const;
  [[nodiscard]] bool closed() const;

  /// From now on every call that must come without the manager's mutex (and every destruction of a
  /// block, wait on a fence and load) asks the manager something from another thread, and is a
  /// violation when no answer comes.
  void probe_lock(const std::shared_ptr<Manager>& manager,
                  std::chrono::milliseconds patience = std::chrono::seconds(20));
  void probe(std::string_view what) const;

 private:
  std::shared_ptr<World> world_;
  std::weak_ptr<Reclaimer> reclaimer_;
};

/// Produces a block with the seed's bytes; counts, and can fail or run a hook first.
class FakeSource : public Source {
 public:
  FakeSource(std::shared_ptr<FakeBackend> backend, Location at, ValueSpec spec, std::uint64_t seed);
  ~FakeSource() override;
  [[nodiscard]] std::shared_ptr<Block> load() override;
  [[nodiscard]] std::string describe() const override { return "fake source"; }

  /// Runs in `load` before the block is made.
  std::function<void()> before_load;
  /// Replaces the block that `load` returns.
  std::function<std::shared_ptr<Block>()> instead;
  std::atomic<int> num_loads = 0;

 private:
  std::weak_ptr<FakeBackend> backend_;
  Location at_;
  ValueSpec spec_;
  std::uint64_t seed_;
};

}  // namespace residency::fake
