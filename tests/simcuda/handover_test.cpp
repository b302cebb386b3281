// Whether the order of calls depends on chance. Each test is the first of its process, as the
// answer is remembered.
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/simcuda/fixture.h"

namespace simcuda_test {
namespace {

// Runs the test in a new process; ctest does that too, but the program may be run as one.
template <class Test>
void in_new_process(Test test) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(_exit(test()), ::testing::ExitedWithCode(0), "");
}

void call() {
  static Event* event = new Event;
  EXPECT_CUDA(cudaEventQuery(*event));
}

TEST(HandoverTest, OneThreadIsDeterministic) {
  in_new_process([] {
    call();
    call();
    return simcuda_deterministic() == 1 ? 0 : 1;
  });
}

TEST(HandoverTest, ThreadThatWaitsForTheOtherHandsOver) {
  in_new_process([] {
    // As autograd: the caller sleeps while the other thread enqueues, back and forth.
    std::mutex mutex;
    std::condition_variable changed;
    int turn = 0;
    std::thread other([&] {
      for (int i = 0; i < 20; ++i) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return turn == 1; });
        call();
        turn = 0;
        changed.notify_all();
      }
    });
    for (int i = 0; i < 20; ++i) {
      call();
      std::unique_lock lock(mutex);
      turn = 1;
      changed.notify_all();
      changed.wait(lock, [&] { return turn == 0; });
    }
    other.join();
    call();
    return simcuda_deterministic() == 1 ? 0 : 1;
  });
}

TEST(HandoverTest, ThreadThatEndedHandedOver) {
  in_new_process([] {
    std::thread(call).join();
    call();
    return simcuda_deterministic() == 1 ? 0 : 1;
  });
}

TEST(HandoverTest, ThreadThatRunsOnDoesNotHandOver) {
  in_new_process([] {
    std::atomic<bool> stop{false};
    std::atomic<bool> called{false};
    std::thread other([&] {
      call();
      called = true;
      while (!stop) {
      }
    });
    while (!called) std::this_thread::yield();
    call();
    int answer = simcuda_deterministic();
    stop = true;
    other.join();
    return answer == 0 ? 0 : 1;
  });
}

TEST(HandoverTest, CallsAtOnceAreNotDeterministic) {
  in_new_process([] {
    auto many = [] {
      for (int i = 0; i < 200000; ++i) call();
    };
    std::thread other(many);
    many();
    other.join();
    return simcuda_deterministic() == 0 ? 0 : 1;
  });
}

}  // namespace
}  // namespace simcuda_test
