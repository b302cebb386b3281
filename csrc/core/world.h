#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "ledger.h"
#include "residency/core/backend.h"
#include "residency/core/inline_vector.h"
#include "residency/core/options.h"
#include "value_table.h"

namespace residency {

/// A materialization as the planner sees it.
struct Residence {
  Location location;
  bool stale = false;
  bool lost = false;       ///< with its device, or with the one that was to bring it
  bool uncertain = false;  ///< an arrival that may still fail
  bool put_off = false;    ///< the same, of which the call makes certain before it acts
  bool replaces = false;   ///< it came by a move whose source comes back if it fails
  bool arrives_by_worker = false;
  bool read_by_copy = false;    ///< a copy that completes on a worker reads it
  bool used_by_worker = false;  ///< so that its memory stays for a while after it was given up
  std::uint32_t num_leases = 0;
  std::uint32_t num_holds = 0;
  std::uint32_t num_pending = 0;
  Bytes charge{};
  const Block* block = nullptr;  ///< null for one that only the simulation has made
  std::uint32_t taken_by = kNoStep;

  static constexpr std::uint32_t kNoStep = UINT32_MAX;

  [[nodiscard]] bool is_protected() const noexcept { return num_leases != 0 || num_holds != 0; }
  [[nodiscard]] bool is_good() const noexcept { return !stale && !lost; }
};

/// A value as the planner sees it: its record for what never changes, its residences.
struct ValueView {
  const ValueRecord* record = nullptr;
  Reason why_not = Reason::kUnknownHandle;  ///< when record is null
  bool ended = false;                       ///< the simulation has discarded it
  InlineVector<Residence, 2> residences;

  [[nodiscard]] Residence* find(Location location) noexcept {
    for (Residence& each : residences) {
      if (each.location == location) {
        return &each;
      }
    }
    return nullptr;
  }
  [[nodiscard]] const Residence* find(Location location) const noexcept {
    return const_cast<ValueView*>(this)->find(location);
  }
};

/// What the planner plans against: the manager's state, overlaid with what a simulation has done
/// to it so far. Without simulated actions it is the state itself and allocates nothing; its cost
/// grows with what the simulated actions touch, never with what is registered.
///
/// Lives under the manager's mutex.
class World {
 public:
  /// Of the locations that the system lets take no more than a part of what they are to.
  using Limits = std::vector<std::pair<Location, SystemLimit>>;

  /// `num_actions`: how many are going to be simulated, so that room is made once.
  World(const ValueTable& values, const Ledger& ledger, const Backend& backend,
        const ManagerOptions& options, std::size_t num_actions = 0, Limits limits = {}) noexcept
      : values_(values),
        ledger_(ledger),
        backend_(backend),
        options_(options),
        num_actions_(num_actions),
        limits_(std::move(limits)) {}

  /// The reference is valid until the next call.
  [[nodiscard]] const ValueView& value(const Handle& handle);
  [[nodiscard]] const Account& account(Location location);
  [[nodiscard]] const Backend& backend() const noexcept { return backend_; }
  [[nodiscard]] const ManagerOptions& options() const noexcept { return options_; }

  /// Simulates the action of which `verdict` was planned against this world.
  void apply(const Handle& handle, const Verdict& verdict);
  /// Simulates a reservation that was found to fit.
  void reserve(Location location, Bytes nbytes);

  /// From now on notes what the simulation does to memory that is taken in segments.
  void note_steps() noexcept { notes_steps_ = true; }
  [[nodiscard]] std::span<const MemoryStep> steps_at(Location location) const noexcept;

  /// Accounts that the simulation has touched, in the order of first touch.
  [[nodiscard]] const std::vector<Account>& touched() const noexcept { return accounts_; }

 private:
  void read(const Handle& handle, ValueView& view) const;
  [[nodiscard]] ValueView& overlaid(const Handle& handle);
  [[nodiscard]] Account& overlaid(Location location);
  [[nodiscard]] std::uint32_t* find_slot(std::int64_t id);
  void grow();
  [[nodiscard]] std::vector<MemoryStep>& steps_of(Location location);
  /// The number of the step; kNoStep when none was noted.
  std::uint32_t note_taken(Location location, Bytes nbytes);
  void note_given_back(const Residence& residence);

  const ValueTable& values_;
  const Ledger& ledger_;
  const Backend& backend_;
  const ManagerOptions& options_;
  const std::size_t num_actions_;
  const Limits limits_;

  bool notes_steps_ = false;
  std::vector<std::pair<Location, std::vector<MemoryStep>>> steps_;
  std::vector<Account> accounts_;
  Account unlisted_;
  ValueView scratch_;
  std::int64_t scratch_id_ = 0;  // what scratch_ was read for
  std::vector<ValueView> views_;
  std::vector<std::int64_t> ids_;     // of views_
  std::vector<std::uint32_t> index_;  // open addressing: position in views_ + 1, 0 is empty
};

}  // namespace residency
