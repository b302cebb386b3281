#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "guard.h"
#include "manager_state.h"

namespace residency {

Hold ManagerState::hold(std::span<const Handle> handles, Location at) {
  check_not_loading();
  if (handles.empty()) {
    throw std::invalid_argument("hold: the list of handles is empty");
  }
  auto hold = std::make_unique<HoldState>();
  hold->manager = shared_from_this();
  hold->location = at;
  Trash trash;
  Lock lock(mutex_);
  check_open();
  check_available(at);
  settle(trash);
  Turns turns(*this);
  const std::vector<ValueRecord*> records = resolve_all(lock, trash, handles, hold->handles, turns);
  while (true) {
    hold->materializations.clear();
    std::vector<FencePtr> uncertain;
    for (std::size_t i = 0; i < records.size(); ++i) {
      Materialization* materialization = records[i]->find(at);
      if (materialization == nullptr || !is_good(*materialization)) {
        throw UnavailableError(fmt::format("hold: {} has no good materialization at {}",
                                           to_string(hold->handles[i]), to_string(at)));
      }
      if (materialization->is_uncertain()) {
        uncertain.push_back(materialization->ready());
      }
      hold->materializations.push_back(materialization);
    }
    if (uncertain.empty()) {
      break;
    }
    for (ValueRecord* record : records) {
      turns.take_idle(*record);
    }
    make_certain(lock, uncertain);  // what may still fail to arrive cannot be kept
    check_open();
    for (std::size_t i = 0; i < records.size(); ++i) {
      settle(trash, records[i]);
      throw_failure_of(*records[i], hold->handles[i]);
    }
  }
  for (Materialization* each : hold->materializations) {
    ++each->num_holds;
  }
  ++num_holds_;
  ++version_;
  return Hold(std::move(hold));
}

void ManagerState::release(HoldState& hold) {
  if (hold.ended.exchange(true, std::memory_order_acq_rel)) {
    return;
  }
  const Lock lock(mutex_);
  if (closed()) {
    return;
  }
  for (Materialization* each : hold.materializations) {
    --each->num_holds;
  }
  --num_holds_;
  ++version_;
}

std::string in_words(const HoldState& hold) {
  return fmt::format("a hold of {} value(s) at {}", hold.handles.size(), to_string(hold.location));
}

Hold::Hold(std::unique_ptr<HoldState> state) noexcept : state_(std::move(state)) {}
Hold::Hold(Hold&&) noexcept = default;
Hold& Hold::operator=(Hold&& other) noexcept {
  const Hold ended(std::move(*this));
  state_ = std::move(other.state_);
  return *this;
}
Hold::~Hold() {
  abandon_guard(state_);
}
std::span<const Handle> Hold::handles() const noexcept {
  return state_->handles;
}
Location Hold::location() const noexcept {
  return state_->location;
}
bool Hold::active() const noexcept {
  return is_active(state_);
}
void Hold::release() {
  release_guard(state_);
}

}  // namespace residency
