#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "guard.h"
#include "manager_state.h"

namespace residency {

Reservation ManagerState::reserve(MemoryReservation reservation, bool require_physical,
                                  bool may_block) {
  check_not_loading();
  if (reservation.label.empty()) {
    throw std::invalid_argument("reserve: the label is empty");
  }
  auto state = std::make_unique<ReservationState>();
  state->manager = shared_from_this();
  state->fields = reservation;
  Trash trash;
  Lock lock(mutex_);
  check_open();
  check_available(reservation.location);
  admit(lock, trash, reservation.location, reservation.nbytes, may_block);
  ledger_.account(reservation.location).reserve(reservation.nbytes);
  std::shared_ptr<void> headroom;
  std::map<std::uint64_t, OpenReservation> open;
  try {
    open.emplace(0, OpenReservation{reservation, nullptr});
    ledger_.make_room_to_list(1);
    const Unlocked unlocked(*this, lock);
    headroom = backend_->make_headroom(reservation.location, reservation.nbytes, reservation.label);
    if (!headroom && require_physical) {
      throw HeadroomError(
          reservation.location, reservation.nbytes, std::nullopt, std::nullopt,
          fmt::format("reservation '{}' of {} B at {} can only be accounted: {}", reservation.label,
                      reservation.nbytes.count(), to_string(reservation.location),
                      reservation.location.is_cuda()
                          ? "install the allocator plugin, or do without require_physical"
                          : "nothing can make one physical there; do without require_physical"));
    }
  } catch (...) {
    ledger_.account(reservation.location).reserved -= reservation.nbytes;
    throw;
  }
  state->number = next_reservation_++;
  state->physical = headroom != nullptr;
  ledger_.list(reservation.location);
  auto node = open.extract(open.begin());
  node.key() = state->number;
  node.mapped().headroom = std::move(headroom);
  reservations_.insert(std::move(node));
  ++version_;
  return Reservation(std::move(state));
}

void ManagerState::release(ReservationState& reservation) {
  if (reservation.ended.exchange(true, std::memory_order_acq_rel)) {
    return;
  }
  std::shared_ptr<void> headroom;  // given back with the mutex open
  const Lock lock(mutex_);
  const auto open = reservations_.find(reservation.number);
  if (open == reservations_.end()) {
    return;  // a forced close has ended it
  }
  headroom = std::move(open->second.headroom);
  ledger_.account(open->second.fields.location).reserved -= open->second.fields.nbytes;
  reservations_.erase(open);
  ++version_;
}

std::string in_words(const ReservationState& reservation) {
  return "reservation '" + reservation.fields.label + "'";
}

Reservation::Reservation(std::unique_ptr<ReservationState> state) noexcept
    : state_(std::move(state)) {}
Reservation::Reservation(Reservation&&) noexcept = default;
Reservation& Reservation::operator=(Reservation&& other) noexcept {
  const Reservation ended(std::move(*this));
  state_ = std::move(other.state_);
  return *this;
}
Reservation::~Reservation() {
  abandon_guard(state_);
}
const MemoryReservation& Reservation::fields() const noexcept {
  return state_->fields;
}
bool Reservation::active() const noexcept {
  return is_active(state_);
}
bool Reservation::physical() const noexcept {
  return state_->physical;
}
void Reservation::release() {
  release_guard(state_);
}

}  // namespace residency
