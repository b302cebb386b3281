#pragma once

#include <atomic>
#include <utility>

namespace residency {

/// Leaves an object alone until the process ends: what it refers to is in use for who knows how
/// long, or is another process's. A bare `new` will not do: GCC 12 leaves it out at -O2, and with
/// it the condition under which the object was to be moved away (seen in `TorchBackend::release`).
template <class Object>
[[gnu::noinline]] void keep_for_ever(Object object) {
  static std::atomic<Object*> last{nullptr};
  last.store(new Object(std::move(object)));
}

}  // namespace residency
