#include "residency/core/verdict.h"

#include <fmt/format.h>

namespace residency {

std::string_view to_string(Reason reason) {
  switch (reason) {
    case Reason::kCopied: return "copied";
    case Reason::kLoaded: return "loaded";
    case Reason::kRefreshed: return "refreshed";
    case Reason::kReleased: return "released";
    case Reason::kDiscarded: return "discarded";
    case Reason::kTaken: return "taken";
    case Reason::kAlreadyResident: return "already-resident";
    case Reason::kAlreadyAbsent: return "already-absent";
    case Reason::kSameLocation: return "same-location";
    case Reason::kForeignHandle: return "foreign-handle";
    case Reason::kUnknownHandle: return "unknown-handle";
    case Reason::kDiscardedHandle: return "discarded-handle";
    case Reason::kLocationUnavailable: return "location-unavailable";
    case Reason::kExclusiveElsewhere: return "exclusive-elsewhere";
    case Reason::kNothingToCopy: return "nothing-to-copy";
    case Reason::kFromLocationAbsent: return "from-location-absent";
    case Reason::kProtected: return "protected";
    case Reason::kShared: return "shared";
    case Reason::kLastMaterialization: return "last-materialization";
    case Reason::kOverBudget: return "over-budget";
    case Reason::kTransferFailed: return "transfer-failed";
    case Reason::kWouldBlock: return "would-block";
  }
  return {};
}

std::string describe(const Verdict& verdict) {
  const auto place = [](const std::optional<Location>& location) {
    return location ? to_string(*location) : std::string("nowhere");
  };
  switch (verdict.reason) {
    case Reason::kCopied:
      return fmt::format("{} copied from {} to {}", to_string(verdict.bytes), place(verdict.source),
                         place(verdict.destination));
    case Reason::kLoaded:
      return fmt::format("{} loaded by the source to {}", to_string(verdict.bytes),
                         place(verdict.destination));
    case Reason::kRefreshed:
      return fmt::format("the stale materialization at {} is overwritten from {}",
                         place(verdict.destination), place(verdict.source));
    case Reason::kReleased:
      return fmt::format("{} given up, nothing is copied", place(verdict.source));
    case Reason::kDiscarded: return "the value ends";
    case Reason::kTaken: return "management ends";
    case Reason::kAlreadyResident:
      return fmt::format("already resident at {}", place(verdict.destination));
    case Reason::kAlreadyAbsent: return fmt::format("already absent at {}", place(verdict.source));
    case Reason::kSameLocation:
      return fmt::format("source and destination are both {}", place(verdict.destination));
    case Reason::kForeignHandle: return "the handle belongs to another manager";
    case Reason::kUnknownHandle:
      return "the handle names no value of this manager (it was forgotten, or never given out)";
    case Reason::kDiscardedHandle: return "the value was discarded or taken";
    case Reason::kLocationUnavailable:
      return fmt::format("{} does not exist here, or was lost",
                         place(verdict.destination ? verdict.destination : verdict.source));
    case Reason::kExclusiveElsewhere:
      return fmt::format(
          "the value is exclusive and resident at {}: ensure would make a second copy; use move",
          place(verdict.source));
    case Reason::kNothingToCopy:
      return "no materialization to copy from, and no source that could make one";
    case Reason::kFromLocationAbsent:
      return fmt::format("no materialization at from_location {}", place(verdict.source));
    case Reason::kProtected:
      return fmt::format(
          "the materialization at {} is protected: {} lease(s), {} hold(s), {} last use(s) "
          "pending; "
          "release them first",
          place(verdict.source), verdict.protection.num_leases, verdict.protection.num_holds,
          verdict.protection.num_pending);
    case Reason::kShared:
      return fmt::format(
          "others keep the memory at {} alive and strict_aliases is on; let go of those tensors "
          "first",
          place(verdict.source));
    case Reason::kLastMaterialization:
      return fmt::format(
          "{} has the last materialization of a value that no source can make again; copy or move "
          "it elsewhere first, or discard the value",
          place(verdict.source));
    case Reason::kOverBudget: {
      const Shortfall& s = verdict.shortfall;
      if (s.budget == Bytes::max()) {
        return fmt::format("{} B more at {} are more than can be counted", s.requested.count(),
                           to_string(s.location));
      }
      return fmt::format(
          "{} has {} of {} B, of which {} B used, {} B reserved, {} B retiring: {} B more do "
          "not fit; make room or raise {} by {} B",
          to_string(s.location), s.of_system ? "a limit of the system" : "a budget",
          s.budget.count(), s.used.count(), s.reserved.count(), s.retiring.count(),
          s.requested.count(),
          s.of_system ? "the limit (ulimit -l, memory.max of the cgroup)" : "the budget",
          s.used.saturating_add(s.reserved)
              .saturating_add(s.retiring)
              .saturating_add(s.requested)
              .saturating_sub(s.budget)
              .count());
    }
    case Reason::kTransferFailed:
      return "an earlier transfer of this value failed after it was enqueued; wait for its report, "
             "or touch the value directly, to be told once";
    case Reason::kWouldBlock:
      return "it needs to wait on the host for a fence, and may_block is false";
  }
  return {};
}

}  // namespace residency
