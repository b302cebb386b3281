// Programs with and without a mistake in the order of their work, for ThreadSanitizer: argv[1]
// names one. It must report those whose name begins with "missing" or "early", and no other.
#include <cstdio>
#include <cstring>
#include <string>

#include <cuda_runtime_api.h>

#include "include/residency/simcuda/control.h"

namespace {

constexpr size_t kBytes = 4096;

struct Setting {
  Setting() {
    cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking);
    cudaStreamCreateWithFlags(&computes, cudaStreamNonBlocking);
    cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
    cudaMalloc(reinterpret_cast<void**>(&device), kBytes);
    cudaHostAlloc(reinterpret_cast<void**>(&source), kBytes, 0);
    cudaHostAlloc(reinterpret_cast<void**>(&result), kBytes, 0);
    memset(source, 5, kBytes);
    memset(result, 0, kBytes);
  }
  void upload() { cudaMemcpyAsync(device, source, kBytes, cudaMemcpyHostToDevice, copies); }
  void download(cudaStream_t stream) {
    cudaMemcpyAsync(result, device, kBytes, cudaMemcpyDeviceToHost, stream);
  }
  void order() {
    cudaEventRecord(event, copies);
    cudaStreamWaitEvent(computes, event, 0);
  }

  cudaStream_t copies = nullptr;
  cudaStream_t computes = nullptr;
  cudaEvent_t event = nullptr;
  char* device = nullptr;
  char* source = nullptr;
  char* result = nullptr;
};

// Uses the block on `computes`, and gives it, as torch's allocator does, to the next user on
// `copies`: right away, or when an event says that the last use is done.
void reuse_block(Setting& s, bool records_last_use) {
  s.upload();
  s.order();
  s.download(s.computes);
  if (records_last_use) {
    cudaEventRecord(s.event, s.computes);
    while (cudaEventQuery(s.event) == cudaErrorNotReady) {
    }
  }
  s.upload();
}

bool run(const std::string& name) {
  Setting s;
  if (name == "event_wait") {
    s.upload();
    s.order();
    s.download(s.computes);
  } else if (name == "missing_event_wait") {
    s.upload();
    s.download(s.computes);
  } else if (name == "read_after_synchronise") {
    s.upload();
    s.download(s.copies);
    cudaStreamSynchronize(s.copies);
    printf("%d\n", s.result[0]);
  } else if (name == "early_read") {
    s.upload();
    s.download(s.copies);
    printf("%d\n", s.result[0]);
  } else if (name == "write_source_after_event") {
    s.upload();
    cudaEventRecord(s.event, s.copies);
    cudaEventSynchronize(s.event);
    s.source[0] = 1;
  } else if (name == "missing_secret_event_wait") {
    s.upload();
    simcuda_keep_order_secret("cudaStreamWaitEvent", 0, 1);
    s.order();
    s.download(s.computes);
  } else if (name == "skipped_secret_event_wait") {
    simcuda_keep_order_secret("cudaStreamWaitEvent", 1, 1);
    s.upload();
    s.order();
    s.download(s.computes);
  } else if (name == "early_write_after_secret_synchronise") {
    s.upload();
    cudaEventRecord(s.event, s.copies);
    simcuda_keep_order_secret("cudaEventSynchronize", 0, 1);
    cudaEventSynchronize(s.event);
    s.source[0] = 1;
  } else if (name == "missing_last_use_after_secret_query") {
    simcuda_keep_order_secret("cudaEventQuery", 0, 1);
    reuse_block(s, true);
  } else if (name == "early_write_of_source") {
    s.upload();
    s.source[0] = 1;
  } else if (name == "last_use_recorded") {
    reuse_block(s, true);
  } else if (name == "missing_last_use") {
    reuse_block(s, false);
  } else {
    return false;
  }
  cudaDeviceSynchronize();
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  bool known = argc == 2 && run(argv[1]);
  if (!known) fprintf(stderr, "order_race: the name of a case is expected\n");
  return known ? 0 : 2;
}
