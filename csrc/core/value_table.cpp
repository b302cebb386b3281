#include "value_table.h"

#include <algorithm>
#include <stdexcept>

namespace residency {

ValueRecord& ValueTable::add(ValueType type) {
  while (true) {
    if (with_room_.empty()) {
      if (chunks_.size() << kChunkBits >= std::size_t{1} << kSlotBits) {
        throw std::length_error("a manager can name 2^28 values, not more");
      }
      with_room_.push_back(static_cast<std::uint32_t>(chunks_.size()));
      chunks_.emplace_back();
    }
    const std::uint32_t number = with_room_.back();
    Chunk& chunk = chunks_[number];
    if (!chunk.records && chunk.base_generation <= kMaxGeneration) {
      chunk.records = std::make_unique<ValueRecord[]>(kChunkSize);
      chunk.first_free = 0;
      for (std::uint32_t i = 0; i < kChunkSize; ++i) {
        chunk.records[i].generation = chunk.base_generation;
        chunk.records[i].slot = (number << kChunkBits) + i;
      }
    }
    for (std::uint32_t i = chunk.first_free; chunk.records && i < kChunkSize; ++i) {
      ValueRecord& record = chunk.records[i];
      if (!record.live && record.generation <= kMaxGeneration) {
        chunk.first_free = static_cast<std::uint16_t>(i + 1);
        ++chunk.num_live;
        ++size_;
        record.live = true;
        record.type = type;
        record.registration = next_registration_++;
        return record;
      }
    }
    chunk.has_room = false;
    with_room_.pop_back();
  }
}

void ValueTable::remove(ValueRecord& record) {
  const std::uint32_t slot = record.slot;
  const std::uint32_t number = slot >> kChunkBits;
  Chunk& chunk = chunks_[number];
  const std::uint32_t index = slot & (kChunkSize - 1);
  const auto next_generation = static_cast<std::uint16_t>(record.generation + 1);
  record = ValueRecord();
  record.generation = next_generation;
  record.slot = slot;
  chunk.first_free = std::min(chunk.first_free, static_cast<std::uint16_t>(index));
  --size_;
  if (--chunk.num_live == 0) {
    for (std::uint32_t i = 0; i < kChunkSize; ++i) {
      chunk.base_generation = std::max(chunk.base_generation, chunk.records[i].generation);
    }
    chunk.records.reset();
    if (chunk.base_generation > kMaxGeneration) {
      return;  // the ids of this chunk are used up: it stays empty
    }
  }
  if (!chunk.has_room) {
    chunk.has_room = true;
    with_room_.push_back(number);
  }
}

ValueTable::Found ValueTable::find(const Handle& handle) const noexcept {
  if (handle.manager() != manager_) {
    // A handle that no manager can have given out is unknown rather than foreign.
    return {nullptr, handle.id() > 0 && handle.manager() != ManagerId{} ? Reason::kForeignHandle
                                                                        : Reason::kUnknownHandle};
  }
  const auto id = static_cast<std::uint64_t>(handle.id());
  const auto slot = static_cast<std::uint32_t>(id) & ((1U << kSlotBits) - 1);
  const auto generation = static_cast<std::uint16_t>((id >> kSlotBits) & kMaxGeneration);
  const std::uint32_t number = slot >> kChunkBits;
  if (number >= chunks_.size() || !chunks_[number].records) {
    return {};
  }
  ValueRecord& record = chunks_[number].records[slot & (kChunkSize - 1)];
  if (!record.live || record.generation != generation || record.type != handle.type()) {
    return {};
  }
  if (record.discarded) {
    return {nullptr, Reason::kDiscardedHandle};
  }
  return {&record, Reason::kAlreadyResident};
}

void ValueTable::sort_by_registration(std::vector<ValueRecord*>& records) {
  const auto by_registration = [](const ValueRecord* left, const ValueRecord* right) {
    return left->registration < right->registration;
  };
  if (!std::ranges::is_sorted(records, by_registration)) {
    std::ranges::sort(records, by_registration);
  }
}

}  // namespace residency
