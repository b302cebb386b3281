#pragma once

#include <string>
#include <vector>

#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "residency/core/export.h"

namespace residency {

/// Every call that the disk tier makes into the operating system, so that tests can replace them:
/// fail the N-th, return short counts, fill the disk.
///
/// Each returns what the system call returns, or `-errno`. Implementations are thread-safe.
class RESIDENCY_API SystemCalls {
 public:
  SystemCalls() = default;
  SystemCalls(const SystemCalls&) = delete;
  SystemCalls& operator=(const SystemCalls&) = delete;
  virtual ~SystemCalls();

  [[nodiscard]] virtual int open(const std::string& path, int flags, mode_t mode);
  [[nodiscard]] virtual int close(int file);
  [[nodiscard]] virtual int fstat(int file, struct stat& status);
  [[nodiscard]] virtual int statvfs(const std::string& path, struct statvfs& status);
  /// Takes an exclusive `flock`, without waiting.
  [[nodiscard]] virtual int try_lock(int file);
  [[nodiscard]] virtual int mkdir(const std::string& path, mode_t mode);
  [[nodiscard]] virtual int rmdir(const std::string& path);
  [[nodiscard]] virtual int unlink(const std::string& path);
  [[nodiscard]] virtual int rename(const std::string& from, const std::string& to);
  /// Appends the names in a directory, without `.` and `..`.
  [[nodiscard]] virtual int list(const std::string& path, std::vector<std::string>& names);
  /// Gives the file `nbytes` bytes of space that later writes cannot run out of.
  [[nodiscard]] virtual int allocate(int file, off_t nbytes);
  [[nodiscard]] virtual ssize_t preadv(int file, const iovec* pieces, int num_pieces, off_t at);
  [[nodiscard]] virtual ssize_t pwritev(int file, const iovec* pieces, int num_pieces, off_t at);
  [[nodiscard]] virtual int fsync(int file);
  /// Asked before requests are given to io_uring: 0, or the `-errno` with which a test has the
  /// kernel refuse them.
  [[nodiscard]] virtual int ring_submit();
  /// The result of one io_uring read or write, as the kernel gave it (bytes or `-errno`); a test
  /// returns something else in its place.
  [[nodiscard]] virtual int ring_result(int result);
};

}  // namespace residency
