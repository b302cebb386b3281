// Which handles of a kind are alive.
#ifndef RESIDENCY_CSRC_SIMCUDA_HANDLE_TABLE_H
#define RESIDENCY_CSRC_SIMCUDA_HANDLE_TABLE_H

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

namespace simcuda {

// Thread-safe. A handle is the object's address; one that is not alive is not found, where the real
// runtime would read freed memory.
template <class Object>
class HandleTable {
 public:
  void* insert(std::shared_ptr<Object> object) {
    void* handle = object.get();
    std::lock_guard lock(mutex_);
    objects_.emplace(handle, std::move(object));
    return handle;
  }

  std::shared_ptr<Object> find(const void* handle) const {
    std::shared_lock lock(mutex_);
    auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Object> take(const void* handle) {
    std::lock_guard lock(mutex_);
    auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<Object> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<const void*, std::shared_ptr<Object>> objects_;
};

}  // namespace simcuda

#endif
