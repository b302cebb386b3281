/* Control interface of the simulated CUDA runtime: what a test, the operator layer and Python set
 * and read while PyTorch runs on it.
 *
 * The functions are exported by the simulated libcudart.so.13. Under the real runtime they do not
 * exist: a program that runs on both tests `simcuda_present != NULL` first (all of them are weak).
 * They may be called from any thread. Unless another thing is said, functions that return int give
 * 0, or -1 with simcuda_message() saying what was expected; nothing has changed then.
 *
 * Units: bytes, nanoseconds of the virtual clock, devices as ordinals (0...). A stream is a
 * cudaStream_t as void*, so that this header needs no CUDA header; NULL is the current device's
 * default stream. */
/* The tables below are laid out by hand: */
/* clang-format off */
#ifndef RESIDENCY_SIMCUDA_CONTROL_H
#define RESIDENCY_SIMCUDA_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SIMCUDA_API __attribute__((weak, visibility("default")))

/* The version of this interface; 0 is never returned. */
SIMCUDA_API int simcuda_present(void);

/* Why the calling thread's last control call was refused, in one line; "" when it was not. */
SIMCUDA_API const char* simcuda_message(void);

/* ---- Configuration -------------------------------------------------------------------------
 * Settings are texts. Each is also read once, when the library starts, from the environment variable
 * SIMCUDA_<KEY> in capitals (SIMCUDA_DEVICES=2); an unknown SIMCUDA_ variable or a bad value ends the
 * process with one line that says what was expected.
 *
 *   devices       number of devices, 1 to 16 (default 1)                            before first use only
 *   visible_devices   which of them the process sees, as "1,0" (""): the variable CUDA_VISIBLE_DEVICES
 *                 sets it until the first use, by CUDA's rules. Read only. Devices elsewhere in this
 *                 file are counted among the visible ones
 *   memory        capacity of each device, a size of 64MiB or more: 24GiB (1GiB)   before first use only
 *   mode          computing | dry (computing)                                       before first use only
 *   card          modelled card: h200 | a100 | rtx4090 | none (h200). `none` gives every operation
 *                 a duration of 0
 *   host          modelled host for operators on CPU tensors: epyc9654 | none (epyc9654)
 *   h2d d2h d2d peer           bandwidth of copies, a rate: 55GB/s, 900MB/s, or none (bytes take no time)
 *   pageable_h2d pageable_d2h  bandwidth of copies from and to pageable memory
 *   copy_latency  duration of a copy besides its bytes, a time: 10us, 1.5ms, 0
 *   launch        time from the enqueue of a kernel to its earliest start
 *   host_call     what each runtime call costs the host; calls that only read the state of the thread
 *                 or of a handle (cudaGetDevice, cudaGetLastError) cost nothing
 *   page_lock     what page-locking costs the host for each MiB
 *   pinned_limit  bytes that may be page-locked, a size, or none (none)
 *   peer_access   on | off (on)
 *   poison        byte that fills fresh device memory, 0 to 255, or none for zeros (none)
 *   jitter        greatest random delay before each operation in real time, a time (0). It changes
 *                 the real interleaving, never the virtual clock
 *   seed          seed of that delay (1) */
SIMCUDA_API int simcuda_set(const char* key, const char* value);
/* The value in force, as text that simcuda_set accepts; NULL for an unknown key. Valid until the
 * calling thread's next call. */
SIMCUDA_API const char* simcuda_get(const char* key);

/* Changes one device's capacity at any time. Below what is in use, it only refuses more. */
SIMCUDA_API int simcuda_set_capacity(int device, uint64_t bytes);

/* ---- What happened ------------------------------------------------------------------------- */

enum { SIMCUDA_H2D, SIMCUDA_D2H, SIMCUDA_D2D, SIMCUDA_PEER, SIMCUDA_NUM_DIRECTIONS };

typedef struct simcuda_counters {
  uint64_t copies[SIMCUDA_NUM_DIRECTIONS];       /* copies, pageable ones included */
  uint64_t copied_bytes[SIMCUDA_NUM_DIRECTIONS];
  uint64_t pageable_copies[2];                   /* of H2D and D2H, from or to pageable memory */
  uint64_t pageable_bytes[2];
  uint64_t copy_time[SIMCUDA_NUM_DIRECTIONS];    /* modelled time the engine was busy */
  uint64_t kernels;                              /* operators and other kernels run on a stream */
  uint64_t kernel_time;                          /* modelled time at least one kernel ran */
  uint64_t overlap_time;                         /* modelled time a kernel and a host copy ran at once */
  uint64_t host_syncs;                           /* calls that make the host wait for the device:
                                                    synchronise, pageable and blocking copies, cudaFree */
  uint64_t busy_host_syncs;                      /* of these, entered while the device had work left */
  uint64_t blocked_time;                         /* modelled time the host waited in them */
  uint64_t device_bytes;                         /* held by cudaMalloc and mapped VMM now */
  uint64_t peak_device_bytes;
  uint64_t failed_allocations;                   /* refused for lack of memory, injected faults excluded */
} simcuda_counters;

/* Of one device, or of all together with device -1 (peaks are summed then). */
SIMCUDA_API int simcuda_read_counters(int device, simcuda_counters* out);
/* Times that an entry point of the runtime or driver ("cudaMalloc", "cuMemCreate") was called. */
SIMCUDA_API uint64_t simcuda_calls(const char* entry_point);
/* Page-locked host bytes now, and the most there were; whole pages, as the system counts them. */
SIMCUDA_API uint64_t simcuda_pinned_bytes(void);
SIMCUDA_API uint64_t simcuda_peak_pinned_bytes(void);
/* Sets counters, peaks (to what is held now) and call counts back. The clock runs on. */
SIMCUDA_API void simcuda_reset_counters(void);

/* ---- The virtual clock --------------------------------------------------------------------- */

/* The host's present time. It rises by the fixed cost of each call, by simcuda_host_work and by
 * waiting for the device; never by real time. */
SIMCUDA_API uint64_t simcuda_now(void);
/* When everything enqueued so far will be done on a device (-1: all). Held streams count as idle. */
SIMCUDA_API uint64_t simcuda_device_end(int device);
/* 1 while one host thread at a time has enqueued (hand-overs count as one), so that figures repeat
 * exactly; 0 once two did at once, or a query was answered while a host function was still running
 * that the clock takes for done. Where the kernel has no /proc/self/task/<id>/syscall, two Python
 * threads that take turns by the interpreter lock are not told from a hand-over. */
SIMCUDA_API int simcuda_deterministic(void);
/* Records every operation with its start and end from now on (1) or not (0). */
SIMCUDA_API void simcuda_record_timeline(int on);
/* Writes what was recorded in the Trace Event format (chrome://tracing, Perfetto). */
SIMCUDA_API int simcuda_write_timeline(const char* path);

/* ---- The order of execution -----------------------------------------------------------------
 * Holding affects the real execution and the clock alike: an operation that is held has not started,
 * and what waits for it waits. */
SIMCUDA_API int simcuda_hold(void* stream);                 /* stops before its next operation */
SIMCUDA_API int simcuda_step(void* stream, uint64_t count); /* a held stream runs so many more */
SIMCUDA_API int simcuda_release(void* stream);
SIMCUDA_API int simcuda_hold_all(int on);                   /* all streams there are, or none any more */
SIMCUDA_API uint64_t simcuda_pending(void* stream);         /* enqueued and not really done */

/* ---- Faults --------------------------------------------------------------------------------- */

/* Of the coming calls of an entry point, the first `skip` pass and the next `count` return `error`
 * (a cudaError_t or CUresult) without doing anything. Count 0 takes it back. */
SIMCUDA_API int simcuda_fail(const char* entry_point, uint64_t skip, uint64_t count, int error);
/* Of the coming calls that put things in order by an event (cudaStreamWaitEvent, cudaEventSynchronize, or
 * cudaEventQuery where it answers that the event has come), the first `skip` pass and the next `count` do
 * what they always do without a race checker being told: it then reports what nothing else orders. Calls
 * about an event that was never recorded are not counted. Count 0 takes it back. */
SIMCUDA_API int simcuda_keep_order_secret(const char* entry_point, uint64_t skip, uint64_t count);
/* The device fails for good, as after an illegal access: every call on it returns `error`. */
SIMCUDA_API int simcuda_break_device(int device, int error);

/* ---- For the operator layer ----------------------------------------------------------------- */

/* Host address of the bytes behind a device address (the same address for others); NULL in dry mode. */
SIMCUDA_API void* simcuda_host_address(const void* address);

enum { SIMCUDA_FP64, SIMCUDA_FP32, SIMCUDA_TF32, SIMCUDA_FP16, SIMCUDA_FP8, SIMCUDA_NUM_PRECISIONS };

typedef struct simcuda_work {
  const char* name;  /* shown in the timeline; a literal or interned */
  double flops;
  double bytes;      /* read and written in device memory */
  int precision;     /* which of the card's FLOP rates */
} simcuda_work;

/* Enqueues a kernel: `run(data)` on the stream's worker when its turn comes (not called in dry mode),
 * then `destroy(data)`, which is always called, once. `run` returns 0, or a cudaError_t that breaks
 * the device. It counts, and fails when injected, as a call of "cudaLaunchKernel". Returns a cudaError_t; destroy has been called when it is not cudaSuccess. During a
 * capture the kernel becomes a node, and destroy is called with the last graph that has it. */
SIMCUDA_API int simcuda_launch(void* stream, const simcuda_work* work, int (*run)(void*), void (*destroy)(void*),
                               void* data);
/* How to ask whether the calling thread is in a backward pass of autograd: a thread that is in none
 * does not share the order of its calls with autograd's threads, see simcuda_deterministic. */
SIMCUDA_API void simcuda_in_backward(int (*ask)(void));
/* An operator on CPU tensors ran on the calling thread: adds its modelled duration to the host's time. */
SIMCUDA_API void simcuda_host_work(const simcuda_work* work);

#ifdef __cplusplus
}
#endif
#endif
