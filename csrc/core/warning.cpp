#include "warning.h"

#include <array>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>

#include <dlfcn.h>
#include <execinfo.h>

namespace residency {
namespace {

struct Handler {
  std::mutex mutex;
  std::shared_ptr<const std::function<void(std::string_view)>> function;
};

Handler& handler() {
  static Handler& instance = *new Handler;  // outlives static objects
  return instance;
}

/// Whether a static object's destructor is among the callers. No flag can tell: the destructor of
/// a static is registered after everything that its constructor could register. Costs some
/// microseconds, and is asked only when there is something to warn about.
bool is_exiting() noexcept {
  std::array<void*, 64> frames{};
  const int count = backtrace(frames.data(), static_cast<int>(frames.size()));
  for (int i = 0; i < count; ++i) {
    // A return address may be the first byte after a call that never returns.
    const void* call = static_cast<const char*>(frames[static_cast<std::size_t>(i)]) - 1;
    Dl_info info{};
    if (dladdr(call, &info) != 0 && info.dli_sname != nullptr &&
        (std::strcmp(info.dli_sname, "exit") == 0 ||
         std::strcmp(info.dli_sname, "__cxa_finalize") == 0)) {
      return true;
    }
  }
  return false;
}

}  // namespace

void warn(std::string_view message) noexcept {
  try {
    if (is_exiting()) {
      return;
    }
    std::shared_ptr<const std::function<void(std::string_view)>> function;
    {
      const std::lock_guard lock(handler().mutex);
      function = handler().function;
    }
    if (function) {
      (*function)(message);
    } else {
      std::fprintf(stderr, "torch-residency: warning: %.*s\n", static_cast<int>(message.size()),
                   message.data());
    }
  } catch (...) {
    // A warning that cannot be given must not become a fault of the caller's destructor.
  }
}

void set_warning_handler(std::function<void(std::string_view)> function) {
  auto shared =
      function ? std::make_shared<const std::function<void(std::string_view)>>(std::move(function))
               : nullptr;
  const std::lock_guard lock(handler().mutex);
  std::swap(handler().function, shared);
}

}  // namespace residency
