#include "residency/core/manager.h"

#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "manager_state.h"
#include "registry.h"
#include "warning.h"

namespace residency {

std::shared_ptr<Manager> Manager::create(ManagerOptions options, std::shared_ptr<Backend> backend) {
  if (!backend) {
    throw std::invalid_argument("Manager::create: the backend is null");
  }
  const ManagerId id = next_manager_id();
  auto state = std::make_shared<ManagerState>(id, std::move(options), std::move(backend));
  std::shared_ptr<Manager> manager(new Manager(state));
  register_manager(id, manager, state);
  state->backend().attach(state);
  return manager;
}

std::shared_ptr<Manager> Manager::find(std::int64_t handle_id) {
  return handle_id > 0 ? find_manager(Handle(handle_id).manager()) : nullptr;
}

Manager::Manager(std::shared_ptr<ManagerState> state) noexcept : state_(std::move(state)) {}

Manager::~Manager() {
  state_->close_without_waiting();
}

ManagerId Manager::id() const noexcept {
  return state_->id();
}
bool Manager::closed() const noexcept {
  return state_->closed();
}
Backend& Manager::backend() const noexcept {
  return state_->backend();
}
const ManagerOptions& Manager::options() const noexcept {
  return state_->options();
}

Handle Manager::register_source(std::shared_ptr<Source> source, const ValueSpec& spec, Location at,
                                ValueType type) {
  return state_->register_source(std::move(source), spec, at, type);
}
Handle Manager::adopt(const std::function<CopyResult()>& make, Location at, const ValueSpec& spec,
                      ValueType type) {
  return state_->adopt(make, at, spec, type);
}
Handle Manager::adopt(BlockPtr block, const ValueSpec& spec, ValueType type, FencePtr ready) {
  return state_->adopt(std::move(block), spec, type, std::move(ready));
}
BlockPtr Manager::take(const Handle& handle, std::optional<Location> at) {
  return state_->take(handle, at);
}

ActionReport Manager::ensure(const Handle& handle, Location location,
                             const ActionOptions& options) {
  return apply(EnsureResident{handle, location}, options);
}
ActionReport Manager::move(const Handle& handle, Location to, std::optional<Location> from_location,
                           const ActionOptions& options) {
  return apply(MoveResident{handle, to, from_location}, options);
}
ActionReport Manager::drop(const Handle& handle, Location location) {
  return apply(DropResident{handle, location});
}
ActionReport Manager::discard(const Handle& handle) {
  return apply(DiscardValue{handle});
}
ActionReport Manager::apply(const ResidencyAction& action, const ActionOptions& options) {
  return state_->apply(action, options);
}

PlanReport Manager::execute(std::span<const ResidencyAction> actions,
                            const ExecuteOptions& options) {
  return state_->execute(actions, options);
}
PlanReport Manager::prefetch(std::span<const Handle> handles, Location at) {
  return state_->prefetch(handles, at);
}
Explanation Manager::explain(const ResidencyPlan& plan,
                             std::optional<std::uint64_t> expected_state_version) const {
  return state_->explain(&plan, {}, expected_state_version);
}
Explanation Manager::explain(std::span<const ResidencyAction> actions,
                             std::optional<std::uint64_t> expected_state_version) const {
  return state_->explain(nullptr, actions, expected_state_version);
}
Scope Manager::scope(ResidencyPlan plan, ScopeOptions options) {
  return state_->scope(std::move(plan), std::move(options));
}

PlanReport Manager::with(ResidencyPlan plan, const std::function<void(Scope&)>& body,
                         ScopeOptions options, std::exception_ptr* exit_error) {
  if (!body) {
    throw std::invalid_argument("with: the body is empty");
  }
  Scope scope = this->scope(std::move(plan), std::move(options));
  scope.enter();
  try {
    body(scope);
  } catch (...) {
    try {
      scope.close();
    } catch (...) {
      if (exit_error != nullptr) {
        *exit_error = std::current_exception();
      } else {
        warn(fmt::format("the exit of plan '{}' failed after its body had: {}", scope.plan().name(),
                         describe(std::current_exception())));
      }
    }
    throw;
  }
  scope.close();
  return scope.report();
}

Lease Manager::acquire(std::span<const Handle> handles, Location at,
                       const AcquireOptions& options) {
  return state_->acquire(handles, at, options);
}
Lease Manager::borrow(std::span<const Handle> handles, Location at, const AcquireOptions& options) {
  return state_->borrow(handles, at, options);
}
Hold Manager::hold(std::span<const Handle> handles, Location at) {
  return state_->hold(handles, at);
}
Reservation Manager::reserve(MemoryReservation reservation, bool require_physical) {
  return state_->reserve(std::move(reservation), require_physical);
}
void Manager::set_budget(Location location, std::optional<Bytes> budget) {
  state_->set_budget(location, budget);
}
void Manager::reset_peaks() {
  state_->reset_peaks();
}
std::size_t Manager::forget_discarded() {
  return state_->forget_discarded();
}

ValueSpec Manager::spec(const Handle& handle) const {
  return state_->spec(handle);
}
std::vector<Location> Manager::locations() const {
  return state_->locations();
}
Snapshot Manager::snapshot() const {
  return state_->snapshot();
}
std::vector<TransitionRecord> Manager::trace(std::optional<std::size_t> limit) const {
  return state_->trace(limit);
}
std::uint64_t Manager::state_version() const {
  return state_->state_version();
}
void Manager::synchronize() {
  state_->synchronize();
}
void Manager::close(const CloseOptions& options) {
  state_->close(options);
}
void Manager::audit() const {
  state_->audit();
}

}  // namespace residency
