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
  SafetensorsField(std::string tensor, std::string field)
      : tensor(std::move(tensor)), field(std::move(field)) {}
  std::string tensor;
  std::string field;
};

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
  /// What `Manager::register_source` needs: a reconstructible value of that layout.
  [[nodiscard]] ValueSpec spec(const std::vector<SafetensorsField>& fields,
                               ReplicaMode mode = ReplicaMode::kReplicable) const;
  /// Produces that value in pageable host memory. Keeps the file open.
  [[nodiscard]] std::shared_ptr<Source> source(const std::vector<SafetensorsField>& fields) const;

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

}  // namespace residency
