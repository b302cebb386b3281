#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <sys/uio.h>

#include "csrc/aten/content_stamp.h"
#include "residency/aten/system_calls.h"

namespace residency {

/// One run of bytes between memory and a file.
struct FileTransfer {
  enum class Direction : std::uint8_t { kRead, kWrite };
  Direction direction = Direction::kRead;
  int file = -1;
  off_t at = 0;
  const std::string* path = nullptr;  ///< for messages
  std::vector<iovec> pieces;          ///< memory, in the order of the file
  ContentStamp* stamp = nullptr;      ///< gets every byte, in the order of the file
  const std::atomic<bool>* abandon = nullptr;
};

/// Carries out transfers, several chunks at a time through io_uring where the kernel allows it and
/// one at a time otherwise. Thread-bound: it lives on one worker's thread.
class FileIo {
 public:
  FileIo();
  ~FileIo();
  FileIo(const FileIo&) = delete;
  FileIo& operator=(const FileIo&) = delete;

  /// Returns when every byte has been transferred. Throws `StorageError`, or
  /// `MaterializationError` when the file ends early; nothing is in flight then.
  void run(const FileTransfer& transfer, SystemCalls& calls, bool allow_ring);

 private:
  struct Ring;
  std::unique_ptr<Ring> ring_;
  bool ring_refused_ = false;
};

/// Whether io_uring was built in and the kernel lets this process use it.
[[nodiscard]] bool ring_is_usable() noexcept;

}  // namespace residency
