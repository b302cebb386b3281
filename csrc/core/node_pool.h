#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <memory_resource>
#include <new>
#include <vector>

namespace residency {

/// Memory for the nodes of containers. It keeps what is given back until it dies, so that whatever
/// was there once can be had again: taking changes back cannot fail for want of memory, nor can
/// what there is room for. Faster than `std::pmr::unsynchronized_pool_resource` too, for it has
/// blocks of one size.
///
/// Not thread-safe.
class NodePool final : public std::pmr::memory_resource {
 public:
  NodePool() = default;
  NodePool(const NodePool&) = delete;
  NodePool& operator=(const NodePool&) = delete;
  ~NodePool() override = default;

  /// So that many nodes can be had without fail. Throws `std::bad_alloc`.
  void make_room(std::size_t num_nodes) {
    if (num_free_ < num_nodes) {
      grow(num_nodes - num_free_);
    }
  }

 private:
  union Node {
    Node* next;
    std::byte bytes[64];  // a red-black tree's links and 32 B of a key and a value
  };

  void grow(std::size_t at_least) {
    const std::size_t count = std::max({at_least, num_nodes_, kFewest});
    slabs_.reserve(slabs_.size() + 1);
    slabs_.push_back(std::make_unique_for_overwrite<Node[]>(count));
    for (std::size_t i = count; i-- > 0;) {  // handed out by address
      give(&slabs_.back()[i]);
    }
    num_nodes_ += count;
  }
  void give(Node* node) noexcept {
    node->next = free_;
    free_ = node;
    ++num_free_;
  }

  void* do_allocate(std::size_t nbytes, std::size_t alignment) override {
    if (nbytes > sizeof(Node) || alignment > alignof(Node)) {
      throw std::bad_alloc();  // another library's nodes are larger: then `bytes` has to be
    }
    make_room(1);
    --num_free_;
    Node* const node = free_;
    free_ = node->next;
    return node->bytes;
  }
  void do_deallocate(void* node, std::size_t /*nbytes*/, std::size_t /*alignment*/) override {
    give(static_cast<Node*>(node));
  }
  [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override {
    return this == &other;
  }

  static constexpr std::size_t kFewest = 16;

  std::vector<std::unique_ptr<Node[]>> slabs_;
  Node* free_ = nullptr;
  std::size_t num_free_ = 0;
  std::size_t num_nodes_ = 0;
};

}  // namespace residency
