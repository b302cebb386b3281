#include "value_table.h"

#include <algorithm>
#include <new>
#include <stdexcept>

#include <sys/mman.h>

namespace residency {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

/// Whole huge pages, where the system has them to give.
void* map_huge_pages(std::size_t nbytes) {
  void* mapped =
      mmap(nullptr, nbytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    throw std::bad_alloc();
  }
  char* const begin = static_cast<char*>(mapped);
  const std::size_t head =
      (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
  if (head != 0) {
    munmap(begin, head);
  }
  if (head != kHugePage) {
    munmap(begin + head + nbytes, kHugePage - head);
  }
  madvise(begin + head, nbytes, MADV_HUGEPAGE);  // a hint: it may fail
  return begin + head;
}

}  // namespace

void ValueTable::allocate(std::uint32_t number) {
  const std::size_t nbytes = capacity_of(number) * sizeof(ValueRecord);
  chunks_[number].records = static_cast<ValueRecord*>(
      number < kNumSmall ? ::operator new(nbytes, std::align_val_t(alignof(ValueRecord)))
                         : map_huge_pages(nbytes));
}

void ValueTable::free(std::uint32_t number) noexcept {
  Chunk& chunk = chunks_[number];
  std::destroy_n(chunk.records, chunk.num_made);
  if (number < kNumSmall) {
    ::operator delete(chunk.records, std::align_val_t(alignof(ValueRecord)));
  } else {
    munmap(chunk.records, capacity_of(number) * sizeof(ValueRecord));
  }
  chunk.records = nullptr;
  chunk.num_made = 0;
  chunk.first_free = kNone;
}

ValueTable::~ValueTable() {
  for (std::uint32_t number = 0; number < chunks_.size(); ++number) {
    if (chunks_[number].records != nullptr) {
      free(number);
    }
  }
}

ValueRecord& ValueTable::add(ValueType type) {
  while (true) {
    if (with_room_.empty()) {
      const auto number = static_cast<std::uint32_t>(chunks_.size());
      if (first_slot_of(number) + capacity_of(number) > 1U << kSlotBits) {
        throw std::length_error("a manager can name 2^28 values, not more");
      }
      chunks_.emplace_back();
      with_room_.reserve(chunks_.capacity());  // also for `remove`, which must not fail
      with_room_.push_back(number);
    }
    const std::uint32_t number = with_room_.back();
    Chunk& chunk = chunks_[number];
    ValueRecord* record = nullptr;
    if (chunk.first_free != kNone) {
      record = &chunk.records[chunk.first_free];
      chunk.first_free = record->next_free;
    } else if (chunk.num_made < capacity_of(number) && chunk.base_generation <= kMaxGeneration) {
      if (chunk.records == nullptr) {
        allocate(number);
      }
      record = new (&chunk.records[chunk.num_made]) ValueRecord();
      record->generation = chunk.base_generation;
      record->slot = first_slot_of(number) + chunk.num_made++;
    } else {
      chunk.has_room = false;
      with_room_.pop_back();
      continue;
    }
    ++chunk.num_live;
    ++size_;
    record->live = true;
    record->type = type;
    record->registration = next_registration_++;
    return *record;
  }
}

void ValueTable::remove(ValueRecord& record) noexcept {
  const std::uint32_t slot = record.slot;
  const auto next_generation = static_cast<std::uint16_t>(record.generation + 1);
  const auto [number, index] = position_of(slot);
  Chunk& chunk = chunks_[number];
  std::destroy_at(&record);
  new (&record) ValueRecord();
  record.generation = next_generation;
  record.slot = slot;
  if (next_generation <= kMaxGeneration) {  // otherwise the ids of this slot are used up
    record.next_free = chunk.first_free;
    chunk.first_free = index;
  }
  --size_;
  if (--chunk.num_live == 0) {
    for (std::uint32_t i = 0; i < chunk.num_made; ++i) {
      chunk.base_generation = std::max(chunk.base_generation, chunk.records[i].generation);
    }
    free(number);
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
  ValueRecord* record = slot_of(handle);
  if (record == nullptr) {
    return {};
  }
  __builtin_prefetch(&record->slot_for_first);
  const auto id = static_cast<std::uint64_t>(handle.id());
  const auto generation = static_cast<std::uint16_t>((id >> kSlotBits) & kMaxGeneration);
  if (!record->live || record->generation != generation || record->type != handle.type()) {
    return {};
  }
  if (record->discarded) {
    return {nullptr, Reason::kDiscardedHandle};
  }
  return {record, Reason::kAlreadyResident};
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
