#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "residency/core/fence.h"
#include "residency/core/report.h"

namespace residency {

/// Fills in what is only known once the transfer has ended.
void complete_record(TransitionRecord& record, const Fence& fence);

/// The newest transitions of a manager, in a ring. Guarded by the manager's mutex.
class Trace {
 public:
  using PlanName = std::shared_ptr<const std::string>;

  explicit Trace(std::size_t capacity) noexcept : capacity_(capacity) {}

  /// So that adding one that has not failed does not allocate.
  void make_room();
  /// Numbers the record and keeps it. Fences kept here own no block: a failed one gave its block
  /// back when the failure was settled.
  void append(TransitionRecord& record, const FencePtr& fence, const PlanName& plan);
  /// The newest `limit`, oldest first.
  [[nodiscard]] std::vector<TransitionRecord> read(std::optional<std::size_t> limit) const;

 private:
  /// A TransitionRecord without the texts that most transitions lack: every action writes one.
  struct Entry {
    Handle handle;
    std::optional<Location> source;
    std::optional<Location> destination;
    ActionKind action;
    Phase phase;
    Reason reason;
    TransferPath path;
    bool failed;
    bool waited;
    Bytes bytes;
    std::int64_t host_start_ns;
    std::int64_t host_end_ns;
    FencePtr fence;
    PlanName plan;
    std::unique_ptr<const std::string> failure;
  };
  std::size_t capacity_;
  std::uint64_t num_appended_ = 0;
  std::vector<Entry> ring_;  // position of number n (from 1): (n - 1) % capacity
};

}  // namespace residency
