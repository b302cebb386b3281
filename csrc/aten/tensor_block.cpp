#include "residency/aten/tensor_block.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include <c10/core/CPUAllocator.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/intrusive_ptr.h>
#include <fmt/format.h>

#include "csrc/aten/content_stamp.h"
#include "residency/core/errors.h"

namespace residency {
namespace {

// Modes and interpreters of Python must not see these copies, nor may a dispatch mode replace them.
class BelowPython {
 public:
  BelowPython()
      : guard_(
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})) {}

 private:
  c10::impl::ExcludeDispatchKeyGuard guard_;
};

at::Tensor shallow_copy(const at::Tensor& tensor, bool requires_grad) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  at::Tensor copy(impl.shallow_copy_and_detach(impl.version_counter(),
                                               /*allow_tensor_metadata_change=*/true));
  if (requires_grad) {
    copy.unsafeGetTensorImpl()->set_requires_grad(true);
  }
  return copy;
}

at::Tensor make_tensor(const FieldLayout& field, const c10::Storage& storage) {
  // A tensor is an inference tensor, or not, by the mode it is made in: not the caller's here.
  const c10::InferenceMode mode(field.inference);
  const auto key = storage.device().is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                   c10::scalarTypeToTypeMeta(field.dtype));
  impl->set_sizes_and_strides(field.sizes, field.strides, field.storage_offset);
  if (field.conjugate) {
    impl->_set_conj(true);
  }
  if (field.negative) {
    impl->_set_neg(true);
  }
  if (field.requires_grad) {
    impl->set_requires_grad(true);
  }
  return at::Tensor(std::move(impl));
}

std::uint32_t version_of(const at::Tensor& tensor) {
  const auto& counter = tensor.unsafeGetTensorImpl()->version_counter();
  return counter.enabled() ? counter.current_version() : 0;
}

class EscapeFence final : public Fence {
 public:
  explicit EscapeFence(std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages)
      : storages_(std::move(storages)) {}

  [[nodiscard]] FenceStatus poll() const noexcept override {
    for (const auto& storage : storages_) {
      if (!storage.expired()) {
        return FenceStatus::kPending;
      }
    }
    return FenceStatus::kDone;
  }
  void wait() override {
    // Nobody announces the death of a storage.
    while (poll() == FenceStatus::kPending) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
};

}  // namespace

// Note [Packs]
// ~~~~~~~~~~~~
// The unique storages of a materialization lie in one allocation at aligned offsets. Each has its
// own StorageImpl of its exact bytes, whose DataPtr points into the pack and holds a reference on
// it. So offsets, `untyped_storage()`, saving, tie detection and version counters are as the user
// made them, and a tensor that outlives its block keeps the memory. Views of one storage would not
// do: offsets change, saving a small field writes the whole pack, and fields that share bytes get
// separate version counters.
struct TensorBlock::Pack {
  std::atomic<std::uint32_t> num_references{0};
  at::DataPtr memory;

  explicit Pack(at::DataPtr pack_memory) noexcept : memory(std::move(pack_memory)) {}

  [[nodiscard]] at::DataPtr refer_to(Bytes offset) {
    num_references.fetch_add(1, std::memory_order_relaxed);
    return {static_cast<std::byte*>(memory.get()) + offset.count(), this, &release,
            memory.device()};
  }
  static void release(void* context) {
    auto* pack = static_cast<Pack*>(context);
    if (pack->num_references.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      delete pack;
    }
  }
};

TensorBlock::TensorBlock(Key, std::shared_ptr<const TensorLayout> layout, Location location,
                         bool packed)
    : layout_(std::move(layout)), location_(location), packed_(packed) {}

TensorBlock::~TensorBlock() {
  if (kept_view_ != nullptr) {
    TensorView::destroy(kept_view_);
  }
}

std::shared_ptr<TensorBlock> TensorBlock::adopt(const TensorResident& value) {
  const BelowPython below;
  // Somebody may have changed the tensors since the value was made, so they are looked at again.
  TensorResident::Fields fields;
  fields.reserve(value.size());
  for (std::size_t i = 0; i < value.size(); ++i) {
    fields.emplace_back(value.name(i), value[i]);
  }
  const TensorResident checked(std::move(fields));
  const bool same = *checked.layout() == *value.layout();
  auto block = std::make_shared<TensorBlock>(Key{}, same ? value.layout() : checked.layout(),
                                             checked.location(), false);
  block->storages_.resize(block->layout_->storages().size());
  const auto& layouts = block->layout_->fields();
  for (std::size_t i = 0; i < checked.size(); ++i) {
    const FieldLayout& field = layouts[i];
    StorageEntry& entry = block->storages_[field.storage];
    const bool elsewhere = checked[i].is_cuda() != block->location_.is_cuda();
    if (elsewhere) {
      // Only zero-byte storages get here; they take the location of the others.
      if (!entry.storage) {
        entry.storage = c10::Storage(c10::Storage::use_byte_size_t(), 0,
                                     at::DataPtr(nullptr, c10::Device(c10::kCPU)), nullptr, false);
      }
      block->tensors_.push_back(make_tensor(field, entry.storage));
    } else {
      block->tensors_.push_back(shallow_copy(checked[i], field.requires_grad));
      entry.storage = checked[i].storage();
    }
  }
  block->enter_storages();
  return block;
}

std::shared_ptr<TensorBlock> TensorBlock::allocate(std::shared_ptr<const TensorLayout> layout) {
  const auto nbytes = static_cast<std::size_t>(layout->packed_bytes().count());
  at::DataPtr memory = nbytes == 0 ? at::DataPtr(nullptr, c10::Device(c10::kCPU))
                                   : c10::GetCPUAllocator()->allocate(nbytes);
  return pack(std::move(layout), Location::pageable_host(), std::move(memory));
}

std::shared_ptr<TensorBlock> TensorBlock::pack(std::shared_ptr<const TensorLayout> layout,
                                               Location location, at::DataPtr memory) {
  auto block = std::make_shared<TensorBlock>(Key{}, std::move(layout), location, true);
  block->pack_data_ = block->layout_->packed_bytes() == Bytes() ? nullptr : memory.get();
  block->pack_context_ = memory.get_context();
  block->pack_deleter_ = memory.get_deleter();
  block->memory_ = std::move(memory);
  return block;
}

void TensorBlock::make_tensors() {
  if (has_tensors_.load(std::memory_order_acquire)) {
    return;
  }
  const BelowPython below;
  const std::lock_guard lock(making_mutex_);
  if (has_tensors_.load(std::memory_order_relaxed)) {
    return;
  }
  if (shared_ == nullptr) {
    shared_ = new Pack(std::move(memory_));
    memory_ = shared_->refer_to(Bytes());
  }
  std::vector<StorageEntry> storages(layout_->storages().size());
  for (std::uint32_t i = 0; i < storages.size(); ++i) {
    const std::size_t nbytes = num_bytes_of(i);
    at::DataPtr data = nbytes == 0 ? at::DataPtr(nullptr, memory_.device())
                                   : shared_->refer_to(layout_->pack_offset(i));
    storages[i].storage = c10::Storage(c10::Storage::use_byte_size_t(),
                                       c10::SymInt(static_cast<std::int64_t>(nbytes)),
                                       std::move(data), nullptr, false);
  }
  std::vector<const c10::TensorImpl*> first(storages.size(), nullptr);
  std::vector<at::Tensor> tensors;
  for (const FieldLayout& field : layout_->fields()) {
    at::Tensor tensor = make_tensor(field, storages[field.storage].storage);
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (impl->version_counter().enabled()) {
      if (first[field.storage] == nullptr) {
        first[field.storage] = impl;
      } else {
        impl->set_version_counter(first[field.storage]->version_counter());
      }
    }
    tensors.push_back(std::move(tensor));
  }
  tensors_ = std::move(tensors);
  storages_ = std::move(storages);
  enter_storages();
}

void TensorBlock::enter_storages() {
  for (const FieldLayout& field : layout_->fields()) {
    ++storages_[field.storage].num_fields;
  }
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    StorageEntry& entry = storages_[i];
    entry.data =
        num_bytes_of(i) == 0 ? nullptr : entry.storage.unsafeGetStorageImpl()->mutable_data();
  }
  note_versions();
  has_tensors_.store(true, std::memory_order_release);
}

void* TensorBlock::storage_data(std::uint32_t storage) const {
  if (!packed_) {
    return storages_.at(storage).data;
  }
  const Bytes offset = layout_->pack_offset(storage);
  return num_bytes_of(storage) == 0 ? nullptr
                                    : static_cast<std::byte*>(pack_data_) + offset.count();
}

std::shared_ptr<TensorBlock> TensorBlock::clone() const {
  auto copy = allocate(layout_);
  copy_on_host(*copy);
  return copy;
}

void TensorBlock::copy_on_host(const TensorBlock& target) const {
  for (std::uint32_t i = 0; i < layout_->storages().size(); ++i) {
    if (const std::size_t nbytes = num_bytes_of(i); nbytes != 0) {
      std::memcpy(target.storage_data(i), storage_data(i), nbytes);
    }
  }
}

AddressRanges TensorBlock::address_ranges() const {
  AddressRanges ranges;
  const auto add = [&](const void* data, std::size_t nbytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    if (!ranges.empty() && std::prev(ranges.end())->end == begin) {
      std::prev(ranges.end())->end += nbytes;
    } else if (nbytes != 0) {
      ranges.push_back({begin, begin + nbytes});
    }
  };
  if (layout_->storages().size() == 1) {  // nothing to put in order
    add(storage_data(0), num_bytes_of(0));
    return ranges;
  }
  for (const iovec& piece : storages()) {
    add(piece.iov_base, piece.iov_len);
  }
  return ranges;
}

TensorResident TensorBlock::tensors() {
  make_tensors();
  return {layout_, tensors_, location_};
}

std::vector<iovec> TensorBlock::storages() const {
  std::vector<iovec> pieces;
  for (const std::uint32_t storage : layout_->order()) {
    const std::size_t nbytes = num_bytes_of(storage);
    if (nbytes == 0) {
      continue;
    }
    void* const data = storage_data(storage);
    if (packed_ && !pieces.empty() &&
        static_cast<std::byte*>(pieces.back().iov_base) + pieces.back().iov_len == data) {
      pieces.back().iov_len += nbytes;
    } else {
      pieces.push_back({data, nbytes});
    }
  }
  return pieces;
}

bool TensorBlock::owns_memory() const noexcept {
  return std::none_of(storages_.begin(), storages_.end(), [](const StorageEntry& entry) {
    return entry.data != nullptr && entry.storage.data_ptr().get_context() == nullptr;
  });
}

bool TensorBlock::is_shared() const noexcept {
  if (!has_tensors_.load(std::memory_order_acquire)) {
    return false;
  }
  const std::size_t num_views = num_views_.load(std::memory_order_acquire);
  for (const StorageEntry& entry : storages_) {
    // Zero-byte storages hold no memory that could escape.
    if (entry.data != nullptr &&
        entry.storage.use_count() > 1 + entry.num_fields * (1 + num_views)) {
      return true;
    }
  }
  return false;
}

FencePtr TensorBlock::watch_escape() const {
  if (!is_shared()) {
    return nullptr;
  }
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
  for (const StorageEntry& entry : storages_) {
    if (entry.data != nullptr) {
      storages.emplace_back(entry.storage.getWeakStorageImpl());
    }
  }
  return std::make_shared<EscapeFence>(std::move(storages));
}

void TensorBlock::check_intact() const {
  if (packed_) {
    return;  // pack storages cannot be resized
  }
  for (std::size_t i = 0; i < storages_.size(); ++i) {
    const StorageEntry& entry = storages_[i];
    const std::size_t nbytes = num_bytes_of(i);
    const c10::StorageImpl& storage = *entry.storage.unsafeGetStorageImpl();
    if (storage.nbytes() == nbytes && (nbytes == 0 || storage.data() == entry.data)) {
      continue;
    }
    for (const FieldLayout& field : layout_->fields()) {
      if (field.storage == i) {
        throw MaterializationError(fmt::format(
            "the storage of field '{}' was resized or given other memory after it was adopted: "
            "expected {} bytes at {}, found {}; give up aliases of adopted tensors, or clone them "
            "before adopting",
            field.name, nbytes, entry.data, storage.nbytes()));
      }
    }
  }
}

std::vector<std::uint64_t> TensorBlock::stamps() const {
  std::vector<std::uint64_t> stamps;
  const auto num_storages = static_cast<std::uint32_t>(layout_->storages().size());
  stamps.reserve(num_storages);
  for (std::uint32_t i = 0; i < num_storages; ++i) {
    ContentStamp stamp;
    stamp.add(storage_data(i), num_bytes_of(i));
    stamps.push_back(stamp.value());
  }
  return stamps;
}

class TensorBlock::KnownContentsGuard {
 public:
  explicit KnownContentsGuard(TensorBlock& block) noexcept : busy_(block.known_contents_busy_) {
    while (busy_.test_and_set(std::memory_order_acquire)) {
      std::this_thread::yield();
    }
  }
  KnownContentsGuard(const KnownContentsGuard&) = delete;
  KnownContentsGuard& operator=(const KnownContentsGuard&) = delete;
  ~KnownContentsGuard() { busy_.clear(std::memory_order_release); }

 private:
  std::atomic_flag& busy_;
};

void TensorBlock::accept_contents(bool checksum) {
  const KnownContentsGuard guard(*this);
  note_contents(checksum);
}

void TensorBlock::note_versions() {
  known_versions_.resize(tensors_.size());
  std::transform(tensors_.begin(), tensors_.end(), known_versions_.begin(), version_of);
}

void TensorBlock::note_contents(bool checksum) {
  if (has_tensors_.load(std::memory_order_acquire)) {
    note_versions();
  }
  known_stamps_.clear();
  if (checksum) {
    known_stamps_ = stamps();
  }
}

void TensorBlock::begin_access(bool checksum) {
  if (!checksum) {
    return;
  }
  const KnownContentsGuard guard(*this);
  if (known_stamps_.empty()) {
    known_stamps_ = stamps();
  }
}

std::optional<std::string> TensorBlock::take_undeclared_write(bool checksum) {
  const KnownContentsGuard guard(*this);
  std::optional<std::size_t> written;
  const auto tensors = made_tensors();
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const std::uint32_t version = version_of(tensors[i]);
    if (version != known_versions_[i]) {
      known_versions_[i] = version;
      written = written.value_or(i);
    }
  }
  if (checksum) {
    const std::vector<FieldLayout>& fields = layout_->fields();
    auto found = stamps();
    for (std::size_t i = 0; !known_stamps_.empty() && !written && i < fields.size(); ++i) {
      const std::uint32_t storage = fields[i].storage;
      if (found[storage] != known_stamps_[storage]) {
        written = i;
      }
    }
    known_stamps_ = std::move(found);
  }
  if (!written.has_value()) {
    return std::nullopt;
  }
  return layout_->fields()[*written].name;
}

void TensorBlock::count_overwrite() {
  for (const at::Tensor& tensor : made_tensors()) {
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (impl->version_counter().enabled()) {
      impl->bump_version();
    }
  }
  accept_contents(false);
}

std::unique_ptr<View> TensorBlock::open_view() {
  if (kept_view_busy_.test_and_set(std::memory_order_acquire)) {
    return std::unique_ptr<View>(TensorView::make(*this));
  }
  try {
    if (kept_view_ == nullptr) {
      kept_view_ = TensorView::make(*this);
      kept_view_->is_kept_ = true;
    } else {
      kept_view_->fill();
    }
  } catch (...) {
    kept_view_busy_.clear(std::memory_order_release);
    throw;
  }
  return std::unique_ptr<View>(kept_view_);
}

TensorView::TensorView(TensorBlock& block)
    : block_(block), tensors_(block.layout_, {}, block.location_) {
  fill();
}

TensorView::~TensorView() {
  if (is_filled_) {
    clear();
  }
}

void TensorView::fill() {
  block_.make_tensors();
  const BelowPython below;
  block_.num_views_.fetch_add(1, std::memory_order_acq_rel);
  is_filled_ = true;
  try {
    const auto& layouts = block_.layout_->fields();
    tensors_.tensors_.reserve(layouts.size());
    for (std::size_t i = 0; i < layouts.size(); ++i) {
      tensors_.tensors_.push_back(shallow_copy(block_.tensors_[i], layouts[i].requires_grad));
    }
  } catch (...) {
    clear();
    throw;
  }
}

void TensorView::clear() noexcept {
  is_filled_ = false;
  tensors_.tensors_.clear();
  block_.num_views_.fetch_sub(1, std::memory_order_acq_rel);
}

// Not `new TensorView`: were the constructor to throw, it would look for a plain operator delete.
TensorView* TensorView::make(TensorBlock& block) {
  void* const memory = ::operator new(sizeof(TensorView));
  try {
    return ::new (memory) TensorView(block);
  } catch (...) {
    ::operator delete(memory);
    throw;
  }
}

void TensorView::destroy(TensorView* view) noexcept {
  view->~TensorView();
  ::operator delete(view);
}

void TensorView::operator delete(TensorView* view, std::destroying_delete_t) noexcept {
  if (view->is_kept_) {
    std::atomic_flag& busy = view->block_.kept_view_busy_;
    view->clear();
    busy.clear(std::memory_order_release);
  } else {
    destroy(view);
  }
}

}  // namespace residency
