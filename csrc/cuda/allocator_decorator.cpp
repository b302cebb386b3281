#include "csrc/cuda/allocator_decorator.h"

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include "residency/core/errors.h"

namespace residency {
namespace {

namespace caching = c10::cuda::CUDACachingAllocator;

// c10 ignores a registration of a lower one than the last, and PyTorch's own have none above this.
constexpr std::uint8_t kPriority = 100;

/// Immortal: storages keep its address. What a torch release adds to the interface stops the build
/// (cmake/ResidencyCudaAllocator.cmake).
class Decorator final : public caching::CUDAAllocator {
 public:
  explicit Decorator(caching::CUDAAllocator& native) : native_(native) {}

  [[nodiscard]] caching::CUDAAllocator& native() const noexcept { return native_; }
  /// Null: calls merely go through.
  void set_pressure(AllocationPressure* pressure) noexcept {
    pressure_.store(pressure, std::memory_order_release);
  }

  c10::DataPtr allocate(std::size_t nbytes) override {
    return under_pressure(nbytes, [&] { return native_.allocate(nbytes); });
  }
  void* raw_alloc(std::size_t nbytes) override {
    return under_pressure(nbytes, [&] { return native_.raw_alloc(nbytes); });
  }
  void* raw_alloc_with_stream(std::size_t nbytes, cudaStream_t stream) override {
    return under_pressure(nbytes, [&] { return native_.raw_alloc_with_stream(nbytes, stream); });
  }

  // Allocator
  bool is_simple_data_ptr(const c10::DataPtr& data) const override {
    return native_.is_simple_data_ptr(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return native_.raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    native_.copy_data(to, from, nbytes);
  }

  // DeviceAllocator
  bool initialized() override { return native_.initialized(); }
  void emptyCache(c10::MempoolId_t pool) override { native_.emptyCache(pool); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return native_.getDeviceStats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    native_.resetAccumulatedStats(device);
  }
  void resetPeakStats(c10::DeviceIndex device) override { native_.resetPeakStats(device); }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return native_.getMemoryInfo(device);
  }
  void recordStream(const c10::DataPtr& data, c10::cuda::CUDAStream stream) override {
    native_.recordStream(data, stream);
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    native_.recordStream(data, stream);
  }

  // CUDAAllocator
  void raw_delete(void* data) override { native_.raw_delete(data); }
  void init(int num_devices) override { native_.init(num_devices); }
  double getMemoryFraction(c10::DeviceIndex device) override {
    return native_.getMemoryFraction(device);
  }
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    native_.setMemoryFraction(fraction, device);
  }
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex device) override {
    return native_.getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { native_.enable(value); }
  bool isEnabled() const override { return native_.isEnabled(); }
  void cacheInfo(c10::DeviceIndex device, std::size_t* largest) override {
    native_.cacheInfo(device, largest);
  }
  void* getBaseAllocation(void* data, std::size_t* nbytes) override {
    return native_.getBaseAllocation(data, nbytes);
  }
  caching::SnapshotInfo snapshot(c10::MempoolId_t pool, bool with_traces) override {
    return native_.snapshot(pool, with_traces);
  }
  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                           std::function<bool(cudaStream_t)> filter) override {
    native_.beginAllocateToPool(device, pool, std::move(filter));
    ++num_pool_contexts(device);
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    native_.endAllocateToPool(device, pool);
    --num_pool_contexts(device);
  }
  void releasePool(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    native_.releasePool(device, pool);
  }
  int getPoolUseCount(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    return native_.getPoolUseCount(device, pool);
  }
  void createOrIncrefPool(c10::DeviceIndex device, c10::MempoolId_t pool,
                          std::shared_ptr<caching::CUDAAllocator> allocator) override {
    native_.createOrIncrefPool(device, pool, std::move(allocator));
  }
  void setUseOnOOM(c10::DeviceIndex device, c10::MempoolId_t pool, bool use_on_oom) override {
    native_.setUseOnOOM(device, pool, use_on_oom);
  }
  void setNoSplit(c10::DeviceIndex device, c10::MempoolId_t pool) override {
    native_.setNoSplit(device, pool);
  }
  bool checkPoolLiveAllocations(c10::DeviceIndex device, c10::MempoolId_t pool,
                                const std::unordered_set<void*>& expected) override {
    return native_.checkPoolLiveAllocations(device, pool, expected);
  }
  caching::ShareableHandle shareIpcHandle(void* data) override {
    return native_.shareIpcHandle(data);
  }
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return native_.getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return native_.isHistoryEnabled(); }
  void recordHistory(bool enabled, caching::CreateContextFn recorder, std::size_t most_entries,
                     caching::RecordContext when, bool clear,
                     const std::vector<std::string>& skipped) override {
    native_.recordHistory(enabled, recorder, most_entries, when, clear, skipped);
  }
  void recordAnnotation(
      const std::vector<std::pair<std::string, std::string>>& annotations) override {
    native_.recordAnnotation(annotations);
  }
  void pushCompileContext(std::string& context) override { native_.pushCompileContext(context); }
  void popCompileContext() override { native_.popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { native_.setUserMetadata(metadata); }
  std::string getUserMetadata() override { return native_.getUserMetadata(); }
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    native_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker tracker) override {
    native_.attachAllocatorTraceTracker(std::move(tracker));
  }
  void enablePeerAccess(c10::DeviceIndex from, c10::DeviceIndex to) override {
    native_.enablePeerAccess(from, to);
  }
  cudaError_t memcpyAsync(void* to, int to_device, const void* from, int from_device,
                          std::size_t nbytes, cudaStream_t stream, bool is_peer_enabled) override {
    return native_.memcpyAsync(to, to_device, from, from_device, nbytes, stream, is_peer_enabled);
  }
  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex device,
                                                              c10::MempoolId_t pool) override {
    return native_.getCheckpointState(device, pool);
  }
  caching::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device, std::shared_ptr<caching::AllocatorState> state) override {
    return native_.setCheckpointPoolState(device, std::move(state));
  }
  std::string name() override { return native_.name(); }

  // What some of the supported releases lack.
#ifdef RESIDENCY_CUDA_ALLOCATOR_HAS_allocateWithAddress
  c10::DataPtr allocateWithAddress(std::size_t nbytes, void* address) override {
    return under_pressure(nbytes, [&] { return native_.allocateWithAddress(nbytes, address); });
  }
#endif
#ifdef RESIDENCY_CUDA_ALLOCATOR_HAS_markCaptureBegin
  void markCaptureBegin(c10::DeviceIndex device) override {
    native_.markCaptureBegin(device);
  }
#endif
#ifdef RESIDENCY_CUDA_ALLOCATOR_HAS_markCaptureEnd
  void markCaptureEnd(c10::DeviceIndex device) override {
    native_.markCaptureEnd(device);
  }
#endif
#ifdef RESIDENCY_CUDA_ALLOCATOR_HAS_getContextForPointer
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* data) override {
    return native_.getContextForPointer(data);
  }
#endif
#ifdef RESIDENCY_CUDA_ALLOCATOR_HAS_supportsUserMetadata
  bool supportsUserMetadata() override {
    return native_.supportsUserMetadata();
  }
#endif
#ifdef RESIDENCY_CUDA_ALLOCATOR_HAS_annotateMemory
  void annotateMemory(const void* data, const std::string& metadata) override {
    native_.annotateMemory(data, metadata);
  }
#endif
#ifdef RESIDENCY_CUDA_ALLOCATOR_HAS_attachOomRejectionObserver
  void attachOomRejectionObserver(caching::OomRejectionObserver observer) override {
    native_.attachOomRejectionObserver(std::move(observer));
  }
#endif

 private:
  std::atomic<int>& num_pool_contexts(c10::DeviceIndex device) {
    return num_pool_contexts_.at(static_cast<std::size_t>(device));
  }

  template <class Allocate>
  std::invoke_result_t<Allocate> under_pressure(std::size_t nbytes, const Allocate& allocate) {
    try {
      return allocate();
    } catch (c10::OutOfMemoryError& error) {
      return after_pressure(error, nbytes, allocate);
    }
  }
  /// Called while the allocator's error is handled: what the caller gets in the end.
  template <class Allocate>
  std::invoke_result_t<Allocate> after_pressure(c10::OutOfMemoryError& error, std::size_t nbytes,
                                                const Allocate& allocate) {
    AllocationPressure* const pressure = pressure_.load(std::memory_order_acquire);
    // What makes room may allocate, and then not in turn.
    static thread_local bool is_making_room = false;
    if (pressure == nullptr || is_making_room) {
      throw;
    }
    const c10::DeviceIndex device = c10::cuda::current_device();
    AllocationPressure::Shortage shortage{device, nbytes, 1, num_pool_contexts(device) > 0};
    const auto makes_room = [&] {
      is_making_room = true;
      const bool may_fit = pressure->make_room(shortage);
      is_making_room = false;
      return may_fit;
    };
    for (; makes_room(); ++shortage.attempt) {
      try {
        std::invoke_result_t<Allocate> given = allocate();
        pressure->recovered();
        return given;
      } catch (const c10::OutOfMemoryError&) {
        // The first error tells what there was before anything was tried.
      }
    }
    try {
      if (std::string more = pressure->explain(shortage); !more.empty()) {
        error.add_context(std::move(more));
      }
    } catch (...) {
      // No memory to say more with: the allocator's error is the one that matters.
    }
    throw;
  }

  caching::CUDAAllocator& native_;
  std::atomic<AllocationPressure*> pressure_{nullptr};
  // Below zero where they began before the plugin was installed.
  std::array<std::atomic<int>, C10_COMPILE_TIME_MAX_GPUS> num_pool_contexts_{};
};

std::mutex& installing_mutex() {
  static std::mutex& mutex = *new std::mutex;  // there for whatever runs when the process ends
  return mutex;
}
std::atomic<Decorator*> decorator{nullptr};

}  // namespace

void install_decorator(AllocationPressure& pressure) {
  const std::lock_guard lock(installing_mutex());
  caching::CUDAAllocator* in_force = caching::allocator.load();
  Decorator* own = decorator.load();
  if (own == nullptr || in_force != own) {
    if (in_force == nullptr || in_force->name() != "native") {
      throw UnavailableError(fmt::format(
          "the CUDA allocator in force is '{}', and the plugin stands before PyTorch's native "
          "caching allocator alone (PYTORCH_CUDA_ALLOC_CONF=backend:native, and no pluggable "
          "allocator). Without it values move as before; reservations are accounting only, and "
          "nothing is evicted under pressure",
          in_force == nullptr ? "none" : in_force->name()));
    }
    if (own == nullptr) {
      own = new Decorator(*in_force);
      decorator.store(own);
    }
    caching::allocator.store(own);
    c10::SetAllocator(c10::kCUDA, own, kPriority);
  }
  own->set_pressure(&pressure);
}

bool remove_decorator() noexcept {
  const std::lock_guard lock(installing_mutex());
  Decorator* const own = decorator.load();
  if (own == nullptr) {
    return true;
  }
  own->set_pressure(nullptr);
  caching::CUDAAllocator* expected = own;
  if (!caching::allocator.compare_exchange_strong(expected, &own->native())) {
    return expected == &own->native();
  }
  if (c10::GetAllocator(c10::kCUDA) == own) {
    c10::SetAllocator(c10::kCUDA, &own->native(), kPriority);
  }
  return true;
}

bool is_decorator_installed() noexcept {
  Decorator* const own = decorator.load();
  return own != nullptr && caching::get() == own;
}

}  // namespace residency
