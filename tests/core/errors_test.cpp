// Section P: the classes, their stable codes, their fields and what they derive from.

#include "residency/core/errors.h"

#include <cerrno>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>

#include <gtest/gtest.h>

namespace residency {
namespace {

using namespace residency::literals;

TEST(Errors, EveryClassIsARuntimeErrorWithTheBase) {
  static_assert(std::is_base_of_v<std::runtime_error, Error>);
  static_assert(std::is_base_of_v<Error, BudgetError>);
  static_assert(std::is_base_of_v<Error, CaptureError>);
  static_assert(std::is_base_of_v<Error, ClosedError>);
  static_assert(std::is_base_of_v<Error, DeviceLostError>);
  static_assert(std::is_base_of_v<Error, ForkError>);
  static_assert(std::is_base_of_v<Error, HandleError>);
  static_assert(std::is_base_of_v<Error, HeadroomError>);
  static_assert(std::is_base_of_v<Error, InUseError>);
  static_assert(std::is_base_of_v<Error, LifetimeClosedError>);
  static_assert(std::is_base_of_v<Error, MaterializationError>);
  static_assert(std::is_base_of_v<Error, OwnershipError>);
  static_assert(std::is_base_of_v<Error, PageLockError>);
  static_assert(std::is_base_of_v<Error, PlanError>);
  static_assert(std::is_base_of_v<Error, PlanExecutionError>);
  static_assert(std::is_base_of_v<Error, ReentrancyError>);
  static_assert(std::is_base_of_v<Error, StorageError>);
  static_assert(std::is_base_of_v<Error, TransferError>);
  static_assert(std::is_base_of_v<Error, UnavailableError>);
  static_assert(std::is_base_of_v<Error, UndeclaredWriteError>);
}

TEST(Errors, PlanErrorsAreThoseWithNothingDone) {
  static_assert(std::is_base_of_v<PlanError, StaleStateError>);
  static_assert(std::is_base_of_v<PlanError, SearchLimitError>);
  static_assert(std::is_base_of_v<PlanError, InfeasibleError>);
  static_assert(!std::is_base_of_v<PlanError, PlanExecutionError>);
}

TEST(Errors, CodesAreStableWords) {
  const std::pair<ErrorCode, const char*> codes[] = {
      {ErrorCode::kBudget, "BUDGET"},
      {ErrorCode::kCapture, "CAPTURE"},
      {ErrorCode::kClosed, "CLOSED"},
      {ErrorCode::kDeviceLost, "DEVICE_LOST"},
      {ErrorCode::kFork, "FORK"},
      {ErrorCode::kHandle, "HANDLE"},
      {ErrorCode::kHeadroom, "HEADROOM"},
      {ErrorCode::kInfeasible, "INFEASIBLE"},
      {ErrorCode::kInUse, "IN_USE"},
      {ErrorCode::kLifetimeClosed, "LIFETIME_CLOSED"},
      {ErrorCode::kMaterialization, "MATERIALIZATION"},
      {ErrorCode::kOwnership, "OWNERSHIP"},
      {ErrorCode::kPageLock, "PAGE_LOCK"},
      {ErrorCode::kPlan, "PLAN"},
      {ErrorCode::kPlanExecution, "PLAN_EXECUTION"},
      {ErrorCode::kReentrancy, "REENTRANCY"},
      {ErrorCode::kSearchLimit, "SEARCH_LIMIT"},
      {ErrorCode::kStaleState, "STALE_STATE"},
      {ErrorCode::kStorage, "STORAGE"},
      {ErrorCode::kTransfer, "TRANSFER"},
      {ErrorCode::kUnavailable, "UNAVAILABLE"},
      {ErrorCode::kUndeclaredWrite, "UNDECLARED_WRITE"},
  };
  std::set<std::string> words;
  for (const auto& [code, word] : codes) {
    EXPECT_EQ(to_string(code), word);
    words.insert(word);
  }
  EXPECT_EQ(words.size(), std::size(codes));
}

TEST(Errors, BudgetErrorCarriesAndTellsTheNumbers) {
  const BudgetError error({Location::cuda(1), 1000_B, 600_B, 300_B, 50_B, 77_B});
  EXPECT_EQ(error.code(), ErrorCode::kBudget);
  EXPECT_EQ(error.shortfall.requested, 77_B);
  const std::string text = error.what();
  for (const char* part : {"cuda:1", "1000", "600", "300", "50", "77", "27"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is missing in: " << text;
  }
}

TEST(Errors, HandleErrorSaysWhichKind) {
  const Handle handle((std::int64_t{3} << Handle::kValueBits) | 9);
  const HandleError foreign(handle, Reason::kForeignHandle, ManagerId{8});
  EXPECT_NE(std::string(foreign.what()).find("3"), std::string::npos);
  EXPECT_NE(std::string(foreign.what()).find("8"), std::string::npos);
  const std::set<std::string> texts = {
      foreign.what(), HandleError(handle, Reason::kUnknownHandle, ManagerId{8}).what(),
      HandleError(handle, Reason::kDiscardedHandle, ManagerId{8}).what()};
  EXPECT_EQ(texts.size(), 3U);
}

TEST(Errors, StorageErrorTellsPathAndReason) {
  const StorageError error("/mnt/x/file", ENOSPC, "writing a value");
  EXPECT_EQ(error.path, "/mnt/x/file");
  EXPECT_EQ(error.error_number, ENOSPC);
  const std::string text = error.what();
  EXPECT_NE(text.find("/mnt/x/file"), std::string::npos);
  EXPECT_NE(text.find("No space left"), std::string::npos);
}

TEST(Errors, StaleStateErrorCarriesBothVersions) {
  const StaleStateError error("plan", 5, 9);
  EXPECT_EQ(error.code(), ErrorCode::kStaleState);
  EXPECT_EQ(error.expected, 5U);
  EXPECT_EQ(error.actual, 9U);
  EXPECT_EQ(error.plan, "plan");
}

TEST(Errors, OthersCarryTheirFields) {
  const HeadroomError headroom(Location::cuda(0), 10_B, 8_B, 4_B, "m");
  EXPECT_EQ(headroom.requested, 10_B);
  EXPECT_EQ(headroom.free_bytes, 8_B);
  EXPECT_EQ(headroom.largest_run, 4_B);
  const PageLockError page_lock(1_MiB, 2_MiB, "m");
  EXPECT_EQ(page_lock.limit, 1_MiB);
  EXPECT_EQ(page_lock.requested, 2_MiB);
  const DeviceLostError lost(Location::cuda(3), "m");
  EXPECT_EQ(lost.device, Location::cuda(3));
  const SearchLimitError limit("p", 100);
  EXPECT_EQ(limit.limit, 100U);
  EXPECT_EQ(limit.code(), ErrorCode::kSearchLimit);
  const InfeasibleError infeasible("p", 10_B, 3_B, "a lease");
  EXPECT_EQ(infeasible.needed, 10_B);
  EXPECT_EQ(infeasible.freeable, 3_B);
  EXPECT_EQ(infeasible.protectors, "a lease");
  const TransferError transfer(Handle(7), TransferPath::kFile,
                               std::make_exception_ptr(std::runtime_error("disk")), "m");
  EXPECT_EQ(transfer.handle, Handle(7));
  EXPECT_EQ(transfer.path, TransferPath::kFile);
  EXPECT_EQ(describe(transfer.cause), "disk");
}

TEST(Errors, AnyExceptionCanBeDescribed) {
  EXPECT_EQ(describe(std::make_exception_ptr(std::logic_error("why"))), "why");
  EXPECT_FALSE(describe(std::make_exception_ptr(42)).empty());
  EXPECT_FALSE(describe(nullptr).empty());
}

TEST(Reasons, AreDistinctWordsAndFallIntoThreeOutcomes) {
  std::set<std::string> words;
  for (int i = 0; i <= static_cast<int>(Reason::kWouldBlock); ++i) {
    words.insert(std::string(to_string(static_cast<Reason>(i))));
  }
  EXPECT_EQ(words.size(), static_cast<std::size_t>(Reason::kWouldBlock) + 1);
  EXPECT_FALSE(words.contains(""));
  EXPECT_EQ(outcome_of(Reason::kTaken), Outcome::kChange);
  EXPECT_EQ(outcome_of(Reason::kAlreadyResident), Outcome::kNoOp);
  EXPECT_EQ(outcome_of(Reason::kSameLocation), Outcome::kNoOp);
  EXPECT_EQ(outcome_of(Reason::kForeignHandle), Outcome::kRefused);
  EXPECT_EQ(to_string(Reason::kAlreadyResident), "already-resident");
  EXPECT_EQ(to_string(Reason::kOverBudget), "over-budget");
}

TEST(Reasons, EveryVerdictIsASentence) {
  for (int i = 0; i <= static_cast<int>(Reason::kWouldBlock); ++i) {
    Verdict verdict;
    verdict.reason = static_cast<Reason>(i);
    EXPECT_FALSE(describe(verdict).empty()) << i;
  }
}

}  // namespace
}  // namespace residency
