// Random calls on values that travel through all tiers, with consumers and producers on streams:
// whoever reads must find what was written last.

#include <algorithm>
#include <array>
#include <random>
#include <string>

#include <c10/cuda/CUDAStream.h>

#include "residency/core/errors.h"
#include "residency/cuda/cuda_layer.h"
#include "tests/cuda/fixture.h"
#include "tests/cuda/tier_fixture.h"

namespace residency::testing {
namespace {

class RandomMoves : public CudaTest {
 protected:
  struct Value {
    Handle handle;
    std::int64_t nbytes;
    int byte;
  };
  /// What a consumer has read, to be looked at once its stream has done it.
  struct Read {
    at::Tensor into;
    int byte;
    std::string what;
  };

  void SetUp() override {
    random_.seed(seed_);
    for (int i = 0; i < 4; ++i) {
      streams_.push_back(c10::cuda::getStreamFromPool(false, 0));
      streams_.push_back(c10::cuda::getStreamFromPool(false, 1));
    }
    constexpr std::array<std::int64_t, 6> kSizes = {1, 4096, 5000, 70'000, 1'500'000, 20'000'000};
    for (int i = 0; i < 18; ++i) {
      const std::int64_t nbytes = kSizes[static_cast<std::size_t>(i) % kSizes.size()];
      values_.push_back({value(*manager_, nbytes, i, Mutability::kMutable), nbytes, i});
    }
  }

  std::size_t below(std::size_t limit) { return random_() % limit; }
  Value& any_value() { return values_[below(values_.size())]; }
  Location any_location() { return places_[below(places_.size())]; }
  ResidencyAction any_action(const Handle& handle) {
    return random_action(random_, handle, any_location());
  }
  c10::cuda::CUDAStream any_stream(Location at) {
    return streams_[2 * below(4) + static_cast<std::size_t>(at.cuda_index())];
  }

  void act() {
    const Value& value = any_value();
    manager_->apply(any_action(value.handle), {.prefetch = below(3) == 0});
  }
  void execute() {
    std::vector<ResidencyAction> actions;
    for (std::size_t i = 1 + below(20); i-- > 0;) {
      actions.push_back(any_action(any_value().handle));
      if (!manager_->explain(actions).feasible) {
        actions.pop_back();
      }
    }
    manager_->execute(actions);
  }
  void prefetch() {
    std::vector<Handle> handles;
    for (std::size_t i = 1 + below(5); i-- > 0;) {
      handles.push_back(any_value().handle);
    }
    (void)manager_->prefetch(handles, any_location());
  }
  void read() {
    const Value& value = any_value();
    const Location at = below(2) == 0 ? kDevice : kOther;
    const auto stream = any_stream(at);
    Lease lease = manager_->borrow(one(value.handle), at, {.stream = named(stream)});
    Read read{on_device(value.nbytes, at.cuda_index()), value.byte,
              to_string(value.handle) + " at " + to_string(at)};
    ASSERT_EQ(cudaMemcpyAsync(read.into.mutable_data_ptr(),
                              tensors(lease, value.handle)["x"].const_data_ptr(),
                              static_cast<std::size_t>(value.nbytes), cudaMemcpyDefault, stream),
              cudaSuccess);
    lease.release();
    reads_.push_back(std::move(read));
  }
  void write() {
    Value& value = any_value();
    const Location at = below(2) == 0 ? kDevice : kOther;
    const auto stream = any_stream(at);
    Lease lease = manager_->borrow(one(value.handle), at,
                                   {.access = Access::kWrite, .stream = named(stream)});
    value.byte = static_cast<int>(below(128));
    ASSERT_EQ(cudaMemsetAsync(tensors(lease, value.handle)["x"].mutable_data_ptr(), value.byte,
                              static_cast<std::size_t>(value.nbytes), stream),
              cudaSuccess);
    lease.release();
  }
  void look_at_reads() {
    ASSERT_EQ(cudaSetDevice(1), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (const Read& read : reads_) {
      std::vector<unsigned char> found(static_cast<std::size_t>(read.into.numel()));
      ASSERT_EQ(
          cudaMemcpy(found.data(), read.into.const_data_ptr(), found.size(), cudaMemcpyDefault),
          cudaSuccess);
      const auto wrong = std::find_if(found.begin(), found.end(),
                                      [&](unsigned char each) { return each != read.byte; });
      ASSERT_EQ(wrong - found.begin(), read.into.numel())
          << "is wrong: " << read.what << ", RESIDENCY_SEED=" << seed_;
    }
    reads_.clear();
  }

  const std::uint32_t seed_ = chosen_seed();
  std::mt19937 random_;
  std::vector<Location> places_ = {kHost, kPinned, kPinned, kDevice, kDevice, kOther};
  std::vector<c10::cuda::CUDAStream> streams_;
  const std::shared_ptr<Manager> manager_ = create_manager({}, {.devices = make_cuda_layer()});
  std::vector<Value> values_;
  std::vector<Read> reads_;
};

TEST_F(RandomMoves, WhoeverReadsFindsWhatWasWrittenLast) {
  constexpr int kNumCalls = 1500;
  int num_refused = 0;
  for (int call = 0; call < kNumCalls && !HasFatalFailure(); ++call) {
    try {
      switch (below(8)) {
        case 0:
        case 1: act(); break;
        case 2: execute(); break;
        case 3: prefetch(); break;
        case 4:
        case 5: write(); break;
        default: read(); break;
      }
    } catch (const Error&) {
      ++num_refused;  // a last copy that is not dropped, a source that is not there
    }
    if (call % 100 == 99) {
      look_at_reads();
    }
  }
  look_at_reads();
  EXPECT_LT(num_refused, kNumCalls / 2);
  manager_->synchronize();
  manager_->audit();
  for (const Value& value : values_) {
    manager_->ensure(value.handle, kPinned).wait();
    EXPECT_EQ(byte_of(*manager_, value.handle, kPinned), value.byte)
        << to_string(value.handle) << ", RESIDENCY_SEED=" << seed_;
  }
  manager_->close();
}

// Between devices and page-locked memory, whatever is in flight.
TEST_F(RandomMoves, NobodyWaitsWhileEveryStreamIsHeld) {
  if (!simulated()) {
    GTEST_SKIP() << "the streams of a GPU cannot be held";
  }
  constexpr int kNumRounds = 60;
  constexpr int kNumCalls = 25;
  for (const Value& value : values_) {
    manager_->move(value.handle, kPinned).wait();
    for (const Location at : {kDevice, kOther}) {
      manager_->ensure(value.handle, at).wait();
    }
  }
  places_ = {kPinned, kPinned, kDevice, kDevice, kOther};
  int num_refused = 0;
  for (int round = 0; round < kNumRounds && !HasFailure(); ++round) {
    SCOPED_TRACE("RESIDENCY_SEED=" + std::to_string(seed_));
    simcuda_reset_counters();
    ASSERT_EQ(simcuda_hold_all(1), 0);
    for (int call = 0; call < kNumCalls; ++call) {
      try {
        switch (below(8)) {
          case 0:
          case 1:
            manager_->apply(any_action(any_value().handle),
                            {.may_block = false, .prefetch = below(3) == 0});
            break;
          case 2: execute(); break;
          case 3: prefetch(); break;
          case 4:
          case 5: write(); break;
          default: read(); break;
        }
      } catch (const Error& error) {
        ++num_refused;  // a last copy that is not dropped, a source that is not there
        EXPECT_EQ(std::string(error.what()).find("may_block"), std::string::npos) << error.what();
      }
    }
    simcuda_counters counters{};
    EXPECT_EQ(simcuda_read_counters(-1, &counters), 0);
    EXPECT_EQ(counters.busy_host_syncs, 0U);
    EXPECT_EQ(counters.blocked_time, 0U);
    ASSERT_EQ(simcuda_hold_all(0), 0);
    look_at_reads();
  }
  EXPECT_LT(num_refused, kNumRounds * kNumCalls / 2);
  for (const Value& value : values_) {
    manager_->ensure(value.handle, kPinned).wait();
    EXPECT_EQ(byte_of(*manager_, value.handle, kPinned), value.byte)
        << to_string(value.handle) << ", RESIDENCY_SEED=" << seed_;
  }
  manager_->audit();
  manager_->close();
}

}  // namespace
}  // namespace residency::testing
