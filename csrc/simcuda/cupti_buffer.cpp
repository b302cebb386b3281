#include "csrc/simcuda/cupti_buffer.h"

#include <cstring>
#include <utility>

#include "csrc/simcuda/cupti_record.h"

namespace simcuda {

void RecordBuffer::set_callbacks(CUpti_BuffersCallbackRequestFunc request,
                                 CUpti_BuffersCallbackCompleteFunc complete) {
  request_ = request;
  complete_ = complete;
}

void RecordBuffer::request() {
  if (request_) request_(&bytes_, &num_bytes_, &max_records_);
}

uint8_t* RecordBuffer::append(CUpti_ActivityKind kind) {
  size_t room = room_of(kind);
  bool full = bytes_ && (used_bytes_ + room > num_bytes_ ||
                         (max_records_ > 0 && num_records_ == max_records_));
  if (full) complete();
  if (!bytes_) request();
  if (!bytes_ || room > num_bytes_) {
    ++num_dropped_;
    return nullptr;
  }
  uint8_t* record = bytes_ + used_bytes_;
  memset(record, 0, room);
  used_bytes_ += room;
  ++num_records_;
  return record;
}

void RecordBuffer::complete() {
  if (!bytes_) return;
  uint8_t* bytes = std::exchange(bytes_, nullptr);
  size_t used_bytes = std::exchange(used_bytes_, 0);
  num_records_ = 0;
  if (complete_) complete_(nullptr, 0, bytes, num_bytes_, used_bytes);
}

size_t RecordBuffer::take_num_dropped() {
  return num_dropped_.exchange(0);
}

CUpti_Activity* next_record(uint8_t* buffer, size_t num_bytes, CUpti_Activity* record) {
  uint8_t* next = buffer;
  if (record) next = reinterpret_cast<uint8_t*>(record) + room_of(record->kind);
  return next < buffer + num_bytes ? reinterpret_cast<CUpti_Activity*>(next) : nullptr;
}

}  // namespace simcuda
