#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "residency/core/backend.h"
#include "residency/core/handle.h"
#include "residency/core/location.h"
#include "residency/core/source.h"
#include "residency/core/spec.h"
#include "residency/core/verdict.h"

namespace residency {

/// One copy of a value at one location.
struct Materialization {
  Location location;
  bool stale = false;
  bool fails_later = false;  ///< arriving on a path that can fail after it was enqueued
  std::uint32_t num_leases = 0;
  std::uint32_t num_holds = 0;
  Bytes charge;
  BlockPtr block;
  FencePtr ready;                   ///< null: ready
  std::vector<FencePtr> last_uses;  ///< of leases that have ended
  std::vector<FencePtr> readers;    ///< copies that read this one
  std::vector<AddressRange> ranges;
  std::unique_ptr<Materialization> next;

  [[nodiscard]] bool is_protected() const noexcept { return num_leases != 0 || num_holds != 0; }
  /// An arrival of which it is not yet known whether it succeeds.
  [[nodiscard]] bool is_uncertain() const noexcept { return fails_later && ready != nullptr; }
};

/// A value as the manager keeps it. Two cache lines: a manager with a million values touches one
/// of them cold for every action.
struct ValueRecord {
  std::uint16_t generation = 0;
  bool live = false;
  bool discarded = false;
  bool busy = false;         ///< an action on it is under way
  bool has_waiters = false;  ///< calls wait for that action to end
  bool write_leased = false;
  bool dirty = false;        ///< written since it was registered: its source cannot make it again
  bool has_failure = false;  ///< a transfer failed and nobody was told yet
  std::uint32_t slot = 0;
  Location source_location;
  ValueType type;
  std::uint32_t content_epoch = 0;  ///< rises with every write
  std::uint32_t visit = 0;          ///< last multi-value call that saw it
  std::uint32_t num_leases = 0;     ///< over all materializations
  ValueSpec spec;
  std::shared_ptr<Source> source;
  std::uint64_t registration = 0;
  std::unique_ptr<Materialization> first;

  [[nodiscard]] Materialization* find(Location location) const noexcept {
    for (Materialization* each = first.get(); each != nullptr; each = each->next.get()) {
      if (each->location == location) {
        return each;
      }
    }
    return nullptr;
  }
  [[nodiscard]] bool can_be_made_again() const noexcept { return source != nullptr && !dirty; }
};

/// The values of a manager by handle: slots in chunks, reused with a new generation, so that a
/// lookup is two loads and a forgotten value leaves nothing behind. Guarded by the manager's mutex.
class ValueTable {
 public:
  explicit ValueTable(ManagerId manager) noexcept : manager_(manager) {}

  /// A fresh record. Throws `std::length_error` when the ids are used up.
  ValueRecord& add(ValueType type);
  /// Frees the record for another value; its handle is unknown from then on. The record must own
  /// nothing whose destruction calls out.
  void remove(ValueRecord& record);

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

  [[nodiscard]] std::size_t size() const noexcept { return size_; }

  template <class Visit>
  void for_each(const Visit& visit) const {
    for (const Chunk& chunk : chunks_) {
      if (chunk.records) {
        for (std::uint32_t i = 0; i < kChunkSize; ++i) {
          if (chunk.records[i].live) {
            visit(chunk.records[i]);
          }
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
  static constexpr std::uint32_t kChunkBits = 8;
  static constexpr std::uint32_t kChunkSize = 1U << kChunkBits;
  static constexpr int kSlotBits = 28;
  static constexpr int kGenerationBits = Handle::kValueBits - kSlotBits;
  static constexpr std::uint16_t kMaxGeneration = (1U << kGenerationBits) - 1;

  struct Chunk {
    std::unique_ptr<ValueRecord[]> records;  ///< null while the chunk is empty
    std::uint16_t num_live = 0;
    std::uint16_t first_free = 0;       ///< no slot below it is free
    std::uint16_t base_generation = 1;  ///< of slots of a chunk that is made again
    bool has_room = true;               ///< it stands in `with_room_`
  };

  static void sort_by_registration(std::vector<ValueRecord*>& records);

  ManagerId manager_;
  std::vector<Chunk> chunks_;
  std::vector<std::uint32_t> with_room_;
  std::size_t size_ = 0;
  std::uint64_t next_registration_ = 1;
};

}  // namespace residency
