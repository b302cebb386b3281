#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "residency/aten/tensor_layout.h"
#include "residency/core/bytes.h"
#include "residency/core/export.h"
#include "residency/core/location.h"

namespace residency {

/// A value as tensors: named fields in a fixed order.
///
/// A value type that holds references on its tensors; copying it copies no bytes.
/// Thread-compatible. What its tensors can be is checked when it is made: dense strided tensors
/// whose storages have memory, leaves of autograd, no subclass, all at one location.
class RESIDENCY_API TensorResident {
 public:
  using Fields = std::vector<std::pair<std::string, at::Tensor>>;

  /// No fields.
  TensorResident();
  /// Throws `std::invalid_argument` for names that are empty or not unique, and
  /// `MaterializationError` naming the field and its kind for a tensor that could not be kept bit
  /// for bit, for fields that overlap in memory without sharing a storage, and for fields at
  /// several locations.
  explicit TensorResident(Fields fields);

  [[nodiscard]] std::size_t size() const noexcept { return tensors_.size(); }
  [[nodiscard]] bool empty() const noexcept { return tensors_.empty(); }
  /// Throws `std::out_of_range` with the number that there are.
  [[nodiscard]] const std::string& name(std::size_t index) const {
    if (index >= tensors_.size()) {
      throw_no_field(index);
    }
    return layout_->fields()[index].name;
  }
  /// Throws `std::out_of_range` with the number that there are.
  [[nodiscard]] const at::Tensor& operator[](std::size_t index) const {
    if (index >= tensors_.size()) {
      throw_no_field(index);
    }
    return tensors_[index];
  }
  /// Throws `std::out_of_range` with the names that there are.
  [[nodiscard]] const at::Tensor& operator[](std::string_view name) const;
  [[nodiscard]] bool contains(std::string_view name) const noexcept {
    return layout_->find(name).has_value();
  }
  [[nodiscard]] const std::vector<at::Tensor>& tensors() const noexcept { return tensors_; }
  [[nodiscard]] const std::shared_ptr<const TensorLayout>& layout() const noexcept {
    return layout_;
  }

  /// Where the tensors are, zero-byte storages aside: their device, or page-locked host memory when
  /// all of them are. Does not initialize CUDA.
  [[nodiscard]] Location location() const noexcept { return location_; }
  [[nodiscard]] Bytes logical_bytes() const noexcept { return layout_->logical_bytes(); }
  [[nodiscard]] Bytes storage_bytes() const noexcept { return layout_->storage_bytes(); }

 private:
  [[noreturn]] void throw_no_field(std::size_t index) const;
  friend class TensorBlock;
  friend class TensorView;
  TensorResident(std::shared_ptr<const TensorLayout> layout, std::vector<at::Tensor> tensors,
                 Location location) noexcept
      : layout_(std::move(layout)), tensors_(std::move(tensors)), location_(location) {}

  std::shared_ptr<const TensorLayout> layout_;
  std::vector<at::Tensor> tensors_;
  Location location_;
};

}  // namespace residency
