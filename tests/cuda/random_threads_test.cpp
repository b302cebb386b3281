// Random calls of several threads on the same values, in all tiers, of two managers that share one
// device layer: whoever reads finds the value's bytes, whatever the others are doing with it.

#include <algorithm>
#include <array>
#include <atomic>
#include <random>
#include <thread>

#include <c10/cuda/CUDAStream.h>

#include "residency/core/errors.h"
#include "residency/cuda/cuda_layer.h"
#include "tests/cuda/tier_fixture.h"

namespace residency::testing {
namespace {

struct Shared {
  std::shared_ptr<Manager> manager;
  std::vector<Handle> handles;  // the bytes of number i are all i
  std::vector<std::int64_t> sizes;
};

/// One thread's calls. What it may be refused is what another thread had a right to.
class Caller {
 public:
  Caller(std::vector<Shared>& managers, std::uint32_t seed) : managers_(managers), random_(seed) {}

  void call() {
    Shared& shared = managers_[below(managers_.size())];
    Manager& manager = *shared.manager;
    const std::size_t number = below(shared.handles.size());
    const Handle& handle = shared.handles[number];
    try {
      switch (below(8)) {
        case 0:
        case 1:
          (void)manager.apply(any_action(handle),
                              {.may_block = below(2) == 0, .prefetch = below(3) == 0});
          break;
        case 2: {
          std::vector<ResidencyAction> actions;
          for (std::size_t i = 1 + below(20); i-- > 0;) {
            actions.push_back(any_action(shared.handles[below(shared.handles.size())]));
          }
          ExecuteOptions options;
          options.on_failure = below(2) == 0 ? OnFailure::kRollback : OnFailure::kKeep;
          (void)manager.execute(actions, options);
          break;
        }
        case 3: (void)manager.prefetch(shared.handles, any_location()); break;
        case 4: read_on_host(manager, handle, number); break;
        case 5: (void)manager.snapshot(); break;
        default: read_on_device(manager, handle, shared.sizes[number], number);
      }
    } catch (const Error&) {
      ++num_refused_;
    }
  }
  [[nodiscard]] int num_refused() const { return num_refused_; }

 private:
  std::size_t below(std::size_t limit) { return random_() % limit; }
  Location any_location() {
    constexpr std::array kKinds = {0, 1, 1, 2, 2, 3};
    const std::array places = {kHost, kPinned, kDevice, kOther};
    return places.at(static_cast<std::size_t>(kKinds.at(below(kKinds.size()))));
  }
  ResidencyAction any_action(const Handle& handle) {
    return random_action(random_, handle, any_location());
  }
  static void expect_all(const void* data, std::int64_t nbytes, std::size_t byte) {
    const auto* bytes = static_cast<const unsigned char*>(data);
    ASSERT_EQ(std::find_if(bytes, bytes + nbytes, [&](unsigned char each) { return each != byte; }),
              bytes + nbytes);
  }
  void read_on_host(Manager& manager, const Handle& handle, std::size_t byte) {
    Lease lease = manager.borrow(one(handle), below(2) == 0 ? kHost : kPinned);
    const at::Tensor tensor = tensors(lease, handle)["x"];
    expect_all(tensor.const_data_ptr(), tensor.numel(), byte);
    lease.release();
  }
  void read_on_device(Manager& manager, const Handle& handle, std::int64_t nbytes,
                      std::size_t byte) {
    const int device = static_cast<int>(below(2));
    const auto stream = c10::cuda::getStreamFromPool(false, static_cast<c10::DeviceIndex>(device));
    const at::Tensor into = page_locked(nbytes);
    Lease lease = manager.borrow(one(handle), Location::cuda(device), {.stream = named(stream)});
    ASSERT_EQ(cudaMemcpyAsync(into.mutable_data_ptr(), tensors(lease, handle)["x"].const_data_ptr(),
                              static_cast<std::size_t>(nbytes), cudaMemcpyDefault, stream),
              cudaSuccess);
    lease.release();
    stream.synchronize();
    expect_all(into.const_data_ptr(), nbytes, byte);
  }

  std::vector<Shared>& managers_;
  std::mt19937 random_;
  int num_refused_ = 0;
};

class RandomThreads : public CudaTest {};

TEST_F(RandomThreads, WhoeverReadsFindsTheBytesOfTheValue) {
  constexpr int kNumThreads = 4;
  constexpr int kNumCalls = 400;
  const std::uint32_t seed = chosen_seed();
  const std::shared_ptr<DeviceLayer> layer = make_cuda_layer();
  std::vector<Shared> managers(2);
  for (Shared& shared : managers) {
    ManagerOptions options;
    options.budgets = {{kDevice, Bytes(30'000'000)}, {kPinned, Bytes(60'000'000)}};
    shared.manager = create_manager(std::move(options), {.devices = layer});
    constexpr std::array<std::int64_t, 5> kSizes = {1, 5000, 70'000, 1'500'000, 9'000'000};
    for (std::size_t i = 0; i < 15; ++i) {
      shared.sizes.push_back(kSizes.at(i % kSizes.size()));
      shared.handles.push_back(
          value(*shared.manager, shared.sizes.back(), static_cast<int>(i), Mutability::kImmutable));
    }
  }
  std::atomic<int> num_refused{0};
  std::vector<std::thread> threads;
  for (std::uint32_t i = 0; i < kNumThreads; ++i) {
    threads.emplace_back([&, i] {
      Caller caller(managers, seed + i);
      for (int call = 0; call < kNumCalls && !HasFatalFailure(); ++call) {
        caller.call();
      }
      num_refused += caller.num_refused();
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_LT(num_refused, kNumThreads * kNumCalls * 2 / 3);
  for (const Shared& shared : managers) {
    shared.manager->synchronize();
    shared.manager->audit();
    for (std::size_t i = 0; i < shared.handles.size(); ++i) {
      shared.manager->ensure(shared.handles[i], kHost).wait();
      EXPECT_EQ(byte_of(*shared.manager, shared.handles[i], kHost), static_cast<int>(i));
    }
    shared.manager->close();
  }
}

}  // namespace
}  // namespace residency::testing
