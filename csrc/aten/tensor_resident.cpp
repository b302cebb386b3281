#include "residency/aten/tensor_resident.h"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <typeinfo>
#include <unordered_map>

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/DispatchKeySet.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "residency/core/errors.h"

namespace residency {
namespace {

bool is_page_locked(const at::Tensor& tensor) {
  try {
    return tensor.is_pinned();
  } catch (const c10::Error&) {
    return false;  // a forked child, where no devices exist, or one that does not answer
  }
}

[[noreturn]] void refuse(const std::string& field, std::string_view kind, std::string_view advice) {
  throw MaterializationError(
      fmt::format("field '{}' is {}, which cannot be kept bit for bit: {}", field, kind, advice));
}

// Gone from torch after 2.11.
template <class Impl>
bool has_named_dimensions(const Impl& impl) {
  if constexpr (requires { impl.has_named_tensor_meta(); }) {
    return impl.has_named_tensor_meta();
  } else {
    return false;
  }
}

// The kinds of tensor that a shallow TensorImpl over a strided storage cannot stand for.
void check_kind(const std::string& field, const at::Tensor& tensor) {
  if (!tensor.defined()) {
    refuse(field, "an undefined tensor", "leave it out");
  }
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  const c10::DispatchKeySet keys = impl.key_set();
  if (keys.has(c10::DispatchKey::Python) || keys.has(c10::DispatchKey::PythonTLSSnapshot)) {
    refuse(field, "a tensor subclass with its own dispatch", "give the plain tensors inside it");
  }
  if (impl.is_sparse() || impl.is_sparse_compressed()) {
    refuse(field, "a sparse tensor", "give its indices and values as fields");
  }
  if (keys.has_any(c10::DispatchKeySet(c10::DispatchKey::NestedTensor))) {
    refuse(field, "a nested tensor", "give its values and offsets as fields");
  }
  if (impl.is_quantized() || c10::isQIntType(tensor.scalar_type())) {
    refuse(field, "a quantized tensor", "give its int_repr, scales and zero points as fields");
  }
  if (impl.is_meta()) {
    refuse(field, "a meta tensor", "it has no bytes; register a source instead");
  }
  if (impl.has_symbolic_sizes_strides()) {
    refuse(field, "a tensor with symbolic sizes", "give a concrete tensor");
  }
  if (keys.has(c10::DispatchKey::ZeroTensor)) {
    refuse(field, "a zero tensor without memory", "clone it");
  }
  if (has_named_dimensions(impl)) {
    refuse(field, "a tensor with named dimensions", "drop the names first");
  }
  constexpr c10::DispatchKeySet kPlain(
      {c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative,
       c10::DispatchKey::AutocastCPU, c10::DispatchKey::AutocastCUDA});
  for (const c10::DispatchKey key : keys - kPlain) {
    const c10::DispatchKey functionality = c10::toFunctionalityKey(key);
    if (functionality != c10::DispatchKey::Dense &&
        functionality != c10::DispatchKey::AutogradFunctionality) {
      refuse(field, fmt::format("a tensor with the dispatch key {}", c10::toString(key)),
             "give the plain tensors inside it");
    }
  }
  if (typeid(impl) != typeid(c10::TensorImpl) || !impl.has_storage()) {
    refuse(field, "a tensor of its own implementation", "give plain strided tensors");
  }
  if (!tensor.is_cpu() && !tensor.is_cuda()) {
    refuse(field, fmt::format("a tensor on the device '{}'", tensor.device().str()),
           "only host and CUDA memory are managed");
  }
  if (!tensor.is_leaf()) {
    refuse(field, "not a leaf of autograd", "detach it first");
  }
}

Location device_location(const at::Tensor& tensor) {
  return tensor.is_cuda() ? Location::cuda(tensor.device().index()) : Location::pageable_host();
}

// Asking whether an address is page-locked makes a CUDA context where there is none; but then
// nothing can be page-locked by torch.
bool can_be_pinned() {
  const auto& hooks = at::detail::getCUDAHooks();
  if (!hooks.hasCUDA()) {
    return false;
  }
  for (int device = 0; device < hooks.getNumGPUs(); ++device) {
    if (hooks.hasPrimaryContext(static_cast<c10::DeviceIndex>(device))) {
      return true;
    }
  }
  return false;
}

struct Memory {
  std::uintptr_t begin;
  std::uintptr_t end;
  std::string field;
};

void refuse_hidden_sharing(std::vector<Memory> memories) {
  std::sort(memories.begin(), memories.end(),
            [](const Memory& left, const Memory& right) { return left.begin < right.begin; });
  for (std::size_t i = 1; i < memories.size(); ++i) {
    if (memories[i].begin < memories[i - 1].end) {
      throw MaterializationError(fmt::format(
          "fields '{}' and '{}' overlap in memory without sharing a storage, so that the sharing "
          "could not be kept: make one a view of the other, or clone it",
          memories[i - 1].field, memories[i].field));
    }
  }
}

std::shared_ptr<const TensorLayout> empty_layout() {
  static const auto* const layout = new std::shared_ptr<const TensorLayout>(
      std::make_shared<const TensorLayout>(std::vector<FieldLayout>(), std::vector<Bytes>()));
  return *layout;
}

}  // namespace

TensorResident::TensorResident() : layout_(empty_layout()) {}

TensorResident::TensorResident(Fields fields) {
  std::vector<FieldLayout> layouts;
  std::vector<Bytes> storages;
  std::vector<Memory> memories;
  std::unordered_map<const c10::StorageImpl*, std::uint32_t> numbers;
  std::optional<Location> location;
  std::string located;
  const bool ask_pinned = can_be_pinned();

  for (auto& [name, tensor] : fields) {
    check_kind(name, tensor);
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    const auto [number, is_new] =
        numbers.try_emplace(storage, static_cast<std::uint32_t>(storages.size()));
    if (is_new) {
      void* data = nullptr;
      std::size_t nbytes = 0;
      try {
        nbytes = storage->nbytes();
        data = storage->mutable_data();  // ends copy-on-write, whose sharing nobody could see
      } catch (const std::exception& error) {
        refuse(name, "a tensor whose storage gives no memory",
               std::string_view(error.what()).substr(0, 200));
      }
      if (nbytes != 0 && data == nullptr) {
        refuse(name, "a tensor whose storage has no memory", "materialize it first");
      }
      storages.emplace_back(static_cast<std::int64_t>(nbytes));
      if (nbytes != 0) {
        const auto begin = reinterpret_cast<std::uintptr_t>(data);
        memories.push_back({begin, begin + nbytes, name});
        Location here = device_location(tensor);
        if (ask_pinned && !here.is_cuda() && is_page_locked(tensor)) {
          here = Location::pinned_host();
        }
        if (location.has_value() && *location != here) {
          throw MaterializationError(fmt::format(
              "field '{}' lies at {} and field '{}' at {}; the fields of a value lie at one "
              "location",
              located, to_string(*location), name, to_string(here)));
        }
        if (!location.has_value()) {
          location = here;
          located = name;
        }
      }
    }
    FieldLayout layout;
    layout.name = name;
    layout.dtype = tensor.scalar_type();
    layout.sizes = tensor.sizes().vec();
    layout.strides = tensor.strides().vec();
    layout.storage_offset = tensor.storage_offset();
    layout.storage = number->second;
    layout.requires_grad = tensor.requires_grad();
    layout.conjugate = tensor.is_conj();
    layout.negative = tensor.is_neg();
    layout.inference = tensor.is_inference();
    layouts.push_back(std::move(layout));
    tensors_.push_back(std::move(tensor));
  }
  refuse_hidden_sharing(std::move(memories));
  if (!location.has_value() && !tensors_.empty()) {
    location = device_location(tensors_.front());
  }
  location_ = location.value_or(Location::pageable_host());
  layout_ = layouts.empty()
                ? empty_layout()
                : std::make_shared<const TensorLayout>(std::move(layouts), std::move(storages));
}

void TensorResident::throw_no_field(std::size_t index) const {
  throw std::out_of_range(
      fmt::format("no field {}; the value has {}, counted from 0", index, tensors_.size()));
}

const at::Tensor& TensorResident::operator[](std::string_view name) const {
  if (const auto index = layout_->find(name); index.has_value()) {
    return tensors_[*index];
  }
  std::vector<std::string_view> names;
  for (const FieldLayout& field : layout_->fields()) {
    names.push_back(field.name);
  }
  throw std::out_of_range(
      fmt::format("no field '{}'; the fields are [{}]", name, fmt::join(names, ", ")));
}

}  // namespace residency
