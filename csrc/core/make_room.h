#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace residency {

/// So that adding so many needs no memory.
template <class Element>
void make_room_in(std::vector<Element>& vector, std::size_t num_more) {
  if (vector.capacity() - vector.size() < num_more) {
    vector.reserve(std::max(vector.size() + num_more, 2 * vector.capacity()));
  }
}

}  // namespace residency
