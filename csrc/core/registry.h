#pragma once

#include <memory>

#include "residency/core/handle.h"

namespace residency {

class Manager;
class ManagerState;

/// The living managers of the process. Thread-safe, never destroyed.

/// Throws `std::length_error` when the ids are used up.
[[nodiscard]] ManagerId next_manager_id();
void register_manager(ManagerId id, const std::weak_ptr<Manager>& manager,
                      const std::weak_ptr<ManagerState>& state);
void unregister_manager(ManagerId id) noexcept;
[[nodiscard]] std::shared_ptr<Manager> find_manager(ManagerId id);

}  // namespace residency
