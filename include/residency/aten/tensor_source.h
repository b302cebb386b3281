#pragma once

#include <functional>
#include <memory>
#include <string>

#include "residency/aten/tensor_resident.h"
#include "residency/core/export.h"
#include "residency/core/source.h"

namespace residency {

/// A source that produces tensors. What the source itself keeps a reference on is copied, so that
/// the managed value never shares memory with it.
class RESIDENCY_API TensorSource : public Source {
 public:
  /// The value, laid out as it was registered and at the registered location. May throw anything.
  [[nodiscard]] virtual TensorResident load_tensors() = 0;
  [[nodiscard]] std::shared_ptr<Block> load() final;
  [[nodiscard]] std::string describe() const override { return "tensor source"; }
};

/// A source that calls a function.
class RESIDENCY_API CallbackSource final : public TensorSource {
 public:
  /// Throws `std::invalid_argument` when the function is empty.
  explicit CallbackSource(std::function<TensorResident()> load,
                          std::string description = "callback");
  ~CallbackSource() override;
  [[nodiscard]] TensorResident load_tensors() override { return load_(); }
  [[nodiscard]] std::string describe() const override { return description_; }

 private:
  std::function<TensorResident()> load_;
  std::string description_;
};

}  // namespace residency
