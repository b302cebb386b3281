// What the simulated driver and NVML ask of the simulated runtime, across the libraries. Not for
// programs.
#ifndef RESIDENCY_CSRC_SIMCUDA_DRIVER_LINK_H
#define RESIDENCY_CSRC_SIMCUDA_DRIVER_LINK_H

#include <stddef.h>
#include <stdint.h>

extern "C" {

// Counts a call of a driver function; the injected error if one is due.
int simcuda_driver_enter(const char* entry_point);
// Says once, on stderr, that it is not simulated.
void simcuda_driver_refuse(const char* entry_point, const char* advice);

int simcuda_driver_num_devices(void);
// NVML sees all of the machine's cards, whatever CUDA_VISIBLE_DEVICES is.
int simcuda_driver_num_cards(void);
uint64_t simcuda_driver_card_capacity(int card);
uint64_t simcuda_driver_card_used(int card);
int simcuda_driver_has_context(int device);
int simcuda_driver_current_device(void);

// Virtual memory management; they return a CUresult.
uint64_t simcuda_driver_granularity(void);
int simcuda_driver_reserve(uint64_t* base, uint64_t num_bytes);
int simcuda_driver_unreserve(uint64_t base, uint64_t num_bytes);
int simcuda_driver_create(uint64_t* handle, uint64_t num_bytes, int device);
int simcuda_driver_release(uint64_t handle);
int simcuda_driver_retain(uint64_t* handle, uint64_t address);
int simcuda_driver_map(uint64_t base, uint64_t num_bytes, uint64_t offset, uint64_t handle);
int simcuda_driver_set_access(uint64_t base, uint64_t num_bytes);
int simcuda_driver_unmap(uint64_t base, uint64_t num_bytes);
int simcuda_driver_export(int* file, uint64_t handle);
int simcuda_driver_device_of(int* device, uint64_t handle);
int simcuda_driver_range(uint64_t* base, uint64_t* num_bytes, uint64_t address);

}  // extern "C"

#endif
