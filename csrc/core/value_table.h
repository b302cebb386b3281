#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "make_room.h"
#include "residency/core/action.h"
#include "residency/core/backend.h"
#include "residency/core/handle.h"
#include "residency/core/location.h"
#include "residency/core/source.h"
#include "residency/core/spec.h"
#include "residency/core/verdict.h"

namespace residency {

struct Materialization;

/// Frees a materialization, or empties the slot in a record that it stands in.
struct MaterializationDeleter {
  void operator()(Materialization* materialization) const noexcept;
};
using MaterializationPtr = std::unique_ptr<Materialization, MaterializationDeleter>;

/// One copy of a value at one location. It fits into a cache line: what is rare hangs off it.
struct Materialization {
  /// Only while something is in flight, or was not so long ago.
  struct Fences {
    FencePtr ready;                   ///< null: ready
    std::vector<FencePtr> last_uses;  ///< of leases that have ended
    std::vector<FencePtr> readers;    ///< copies that read this one

    void clear() noexcept {
      ready = nullptr;
      last_uses.clear();
      readers.clear();
    }
  };

  Location location;
  bool stale = false;
  bool fails_later = false;  ///< arriving by a copy that could still fail when it was made
  bool replaces = false;     ///< arriving by a move: its source comes back if it fails
  bool in_slot = false;      ///< it stands in its record instead of the heap
  std::uint32_t num_leases = 0;
  std::uint32_t num_holds = 0;
  Bytes charge;
  BlockPtr block;
  std::unique_ptr<Fences> fences;
  MaterializationPtr next;

  [[nodiscard]] bool is_protected() const noexcept { return num_leases != 0 || num_holds != 0; }
  /// An arrival of which it is not yet known whether it succeeds.
  [[nodiscard]] bool is_uncertain() const noexcept { return fails_later && ready() != nullptr; }
  /// Of these, one that has only to be given to the device.
  [[nodiscard]] bool is_put_off() const noexcept {
    return is_uncertain() && fences->ready->on_stream() && !fences->ready->is_certain();
  }
  /// The bytes are not there and will not come: the device that was to bring them was lost. Not of
  /// an uncertain one, which goes away when that is settled.
  [[nodiscard]] bool has_failed() const noexcept {
    return fences && fences->ready && !fails_later && fences->ready->has_failed();
  }
  [[nodiscard]] FencePtr ready() const noexcept { return fences ? fences->ready : nullptr; }

  void set_ready(FencePtr fence) {
    if (fence || fences) {
      own_fences().ready = std::move(fence);
    }
  }
  /// The arrival's fence once it has succeeded, which nobody need ask any more; null before.
  [[nodiscard]] FencePtr take_ready() noexcept {
    const bool is_over =
        fences && !fails_later && fences->ready && fences->ready->poll() == FenceStatus::kDone;
    return is_over ? std::exchange(fences->ready, nullptr) : nullptr;
  }
  // So that what follows does not allocate.
  void make_room_for_ready() { (void)own_fences(); }
  void make_room_for_reader() { make_room_in(own_fences().readers, 1); }
  void make_room_for_last_uses(std::size_t count) {
    if (count != 0) {
      make_room_in(own_fences().last_uses, count);
    }
  }
  void add_reader(const FencePtr& fence) { add(own_fences().readers, fence); }
  void add_last_use(const FencePtr& fence) { add(own_fences().last_uses, fence); }

  /// Visits what is still pending of the arrival, the copies that read and the last uses.
  template <class Visit>
  void for_each_pending(const Visit& visit) const {
    if (!fences) {
      return;
    }
    for_each_pending(std::span(&fences->ready, 1), visit);
    for_each_pending(fences->readers, visit);
    for_each_pending(fences->last_uses, visit);
  }
  /// Whether a thread brings it, and not the device.
  [[nodiscard]] bool arrives_by_worker() const noexcept {
    return fences && is_of_worker(fences->ready);
  }
  /// Whether a thread copies from it: what the device does is in an order by itself.
  [[nodiscard]] bool is_read_by_worker() const noexcept {
    return fences && std::ranges::any_of(fences->readers, is_of_worker);
  }
  /// Whether a thread is at it, and not the device.
  [[nodiscard]] bool is_used_by_worker() const noexcept {
    return fences &&
           (is_of_worker(fences->ready) || std::ranges::any_of(fences->readers, is_of_worker) ||
            std::ranges::any_of(fences->last_uses, is_of_worker));
  }
  [[nodiscard]] std::uint32_t num_pending_last_uses() const noexcept {
    return fences ? count_pending(fences->last_uses) : 0;
  }

 private:
  Fences& own_fences() {
    if (!fences) {
      fences = std::make_unique<Fences>();
    }
    return *fences;
  }
  static bool is_of_worker(const FencePtr& fence) noexcept {
    return fence && !fence->on_stream() && is_pending(fence);  // to poll the device costs more
  }
  static void add(std::vector<FencePtr>& to, const FencePtr& fence) {
    std::erase_if(to, [](const FencePtr& each) { return each->poll() != FenceStatus::kPending; });
    to.push_back(fence);
  }
  template <class Visit>
  static void for_each_pending(std::span<const FencePtr> fences, const Visit& visit) {
    for (const FencePtr& fence : fences) {
      if (is_pending(fence)) {
        visit(fence);
      }
    }
  }
  static std::uint32_t count_pending(std::span<const FencePtr> fences) noexcept {
    std::uint32_t count = 0;
    for_each_pending(fences, [&](const FencePtr&) { ++count; });
    return count;
  }
};

static_assert(sizeof(Materialization) <= 64);

inline void MaterializationDeleter::operator()(Materialization* materialization) const noexcept {
  if (materialization->in_slot) {
    *materialization = Materialization();
  } else {
    delete materialization;
  }
}

/// A value as the manager keeps it. A manager with a million values finds it cold every time, so
/// the first materialization stands in it, and what actions touch lies in the first two cache
/// lines, which are fetched at once.
struct alignas(64) ValueRecord {
  Materialization slot_for_first;  // outlives `first`, which may point to it

  std::uint16_t generation = 0;
  bool live = false;
  bool discarded = false;
  bool busy = false;         ///< an action on it is under way
  bool has_waiters = false;  ///< calls wait for that action to end
  bool write_leased = false;
  bool dirty = false;        ///< written since it was registered: its source cannot make it again
  bool has_failure = false;  ///< a transfer failed and nobody was told yet
  std::uint32_t slot = 0;    ///< in the table
  std::uint32_t next_free = 0;  ///< while not live
  ValueType type;
  Location source_location;
  std::uint32_t content_epoch = 0;  ///< rises with every write
  std::uint32_t visit = 0;          ///< last multi-value call that saw it
  std::uint32_t num_leases = 0;     ///< over all materializations
  std::uint32_t num_pins = 0;       ///< a borrow keeps all its materializations for a moment
  MaterializationPtr first;
  std::uint64_t registration = 0;

  ValueSpec spec;
  std::shared_ptr<Source> source;

  [[nodiscard]] Materialization* find(Location location) const noexcept {
    for (Materialization* each = first.get(); each != nullptr; each = each->next.get()) {
      if (each->location == location) {
        return each;
      }
    }
    return nullptr;
  }
  [[nodiscard]] bool has_uncertain_arrival() const noexcept {
    for (const Materialization* each = first.get(); each != nullptr; each = each->next.get()) {
      if (each->is_uncertain()) {
        return true;
      }
    }
    return false;
  }
  /// Of which it has turned out by now whether it succeeds.
  [[nodiscard]] bool has_settled_arrival() const noexcept {
    for (const Materialization* each = first.get(); each != nullptr; each = each->next.get()) {
      if (each->is_uncertain() && each->fences->ready->is_certain()) {
        return true;
      }
    }
    return false;
  }
  [[nodiscard]] bool can_be_made_again() const noexcept { return source != nullptr && !dirty; }
};
static_assert(sizeof(ValueRecord) == 192);

/// The values of a manager by handle: slots in chunks, reused with a new generation, so that a
/// lookup is two loads and a forgotten value leaves nothing behind. Guarded by the manager's mutex.
class ValueTable {
 public:
  explicit ValueTable(ManagerId manager) noexcept : manager_(manager) {}
  ValueTable(const ValueTable&) = delete;
  ValueTable& operator=(const ValueTable&) = delete;
  ~ValueTable();

  /// A fresh record. Throws `std::length_error` when the ids are used up.
  ValueRecord& add(ValueType type);
  /// Frees the record for another value; its handle is unknown from then on. The record must own
  /// nothing whose destruction calls out.
  void remove(ValueRecord& record) noexcept;

  struct Found {
    ValueRecord* record = nullptr;
    Reason why_not = Reason::kUnknownHandle;
  };
  [[nodiscard]] Found find(const Handle& handle) const noexcept;
  [[nodiscard]] Handle handle_of(const ValueRecord& record) const noexcept {
    const std::uint64_t id = static_cast<std::uint64_t>(manager_) << Handle::kValueBits |
                             static_cast<std::uint64_t>(record.generation) << kSlotBits |
                             record.slot;
    return Handle(static_cast<std::int64_t>(id), record.type);
  }

  /// Asks the memory for what the next actions will look at: each thing a while after what leads to
  /// it was asked for. Inlined by force: GCC 12 takes a function that only prefetches for one
  /// without effects, and drops the calls.
  [[gnu::always_inline]] void prefetch(std::span<const ResidencyAction> next) const noexcept {
    constexpr std::size_t kAhead = 4;  // enough to hide a cache miss
    if (next.size() <= 4 * kAhead) {
      return;
    }
    const auto slot_ahead = [&](std::size_t steps) {
      return slot_of(residency::handle_of(next[steps * kAhead]));
    };
    if (const ValueRecord* record = slot_ahead(4); record != nullptr) {
      prefetch_lines(record, sizeof(ValueRecord) / 64);
    }
    if (const ValueRecord* record = slot_ahead(3); record != nullptr) {
      prefetch_lines(record->spec.layout.get(), 3);
      prefetch_lines(record->first.get(), 1);
    }
    if (const ValueRecord* record = slot_ahead(2); record != nullptr && record->first) {
      prefetch_lines(record->first->block.get(), 2);
      prefetch_lines(record->first->fences.get(), 1);
      prefetch_lines(record->first->next.get(), 1);
    }
    if (const ValueRecord* record = slot_ahead(1); record != nullptr && record->first) {
      if (const Materialization::Fences* fences = record->first->fences.get(); fences != nullptr) {
        prefetch_lines(fences->ready.get(), 1);
        prefetch_lines(fences->readers.data(), 1);
      }
    }
  }

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  template <class Visit>
  void for_each(const Visit& visit) const {
    for (const Chunk& chunk : chunks_) {
      for (std::uint32_t i = 0; i < chunk.num_made; ++i) {
        if (chunk.records[i].live) {
          visit(chunk.records[i]);
        }
      }
    }
  }
  /// Visits in the order of registration, which slot order is unless slots were reused.
  template <class Visit>
  void for_each_by_registration(const Visit& visit) const {
    std::vector<ValueRecord*> records;
    records.reserve(size_);
    for_each([&](ValueRecord& record) { records.push_back(&record); });
    sort_by_registration(records);
    for (ValueRecord* record : records) {
      visit(*record);
    }
  }

 private:
  // A few small chunks, so that a small manager is small; then chunks of three huge pages, since
  // most of the cost of a cold record is the walk of the page table.
  static constexpr std::uint32_t kSmallBits = 8;
  static constexpr std::uint32_t kNumSmall = 64;
  static constexpr std::uint32_t kNumSmallSlots = kNumSmall << kSmallBits;
  static constexpr std::uint32_t kLargeBits = 15;
  static constexpr int kSlotBits = 28;
  static constexpr int kGenerationBits = Handle::kValueBits - kSlotBits;
  static constexpr std::uint16_t kMaxGeneration = (1U << kGenerationBits) - 1;
  static constexpr std::uint32_t kNone = ~0U;

  struct Chunk {
    ValueRecord* records = nullptr;  ///< raw memory; null while the chunk is empty
    std::uint32_t num_made = 0;      ///< records constructed
    std::uint32_t num_live = 0;
    std::uint32_t first_free = kNone;   ///< of the made ones, linked by next_free
    std::uint16_t base_generation = 1;  ///< of a slot that is made anew
    bool has_room = true;               ///< it stands in `with_room_`
  };
  struct Position {
    std::uint32_t chunk;
    std::uint32_t index;
  };

  /// The record that a handle would have, whatever stands there now; null when there is none.
  [[gnu::always_inline]] ValueRecord* slot_of(const Handle& handle) const noexcept {
    const auto slot = static_cast<std::uint32_t>(handle.id()) & ((1U << kSlotBits) - 1);
    const auto [number, index] = position_of(slot);
    return number < chunks_.size() && index < chunks_[number].num_made
               ? &chunks_[number].records[index]
               : nullptr;
  }
  [[gnu::always_inline]] static void prefetch_lines(const void* begin, std::size_t count) noexcept {
    for (std::size_t line = 0; begin != nullptr && line < count; ++line) {
      __builtin_prefetch(static_cast<const char*>(begin) + 64 * line);
    }
  }
  [[nodiscard]] static constexpr Position position_of(std::uint32_t slot) noexcept {
    return slot < kNumSmallSlots ? Position{slot >> kSmallBits, slot & ((1U << kSmallBits) - 1)}
                                 : Position{kNumSmall + ((slot - kNumSmallSlots) >> kLargeBits),
                                            (slot - kNumSmallSlots) & ((1U << kLargeBits) - 1)};
  }
  [[nodiscard]] static constexpr std::uint32_t first_slot_of(std::uint32_t chunk) noexcept {
    return chunk < kNumSmall ? chunk << kSmallBits
                             : kNumSmallSlots + ((chunk - kNumSmall) << kLargeBits);
  }
  [[nodiscard]] static constexpr std::uint32_t capacity_of(std::uint32_t chunk) noexcept {
    return 1U << (chunk < kNumSmall ? kSmallBits : kLargeBits);
  }
  void allocate(std::uint32_t number);
  void free(std::uint32_t number) noexcept;
  static void sort_by_registration(std::vector<ValueRecord*>& records);

  ManagerId manager_;
  std::vector<Chunk> chunks_;
  std::vector<std::uint32_t> with_room_;
  std::size_t size_ = 0;
  std::uint64_t next_registration_ = 1;
};

}  // namespace residency
