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

void Trace::make_room() {
  if (ring_.size() < capacity_ && ring_.size() == ring_.capacity()) {
    ring_.reserve(std::min(capacity_, std::max<std::size_t>(16, 2 * ring_.size())));
  }
}

void Trace::append(TransitionRecord& record, const FencePtr& fence, const PlanName& plan) {
  auto failure = record.failed ? std::make_unique<const std::string>(record.failure) : nullptr;
  if (ring_.size() < capacity_) {
    ring_.emplace_back();
  }
  record.sequence = ++num_appended_;
  if (capacity_ == 0) {
    return;
  }
  Entry& entry = ring_[(record.sequence - 1) % capacity_];
  entry.handle = record.handle;
  entry.source = record.source;
  entry.destination = record.destination;
  entry.action = record.action;
  entry.phase = record.phase;
  entry.reason = record.reason;
  entry.path = record.path;
  entry.failed = record.failed;
  entry.waited = record.waited;
  entry.bytes = record.bytes;
  entry.host_start_ns = record.host_start_ns;
  entry.host_end_ns = record.host_end_ns;
  entry.fence = fence;
  entry.plan = plan;
  entry.failure = std::move(failure);
}

std::vector<TransitionRecord> Trace::read(std::optional<std::size_t> limit) const {
  const std::size_t count = std::min(limit.value_or(ring_.size()), ring_.size());
  std::vector<TransitionRecord> records;
  records.reserve(count);
  for (std::uint64_t n = num_appended_ - count; n < num_appended_; ++n) {
    const Entry& entry = ring_[n % capacity_];
    TransitionRecord& record = records.emplace_back();
    record.sequence = n + 1;
    record.action = entry.action;
    record.phase = entry.phase;
    record.reason = entry.reason;
    record.path = entry.path;
    record.failed = entry.failed;
    record.waited = entry.waited;
    record.handle = entry.handle;
    record.source = entry.source;
    record.destination = entry.destination;
    record.bytes = entry.bytes;
    record.host_start_ns = entry.host_start_ns;
    record.host_end_ns = entry.host_end_ns;
    if (entry.failure) {
      record.failure = *entry.failure;
    }
    if (entry.fence) {
      complete_record(record, *entry.fence);
    }
    if (entry.plan) {
      record.plan = *entry.plan;
    }
  }
  return records;
}

}  // namespace residency
