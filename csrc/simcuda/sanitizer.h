// What a race checker is told of the runtime.
//
// Note [Only CUDA's order is visible]
// The runtime's own locks order almost everything, and ThreadSanitizer would take them for the
// program's: a missing event wait would never be reported. So all that the runtime does is hidden
// from it (synchronisation, reads and writes), and it is told of the order that CUDA promises, and
// of nothing else: an operation is ordered after the call that enqueued it, after its predecessors
// in its stream and after the events it waits for; a host call that waits for an operation, or
// learns that it is done, is ordered after it. Copies and kernels themselves run in the open.
// Without ThreadSanitizer the annotations are null and all of this is a branch or two.
#ifndef RESIDENCY_CSRC_SIMCUDA_SANITIZER_H
#define RESIDENCY_CSRC_SIMCUDA_SANITIZER_H

// ThreadSanitizer's run-time library defines these; they are null without it.
extern "C" {
__attribute__((weak)) void AnnotateIgnoreSyncBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreSyncEnd(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreReadsBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreReadsEnd(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreWritesBegin(const char* file, int line);
__attribute__((weak)) void AnnotateIgnoreWritesEnd(const char* file, int line);
__attribute__((weak)) void AnnotateHappensBefore(const char* file, int line, void* address);
__attribute__((weak)) void AnnotateHappensAfter(const char* file, int line, void* address);
}

namespace simcuda {

inline bool race_checker_present() {
  return AnnotateIgnoreSyncBegin != nullptr;
}

inline void begin_hiding() {
  AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}

inline void end_hiding() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
}

// How many Hidden scopes the thread is in; Visible suspends the outermost.
inline thread_local int t_hidden_depth = 0;

// What the thread does in this scope is hidden from the race checker.
class [[nodiscard]] Hidden {
 public:
  Hidden() {
    if (t_hidden_depth++ == 0 && race_checker_present()) begin_hiding();
  }
  ~Hidden() {
    if (--t_hidden_depth == 0 && race_checker_present()) end_hiding();
  }
  // A scope of the thread: there is nothing to hand over.
  Hidden(const Hidden&) = delete;
  Hidden& operator=(const Hidden&) = delete;
};

// In this scope, within a Hidden one, the race checker sees the thread again.
class [[nodiscard]] Visible {
 public:
  Visible() : suspended_depth_(t_hidden_depth) {
    t_hidden_depth = 0;
    if (suspended_depth_ > 0 && race_checker_present()) end_hiding();
  }
  ~Visible() {
    if (suspended_depth_ > 0 && race_checker_present()) begin_hiding();
    t_hidden_depth = suspended_depth_;
  }
  Visible(const Visible&) = delete;
  Visible& operator=(const Visible&) = delete;

 private:
  int suspended_depth_;
};

// Whether the thread keeps to itself what it is ordered after.
inline thread_local bool t_keeps_order_secret = false;

// In this scope, when told to, the race checker does not learn what the thread is ordered after.
class [[nodiscard]] SecretOrder {
 public:
  explicit SecretOrder(bool secret) { t_keeps_order_secret = secret; }
  ~SecretOrder() { t_keeps_order_secret = false; }
  SecretOrder(const SecretOrder&) = delete;
  SecretOrder& operator=(const SecretOrder&) = delete;
};

// What the thread did so far is ordered before what follows order_after(token) in another.
inline void order_before(void* token) {
  if (!race_checker_present()) return;
  Visible visible;
  AnnotateHappensBefore(__FILE__, __LINE__, token);
}

inline void order_after(void* token) {
  if (!race_checker_present() || t_keeps_order_secret) return;
  Visible visible;
  AnnotateHappensAfter(__FILE__, __LINE__, token);
}

}  // namespace simcuda

#endif
