// The end of the process while there is work in flight (CASES 33).
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif
#include <sys/wait.h>
#include <unistd.h>

#include "tests/simcuda/fixture.h"

namespace simcuda_test {
namespace {

using std::chrono::milliseconds;

// Each process of these tests is a fresh one, as its end is what is tested.
class ExitTest : public SimcudaTest {
 protected:
  static void SetUpTestSuite() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  static void TearDownTestSuite() { GTEST_FLAG_SET(death_test_style, "fast"); }
};

void say(const char* text) {
  [[maybe_unused]] ssize_t written = write(STDERR_FILENO, text, strlen(text));
}

// What a kernel needs, destroyed when the process ends. As libtorch's dispatcher it is there before
// the runtime is used.
struct Library {
  ~Library() {
    destroyed = true;
    // Time for a worker that goes on to be seen.
    std::this_thread::sleep_for(milliseconds(100));
  }
  static std::atomic<bool> destroyed;
};
std::atomic<bool> Library::destroyed{false};

Library& library() {
  static Library library;
  return library;
}

std::atomic<int> num_begun{0};

int kernel_of_the_library(void*) {
  ++num_begun;
  for (int i = 0; i < 20; ++i) {
    if (Library::destroyed) say("a kernel ran on a library that was gone\n");
    std::this_thread::sleep_for(milliseconds(1));
  }
  return 0;
}

void launch(cudaStream_t stream, int (*run)(void*), int count = 1) {
  simcuda_work work{"kernel", 0, 0, SIMCUDA_FP32};
  for (int i = 0; i < count; ++i) simcuda_launch(stream, &work, run, nullptr, nullptr);
}

// Streams that outlive everything, as torch's.
cudaStream_t make_stream() {
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}

void wait_for_first() {
  while (num_begun == 0) std::this_thread::yield();
}

TEST_F(ExitTest, WorkInFlightIsAbandonedBeforeLibrariesAreDestroyed) {
  auto end = [] {
    library();
    cudaStream_t first = make_stream();
    cudaStream_t second = make_stream();
    launch(first, kernel_of_the_library, 1000);
    cudaEvent_t event = nullptr;
    cudaEventCreate(&event);
    cudaEventRecord(event, first);
    cudaStreamWaitEvent(second, event, 0);
    launch(second, kernel_of_the_library, 1000);
    cudaStreamDestroy(first);
    wait_for_first();
    exit(3);
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(3), "^$");
}

TEST_F(ExitTest, HeldStreamsAndThreadsThatWaitForThemDoNotKeepTheProcess) {
  struct Waiter {
    std::thread thread;
    ~Waiter() { thread.join(); }
  };
  auto end = [] {
    static Waiter waiter;
    static cudaStream_t stream = make_stream();
    simcuda_hold(stream);
    launch(stream, kernel_of_the_library);
    launch(nullptr, kernel_of_the_library);
    wait_for_first();
    waiter.thread = std::thread([] {
      if (cudaStreamSynchronize(stream) == cudaErrorCudartUnloading) say("let go\n");
    });
    std::this_thread::sleep_for(milliseconds(20));
    exit(0);  // the thread is joined
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(0), "^let go\n$");
}

TEST_F(ExitTest, CallsAfterTheEndAreRefusedAndWaitForNothing) {
  struct Last {
    ~Last() {
      int error = cudaDeviceSynchronize();
      error += cudaMemset(nullptr, 0, 0);
      if (error == 2 * cudaErrorCudartUnloading) say("unloading\n");
    }
  };
  auto end = [] {
    static Last last;
    launch(nullptr, kernel_of_the_library, 1000);
    wait_for_first();
    exit(0);
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(0), "^unloading\n$");
}

TEST_F(ExitTest, AHostFunctionThatNeverReturnsDoesNotKeepTheProcess) {
  auto end = [] {
    auto forever = [](void*) {
      ++num_begun;
      for (;;) pause();
    };
    cudaLaunchHostFunc(make_stream(), forever, nullptr);
    wait_for_first();
    exit(0);
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(0), "^$");
}

TEST_F(ExitTest, AHostFunctionMayEndTheProcess) {
  auto end = [] {
    cudaLaunchHostFunc(
        make_stream(), [](void*) { exit(4); }, nullptr);
    for (;;) pause();
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(4), "^$");
}

TEST_F(ExitTest, AForkedChildEndsWhileItsParentWorks) {
#ifdef __SANITIZE_ADDRESS__
  // In the child the kernel is held by the stack of a thread that is not there: no leak of ours.
  __lsan_disable();
  const char* said = "";  // the leak checker remarks on the threads of the parent
#else
  const char* said = "^$";
#endif
  auto end = [] {
    launch(make_stream(), kernel_of_the_library, 1000);
    wait_for_first();
    pid_t child = fork();
    if (child == 0) exit(5);
    int status = 0;
    waitpid(child, &status, 0);
    exit(WEXITSTATUS(status));
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(5), said);
#ifdef __SANITIZE_ADDRESS__
  __lsan_enable();
#endif
}

}  // namespace
}  // namespace simcuda_test
