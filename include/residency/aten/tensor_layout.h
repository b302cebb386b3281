#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/ScalarType.h>

#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/spec.h"

namespace residency {

/// One named tensor of a value, without its bytes.
struct FieldLayout {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<std::int64_t> sizes;    ///< elements
  std::vector<std::int64_t> strides;  ///< elements
  std::int64_t storage_offset = 0;    ///< elements
  std::uint32_t storage = 0;          ///< index of its unique storage
  bool requires_grad = false;
  bool conjugate = false;
  bool negative = false;
  bool inference = false;  ///< made in inference mode: no version counter, so writes go unseen
  friend bool operator==(const FieldLayout&, const FieldLayout&) = default;
};
/// The product of its sizes. Throws `std::out_of_range` where that exceeds 2^63-1.
[[nodiscard]] RESIDENCY_API std::int64_t num_elements(const FieldLayout& field);

/// How the tensors of a value lie in their storages. Two values of equal layout differ in their
/// bytes alone. Immutable; thread-safe.
class RESIDENCY_API TensorLayout final : public Layout {
 public:
  /// `storages` are the bytes of the unique storages. Throws `std::invalid_argument` for a name
  /// that is empty, given twice or not UTF-8, and `MaterializationError` for a field that reaches
  /// outside its storage.
  TensorLayout(std::vector<FieldLayout> fields, std::vector<Bytes> storages);

  [[nodiscard]] const std::vector<FieldLayout>& fields() const noexcept { return fields_; }
  [[nodiscard]] const std::vector<Bytes>& storages() const noexcept { return storages_; }
  /// The position of a field. O(log fields).
  [[nodiscard]] std::optional<std::size_t> find(std::string_view name) const noexcept;

  /// Elements x element size over all fields.
  [[nodiscard]] Bytes logical_bytes() const noexcept { return logical_bytes_; }
  /// Each unique storage once.
  [[nodiscard]] Bytes storage_bytes() const noexcept { return storage_bytes_; }

  /// The order in which storages lie in a pack and in a file: descending by alignment, so that a
  /// file without gaps is aligned.
  [[nodiscard]] const std::vector<std::uint32_t>& order() const noexcept { return order_; }
  /// Where a storage begins in a pack; a multiple of `kPackAlignment`.
  [[nodiscard]] Bytes pack_offset(std::uint32_t storage) const { return pack_offsets_.at(storage); }
  /// All storages in one allocation, each rounded to `kPackAlignment`.
  [[nodiscard]] Bytes packed_bytes() const noexcept { return packed_bytes_; }
  /// What precedes the storages in a file; depends on the layout alone.
  [[nodiscard]] Bytes file_header_bytes() const noexcept { return file_header_bytes_; }
  [[nodiscard]] Bytes file_bytes() const { return file_header_bytes_ + storage_bytes_; }

  /// False when some field has no version counter.
  [[nodiscard]] bool detects_writes() const noexcept { return detects_writes_; }

  [[nodiscard]] bool equals(const Layout& other) const override;
  [[nodiscard]] std::string describe() const override;
  friend bool operator==(const TensorLayout& left, const TensorLayout& right) {
    return left.fields_ == right.fields_ && left.storages_ == right.storages_;
  }

  static constexpr std::int64_t kPackAlignment = 64;

 private:
  std::vector<FieldLayout> fields_;
  std::vector<Bytes> storages_;
  std::vector<std::uint32_t> by_name_;
  std::vector<std::uint32_t> order_;
  std::vector<Bytes> pack_offsets_;
  Bytes logical_bytes_;
  Bytes storage_bytes_;
  Bytes packed_bytes_;
  Bytes file_header_bytes_;
  bool detects_writes_ = true;
};

/// A spec whose charges and checks follow from the layout.
[[nodiscard]] RESIDENCY_API ValueSpec
spec_of(std::shared_ptr<const TensorLayout> layout, ReplicaMode mode = ReplicaMode::kExclusive,
        Recoverability recoverability = Recoverability::kMustPreserve,
        Mutability mutability = Mutability::kImmutable);

}  // namespace residency
