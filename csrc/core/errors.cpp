#include "residency/core/errors.h"

#include <system_error>
#include <utility>

#include <fmt/format.h>

namespace residency {
namespace {

Verdict over_budget(const Shortfall& shortfall) {
  Verdict verdict;
  verdict.reason = Reason::kOverBudget;
  verdict.shortfall = shortfall;
  return verdict;
}

std::string handle_message(const Handle& handle, Reason reason, ManagerId manager) {
  const auto asked = static_cast<std::uint32_t>(manager);
  switch (reason) {
    case Reason::kForeignHandle:
      return fmt::format("{} belongs to manager {}, this is manager {}", to_string(handle),
                         static_cast<std::uint32_t>(handle.manager()), asked);
    case Reason::kDiscardedHandle:
      return fmt::format("{} was discarded or taken from manager {}", to_string(handle), asked);
    default:
      return fmt::format(
          "{} is unknown to manager {}: it never gave out such a handle, or has forgotten it",
          to_string(handle), asked);
  }
}

}  // namespace

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kBudget: return "BUDGET";
    case ErrorCode::kCapture: return "CAPTURE";
    case ErrorCode::kClosed: return "CLOSED";
    case ErrorCode::kDeviceLost: return "DEVICE_LOST";
    case ErrorCode::kFork: return "FORK";
    case ErrorCode::kHandle: return "HANDLE";
    case ErrorCode::kHeadroom: return "HEADROOM";
    case ErrorCode::kInfeasible: return "INFEASIBLE";
    case ErrorCode::kInUse: return "IN_USE";
    case ErrorCode::kLifetimeClosed: return "LIFETIME_CLOSED";
    case ErrorCode::kMaterialization: return "MATERIALIZATION";
    case ErrorCode::kOwnership: return "OWNERSHIP";
    case ErrorCode::kPageLock: return "PAGE_LOCK";
    case ErrorCode::kPlan: return "PLAN";
    case ErrorCode::kPlanExecution: return "PLAN_EXECUTION";
    case ErrorCode::kReentrancy: return "REENTRANCY";
    case ErrorCode::kSearchLimit: return "SEARCH_LIMIT";
    case ErrorCode::kStaleState: return "STALE_STATE";
    case ErrorCode::kStorage: return "STORAGE";
    case ErrorCode::kTransfer: return "TRANSFER";
    case ErrorCode::kUnavailable: return "UNAVAILABLE";
    case ErrorCode::kUndeclaredWrite: return "UNDECLARED_WRITE";
  }
  return {};
}

BudgetError::BudgetError(const Shortfall& shortfall)
    : BudgetError(shortfall, describe(over_budget(shortfall))) {}

HandleError::HandleError(const Handle& handle, Reason reason, ManagerId manager)
    : Error(ErrorCode::kHandle, handle_message(handle, reason, manager)),
      handle(handle),
      reason(reason),
      manager(manager) {}

StaleStateError::StaleStateError(std::string plan, std::uint64_t expected, std::uint64_t actual)
    : PlanError(std::move(plan), Phase::kExecute, 0, Verdict{},
                fmt::format("expected state version {}, but the manager is at {}: plan again",
                            expected, actual),
                ErrorCode::kStaleState),
      expected(expected),
      actual(actual) {}

SearchLimitError::SearchLimitError(std::string plan, std::uint64_t limit)
    : PlanError(std::move(plan), Phase::kExecute, 0, Verdict{},
                fmt::format("no answer within {} explored states: raise the limit, or give the "
                            "policy fewer candidates",
                            limit),
                ErrorCode::kSearchLimit),
      limit(limit) {}

InfeasibleError::InfeasibleError(std::string plan, Bytes needed, Bytes freeable,
                                 std::string protectors)
    : PlanError(std::move(plan), Phase::kExecute, 0, Verdict{},
                fmt::format("{} needed, {} could be freed at most; the rest is kept by {}",
                            to_string(needed), to_string(freeable), protectors),
                ErrorCode::kInfeasible),
      needed(needed),
      freeable(freeable),
      protectors(std::move(protectors)) {}

PlanExecutionError::PlanExecutionError(std::string plan, Phase phase, std::size_t index,
                                       std::string failed, PlanReport completed,
                                       std::exception_ptr cause, bool state_restored,
                                       const std::string& message)
    : Error(ErrorCode::kPlanExecution, message),
      plan(std::move(plan)),
      phase(phase),
      index(index),
      failed(std::move(failed)),
      completed(std::move(completed)),
      cause(std::move(cause)),
      state_restored(state_restored) {}

StorageError::StorageError(std::string path, int error_number, const std::string& what_was_done)
    : Error(ErrorCode::kStorage, fmt::format("{}: {}: {}", what_was_done, path,
                                             std::generic_category().message(error_number))),
      path(std::move(path)),
      error_number(error_number) {}

std::string describe(const std::exception_ptr& error) {
  if (!error) {
    return "no error";
  }
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is not a std::exception";
  }
}

}  // namespace residency
