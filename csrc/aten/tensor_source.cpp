#include "residency/aten/tensor_source.h"

#include <stdexcept>
#include <utility>

#include "residency/aten/tensor_block.h"

namespace residency {

std::shared_ptr<Block> TensorSource::load() {
  return TensorBlock::adopt(load_tensors());
}

CallbackSource::CallbackSource(std::function<TensorResident()> load, std::string description)
    : load_(std::move(load)), description_(std::move(description)) {
  if (!load_) {
    throw std::invalid_argument("CallbackSource: the function must not be empty");
  }
}

CallbackSource::~CallbackSource() = default;

}  // namespace residency
