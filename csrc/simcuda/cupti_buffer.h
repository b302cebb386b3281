// The profiler's buffer that records are written to.
#ifndef RESIDENCY_CSRC_SIMCUDA_CUPTI_BUFFER_H
#define RESIDENCY_CSRC_SIMCUDA_CUPTI_BUFFER_H

#include <atomic>
#include <cstddef>
#include <cstdint>

#include <cupti.h>

namespace simcuda {

// Asks the profiler for a buffer when there is none with room, and hands full ones back; nothing is
// kept here, so the profiler decides how much there may be. Not thread-safe, but for
// take_num_dropped.
class RecordBuffer {
 public:
  void set_callbacks(CUpti_BuffersCallbackRequestFunc request,
                     CUpti_BuffersCallbackCompleteFunc complete);
  // Zeroed room for a record of that kind; null when the profiler has no buffer, which counts it as
  // dropped.
  uint8_t* append(CUpti_ActivityKind kind);
  // Hands the records over.
  void complete();
  // How many were dropped since it was asked for last.
  size_t take_num_dropped();

 private:
  void request();

  CUpti_BuffersCallbackRequestFunc request_ = nullptr;
  CUpti_BuffersCallbackCompleteFunc complete_ = nullptr;
  uint8_t* bytes_ = nullptr;
  size_t num_bytes_ = 0;
  size_t max_records_ = 0;  // 0: as many as fit
  size_t used_bytes_ = 0;
  size_t num_records_ = 0;
  std::atomic<size_t> num_dropped_{0};
};

// The record after `record` (null: the first) of a buffer with so many bytes of records; null after
// the last.
CUpti_Activity* next_record(uint8_t* buffer, size_t num_bytes, CUpti_Activity* record);

}  // namespace simcuda

#endif
