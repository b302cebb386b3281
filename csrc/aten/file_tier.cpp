#include "csrc/aten/file_tier.h"

#include <algorithm>
#include <cerrno>
#include <exception>
#include <filesystem>
#include <random>
#include <utility>

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "csrc/core/fork.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

constexpr std::string_view kPrefix = "residency-";
constexpr std::string_view kLockName = "lock";
constexpr std::string_view kFileSuffix = ".safetensors";
constexpr std::string_view kTemporarySuffix = ".safetensors.tmp";

std::uint64_t random_number() {
  std::random_device device;
  return (static_cast<std::uint64_t>(device()) << 32) | device();
}

template <class Call>
auto retry_interrupted(Call&& call) {
  auto result = call();
  while (result == -EINTR) {
    result = call();
  }
  return result;
}

void throw_if_failed(std::int64_t result, const std::string& path, const char* what) {
  if (result < 0) {
    throw StorageError(path, static_cast<int>(-result), what);
  }
}

bool is_our_file(std::string_view name) {
  return name == kLockName || name.ends_with(kFileSuffix) || name.ends_with(kTemporarySuffix);
}

}  // namespace

// An open file that is closed on the way out. `close` reports what the destructor cannot.
class FileTier::OpenFile {
 public:
  OpenFile(SystemCalls& calls, std::string path, int flags)
      : calls_(calls),
        path_(std::move(path)),
        file_(retry_interrupted([&] { return calls.open(path_, flags, 0600); })) {
    throw_if_failed(file_, path_, "open");
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  ~OpenFile() {
    if (file_ >= 0) {
      static_cast<void>(calls_.close(file_));
    }
  }
  [[nodiscard]] int get() const noexcept { return file_; }
  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  void close() {
    // Linux has closed the file whatever it answers.
    const int result = calls_.close(std::exchange(file_, -1));
    if (result != -EINTR) {
      throw_if_failed(result, path_, "close");
    }
  }

 private:
  SystemCalls& calls_;
  std::string path_;
  int file_;
};

FileBlock::FileBlock(std::shared_ptr<FileTier> tier, std::shared_ptr<const TensorLayout> layout,
                     std::uint64_t serial)
    : tier_(std::move(tier)), layout_(std::move(layout)), serial_(serial) {}

FileBlock::~FileBlock() {
  tier_->forget(*this);
}

Location FileBlock::location() const {
  return tier_->location();
}

std::string FileBlock::path() const {
  return fmt::format("{}/{:08}{}", tier_->subdirectory_, serial_, kFileSuffix);
}
std::string FileBlock::temporary_path() const {
  return fmt::format("{}/{:08}{}", tier_->subdirectory_, serial_, kTemporarySuffix);
}

FileTier::FileTier(std::shared_ptr<SystemCalls> calls, const DiskTier& declaration,
                   ManagerId manager, bool allow_ring)
    : calls_(std::move(calls)),
      location_(Location::disk(declaration.name)),
      fsync_(declaration.fsync),
      allow_ring_(allow_ring),
      generation_(fork_generation()),
      writer_(random_number()) {
  // Made absolute: what is there must be found again after a chdir.
  const std::string directory = std::filesystem::absolute(declaration.directory).string();
  struct statvfs status {};
  throw_if_failed(retry_interrupted([&] { return calls_->statvfs(directory, status); }), directory,
                  "examine the directory of a disk tier");
  block_bytes_ = static_cast<std::int64_t>(status.f_frsize != 0 ? status.f_frsize : status.f_bsize);
  sweep(directory);
  make_subdirectory(directory, manager);
}

FileTier::~FileTier() {
  remove();
}

bool FileTier::is_ours() const noexcept {
  return generation_ == fork_generation();
}

void FileTier::refuse_in_forked_child() const {
  if (!is_ours()) {
    throw ForkError(fmt::format(
        "{} belongs to the process that this one was forked from: its disk thread does not exist "
        "here and its files are the parent's; make a manager in the child instead",
        to_string(location_)));
  }
}

// Note [Sweeping]
// ~~~~~~~~~~~~~~~
// A subdirectory belongs to whoever holds the lock on the file `lock` in it, so one whose lock is
// free was left by a process that crashed. Between mkdir and lock its maker holds nothing yet. So a
// sweep takes the lock before it removes a subdirectory, and removes one without a lock file only
// when it is empty; the maker looks, once it has the lock, whether its lock file was removed
// meanwhile, and begins anew if so.
void FileTier::sweep(const std::string& directory) {
  std::vector<std::string> names;
  if (calls_->list(directory, names) < 0) {
    return;  // what others left is no reason to fail; a directory that is no use fails at mkdir
  }
  for (const std::string& name : names) {
    if (!name.starts_with(kPrefix)) {
      continue;
    }
    const std::string subdirectory = fmt::format("{}/{}", directory, name);
    const std::string lock_path = fmt::format("{}/{}", subdirectory, kLockName);
    const int lock = calls_->open(lock_path, O_RDWR, 0);
    if (lock == -ENOENT) {
      static_cast<void>(calls_->rmdir(subdirectory));
    }
    if (lock < 0) {
      continue;
    }
    if (calls_->try_lock(lock) == 0) {
      remove_files(subdirectory);
    }
    static_cast<void>(calls_->close(lock));
  }
}

void FileTier::make_subdirectory(const std::string& directory, ManagerId manager) {
  for (int attempt = 0;; ++attempt) {
    const std::string subdirectory =
        fmt::format("{}/{}{}-{}-{:016x}", directory, kPrefix, ::getpid(),
                    static_cast<std::uint32_t>(manager), writer_ + static_cast<unsigned>(attempt));
    throw_if_failed(retry_interrupted([&] { return calls_->mkdir(subdirectory, 0700); }),
                    subdirectory, "make the directory of a disk tier");
    int lock = -1;
    int result = 0;
    const std::string lock_path = fmt::format("{}/{}", subdirectory, kLockName);
    try {
      lock = retry_interrupted(
          [&] { return calls_->open(lock_path, O_RDWR | O_CREAT | O_EXCL, 0600); });
      result = lock < 0 ? lock : retry_interrupted([&] { return calls_->try_lock(lock); });
      struct stat status {};
      if (result == 0) {
        result = retry_interrupted([&] { return calls_->fstat(lock, status); });
      }
      if (result == 0 && status.st_nlink == 0) {
        result = -ENOENT;
      }
    } catch (...) {
      result = -ENOMEM;
    }
    if (result == 0) {
      subdirectory_ = subdirectory;
      lock_file_ = lock;
      return;
    }
    const bool swept = result == -ENOENT || result == -EWOULDBLOCK;
    if (lock >= 0) {
      static_cast<void>(calls_->unlink(lock_path));
      static_cast<void>(calls_->close(lock));
    }
    static_cast<void>(calls_->rmdir(subdirectory));
    if (!swept || attempt == 100) {
      throw StorageError(lock_path, -result, "lock the directory of a disk tier");
    }
  }
}

void FileTier::remove_files(const std::string& subdirectory) noexcept {
  try {
    std::vector<std::string> names;
    static_cast<void>(calls_->list(subdirectory, names));
    // The lock goes last: until then nobody else takes the subdirectory for abandoned.
    std::stable_partition(names.begin(), names.end(),
                          [](const std::string& name) { return name != kLockName; });
    for (const std::string& name : names) {
      if (is_our_file(name)) {
        static_cast<void>(calls_->unlink(fmt::format("{}/{}", subdirectory, name)));
      }
    }
    static_cast<void>(calls_->rmdir(subdirectory));
  } catch (...) {
    // What is left is swept by the next start.
  }
}

void FileTier::remove() noexcept {
  if (removed_.exchange(true)) {
    return;
  }
  if (is_ours()) {
    remove_files(subdirectory_);
  }
  // In a forked child this closes the child's copy alone; the parent keeps the lock.
  static_cast<void>(calls_->close(lock_file_));
}

std::shared_ptr<FileBlock> FileTier::make_file(std::shared_ptr<const TensorLayout> layout) {
  auto block = std::make_shared<FileBlock>(shared_from_this(), std::move(layout),
                                           next_serial_.fetch_add(1, std::memory_order_relaxed));
  make_file_again(*block);
  return block;
}

void FileTier::make_file_again(FileBlock& block) {
  if (block.state_ != FileBlock::State::kAbsent) {
    return;
  }
  const auto nbytes = static_cast<off_t>(block.layout_->file_bytes().count());
  try {
    OpenFile file(*calls_, block.temporary_path(), O_RDWR | O_CREAT | O_EXCL);
    block.state_ = FileBlock::State::kTemporary;
    throw_if_failed(retry_interrupted([&] { return calls_->allocate(file.get(), nbytes); }),
                    file.path(), "allocate space for a value");
    file.close();
  } catch (...) {
    forget(block);
    throw;
  }
}

void FileTier::forget(FileBlock& block) noexcept {
  try {
    const auto state = block.state_.exchange(FileBlock::State::kAbsent);
    if (state != FileBlock::State::kAbsent && is_ours() && !removed_.load()) {
      static_cast<void>(calls_->unlink(
          state == FileBlock::State::kComplete ? block.path() : block.temporary_path()));
    }
  } catch (...) {
    // The subdirectory is removed with whatever is in it.
  }
}

void FileTier::check_header(int file, const FileBlock& block) {
  const std::string path = block.path();
  struct stat status {};
  throw_if_failed(retry_interrupted([&] { return calls_->fstat(file, status); }), path, "examine");
  const std::int64_t expected_bytes = block.layout_->file_bytes().count();
  if (status.st_size != expected_bytes) {
    throw MaterializationError(
        fmt::format("{}: the file is {}: expected {} bytes, it has {}", path,
                    status.st_size < expected_bytes ? "truncated" : "not the one that was written",
                    expected_bytes, status.st_size));
  }
  const std::string expected = file_header(*block.layout_, identity(block));
  std::string found(expected.size(), '\0');
  for (std::size_t done = 0; done < found.size();) {
    const iovec piece{found.data() + done, found.size() - done};
    const ssize_t result = retry_interrupted(
        [&] { return calls_->preadv(file, &piece, 1, static_cast<off_t>(done)); });
    throw_if_failed(result, path, "read");
    if (result == 0) {
      throw MaterializationError(fmt::format(
          "{}: the file is truncated: it ends inside its header, at byte {}", path, done));
    }
    done += static_cast<std::size_t>(result);
  }
  if (found != expected) {
    throw MaterializationError(fmt::format(
        "{}: the file is corrupt or foreign: its header is not the one that was written with stamp "
        "xxh64:{} by {}-{}",
        path, fixed_width_hex(block.stamp_), fixed_width_hex(writer_),
        fixed_width_hex(block.serial_)));
  }
}

void FileTier::check(const FileBlock& block) {
  OpenFile file(*calls_, block.path(), O_RDONLY);
  check_header(file.get(), block);
}

namespace {

off_t move_bytes(const FileTransfer& transfer, FileIo& io, SystemCalls& calls, bool allow_ring) {
  io.run(transfer, calls, allow_ring);
  off_t nbytes = 0;
  for (const iovec& piece : transfer.pieces) {
    nbytes += static_cast<off_t>(piece.iov_len);
  }
  return nbytes;
}

}  // namespace

FileTier::Writer::Writer(std::shared_ptr<FileBlock> block)
    : block_(std::move(block)),
      tier_(*block_->tier_),
      at_(static_cast<off_t>(block_->layout_->file_header_bytes().count())) {
  try {
    const std::string temporary = block_->temporary_path();
    tier_.make_file_again(*block_);
    if (block_->state_ == FileBlock::State::kComplete) {
      // Under the temporary name a half-written file is nobody's value.
      throw_if_failed(
          retry_interrupted([&] { return tier_.calls_->rename(block_->path(), temporary); }),
          temporary, "rename");
      block_->state_ = FileBlock::State::kTemporary;
    }
    file_ = std::make_unique<OpenFile>(*tier_.calls_, temporary, O_RDWR);
  } catch (...) {
    tier_.forget(*block_);
    throw;
  }
}

FileTier::Writer::~Writer() {
  if (!finished_) {
    tier_.forget(*block_);
  }
}

void FileTier::Writer::write(const std::vector<iovec>& pieces, const std::atomic<bool>& abandon,
                             FileIo& io) {
  at_ += move_bytes({FileTransfer::Direction::kWrite, file_->get(), at_, &file_->path(), pieces,
                     &stamp_, &abandon},
                    io, *tier_.calls_, tier_.allow_ring_);
}

void FileTier::Writer::finish() {
  SystemCalls& calls = *tier_.calls_;
  const std::string& temporary = file_->path();
  block_->stamp_ = stamp_.value();
  // The header comes last: until it is there, no reader takes the file for complete.
  const std::string header = file_header(*block_->layout_, tier_.identity(*block_));
  for (std::size_t done = 0; done < header.size();) {
    const iovec piece{const_cast<char*>(header.data()) + done, header.size() - done};
    const ssize_t result = retry_interrupted(
        [&] { return calls.pwritev(file_->get(), &piece, 1, static_cast<off_t>(done)); });
    throw_if_failed(result == 0 ? -EIO : result, temporary, "write");
    done += static_cast<std::size_t>(result);
  }
  if (tier_.fsync_) {
    throw_if_failed(retry_interrupted([&] { return calls.fsync(file_->get()); }), temporary,
                    "fsync");
  }
  file_->close();
  const std::string path = block_->path();
  throw_if_failed(retry_interrupted([&] { return calls.rename(temporary, path); }), path, "rename");
  block_->state_ = FileBlock::State::kComplete;
  finished_ = true;
}

FileTier::Reader::Reader(std::shared_ptr<const FileBlock> block)
    : block_(std::move(block)),
      tier_(*block_->tier_),
      file_(std::make_unique<OpenFile>(*tier_.calls_, block_->path(), O_RDONLY)),
      at_(static_cast<off_t>(block_->layout_->file_header_bytes().count())) {
  tier_.check_header(file_->get(), *block_);
}

FileTier::Reader::~Reader() = default;

void FileTier::Reader::read(const std::vector<iovec>& pieces, const std::atomic<bool>& abandon,
                            FileIo& io) {
  at_ += move_bytes({FileTransfer::Direction::kRead, file_->get(), at_, &file_->path(), pieces,
                     &stamp_, &abandon},
                    io, *tier_.calls_, tier_.allow_ring_);
}

void FileTier::Reader::finish() {
  if (stamp_.value() != block_->stamp_) {
    throw MaterializationError(fmt::format(
        "{}: the file is corrupt: its bytes have the stamp xxh64:{}, those written had xxh64:{}",
        file_->path(), fixed_width_hex(stamp_.value()), fixed_width_hex(block_->stamp_)));
  }
}

void FileTier::copy(std::shared_ptr<const FileBlock> from, std::shared_ptr<FileBlock> to,
                    const std::atomic<bool>& abandon, FileIo& io) {
  constexpr std::int64_t kBufferBytes = std::int64_t{4} << 20;
  const std::int64_t data_bytes = from->layout_->storage_bytes().count();
  Writer writer(std::move(to));
  Reader reader(std::move(from));
  std::vector<std::byte> buffer(static_cast<std::size_t>(std::min(data_bytes, kBufferBytes)));
  for (std::int64_t done = 0; done < data_bytes;) {
    const std::int64_t part = std::min(data_bytes - done, kBufferBytes);
    const std::vector<iovec> pieces{{buffer.data(), static_cast<std::size_t>(part)}};
    reader.read(pieces, abandon, io);
    writer.write(pieces, abandon, io);
    done += part;
  }
  reader.finish();
  writer.finish();
}

}  // namespace residency
