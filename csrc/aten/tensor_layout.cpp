#include "residency/aten/tensor_layout.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "csrc/aten/safetensors_format.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

std::int64_t checked_product(std::int64_t left, std::int64_t right) {
  std::int64_t product = 0;
  if (__builtin_mul_overflow(left, right, &product)) {
    throw std::out_of_range("TensorLayout: a field has more than 2^63-1 bytes");
  }
  return product;
}

// One past the last byte that the field touches in its storage.
std::int64_t extent_bytes(const FieldLayout& field, std::int64_t element_bytes) {
  if (num_elements(field) == 0) {
    return 0;
  }
  std::int64_t last = field.storage_offset;
  for (std::size_t i = 0; i < field.sizes.size(); ++i) {
    if (__builtin_add_overflow(last, checked_product(field.sizes[i] - 1, field.strides[i]),
                               &last)) {
      throw std::out_of_range("TensorLayout: a field reaches beyond 2^63-1 elements");
    }
  }
  return checked_product(last + 1, element_bytes);
}

std::int64_t element_bytes(const FieldLayout& field) {
  return static_cast<std::int64_t>(c10::elementSize(field.dtype));
}

}  // namespace

std::int64_t num_elements(const FieldLayout& field) {
  if (std::find(field.sizes.begin(), field.sizes.end(), 0) != field.sizes.end()) {
    return 0;
  }
  std::int64_t count = 1;
  for (const std::int64_t size : field.sizes) {
    count = checked_product(count, size);
  }
  return count;
}

TensorLayout::TensorLayout(std::vector<FieldLayout> fields, std::vector<Bytes> storages)
    : fields_(std::move(fields)), storages_(std::move(storages)) {
  std::vector<std::int64_t> alignments(storages_.size(), 1);
  for (const FieldLayout& field : fields_) {
    if (field.name.empty() || !is_utf8(field.name)) {
      throw std::invalid_argument(fmt::format(
          "TensorLayout: a field's name must be non-empty UTF-8, got '{}'", field.name));
    }
    if (field.sizes.size() != field.strides.size() || field.storage >= storages_.size() ||
        field.storage_offset < 0) {
      throw std::invalid_argument(fmt::format(
          "TensorLayout: field '{}' needs as many strides as sizes, an offset that is not negative "
          "and one of the {} storages",
          field.name, storages_.size()));
    }
    const std::int64_t element = element_bytes(field);
    const std::int64_t extent = extent_bytes(field, element);
    const std::int64_t available = storages_[field.storage].count();
    if (extent > available) {
      throw MaterializationError(fmt::format(
          "field '{}' reaches {} bytes into a storage of {} bytes", field.name, extent, available));
    }
    logical_bytes_ += Bytes(checked_product(num_elements(field), element));
    detects_writes_ = detects_writes_ && !field.inference;
    std::int64_t& alignment = alignments[field.storage];
    alignment = std::max(alignment, element);
  }

  by_name_.resize(fields_.size());
  std::iota(by_name_.begin(), by_name_.end(), 0U);
  std::sort(by_name_.begin(), by_name_.end(), [this](std::uint32_t left, std::uint32_t right) {
    return fields_[left].name < fields_[right].name;
  });
  for (std::size_t i = 1; i < by_name_.size(); ++i) {
    if (fields_[by_name_[i - 1]].name == fields_[by_name_[i]].name) {
      throw std::invalid_argument(
          fmt::format("TensorLayout: names of fields must be unique, got '{}' twice",
                      fields_[by_name_[i]].name));
    }
  }

  // A storage that is no multiple of its alignment would misalign what follows it in a file.
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    while (storages_[i].count() % alignments[i] != 0) {
      alignments[i] /= 2;
    }
  }
  order_.resize(storages_.size());
  std::iota(order_.begin(), order_.end(), 0U);
  std::stable_sort(order_.begin(), order_.end(), [&](std::uint32_t left, std::uint32_t right) {
    return alignments[left] > alignments[right];
  });
  pack_offsets_.resize(storages_.size());
  for (const std::uint32_t storage : order_) {
    pack_offsets_[storage] = packed_bytes_;
    packed_bytes_ += storages_[storage].rounded_up(kPackAlignment);
    storage_bytes_ += storages_[storage];
  }
  file_header_bytes_ = Bytes(static_cast<std::int64_t>(file_header(*this, {}).size()));
}

std::optional<std::size_t> TensorLayout::find(std::string_view name) const noexcept {
  const auto found = std::lower_bound(by_name_.begin(), by_name_.end(), name,
                                      [this](std::uint32_t field, std::string_view sought) {
                                        return fields_[field].name < sought;
                                      });
  if (found == by_name_.end() || fields_[*found].name != name) {
    return std::nullopt;
  }
  return *found;
}

bool TensorLayout::equals(const Layout& other) const {
  if (this == &other) {
    return true;
  }
  const auto* layout = dynamic_cast<const TensorLayout*>(&other);
  return layout != nullptr && *this == *layout;
}

std::string TensorLayout::describe() const {
  std::string text;
  for (const FieldLayout& field : fields_) {
    fmt::format_to(std::back_inserter(text), "{}{}: {}[{}]", text.empty() ? "" : ", ", field.name,
                   c10::toString(field.dtype), fmt::join(field.sizes, ", "));
    fmt::format_to(std::back_inserter(text), " strides [{}] in storage {} at {}",
                   fmt::join(field.strides, ", "), field.storage, field.storage_offset);
    text += field.requires_grad ? " requires_grad" : "";
    text += field.conjugate ? " conjugate" : "";
    text += field.negative ? " negative" : "";
    text += field.inference ? " write_detection=none" : "";
  }
  std::vector<std::int64_t> nbytes;
  for (const Bytes storage : storages_) {
    nbytes.push_back(storage.count());
  }
  return fmt::format("{}; storages of [{}] bytes", text.empty() ? "no fields" : text,
                     fmt::join(nbytes, ", "));
}

ValueSpec spec_of(std::shared_ptr<const TensorLayout> layout, ReplicaMode mode,
                  Recoverability recoverability, Mutability mutability) {
  if (layout == nullptr) {
    throw std::invalid_argument("spec_of: the layout must not be null");
  }
  ValueSpec spec;
  spec.logical_bytes = layout->logical_bytes();
  spec.storage_bytes = layout->storage_bytes();
  spec.layout = std::move(layout);
  spec.mode = mode;
  spec.recoverability = recoverability;
  spec.mutability = mutability;
  return spec;
}

}  // namespace residency
