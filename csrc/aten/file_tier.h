#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <sys/uio.h>

#include "csrc/aten/file_io.h"
#include "csrc/aten/safetensors_format.h"
#include "residency/aten/system_calls.h"
#include "residency/aten/tensor_layout.h"
#include "residency/core/backend.h"
#include "residency/core/options.h"

namespace residency {

class FileTier;

/// One value in one file. Destroying it removes the file.
class FileBlock final : public Block {
 public:
  FileBlock(std::shared_ptr<FileTier> tier, std::shared_ptr<const TensorLayout> layout,
            std::uint64_t serial);
  ~FileBlock() override;
  [[nodiscard]] Location location() const override;
  [[nodiscard]] Bytes logical_bytes() const override { return layout_->logical_bytes(); }
  [[nodiscard]] const Layout* layout() const override { return layout_.get(); }
  [[nodiscard]] AddressRanges address_ranges() const override { return {}; }

  [[nodiscard]] const std::shared_ptr<FileTier>& tier() const noexcept { return tier_; }
  [[nodiscard]] const std::shared_ptr<const TensorLayout>& tensor_layout() const noexcept {
    return layout_;
  }
  [[nodiscard]] std::string path() const;

 private:
  friend class FileTier;
  [[nodiscard]] std::string temporary_path() const;

  enum class State : std::uint8_t { kAbsent, kTemporary, kComplete };
  std::shared_ptr<FileTier> tier_;
  std::shared_ptr<const TensorLayout> layout_;
  std::uint64_t serial_;
  // Written by a worker before the fence of the write completes, read behind that fence.
  std::uint64_t stamp_ = 0;
  std::atomic<State> state_{State::kAbsent};
};

/// The files of one `disk:NAME` of one manager: a subdirectory of its own, under a held lock.
///
/// Thread-safe; for one block from one thread at a time. Methods that take a `FileIo` run on the
/// worker's thread, the others do not wait for data. Does nothing to the file system in a forked
/// child.
class FileTier : public std::enable_shared_from_this<FileTier> {
 public:
  /// Sweeps what crashed processes left in the directory, and makes the subdirectory. Throws
  /// `StorageError`.
  FileTier(std::shared_ptr<SystemCalls> calls, const DiskTier& declaration, ManagerId manager,
           bool allow_ring);
  ~FileTier();
  FileTier(const FileTier&) = delete;
  FileTier& operator=(const FileTier&) = delete;

  [[nodiscard]] Location location() const noexcept { return location_; }
  /// The file with its header, in whole blocks of the file system.
  [[nodiscard]] Bytes occupied_bytes(const TensorLayout& layout) const {
    return layout.file_bytes().rounded_up(block_bytes_);
  }
  /// False in a forked child.
  [[nodiscard]] bool is_ours() const noexcept;
  /// Throws `ForkError` in a forked child.
  void refuse_in_forked_child() const;

  /// A new file with its space, under a temporary name. Throws `StorageError`.
  [[nodiscard]] std::shared_ptr<FileBlock> make_file(std::shared_ptr<const TensorLayout> layout);
  /// Gives a block that lost its file in a failed write a new one. Throws `StorageError`.
  void make_file_again(FileBlock& block);
  /// Throws `MaterializationError` unless the file has the size and the header that it must have.
  void check(const FileBlock& block);

  class Writer;
  class Reader;
  /// Reads another file (perhaps of another tier) into one of this tier.
  static void copy(std::shared_ptr<const FileBlock> from, std::shared_ptr<FileBlock> to,
                   const std::atomic<bool>& abandon, FileIo& io);

  /// Removes the subdirectory with all its files, now. Blocks that are left have lost theirs.
  void remove() noexcept;

 private:
  friend class FileBlock;
  class OpenFile;
  void sweep(const std::string& directory);
  void make_subdirectory(const std::string& directory, ManagerId manager);
  void remove_files(const std::string& subdirectory) noexcept;
  void forget(FileBlock& block) noexcept;
  void check_header(int file, const FileBlock& block);
  [[nodiscard]] FileIdentity identity(const FileBlock& block) const noexcept {
    return {block.stamp_, writer_, block.serial_};
  }
  const std::shared_ptr<SystemCalls> calls_;
  const Location location_;
  const bool fsync_;
  const bool allow_ring_;
  const std::uint64_t generation_;
  std::uint64_t writer_ = 0;
  std::int64_t block_bytes_ = 4096;
  std::string subdirectory_;
  int lock_file_ = -1;
  std::atomic<std::uint64_t> next_serial_{1};
  std::atomic<bool> removed_{false};
};

/// Writes the storages of a value, in the layout's order and piece by piece, and gives the file its
/// name at the end. Unless it comes to that, no file is left behind. Throws `StorageError`.
class FileTier::Writer {
 public:
  explicit Writer(std::shared_ptr<FileBlock> block);
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;
  void write(const std::vector<iovec>& pieces, const std::atomic<bool>& abandon, FileIo& io);
  void finish();

 private:
  const std::shared_ptr<FileBlock> block_;
  FileTier& tier_;
  std::unique_ptr<OpenFile> file_;
  off_t at_ = 0;
  ContentStamp stamp_;
  bool finished_ = false;
};

/// Reads them, in the same order, and compares their stamp at the end. Throws `StorageError`,
/// `MaterializationError`.
class FileTier::Reader {
 public:
  explicit Reader(std::shared_ptr<const FileBlock> block);
  ~Reader();
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;
  void read(const std::vector<iovec>& pieces, const std::atomic<bool>& abandon, FileIo& io);
  void finish();

 private:
  const std::shared_ptr<const FileBlock> block_;
  FileTier& tier_;
  std::unique_ptr<OpenFile> file_;
  off_t at_ = 0;
  ContentStamp stamp_;
};

}  // namespace residency
