#pragma once

#include <memory>

#include "residency/core/export.h"
#include "residency/core/plan.h"

namespace residency {

class ManagerState;
class [[nodiscard]] Reservation;
struct ReservationState;

/// Headroom that is being held. Thread-safe, movable, not copyable; fields stay readable after
/// release. Destroying an active reservation releases it and warns with its label.
class RESIDENCY_API Reservation {
 public:
  Reservation(Reservation&&) noexcept;
  Reservation& operator=(Reservation&&) noexcept;
  ~Reservation();
  [[nodiscard]] const MemoryReservation& fields() const noexcept;
  [[nodiscard]] bool active() const noexcept;
  /// Whether real headroom stands behind it, or it is accounting only.
  [[nodiscard]] bool physical() const noexcept;
  /// Gives the bytes back. Twice is harmless.
  void release();

 private:
  friend class ManagerState;
  explicit Reservation(std::unique_ptr<ReservationState> state) noexcept;
  std::unique_ptr<ReservationState> state_;
};

}  // namespace residency
