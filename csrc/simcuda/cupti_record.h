// The activity records that a profiler reads, as CUPTI lays them out.
//
// Note [Record layouts]
// CUPTI's records are versioned, and the versions of one kind begin alike: what is written here, of
// the toolkit this is compiled with, torch 2.11 reads as CUpti_ActivityKernel4 and torch 2.15 as
// CUpti_ActivityKernel11. A record takes more room than any version known, and the rest is zero, so
// that fields of a newer version read as zero.
#ifndef RESIDENCY_CSRC_SIMCUDA_CUPTI_RECORD_H
#define RESIDENCY_CSRC_SIMCUDA_CUPTI_RECORD_H

#include <cstddef>
#include <cstdint>

#include <cupti.h>

#include "csrc/simcuda/activity_link.h"

namespace simcuda {

// The room of a record; 0 for a kind that is never written.
size_t room_of(CUpti_ActivityKind kind);
CUpti_ActivityKind record_kind_of(int activity_kind);

// Write a record into zeroed memory of its kind's room.
void write_record(const simcuda_activity& activity, uint8_t* room);
void write_external_correlation(CUpti_ExternalCorrelationKind kind, uint64_t external_id,
                                uint64_t correlation_id, uint8_t* room);

}  // namespace simcuda

#endif
