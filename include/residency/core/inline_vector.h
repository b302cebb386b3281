#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <type_traits>
#include <vector>

namespace residency {

/// A vector of small trivial elements whose first N need no allocation.
template <class T, std::size_t N>
class InlineVector {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  void push_back(const T& element) {
    if (spilled_.empty() && size_ < N) {
      inline_[size_] = element;
    } else {
      if (spilled_.empty()) {
        spilled_.assign(inline_.begin(), inline_.begin() + N);
      }
      spilled_.push_back(element);
    }
    ++size_;
  }
  void erase(T* position) {
    for (T* next = position + 1; next != end(); ++position, ++next) {
      *position = *next;
    }
    if (!spilled_.empty()) {
      spilled_.pop_back();
      if (spilled_.size() == N) {  // back inline, so that an empty spill means inline
        std::copy(spilled_.begin(), spilled_.end(), inline_.begin());
        spilled_.clear();
      }
    }
    --size_;
  }
  void clear() noexcept {
    size_ = 0;
    spilled_.clear();
  }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }
  [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
  [[nodiscard]] T* begin() noexcept { return spilled_.empty() ? inline_.data() : spilled_.data(); }
  [[nodiscard]] T* end() noexcept { return begin() + size_; }
  [[nodiscard]] const T* begin() const noexcept {
    return spilled_.empty() ? inline_.data() : spilled_.data();
  }
  [[nodiscard]] const T* end() const noexcept { return begin() + size_; }
  friend bool operator==(const InlineVector& a, const InlineVector& b) noexcept {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::size_t size_ = 0;
  std::array<T, N> inline_;
  std::vector<T> spilled_;
};

}  // namespace residency
