#include "residency/aten/safetensors.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <unordered_map>

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "csrc/aten/safetensors_format.h"
#include "residency/aten/tensor_block.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

// Mapped pages are given back after this many bytes: the only bytes that exist twice.
constexpr std::size_t kCopyBytes = std::size_t{4} << 20;

}  // namespace

struct SafetensorsFile::Tensors {
  std::vector<SafetensorsEntry> entries;
  std::unordered_map<std::string_view, std::size_t> by_name;  // views into entries
};

std::shared_ptr<const SafetensorsFile> SafetensorsFile::open(const std::filesystem::path& path) {
  return std::shared_ptr<const SafetensorsFile>(new SafetensorsFile(path));
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path) : path_(path) {
  const std::string name = path.string();
  const int file = ::open(name.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) {
    throw StorageError(name, errno, "open");
  }
  struct stat status {};
  void* map = MAP_FAILED;
  int error = 0;
  if (::fstat(file, &status) != 0) {
    error = errno;
  } else if (!S_ISREG(status.st_mode)) {
    error = S_ISDIR(status.st_mode) ? EISDIR : EINVAL;
  } else if (status.st_size != 0) {
    nbytes_ = static_cast<std::size_t>(status.st_size);
    map = ::mmap(nullptr, nbytes_, PROT_READ, MAP_PRIVATE, file, 0);
    error = map == MAP_FAILED ? errno : 0;
  }
  if (error != 0) {
    ::close(file);
    throw StorageError(name, error, "map");
  }
  file_ = file;
  map_ = map == MAP_FAILED ? nullptr : static_cast<const std::byte*>(map);
  try {
    auto tensors = std::make_unique<Tensors>();
    tensors->entries = parse_safetensors(name, map_, nbytes_);
    for (std::size_t i = 0; i < tensors->entries.size(); ++i) {
      names_.push_back(tensors->entries[i].name);
      tensors->by_name.emplace(tensors->entries[i].name, i);
    }
    tensors_ = std::move(tensors);
  } catch (...) {
    if (map_ != nullptr) {
      ::munmap(map, nbytes_);
    }
    ::close(file_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) {
    ::munmap(const_cast<std::byte*>(map_), nbytes_);
  }
  ::close(file_);
}

bool SafetensorsFile::contains(std::string_view name) const noexcept {
  return tensors_->by_name.contains(name);
}

std::size_t SafetensorsFile::index_of(std::string_view name) const {
  const auto found = tensors_->by_name.find(name);
  if (found == tensors_->by_name.end()) {
    throw std::out_of_range(fmt::format("{} has no tensor '{}'; it has {} tensors", path_.string(),
                                        name, names_.size()));
  }
  return found->second;
}

// A page behind the end of a file that was cut while it is mapped cannot be read without a signal.
void SafetensorsFile::check_size() const {
  struct stat status {};
  if (::fstat(file_, &status) != 0) {
    throw StorageError(path_.string(), errno, "examine");
  }
  if (static_cast<std::size_t>(status.st_size) < nbytes_) {
    throw MaterializationError(
        fmt::format("{}: the file was truncated after it was opened: expected {} bytes, it has {}",
                    path_.string(), nbytes_, status.st_size));
  }
}

std::shared_ptr<const TensorLayout> SafetensorsFile::layout(
    const std::vector<SafetensorsField>& fields) const {
  std::vector<FieldLayout> layouts;
  std::vector<Bytes> storages;
  for (const SafetensorsField& field : fields) {
    const SafetensorsEntry& entry = tensors_->entries[index_of(field.tensor)];
    FieldLayout layout;
    layout.name = field.field;
    layout.dtype = entry.dtype;
    layout.sizes = entry.sizes;
    layout.strides.resize(entry.sizes.size());
    std::int64_t stride = 1;
    for (std::size_t i = entry.sizes.size(); i-- > 0;) {
      layout.strides[i] = stride;
      if (__builtin_mul_overflow(stride, std::max<std::int64_t>(entry.sizes[i], 1), &stride)) {
        throw MaterializationError(fmt::format("{}: the strides of tensor '{}' exceed 2^63-1",
                                               path_.string(), field.tensor));
      }
    }
    layout.storage = static_cast<std::uint32_t>(storages.size());
    storages.emplace_back(static_cast<std::int64_t>(entry.nbytes));
    layouts.push_back(std::move(layout));
  }
  return std::make_shared<const TensorLayout>(std::move(layouts), std::move(storages));
}

std::shared_ptr<SafetensorsSource> SafetensorsFile::source(
    const std::vector<SafetensorsField>& fields) const {
  return std::shared_ptr<SafetensorsSource>(new SafetensorsSource(shared_from_this(), fields));
}

SafetensorsSource::SafetensorsSource(std::shared_ptr<const SafetensorsFile> file,
                                     const std::vector<SafetensorsField>& fields)
    : file_(std::move(file)), layout_(file_->layout(fields)) {
  tensors_.reserve(fields.size());
  for (const SafetensorsField& field : fields) {
    tensors_.push_back(file_->index_of(field.tensor));
  }
}

std::shared_ptr<Block> SafetensorsSource::load() {
  file_->check_size();
  auto block = TensorBlock::allocate(layout_);
  const auto page_bytes = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const SafetensorsEntry& entry = file_->tensors_->entries[tensors_[i]];
    auto* to = static_cast<std::byte*>(block->storage_data(static_cast<std::uint32_t>(i)));
    const std::byte* from = file_->map_ + entry.begin;
    for (std::size_t done = 0; done < entry.nbytes;) {
      const std::size_t part = std::min(entry.nbytes - done, kCopyBytes);
      std::memcpy(to + done, from + done, part);
      const auto begin = reinterpret_cast<std::uintptr_t>(from + done) / page_bytes * page_bytes;
      const auto end = reinterpret_cast<std::uintptr_t>(from + done + part);
      // Pages of the neighbours go too; whoever reads them next finds them in the page cache.
      static_cast<void>(::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED));
      done += part;
    }
  }
  return block;
}

std::string SafetensorsSource::describe() const {
  return fmt::format("safetensors file {}", file_->path().string());
}

}  // namespace residency
