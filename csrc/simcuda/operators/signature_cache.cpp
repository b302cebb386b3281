#include "csrc/simcuda/operators/signature_cache.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <c10/core/DefaultDtype.h>

namespace residency::simcuda {
namespace {

using c10::IValue;

enum Tag : uint64_t {
  kAbsent = 1,
  kTensor,
  kList,
  kInt,
  kDouble,
  kBool,
  kComplex,
  kString,
  kDevice,
  kNumberInt,
  kNumberDouble,
};

uint64_t word(int64_t value) {
  return static_cast<uint64_t>(value);
}

// A word at a time, with a multiply and a shift that spread each to all bits.
uint64_t hash_of(c10::ArrayRef<uint64_t> words) {
  uint64_t hash = 0x9e3779b97f4a7c15ULL + words.size();
  for (const uint64_t value : words) {
    hash = (hash ^ value) * 0xff51afd7ed558ccdULL;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

Signature::Signature(const OperatorTraits& traits, c10::ArrayRef<IValue> arguments) {
  // Integer division and means turn into the default type.
  words_.push_back(static_cast<uint64_t>(c10::get_default_dtype_as_scalartype()));
  for (size_t i = 0; i < arguments.size(); ++i) {
    add(traits, traits.arguments[i].kind, arguments[i]);
  }
  hash_ = hash_of(words_);
}

void Signature::add(const OperatorTraits& traits, ArgumentKind kind, const IValue& value) {
  switch (kind) {
    case ArgumentKind::kTensor:
      if (value.isTensor()) {
        add_tensor(value.toTensor());
      } else {
        words_.push_back(kAbsent);
      }
      return;
    case ArgumentKind::kTensorList:
    case ArgumentKind::kOptionalTensorList:
      if (!value.isList()) {
        words_.push_back(kAbsent);
        return;
      }
      words_.push_back(kList | value.toListRef().size() << 8);
      for (const IValue& element : value.toListRef()) {
        add(traits, ArgumentKind::kTensor, element);
      }
      return;
    case ArgumentKind::kGenerator: return;
    case ArgumentKind::kNumber: add_plain(value, traits.shaped_by_numbers); return;
    case ArgumentKind::kOther: add_plain(value, true); return;
  }
}

void Signature::add_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) {
    words_.push_back(kAbsent);
    return;
  }
  const auto& impl = *tensor.unsafeGetTensorImpl();
  const uint64_t flags = static_cast<uint64_t>(tensor.is_cuda()) |
                         static_cast<uint64_t>(impl.is_wrapped_number()) << 1 |
                         static_cast<uint64_t>(tensor.is_conj()) << 2 |
                         static_cast<uint64_t>(tensor.is_neg()) << 3;
  words_.push_back(kTensor | flags << 8 | static_cast<uint64_t>(tensor.scalar_type()) << 16 |
                   word(tensor.dim()) << 32);
  for (const int64_t size : impl.sizes()) {
    words_.push_back(word(size));
  }
  for (const int64_t stride : impl.strides()) {
    words_.push_back(word(stride));
  }
}

void Signature::add_plain(const IValue& value, bool with_numbers) {
  if (value.isNone()) {
    words_.push_back(kAbsent);
  } else if (value.isBool()) {
    words_.push_back(kBool | static_cast<uint64_t>(value.toBool()) << 8);
  } else if (value.isInt()) {
    words_.push_back(with_numbers ? kInt : kNumberInt);
    if (with_numbers) {
      words_.push_back(word(value.toInt()));
    }
  } else if (value.isDouble()) {
    words_.push_back(with_numbers ? kDouble : kNumberDouble);
    if (with_numbers) {
      words_.push_back(std::bit_cast<uint64_t>(value.toDouble()));
    }
  } else if (value.isComplexDouble()) {
    words_.push_back(kComplex);
  } else if (value.isDevice()) {
    words_.push_back(kDevice | static_cast<uint64_t>(value.toDevice().is_cuda()) << 8);
  } else if (value.isString()) {
    const std::string& text = value.toStringRef();
    words_.push_back(kString | text.size() << 8);
    const size_t start = words_.size();
    words_.resize(start + (text.size() + 7) / 8, 0);
    std::memcpy(words_.data() + start, text.data(), text.size());
  } else if (value.isList()) {
    words_.push_back(kList | value.toListRef().size() << 8);
    for (const IValue& element : value.toListRef()) {
      // Scalars in a list are as many as there are tensors, and none of them shapes a result.
      add_plain(element, with_numbers && !element.isDouble());
    }
  } else {
    cacheable_ = false;
  }
}

std::shared_ptr<const Plan> SignatureCache::find(const Signature& signature) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto [begin, end] = entries_.equal_range(signature.hash());
  for (auto entry = begin; entry != end; ++entry) {
    const auto& words = entry->second.words;
    if (std::equal(words.begin(), words.end(), signature.words().begin(),
                   signature.words().end())) {
      return entry->second.plan;
    }
  }
  return nullptr;
}

void SignatureCache::insert(const Signature& signature, std::shared_ptr<const Plan> plan) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (num_words_ + signature.words().size() > kMaxWords) {
    entries_.clear();
    num_words_ = 0;
  }
  num_words_ += signature.words().size();
  entries_.emplace(signature.hash(), Entry{signature.words().vec(), std::move(plan)});
}

}  // namespace residency::simcuda
