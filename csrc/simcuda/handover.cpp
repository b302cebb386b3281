#include "csrc/simcuda/handover.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <fcntl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace simcuda {
namespace {

std::atomic<bool> g_one_at_a_time{true};
std::atomic<int> g_inside{0};    // thread in a call that moves the clock, or 0
std::atomic<int> g_previous{0};  // thread that made the last such call
std::atomic<int (*)()> g_in_backward{nullptr};

int thread_id() {
  static thread_local int id = static_cast<int>(syscall(SYS_gettid));
  return id;
}

bool read_task_file(int thread, const char* file, char* text, size_t size) {
  char path[64];
  snprintf(path, sizeof path, "/proc/self/task/%d/%s", thread, file);
  int descriptor = open(path, O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return false;
  ssize_t length = read(descriptor, text, size - 1);
  close(descriptor);
  text[length > 0 ? length : 0] = '\0';
  return length > 0;
}

enum class ThreadState { kEnded, kSleeping, kRunning };

ThreadState state_of(int thread) {
  char text[512];
  if (!read_task_file(thread, "stat", text, sizeof text)) return ThreadState::kEnded;
  // The state follows the name, which may itself hold parentheses.
  const char* name_end = strrchr(text, ')');
  if (!name_end || name_end[1] == '\0') return ThreadState::kEnded;
  char state = name_end[2];
  if (state == 'Z' || state == 'X') return ThreadState::kEnded;
  return state == 'R' ? ThreadState::kRunning : ThreadState::kSleeping;
}

bool will_wake_by_itself(int thread) {
  char text[256];
  if (!read_task_file(thread, "syscall", text, sizeof text)) return false;
  long number = -1;
  unsigned long arguments[4] = {};
  int found = sscanf(text, "%ld %lx %lx %lx %lx", &number, &arguments[0], &arguments[1],
                     &arguments[2], &arguments[3]);
  if (found < 1) return false;
  if (number == SYS_nanosleep || number == SYS_clock_nanosleep) return true;
  return number == SYS_futex && found == 5 && arguments[3] != 0;
}

bool has_ended_its_backward_pass(int thread) {
  char name[32];
  auto* in_backward = g_in_backward.load(std::memory_order_relaxed);
  return in_backward && !in_backward() && read_task_file(thread, "comm", name, sizeof name) &&
         strncmp(name, "pt_autograd", strlen("pt_autograd")) == 0;
}

bool handed_over(int previous) {
  // On a machine with more work than cores it may take that long to fall asleep. A thread that goes
  // on instead enters a call meanwhile, which tells at once.
  constexpr int kNumTries = 2000;
  for (int tries = 0; tries < kNumTries; ++tries) {
    switch (state_of(previous)) {
      case ThreadState::kEnded: return true;
      case ThreadState::kSleeping:
        return !will_wake_by_itself(previous) || has_ended_its_backward_pass(previous);
      case ThreadState::kRunning: break;
    }
    if (!one_thread_at_a_time()) return false;
    timespec pause{0, 50000};
    nanosleep(&pause, nullptr);
  }
  return false;
}

}  // namespace

ClockCall::ClockCall(bool moves_clock) : entered_(moves_clock) {
  if (!entered_) return;
  int me = thread_id();
  int inside = 0;
  if (!g_inside.compare_exchange_strong(inside, me) && inside != me) mark_order_undetermined();
  int previous = g_previous.exchange(me);
  if (previous == me || previous == 0) return;
  // Nothing is left to find out once the answer is no.
  if (one_thread_at_a_time() && !handed_over(previous)) mark_order_undetermined();
}

ClockCall::~ClockCall() {
  if (!entered_) return;
  int me = thread_id();
  g_inside.compare_exchange_strong(me, 0);
}

void ask_for_backward_by(int (*in_backward)()) {
  g_in_backward = in_backward;
}

bool one_thread_at_a_time() {
  return g_one_at_a_time.load(std::memory_order_relaxed);
}

void mark_order_undetermined() {
  g_one_at_a_time = false;
}

}  // namespace simcuda
