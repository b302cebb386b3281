#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <sys/uio.h>

#include "residency/aten/tensor_layout.h"
#include "residency/aten/tensor_resident.h"
#include "residency/core/backend.h"
#include "residency/core/export.h"

namespace residency {

class TensorView;

/// A materialization in memory: the storages of a value and its tensors over them.
///
/// Either *packed* (all storages in one allocation, see Note [Packs]) or *adopted* (the storages
/// that the caller made). Its tensors are shallow copies that share the version counters of the
/// storages, so that later changes to the metadata of somebody else's tensor do not reach them.
/// Those of a pack are made when somebody first looks: most packs come and go unseen.
/// For one block from one thread at a time, except `is_shared` and what begins and ends accesses
/// (several leases may read one block), which any thread may call.
class RESIDENCY_API TensorBlock final : public Block,
                                        public std::enable_shared_from_this<TensorBlock> {
 public:
  /// Takes references on the storages of the tensors. Throws `MaterializationError` for what
  /// TensorResident refuses, as the tensors are now.
  [[nodiscard]] static std::shared_ptr<TensorBlock> adopt(const TensorResident& value);
  /// A new pack in pageable host memory, not initialized. Throws what the CPU allocator throws.
  [[nodiscard]] static std::shared_ptr<TensorBlock> allocate(
      std::shared_ptr<const TensorLayout> layout);
  /// A new pack over `memory`, which has at least `layout->packed_bytes()` bytes at an address that
  /// is a multiple of `TensorLayout::kPackAlignment`.
  [[nodiscard]] static std::shared_ptr<TensorBlock> pack(std::shared_ptr<const TensorLayout> layout,
                                                         Location location, at::DataPtr memory);
  /// A new pack in pageable host memory with the bytes of this block.
  [[nodiscard]] std::shared_ptr<TensorBlock> clone() const;
  /// Copies every storage into that of `target`, which has the same layout. Both are in host
  /// memory.
  void copy_on_host(const TensorBlock& target) const;

  ~TensorBlock() override;
  [[nodiscard]] Location location() const override { return location_; }
  [[nodiscard]] Bytes logical_bytes() const override { return layout_->logical_bytes(); }
  [[nodiscard]] const Layout* layout() const override { return layout_.get(); }
  [[nodiscard]] AddressRanges address_ranges() const override;

  [[nodiscard]] const std::shared_ptr<const TensorLayout>& tensor_layout() const noexcept {
    return layout_;
  }
  [[nodiscard]] bool is_packed() const noexcept { return packed_; }
  /// The block's own tensors, to be given away when management ends.
  [[nodiscard]] TensorResident tensors();
  /// The memory of the storages in the layout's order, neighbours in a pack merged. Those of
  /// adopted tensors can be neighbours too, but of different allocations, which no device copies at
  /// once.
  [[nodiscard]] std::vector<iovec> storages() const;

  /// The memory of one storage; null when it has no bytes.
  [[nodiscard]] void* storage_data(std::uint32_t storage) const;
  /// Where the pack begins; null when it has no bytes, and for adopted tensors.
  [[nodiscard]] void* pack_data() const noexcept { return pack_data_; }
  /// What the deleter of the pack's memory is given; null when it is another one.
  [[nodiscard]] void* pack_context(at::DeleterFnPtr deleter) const noexcept {
    return deleter == pack_deleter_ ? pack_context_ : nullptr;
  }
  /// Whether the storages free their memory when they die. Tensors over memory of somebody else
  /// (`from_blob` without a deleter) do not.
  [[nodiscard]] bool owns_memory() const noexcept;

  /// Whether a storage has references besides those of this block and of its open views. Weak
  /// references do not count. O(storages).
  [[nodiscard]] bool is_shared() const noexcept;
  /// Done when the memory of every storage has gone; null when the block is not shared.
  [[nodiscard]] FencePtr watch_escape() const;

  /// Throws `MaterializationError` when somebody resized a storage or exchanged its memory.
  void check_intact() const;
  /// With `checksum` remembers the bytes, unless they are known already.
  void begin_access(bool checksum);
  /// The name of the first field whose bytes changed since they were last known. Its present
  /// contents become the known ones.
  [[nodiscard]] std::optional<std::string> take_undeclared_write(bool checksum);
  /// Makes the present contents the known ones.
  void accept_contents(bool checksum);
  /// A view of the block, which must outlive it. Throws what allocating throws.
  [[nodiscard]] std::unique_ptr<View> open_view();
  /// Counts a write to every storage, for autograd and for `take_undeclared_write` elsewhere, and
  /// makes the present contents the known ones.
  void count_overwrite();

 private:
  friend class TensorView;
  struct Pack;
  struct StorageEntry {
    c10::Storage storage;
    void* data = nullptr;
    std::uint32_t num_fields = 0;
  };

  struct Key {};  // make_shared needs a public constructor

 public:
  TensorBlock(Key, std::shared_ptr<const TensorLayout> layout, Location location, bool packed);

 private:
  [[nodiscard]] std::size_t num_bytes_of(std::size_t storage) const {
    return static_cast<std::size_t>(layout_->storages()[storage].count());
  }
  void make_tensors();
  /// None before they are made.
  [[nodiscard]] std::span<const at::Tensor> made_tensors() const noexcept {
    return has_tensors_.load(std::memory_order_acquire) ? std::span(tensors_)
                                                        : std::span<const at::Tensor>();
  }
  void enter_storages();
  void note_versions();
  void note_contents(bool checksum);
  /// Held for some nanoseconds, or while bytes are compared (debug). A mutex would be a tenth of
  /// the cost of a lease.
  class KnownContentsGuard;
  [[nodiscard]] std::vector<std::uint64_t> stamps() const;

  std::shared_ptr<const TensorLayout> layout_;
  Location location_;
  bool packed_;
  void* pack_data_ = nullptr;
  void* pack_context_ = nullptr;
  at::DeleterFnPtr pack_deleter_ = nullptr;
  at::DataPtr memory_;      // of a pack
  Pack* shared_ = nullptr;  // what its tensors keep; made with them
  std::mutex making_mutex_;
  std::atomic<bool> has_tensors_{false};  // the next two are made, and stay as they are
  std::vector<at::Tensor> tensors_;
  std::vector<StorageEntry> storages_;
  std::atomic_flag known_contents_busy_;       // guards the next two
  std::vector<std::uint32_t> known_versions_;  // by field
  std::vector<std::uint64_t> known_stamps_;    // by storage; empty when not known
  std::atomic<std::uint32_t> num_views_{0};
  /// Most blocks have one view at a time: it is kept for the next lease, empty meanwhile.
  TensorView* kept_view_ = nullptr;
  std::atomic_flag kept_view_busy_;  // guards it
};

/// What a lease shows: shallow copies of a block's tensors, sharing their version counters. The
/// block outlives it.
class RESIDENCY_API TensorView final : public View {
 public:
  explicit TensorView(TensorBlock& block);
  ~TensorView() override;
  [[nodiscard]] const TensorResident& tensors() const noexcept { return tensors_; }

  /// Deleting a view that its block keeps only empties it.
  static void operator delete(TensorView* view, std::destroying_delete_t) noexcept;

 private:
  friend class TensorBlock;
  void fill();
  void clear() noexcept;
  [[nodiscard]] static TensorView* make(TensorBlock& block);
  static void destroy(TensorView* view) noexcept;

  TensorBlock& block_;
  TensorResident tensors_;
  bool is_kept_ = false;
  bool is_filled_ = false;
};

}  // namespace residency
