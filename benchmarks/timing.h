#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <vector>

/// Microseconds of one unit of work, measured in batches of equal work. The median does not count
/// the batches during which the machine did something else.
class Timing {
 public:
  template <class Batch>
  void measure(std::size_t units, const Batch& batch) {
    const auto start = std::chrono::steady_clock::now();
    batch();
    const auto end = std::chrono::steady_clock::now();
    samples_.push_back(std::chrono::duration<double, std::micro>(end - start).count() /
                       static_cast<double>(units));
  }
  [[nodiscard]] double median() const {
    std::vector<double> sorted = samples_;
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
    std::nth_element(sorted.begin(), middle, sorted.end());
    return *middle;
  }

 private:
  std::vector<double> samples_;
};
