#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "residency/core/errors.h"
#include "residency/core/manager.h"
#include "residency/core/warning.h"
#include "tests/fake/fake_backend.h"

namespace residency::test {

using namespace residency::literals;
using fake::Call;
using fake::FakeBackend;
using fake::FakeBlock;
using fake::FakeSource;
using fake::FakeView;
using fake::make_spec;

inline const Location kPageable = Location::pageable_host();
inline const Location kPinned = Location::pinned_host();
inline const Location kCuda0 = Location::cuda(0);
inline const Location kCuda1 = Location::cuda(1);
inline const Location kDisk = Location::disk("nvme");
inline constexpr auto kReplicable = ReplicaMode::kReplicable;
inline constexpr auto kExclusive = ReplicaMode::kExclusive;
inline constexpr auto kMustPreserve = Recoverability::kMustPreserve;
inline constexpr auto kReconstructible = Recoverability::kReconstructible;
inline constexpr auto kImmutable = Mutability::kImmutable;
inline constexpr auto kMutable = Mutability::kMutable;

/// All that a snapshot says, but for time, version and peaks, as one text to compare.
inline std::string fingerprint(const Snapshot& snapshot) {
  std::string text;
  const auto add = [&](const auto&... parts) { ((text += std::string(parts) + " "), ...); };
  const auto number = [](auto n) { return std::to_string(n); };
  for (const auto& value : snapshot.values) {
    add(to_string(value.handle), value.discarded ? "discarded" : "live",
        value.write_leased ? "write-leased" : "", value.has_source ? "source" : "");
    for (const auto& each : value.materializations) {
      add("[", to_string(each.location), std::string(to_string(each.state)),
          each.stale ? "stale" : "good", number(each.charged_bytes.count()),
          number(each.num_leases), number(each.num_holds), number(each.num_pending), "]");
    }
    text += "\n";
  }
  for (const auto& each : snapshot.locations) {
    add(to_string(each.location), each.budget ? number(each.budget->count()) : "-",
        number(each.used.count()), number(each.reserved.count()), number(each.retiring.count()),
        number(each.arriving.count()), number(each.escaped.count()));
    text += "\n";
  }
  for (const auto& each : snapshot.reservations) {
    add(each.reservation.label, to_string(each.reservation.location),
        number(each.reservation.nbytes.count()), each.physical ? "physical" : "");
    text += "\n";
  }
  add(number(snapshot.num_leases), number(snapshot.num_holds), number(snapshot.num_scopes));
  return text;
}

/// Collects warnings instead of printing them.
class Warnings {
 public:
  Warnings() {
    set_warning_handler([this](std::string_view text) {
      const std::lock_guard lock(mutex_);
      texts_.emplace_back(text);
    });
  }
  ~Warnings() { set_warning_handler(nullptr); }
  Warnings(const Warnings&) = delete;
  Warnings& operator=(const Warnings&) = delete;
  [[nodiscard]] std::vector<std::string> texts() const {
    const std::lock_guard lock(mutex_);
    return texts_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> texts_;
};

/// A manager over the fake backend. The disk tier `disk:nvme` is declared; nothing is budgeted
/// unless the test says so before it calls `start`.
class ManagerTest : public testing::Test {
 protected:
  fake::FakeOptions fake_options;
  ManagerOptions options;
  std::shared_ptr<FakeBackend> backend;
  std::shared_ptr<Manager> manager;
  std::map<Handle, std::uint64_t> seeds;
  std::map<Handle, std::shared_ptr<FakeSource>> sources;
  std::uint64_t next_seed = 1;

  void budget(Location at, std::optional<Bytes> bytes) { options.budgets.push_back({at, bytes}); }

  void start() {
    if (options.disks.empty()) {
      options.disks.push_back({.name = "nvme", .directory = "/nowhere", .budget = std::nullopt});
    }
    backend = std::make_shared<FakeBackend>(fake_options);
    manager = Manager::create(options, backend);
  }

  void TearDown() override {
    if (!manager) {
      return;
    }
    if (!manager->closed()) {
      EXPECT_NO_THROW(manager->audit());
      backend->allow_views_to_outlive_blocks();
      manager->close({.force = true});
    }
    manager.reset();
    backend->complete_all();
    EXPECT_TRUE(backend->violations().empty());
    for (const Location at : {kPageable, kPinned, kCuda0, kCuda1, kDisk}) {
      EXPECT_EQ(backend->live_bytes(at), Bytes()) << to_string(at);
    }
  }

  Handle adopt(Location at, std::int64_t nbytes, ReplicaMode mode = kReplicable,
               Mutability mutability = kImmutable) {
    const auto spec = make_spec(nbytes, mode, kMustPreserve, mutability);
    const std::uint64_t seed = next_seed++;
    const Handle handle = manager->adopt(backend->make_block(at, spec, seed), spec);
    seeds[handle] = seed;
    return handle;
  }

  Handle source(std::int64_t nbytes, Location at = kPageable, ReplicaMode mode = kReplicable,
                Mutability mutability = kImmutable) {
    const auto spec = make_spec(nbytes, mode, kReconstructible, mutability);
    const std::uint64_t seed = next_seed++;
    auto made = std::make_shared<FakeSource>(backend, at, spec, seed);
    const Handle handle = manager->register_source(made, spec, at);
    seeds[handle] = seed;
    sources[handle] = std::move(made);
    return handle;
  }

  Lease acquire(const Handle& handle, Location at, Access access = Access::kRead) {
    const Handle handles[] = {handle};
    return manager->acquire(handles, at, {.access = access});
  }
  Hold hold(const Handle& handle, Location at) {
    const Handle handles[] = {handle};
    return manager->hold(handles, at);
  }

  static FakeBlock& block(const Lease& lease, const Handle& handle) {
    return dynamic_cast<FakeView&>(lease.view(handle)).block();
  }

  /// The bytes at the location (no disk), through a lease.
  testing::AssertionResult holds(const Handle& handle, Location at) {
    Lease lease = acquire(handle, at);
    FakeBlock& leased = block(lease, handle);
    bool right = true;
    if (at.is_cuda()) {
      backend->launch_read({at, 0}, leased, seeds.at(handle));
      lease.release(true);
    } else {
      right = leased.holds(seeds.at(handle));
      lease.release();
    }
    return right ? testing::AssertionSuccess()
                 : testing::AssertionFailure() << "other bytes at " << to_string(at);
  }

  [[nodiscard]] std::vector<Location> places(const Handle& handle) const {
    std::vector<Location> found;
    const Snapshot snapshot = manager->snapshot();
    for (const auto& each : snapshot.find(handle)->materializations) {
      found.push_back(each.location);
    }
    return found;
  }
  [[nodiscard]] MaterializationSnapshot at(const Handle& handle, Location location) const {
    const Snapshot snapshot = manager->snapshot();
    for (const auto& each : snapshot.find(handle)->materializations) {
      if (each.location == location) {
        return each;
      }
    }
    throw std::out_of_range("no materialization of " + to_string(handle) + " at " +
                            to_string(location));
  }
  [[nodiscard]] LocationSnapshot account(Location location) const {
    const Snapshot snapshot = manager->snapshot();
    const auto* found = snapshot.find(location);
    return found != nullptr ? *found
                            : LocationSnapshot{.location = location,
                                               .budget = std::nullopt,
                                               .used = {},
                                               .reserved = {},
                                               .retiring = {},
                                               .arriving = {},
                                               .escaped = {},
                                               .peak_used = {},
                                               .peak_charged = {}};
  }
  [[nodiscard]] Bytes used(Location location) const { return account(location).used; }

  /// Runs `call`, which must throw `Expected` and leave state, version and locations as they were.
  /// Returns the error, so that its fields can be looked at.
  template <class Expected, class Function>
  std::optional<Expected> refused(const Function& call) {
    const std::string before = fingerprint(manager->snapshot());
    const auto version = manager->state_version();
    const auto trace = manager->trace().size();
    std::optional<Expected> caught;
    try {
      call();
      ADD_FAILURE() << "nothing was thrown";
    } catch (const Expected& error) {
      EXPECT_STRNE(error.what(), "");
      caught.emplace(error);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "another error was thrown: " << error.what();
    }
    EXPECT_EQ(fingerprint(manager->snapshot()), before);
    EXPECT_EQ(manager->state_version(), version);
    EXPECT_EQ(manager->trace().size(), trace) << "a refusal is not in the trace";
    EXPECT_NO_THROW(manager->audit());
    return caught;
  }

  /// Runs `call`, which must change neither state nor version.
  template <class Function>
  void changes_nothing(const Function& call) {
    const std::string before = fingerprint(manager->snapshot());
    const auto version = manager->state_version();
    call();
    EXPECT_EQ(fingerprint(manager->snapshot()), before);
    EXPECT_EQ(manager->state_version(), version);
  }
};

}  // namespace residency::test
