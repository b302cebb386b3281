#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "residency/aten/tensor_layout.h"
#include "residency/core/export.h"
#include "residency/core/source.h"
#include "residency/core/spec.h"

namespace residency {

/// A tensor of a file and the name of the field that it becomes.
struct SafetensorsField {
  /*implicit*/ SafetensorsField(std::string tensor) : tensor(tensor), field(std::move(tensor)) {}
  /*implicit*/ SafetensorsField(const char* tensor) : SafetensorsField(std::string(tensor)) {}
  /// The same tensor as a field of another name.
  [[nodiscard]] SafetensorsField as(std::string name) const {
    SafetensorsField renamed = *this;
    renamed.field = std::move(name);
    return renamed;
  }
  std::string tensor;
  std::string field;
};

class SafetensorsSource;

/// A safetensors file, mapped into memory and read when a value is loaded from it.
///
/// Loading copies a value out of the map and gives the mapped pages back as it goes, so that a
/// model of W bytes never takes more than W and a few megabytes. The file must not change while it
/// is open. Immutable; thread-safe.
class RESIDENCY_API SafetensorsFile : public std::enable_shared_from_this<SafetensorsFile> {
 public:
  /// Maps the file and checks its header. Throws `StorageError` when it cannot be read, and
  /// `MaterializationError` naming the file when it is not valid: truncated, not JSON, a dtype that
  /// torch lacks, a tensor out of bounds, overlapping another or named twice.
  [[nodiscard]] static std::shared_ptr<const SafetensorsFile> open(
      const std::filesystem::path& path);
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;
  ~SafetensorsFile();

  [[nodiscard]] const std::filesystem::path& path() const noexcept { return path_; }
  /// The tensors, in the order of their bytes.
  [[nodiscard]] const std::vector<std::string>& names() const noexcept { return names_; }
  [[nodiscard]] bool contains(std::string_view name) const noexcept;

  /// The layout of a value made of some of the tensors; reads nothing. Throws `std::out_of_range`
  /// for a name that the file lacks.
  [[nodiscard]] std::shared_ptr<const TensorLayout> layout(
      const std::vector<SafetensorsField>& fields) const;
  /// Produces that value. Throws as `layout` does.
  [[nodiscard]] std::shared_ptr<SafetensorsSource> source(
      const std::vector<SafetensorsField>& fields) const;

 private:
  friend class SafetensorsSource;
  struct Tensors;
  explicit SafetensorsFile(const std::filesystem::path& path);
  [[nodiscard]] std::size_t index_of(std::string_view name) const;
  void check_size() const;

  std::filesystem::path path_;
  int file_ = -1;
  const std::byte* map_ = nullptr;
  std::size_t nbytes_ = 0;
  std::vector<std::string> names_;
  std::unique_ptr<const Tensors> tensors_;
};

/// Loads a value made of some tensors of a file into pageable host memory. Keeps the file open.
/// Immutable; thread-safe.
class RESIDENCY_API SafetensorsSource final : public Source {
 public:
  [[nodiscard]] const std::shared_ptr<const TensorLayout>& layout() const noexcept {
    return layout_;
  }
  /// Throws `MaterializationError` when the file was cut after it was opened.
  [[nodiscard]] std::shared_ptr<Block> load() override;
  [[nodiscard]] std::string describe() const override;

 private:
  friend class SafetensorsFile;
  SafetensorsSource(std::shared_ptr<const SafetensorsFile> file,
                    const std::vector<SafetensorsField>& fields);

  std::shared_ptr<const SafetensorsFile> file_;
  std::shared_ptr<const TensorLayout> layout_;
  std::vector<std::size_t> tensors_;  // by field; each has a storage of its own
};

}  // namespace residency
