#include "residency/aten/system_calls.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

namespace residency {
namespace {

template <class Result>
Result or_negative_errno(Result result) noexcept {
  return result < 0 ? static_cast<Result>(-errno) : result;
}

}  // namespace

SystemCalls::~SystemCalls() = default;

int SystemCalls::open(const std::string& path, int flags, mode_t mode) {
  return or_negative_errno(::open(path.c_str(), flags | O_CLOEXEC, mode));
}
int SystemCalls::close(int file) {
  return or_negative_errno(::close(file));
}
int SystemCalls::fstat(int file, struct stat& status) {
  return or_negative_errno(::fstat(file, &status));
}
int SystemCalls::statvfs(const std::string& path, struct statvfs& status) {
  return or_negative_errno(::statvfs(path.c_str(), &status));
}
int SystemCalls::try_lock(int file) {
  return or_negative_errno(::flock(file, LOCK_EX | LOCK_NB));
}
int SystemCalls::mkdir(const std::string& path, mode_t mode) {
  return or_negative_errno(::mkdir(path.c_str(), mode));
}
int SystemCalls::rmdir(const std::string& path) {
  return or_negative_errno(::rmdir(path.c_str()));
}
int SystemCalls::unlink(const std::string& path) {
  return or_negative_errno(::unlink(path.c_str()));
}
int SystemCalls::rename(const std::string& from, const std::string& to) {
  return or_negative_errno(::rename(from.c_str(), to.c_str()));
}

int SystemCalls::list(const std::string& path, std::vector<std::string>& names) {
  DIR* directory = ::opendir(path.c_str());
  if (directory == nullptr) {
    return -errno;
  }
  int result = 0;
  for (;;) {
    errno = 0;
    const dirent* entry = ::readdir(directory);
    if (entry == nullptr) {
      result = -errno;
      break;
    }
    if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0) {
      names.emplace_back(entry->d_name);
    }
  }
  ::closedir(directory);
  return result;
}

int SystemCalls::allocate(int file, off_t nbytes) {
  // glibc's emulation covers file systems that cannot allocate ahead.
  return nbytes == 0 ? 0 : -::posix_fallocate(file, 0, nbytes);
}
ssize_t SystemCalls::preadv(int file, const iovec* pieces, int num_pieces, off_t at) {
  return or_negative_errno(::preadv(file, pieces, num_pieces, at));
}
ssize_t SystemCalls::pwritev(int file, const iovec* pieces, int num_pieces, off_t at) {
  return or_negative_errno(::pwritev(file, pieces, num_pieces, at));
}
int SystemCalls::fsync(int file) {
  return or_negative_errno(::fsync(file));
}
int SystemCalls::ring_submit() {
  return 0;
}
int SystemCalls::ring_result(int result) {
  return result;
}

}  // namespace residency
