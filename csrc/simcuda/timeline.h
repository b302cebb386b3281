// What happened when on the virtual clock, for chrome://tracing and Perfetto.
#ifndef RESIDENCY_CSRC_SIMCUDA_TIMELINE_H
#define RESIDENCY_CSRC_SIMCUDA_TIMELINE_H

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace simcuda {

class Operation;

// Thread-safe.
class Timeline {
 public:
  void record(bool on);
  // Operations that only order others (records, waits) are left out.
  void add(const Operation& operation);
  void add_wait(uint64_t start_ns, uint64_t end_ns);
  void add_host_work(const char* name, uint64_t start_ns, uint64_t end_ns);
  // Returns why it could not be written, or an empty text.
  std::string write(const char* path);

 private:
  struct Entry {
    std::string name;
    const char* category;
    int device;       // -1: the host
    uint64_t thread;  // a stream, or one of the host's rows
    uint64_t start_ns;
    uint64_t end_ns;
    uint64_t num_bytes;
  };
  void push(Entry entry);

  std::mutex mutex_;
  bool on_ = false;
  std::vector<Entry> entries_;
};

}  // namespace simcuda

#endif
