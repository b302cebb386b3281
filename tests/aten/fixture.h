#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <stdlib.h>

#include "residency/aten/manager.h"
#include "residency/core/errors.h"

namespace residency::testing {

inline const Location kHost = Location::pageable_host();
inline const Location kDisk = Location::disk("spill");

/// A directory that goes with the test.
class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern =
        (std::filesystem::temp_directory_path() / "residency-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) {
      throw std::runtime_error("mkdtemp failed");
    }
    path_ = pattern;
  }
  TemporaryDirectory(const TemporaryDirectory&) = delete;
  TemporaryDirectory& operator=(const TemporaryDirectory&) = delete;
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  /// A file with this line, and the directories that it lies in.
  void write(const std::string& file, const std::string& line) const {
    std::filesystem::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << line << '\n';
  }
  /// All files and directories below.
  [[nodiscard]] std::vector<std::filesystem::path> contents() const {
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
      found.push_back(entry.path());
    }
    return found;
  }
  /// The safetensors files below, temporary ones included.
  [[nodiscard]] std::vector<std::filesystem::path> files() const {
    std::vector<std::filesystem::path> found;
    for (const auto& path : contents()) {
      if (path.string().find(".safetensors") != std::string::npos) {
        found.push_back(path);
      }
    }
    return found;
  }

 private:
  std::filesystem::path path_;
};

/// System calls that can be made to fail: the N-th of all, or every one that a predicate picks.
class FaultySystemCalls final : public SystemCalls {
 public:
  /// Fails the `nth` call from now on (1 is the next) with `-error_number`; 0 fails none.
  void fail_nth(std::uint64_t nth, int error_number) {
    num_calls_ = 0;
    nth_ = nth;
    error_number_ = error_number;
    injected_ = false;
  }
  /// Fails every call of this name from now on; empty fails none.
  void fail_all(std::string name, int error_number) {
    name_ = std::move(name);
    error_number_ = error_number;
  }
  /// Reads and writes transfer at most this many bytes; 0 is no limit.
  std::atomic<std::size_t> short_bytes{0};
  /// Every other call that may be interrupted is.
  std::atomic<bool> interrupts{false};

  /// Every n-th submission to io_uring is refused for now; 0 refuses none.
  std::atomic<int> submissions_refused{0};
  std::atomic<int> num_submissions{0};

  [[nodiscard]] std::uint64_t num_calls() const noexcept { return num_calls_; }
  [[nodiscard]] bool injected() const noexcept { return injected_; }

  int open(const std::string& path, int flags, mode_t mode) override {
    const int fault = next("open", true);
    return fault != 0 ? fault : SystemCalls::open(path, flags, mode);
  }
  int close(int file) override {
    const int fault = next("close");
    const int result = SystemCalls::close(file);  // as Linux does, whatever it answers
    return fault != 0 ? fault : result;
  }
  int fstat(int file, struct stat& status) override {
    const int fault = next("fstat");
    return fault != 0 ? fault : SystemCalls::fstat(file, status);
  }
  int statvfs(const std::string& path, struct statvfs& status) override {
    const int fault = next("statvfs", true);
    return fault != 0 ? fault : SystemCalls::statvfs(path, status);
  }
  int try_lock(int file) override {
    const int fault = next("try_lock");
    return fault != 0 ? fault : SystemCalls::try_lock(file);
  }
  int mkdir(const std::string& path, mode_t mode) override {
    const int fault = next("mkdir");
    return fault != 0 ? fault : SystemCalls::mkdir(path, mode);
  }
  int rmdir(const std::string& path) override {
    const int fault = next("rmdir");
    return fault != 0 ? fault : SystemCalls::rmdir(path);
  }
  int unlink(const std::string& path) override {
    const int fault = next("unlink");
    return fault != 0 ? fault : SystemCalls::unlink(path);
  }
  int rename(const std::string& from, const std::string& to) override {
    const int fault = next("rename");
    return fault != 0 ? fault : SystemCalls::rename(from, to);
  }
  int list(const std::string& path, std::vector<std::string>& names) override {
    const int fault = next("list");
    return fault != 0 ? fault : SystemCalls::list(path, names);
  }
  int allocate(int file, off_t nbytes) override {
    const int fault = next("allocate", true);
    return fault != 0 ? fault : SystemCalls::allocate(file, nbytes);
  }
  ssize_t preadv(int file, const iovec* pieces, int num_pieces, off_t at) override {
    const int fault = next("preadv", true);
    if (fault != 0) {
      return fault;
    }
    iovec first = pieces[0];
    first.iov_len = limit(first.iov_len);
    return short_bytes != 0 ? SystemCalls::preadv(file, &first, 1, at)
                            : SystemCalls::preadv(file, pieces, num_pieces, at);
  }
  ssize_t pwritev(int file, const iovec* pieces, int num_pieces, off_t at) override {
    const int fault = next("pwritev", true);
    if (fault != 0) {
      return fault;
    }
    iovec first = pieces[0];
    first.iov_len = limit(first.iov_len);
    return short_bytes != 0 ? SystemCalls::pwritev(file, &first, 1, at)
                            : SystemCalls::pwritev(file, pieces, num_pieces, at);
  }
  int fsync(int file) override {
    const int fault = next("fsync", true);
    return fault != 0 ? fault : SystemCalls::fsync(file);
  }
  int ring_submit() override {
    const int fault = next("ring_submit");
    if (fault != 0) {
      return fault;
    }
    const int refusals = submissions_refused;
    return refusals != 0 && ++num_submissions % refusals == 0 ? -EBUSY : 0;
  }
  int ring_result(int result) override {
    const int fault = next("ring_result", true);
    if (fault != 0) {
      return fault;
    }
    return result > 0 ? static_cast<int>(limit(static_cast<std::size_t>(result))) : result;
  }

 private:
  int next(std::string_view name, bool interruptible = false) {
    const std::uint64_t call = ++num_calls_;
    if (interrupts && interruptible && ++num_interruptible_ % 2 == 0) {
      return -EINTR;
    }
    if (call == nth_ || name == name_) {
      injected_ = true;
      return -error_number_;
    }
    return 0;
  }
  [[nodiscard]] std::size_t limit(std::size_t nbytes) const {
    const std::size_t most = short_bytes;
    return most == 0 || nbytes < most ? nbytes : most;
  }

  std::atomic<std::uint64_t> num_calls_{0};
  std::atomic<std::uint64_t> num_interruptible_{0};
  std::atomic<std::uint64_t> nth_{0};
  std::atomic<int> error_number_{EIO};
  std::atomic<bool> injected_{false};
  std::string name_;
};

/// Reads and writes that fail while they are told to.
struct BreakableCalls final : SystemCalls {
  std::atomic<bool> broken{false};
  ssize_t preadv(int file, const iovec* pieces, int num_pieces, off_t at) override {
    return broken ? -EIO : SystemCalls::preadv(file, pieces, num_pieces, at);
  }
  ssize_t pwritev(int file, const iovec* pieces, int num_pieces, off_t at) override {
    return broken ? -EIO : SystemCalls::pwritev(file, pieces, num_pieces, at);
  }
};

/// Options with one disk tier.
inline ManagerOptions with_disk(const std::filesystem::path& directory) {
  ManagerOptions options;
  options.disks.push_back(
      {.name = "spill", .directory = directory, .budget = std::nullopt, .fsync = false});
  return options;
}
inline ManagerOptions with_disk(const TemporaryDirectory& directory) {
  return with_disk(directory.path());
}

/// Same dtype, sizes, strides, offset, flags and bytes.
inline bool same(const at::Tensor& left, const at::Tensor& right) {
  return left.scalar_type() == right.scalar_type() && left.sizes() == right.sizes() &&
         left.strides() == right.strides() && left.storage_offset() == right.storage_offset() &&
         left.requires_grad() == right.requires_grad() && left.is_conj() == right.is_conj() &&
         left.is_neg() == right.is_neg() && left.detach().equal(right.detach());
}

inline Bytes used_at(const Manager& manager, Location location) {
  const Snapshot snapshot = manager.snapshot();
  const LocationSnapshot* found = snapshot.find(location);
  return found == nullptr ? Bytes() : found->used;
}

inline std::vector<Handle> one(const Handle& handle) {
  return {handle};
}

/// Keeps the disk thread alive, and tells when it has ended all that was asked of it so far.
class DiskThread {
 public:
  explicit DiskThread(const at::Tensor& tensor)
      : handle_(adopt(*manager_, TensorResident({{"x", tensor.clone()}}))) {
    drain();
  }
  DiskThread(const DiskThread&) = delete;
  DiskThread& operator=(const DiskThread&) = delete;
  ~DiskThread() { manager_->close({.force = true}); }
  /// The thread works in order: once this is through, so is everything before.
  void drain() {
    manager_->move(handle_, kDisk);
    manager_->move(handle_, kHost).wait();
  }

 private:
  TemporaryDirectory directory_;
  std::shared_ptr<Manager> manager_ = create_manager(with_disk(directory_));
  Handle handle_;
};

/// The text of the exception of this type that `body` throws; empty when it throws none.
template <class Expected>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Expected& error) {
    return error.what();
  }
  return {};
}

}  // namespace residency::testing
