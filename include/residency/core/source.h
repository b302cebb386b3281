#pragma once

#include <memory>
#include <string>

#include "residency/core/export.h"

namespace residency {

class Block;

/// Something that can produce a value on demand, again and again: a callback, a file.
///
/// `load` is called without any lock of the library held, from the thread whose action needs the
/// value, never twice at the same time for one value. It may throw anything: a direct caller gets
/// it unchanged. Calling the same manager from inside `load` on the same thread is a
/// `ReentrancyError`. That contents are the same each time is the source's own responsibility.
class RESIDENCY_API Source {
 public:
  Source() = default;
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source();
  /// The value at the source's registered location, in a block of the manager's backend.
  [[nodiscard]] virtual std::shared_ptr<Block> load() = 0;
  /// For messages: where the value comes from.
  [[nodiscard]] virtual std::string describe() const { return "source"; }
};

}  // namespace residency
