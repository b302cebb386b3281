#include "registry.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#include <pthread.h>

#include "manager_state.h"

namespace residency {
namespace {

constexpr std::uint32_t kMaxManagers = (1U << (63 - Handle::kValueBits)) - 1;

struct Registry {
  struct Entry {
    std::weak_ptr<Manager> manager;
    std::weak_ptr<ManagerState> state;
  };
  std::mutex mutex;
  std::map<ManagerId, Entry> entries;
  std::vector<std::shared_ptr<ManagerState>> locked_for_fork;
};

Registry& registry();

void unlock_after_fork() {
  Registry& r = registry();
  for (const auto& state : r.locked_for_fork) {
    state->unlock_after_fork();
  }
  const auto released = std::move(r.locked_for_fork);
  r.locked_for_fork.clear();
  r.mutex.unlock();
}

Registry& registry() {
  static Registry& instance = *[] {
    auto* made = new Registry;
    // A child must find every mutex open: the thread that held one may not exist there.
    pthread_atfork(
        [] {
          Registry& r = registry();
          r.mutex.lock();
          for (const auto& [id, entry] : r.entries) {
            if (std::shared_ptr<ManagerState> state = entry.state.lock()) {
              state->lock_for_fork();
              r.locked_for_fork.push_back(std::move(state));
            }
          }
        },
        unlock_after_fork, unlock_after_fork);
    return made;
  }();
  return instance;
}

}  // namespace

ManagerId next_manager_id() {
  static std::atomic<std::uint32_t> next{1};
  const std::uint32_t id = next.fetch_add(1, std::memory_order_relaxed);
  if (id > kMaxManagers) {
    throw std::length_error("a process can create 2^20 - 1 managers, not more");
  }
  return static_cast<ManagerId>(id);
}

void register_manager(ManagerId id, const std::weak_ptr<Manager>& manager,
                      const std::weak_ptr<ManagerState>& state) {
  const std::lock_guard lock(registry().mutex);
  registry().entries[id] = {manager, state};
}

void unregister_manager(ManagerId id) noexcept {
  const std::lock_guard lock(registry().mutex);
  registry().entries.erase(id);
}

std::shared_ptr<Manager> find_manager(ManagerId id) {
  const std::lock_guard lock(registry().mutex);
  const auto found = registry().entries.find(id);
  return found != registry().entries.end() ? found->second.manager.lock() : nullptr;
}

}  // namespace residency
