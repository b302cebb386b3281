#pragma once

#include <algorithm>
#include <cstddef>
#include <string>
#include <vector>

#include <fmt/format.h>

namespace residency {

/// Rows of text in aligned columns, two spaces apart, the first row underlined.
class Table {
 public:
  explicit Table(std::vector<std::string> heading) { add(std::move(heading)); }

  void add(std::vector<std::string> row) {
    widths_.resize(std::max(widths_.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) {
      widths_[i] = std::max(widths_[i], row[i].size());
    }
    rows_.push_back(std::move(row));
  }

  [[nodiscard]] std::string text() const {
    std::string text;
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      std::string line;
      for (std::size_t i = 0; i < rows_[r].size(); ++i) {
        line += fmt::format("{:<{}}", rows_[r][i], widths_[i] + 2);
      }
      line.erase(line.find_last_not_of(' ') + 1);
      text += line + '\n';
      if (r == 0) {
        text += std::string(line.size(), '-') + '\n';
      }
    }
    return text;
  }

 private:
  std::vector<std::vector<std::string>> rows_;
  std::vector<std::size_t> widths_;
};

}  // namespace residency
