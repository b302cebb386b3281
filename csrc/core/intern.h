#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

namespace residency {

/// Numbers strings for the life of the process. Thread-safe. Instances are never destroyed, so
/// that locations and handles in static objects stay readable to the end of the process.
class InternTable {
 public:
  /// The number of `text`, the same for equal texts, counted from 0.
  std::uint32_t number(std::string_view text) {
    const std::lock_guard lock(mutex_);
    if (const auto found = numbers_.find(text); found != numbers_.end()) {
      return found->second;
    }
    const auto number = static_cast<std::uint32_t>(texts_.size());
    texts_.emplace_back(text);
    numbers_.emplace(texts_.back(), number);
    return number;
  }
  /// The reference stays valid: a deque does not move its elements.
  const std::string& text(std::uint32_t number) {
    const std::lock_guard lock(mutex_);
    return texts_.at(number);
  }

 private:
  std::mutex mutex_;
  std::deque<std::string> texts_;
  std::unordered_map<std::string_view, std::uint32_t> numbers_;
};

}  // namespace residency
