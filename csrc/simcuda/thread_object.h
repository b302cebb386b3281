// An object of each thread that is there to the thread's very end.
#ifndef RESIDENCY_CSRC_SIMCUDA_THREAD_OBJECT_H
#define RESIDENCY_CSRC_SIMCUDA_THREAD_OBJECT_H

namespace simcuda {

// The calling thread's only T. A plain thread_local is dead for the destructors of the thread's
// other objects that call later (those of libraries that clean up at the end); here such a call
// finds a new T, which nobody frees.
template <typename T>
T& thread_object() {
  static thread_local T* object = nullptr;  // outlives `end`, as nothing destroys a pointer
  struct End {
    ~End() {
      delete object;
      object = nullptr;
    }
  };
  static thread_local End end;
  if (!object) object = new T;
  return *object;
}

}  // namespace simcuda

#endif
