#include "trace.h"

#include <algorithm>

#include "residency/core/errors.h"

namespace residency {

void complete_record(TransitionRecord& record, const Fence& fence) {
  switch (fence.poll()) {
    case FenceStatus::kPending: break;
    case FenceStatus::kDone: record.device_elapsed_ns = fence.elapsed_ns(); break;
    case FenceStatus::kFailed:
      record.failed = true;
      record.failure = describe(fence.error());
      break;
  }
}

void Trace::append(TransitionRecord& record, const FencePtr& fence, const PlanName& plan) {
  record.sequence = ++num_appended_;
  if (capacity_ == 0) {
    return;
  }
  const std::size_t position = (record.sequence - 1) % capacity_;
  if (position == ring_.size()) {
    ring_.push_back({record, fence, plan});
  } else {
    ring_[position] = {record, fence, plan};
  }
}

std::vector<TransitionRecord> Trace::read(std::optional<std::size_t> limit) const {
  const std::size_t count = std::min(limit.value_or(ring_.size()), ring_.size());
  std::vector<TransitionRecord> records;
  records.reserve(count);
  for (std::uint64_t n = num_appended_ - count; n < num_appended_; ++n) {
    const Entry& entry = ring_[n % capacity_];
    records.push_back(entry.record);
    if (entry.fence) {
      complete_record(records.back(), *entry.fence);
    }
    if (entry.plan) {
      records.back().plan = *entry.plan;
    }
  }
  return records;
}

}  // namespace residency
