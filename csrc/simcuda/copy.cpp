// Copies and fills.
#include <cstring>
#include <memory>
#include <vector>

#include "csrc/simcuda/entry.h"
#include "csrc/simcuda/graph.h"
#include "csrc/simcuda/runtime.h"

using namespace simcuda;

namespace {

// A pageable source of at most so many bytes is copied to a staging buffer of the driver, and the
// call returns (CUDA Driver API, "API synchronization behavior").
constexpr uint64_t kStagedBytes = uint64_t{64} << 10;

// Rows of bytes; a plain copy is one row.
struct Shape {
  uint64_t row_bytes = 0;
  uint64_t num_rows = 1;
  uint64_t destination_pitch = 0;
  uint64_t source_pitch = 0;

  uint64_t num_bytes() const { return row_bytes * num_rows; }
  uint64_t span(uint64_t pitch) const { return pitch * (num_rows - 1) + row_bytes; }
};

struct CopyRequest {
  void* destination = nullptr;
  const void* source = nullptr;
  Shape shape;
  cudaMemcpyKind kind = cudaMemcpyDefault;
  bool blocking = false;     // the host waits, as cudaMemcpy does
  bool source_ends = false;  // the source may change once the call has returned
};

// What a copy turns out to be, from what its pointers are.
struct Route {
  int direction = -1;  // -1: from host memory to host memory
  bool pageable = false;
  int source_device = 0;
  int destination_device = 0;

  friend bool operator==(const Route&, const Route&) = default;
};

struct Side {
  bool on_device = false;
  bool pageable = true;
  int device = 0;
};

// False when the bytes are not all of one allocation.
bool look_at(const void* address, uint64_t num_bytes, Side& side) {
  const AddressSpace& memory = runtime().memory;
  std::optional<Range> range = memory.cover(address, num_bytes);
  if (!range) return !memory.in_window(address);
  side = {range->on_device(), false, range->device};
  return true;
}

bool kind_fits(cudaMemcpyKind kind, bool from_device, bool to_device) {
  switch (kind) {
    case cudaMemcpyHostToHost: return !from_device && !to_device;
    case cudaMemcpyHostToDevice: return !from_device && to_device;
    case cudaMemcpyDeviceToHost: return from_device && !to_device;
    case cudaMemcpyDeviceToDevice: return from_device && to_device;
    case cudaMemcpyDefault: return true;
  }
  return false;
}

std::optional<Route> find_route(const CopyRequest& request) {
  Side from;
  Side to;
  const Shape& shape = request.shape;
  if (!look_at(request.source, shape.span(shape.source_pitch), from)) return std::nullopt;
  if (!look_at(request.destination, shape.span(shape.destination_pitch), to)) return std::nullopt;
  if (!kind_fits(request.kind, from.on_device, to.on_device)) return std::nullopt;
  Route route{.source_device = from.device, .destination_device = to.device};
  if (from.on_device && to.on_device) {
    route.direction = from.device == to.device ? SIMCUDA_D2D : SIMCUDA_PEER;
  } else if (to.on_device) {
    route.direction = SIMCUDA_H2D;
    route.pageable = from.pageable;
  } else if (from.on_device) {
    route.direction = SIMCUDA_D2H;
    route.pageable = to.pageable;
  }
  return route;
}

Device& device_at(int ordinal) {
  return *runtime().devices[static_cast<size_t>(ordinal)];
}

Engine* engine_of(const Route& route) {
  switch (route.direction) {
    case SIMCUDA_H2D: return &device_at(route.destination_device).engines[kEngineH2D];
    case SIMCUDA_D2H: return &device_at(route.source_device).engines[kEngineD2H];
    case SIMCUDA_D2D: return &device_at(route.source_device).engines[kEngineD2D];
    case SIMCUDA_PEER: return &runtime().peer_engine(route.source_device, route.destination_device);
    default: return nullptr;
  }
}

Rate rate_of(const Route& route) {
  switch (route.direction) {
    case SIMCUDA_H2D: return route.pageable ? kPageableH2D : kH2D;
    case SIMCUDA_D2H: return route.pageable ? kPageableD2H : kD2H;
    case SIMCUDA_D2D: return kD2D;
    case SIMCUDA_PEER: return kPeer;
    default: return kPageableH2D;
  }
}

const char* name_of(const Route& route) {
  switch (route.direction) {
    case SIMCUDA_H2D: return route.pageable ? "copy H2D (pageable)" : "copy H2D";
    case SIMCUDA_D2H: return route.pageable ? "copy D2H (pageable)" : "copy D2H";
    case SIMCUDA_D2D: return "copy D2D";
    case SIMCUDA_PEER: return "copy peer";
    default: return "copy host";
  }
}

void copy_rows(char* destination, const char* source, const Shape& shape) {
  for (uint64_t row = 0; row < shape.num_rows; ++row) {
    memmove(destination + row * shape.destination_pitch, source + row * shape.source_pitch,
            shape.row_bytes);
  }
}

// A copy of the rows, without what lies between them.
std::shared_ptr<std::vector<char>> stage(const char* source, const Shape& shape) {
  auto staged = std::make_shared<std::vector<char>>(shape.num_bytes());
  Shape packed = shape;
  packed.destination_pitch = shape.row_bytes;
  // The program's memory: a race on it is the program's.
  Visible visible;
  copy_rows(staged->data(), source, packed);
  return staged;
}

// False when a side on a device has been freed since the copy was enqueued.
bool still_there(const CopyRequest& request, const Route& route) {
  Hidden hidden;
  const AddressSpace& memory = runtime().memory;
  const Shape& shape = request.shape;
  auto intact = [&](const void* address, uint64_t pitch) {
    return !memory.in_window(address) || memory.cover(address, shape.span(pitch)).has_value();
  };
  return route.direction < 0 || (intact(request.source, shape.source_pitch) &&
                                 intact(request.destination, shape.destination_pitch));
}

void fill_rows(char* destination, int value, const Shape& shape) {
  for (uint64_t row = 0; row < shape.num_rows; ++row) {
    memset(destination + row * shape.destination_pitch, value, shape.row_bytes);
  }
}

// The copy itself. What comes from memory that is not there is zeros, not what the host's memory
// happened to hold.
cudaError_t run(const CopyRequest& request, const Route& route) {
  if (!still_there(request, route)) return cudaErrorIllegalAddress;
  const AddressSpace& memory = runtime().memory;
  char* destination = static_cast<char*>(memory.bytes_at(request.destination));
  if (runtime().dry && route.direction >= 0) {
    fill_rows(destination, 0, request.shape);
  } else {
    copy_rows(destination, static_cast<const char*>(memory.bytes_at(request.source)),
              request.shape);
  }
  return cudaSuccess;
}

// Where there is no device memory, only what comes from it leaves anything behind.
bool really_runs(const Route& route) {
  return !runtime().dry || route.direction < 0 || route.direction == SIMCUDA_D2H;
}

std::shared_ptr<Body> body_of(CopyRequest request, const Route& route, bool staged) {
  if (!really_runs(route)) return nullptr;
  std::shared_ptr<std::vector<char>> buffer;
  if (staged) {
    const void* source = runtime().memory.bytes_at(request.source);
    buffer = stage(static_cast<const char*>(source), request.shape);
    request.source = buffer->data();
    request.shape.source_pitch = request.shape.row_bytes;
  }
  return std::make_shared<Body>([request, route, buffer] { return run(request, route); });
}

OperationSpec spec_of(const Route& route) {
  OperationSpec spec{.kind = OperationKind::kCopy, .name = name_of(route)};
  spec.engine = engine_of(route);
  spec.direction = route.direction;
  spec.pageable = route.pageable;
  return spec;
}

cudaError_t copy(StreamPtr& stream, const CopyRequest& request) {
  const Shape& shape = request.shape;
  if (shape.num_bytes() == 0) return cudaSuccess;
  bool pitches_fit =
      shape.row_bytes <= shape.destination_pitch && shape.row_bytes <= shape.source_pitch;
  if (!pitches_fit) return cudaErrorInvalidPitchValue;
  std::optional<Route> route = find_route(request);
  if (!route) return cudaErrorInvalidValue;

  bool captured = false;
  bool staged = false;
  bool was_busy = false;
  OperationPtr operation;
  {
    Clock::Lock lock(runtime().clock.mutex);
    captured = stream->capture != nullptr;
    was_busy = is_busy(lock, stream->device);
    bool small = route->pageable && shape.num_bytes() <= kStagedBytes;
    bool stageable = route->direction == SIMCUDA_H2D && (small || request.source_ends);
    staged = stageable && !captured && !request.blocking;
    double num_bytes = static_cast<double>(shape.num_bytes());
    if (staged) runtime().clock.pass(transfer_ns(num_bytes, kPageableH2D));
    OperationSpec spec = spec_of(*route);
    spec.num_bytes = shape.num_bytes();
    Rate rate = staged ? kH2D : rate_of(*route);
    spec.duration_ns = time_ns(kCopyLatency) + transfer_ns(num_bytes, rate);
    spec.body = body_of(request, *route, staged);
    if (cudaError_t error = submit(lock, *stream, std::move(spec), &operation)) return error;
  }
  // Within a device and between devices even cudaMemcpy does not wait (same source as above).
  bool touches_host = route->direction != SIMCUDA_D2D && route->direction != SIMCUDA_PEER;
  bool waits = touches_host && !captured && !staged && (request.blocking || route->pageable);
  if (!waits) return cudaSuccess;
  synchronize(stream->device, {operation}, was_busy);
  return static_cast<cudaError_t>(stream->device.broken.load());
}

CopyRequest plain(void* destination, const void* source, uint64_t num_bytes, cudaMemcpyKind kind) {
  return {.destination = destination,
          .source = source,
          .shape = {num_bytes, 1, num_bytes, num_bytes},
          .kind = kind};
}

bool is_plain_transfer(const CopyRequest& request, const Route& route) {
  return route.direction >= 0 && !route.pageable && !request.source_ends &&
         request.shape.num_bytes() > 0;
}

// Copies of one engine, none of pageable memory: one operation that takes as long as all of them.
// Within a batch they come in no particular order, so the last is done first here: who relies on
// the order of the call is to notice.
cudaError_t submit_together(StreamPtr& stream, std::vector<CopyRequest> requests,
                            const Route& route) {
  OperationSpec spec = spec_of(route);
  spec.num_copies = static_cast<uint32_t>(requests.size());
  for (const CopyRequest& request : requests) {
    uint64_t num_bytes = request.shape.num_bytes();
    spec.num_bytes += num_bytes;
    spec.duration_ns +=
        time_ns(kCopyLatency) + transfer_ns(static_cast<double>(num_bytes), rate_of(route));
  }
  if (really_runs(route)) {
    spec.body = std::make_shared<Body>([requests = std::move(requests), route] {
      for (auto request = requests.rbegin(); request != requests.rend(); ++request) {
        if (cudaError_t error = run(*request, route)) return error;
      }
      return cudaSuccess;
    });
  }
  return submit(stream, std::move(spec));
}

// A batch. Each run of its copies that one engine can do in a row is handed over at once.
cudaError_t copy_each(StreamPtr& stream, const std::vector<CopyRequest>& requests) {
  bool captured = false;
  {
    Clock::Lock lock(runtime().clock.mutex);
    captured = stream->capture != nullptr;
  }
  for (size_t i = 0; i < requests.size();) {
    std::optional<Route> route = find_route(requests[i]);
    if (!route) return cudaErrorInvalidValue;
    if (captured || !is_plain_transfer(requests[i], *route)) {
      if (cudaError_t error = copy(stream, requests[i++])) return error;
      continue;
    }
    std::vector<CopyRequest> together;
    together.reserve(requests.size() - i);
    together.push_back(requests[i]);
    while (++i < requests.size()) {
      std::optional<Route> next = find_route(requests[i]);
      if (!next || *next != *route || !is_plain_transfer(requests[i], *next)) break;
      together.push_back(requests[i]);
    }
    if (cudaError_t error = submit_together(stream, std::move(together), *route)) return error;
  }
  return cudaSuccess;
}

// A fill of device memory, or of page-locked memory.
cudaError_t fill(StreamPtr& stream, void* destination, int value, const Shape& shape) {
  if (shape.num_bytes() == 0) return cudaSuccess;
  if (shape.row_bytes > shape.destination_pitch) return cudaErrorInvalidPitchValue;
  const AddressSpace& memory = runtime().memory;
  std::optional<Range> range = memory.cover(destination, shape.span(shape.destination_pitch));
  if (!range) return cudaErrorInvalidValue;
  OperationSpec spec{.kind = OperationKind::kMemset, .name = "memset"};
  if (range->on_device()) spec.engine = &device_at(range->device).engines[kEngineD2D];
  spec.num_bytes = shape.num_bytes();
  spec.duration_ns =
      time_ns(kCopyLatency) + transfer_ns(static_cast<double>(shape.num_bytes()), kD2D);
  if (!runtime().dry || !range->on_device()) {
    char* bytes = static_cast<char*>(memory.bytes_at(destination));
    spec.body = std::make_shared<Body>([bytes, value, shape] {
      fill_rows(bytes, value, shape);
      return cudaSuccess;
    });
  }
  return submit(stream, std::move(spec));
}

}  // namespace

SIMCUDA_EXPORT cudaError_t cudaMemcpy(void* destination, const void* source, size_t num_bytes,
                                      cudaMemcpyKind kind) {
  SIMCUDA_ENTER(cudaMemcpy, kHostCall);
  if (cudaError_t error = refuse_during_capture()) return fail(error);
  StreamPtr stream;
  if (cudaError_t error = open_stream(nullptr, stream)) return fail(error);
  CopyRequest request = plain(destination, source, num_bytes, kind);
  request.blocking = true;
  return fail(copy(stream, request));
}

SIMCUDA_EXPORT cudaError_t cudaMemcpyAsync(void* destination, const void* source, size_t num_bytes,
                                           cudaMemcpyKind kind, cudaStream_t handle) {
  SIMCUDA_ENTER(cudaMemcpyAsync, kHostCall);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  return fail(copy(stream, plain(destination, source, num_bytes, kind)));
}

SIMCUDA_EXPORT cudaError_t cudaMemcpyPeer(void* destination, int, const void* source, int,
                                          size_t num_bytes) {
  SIMCUDA_ENTER(cudaMemcpyPeer, kHostCall);
  if (cudaError_t error = refuse_during_capture()) return fail(error);
  StreamPtr stream;
  if (cudaError_t error = open_stream(nullptr, stream)) return fail(error);
  return fail(copy(stream, plain(destination, source, num_bytes, cudaMemcpyDeviceToDevice)));
}

SIMCUDA_EXPORT cudaError_t cudaMemcpyPeerAsync(void* destination, int destination_device,
                                               const void* source, int source_device,
                                               size_t num_bytes, cudaStream_t handle) {
  SIMCUDA_ENTER(cudaMemcpyPeerAsync, kHostCall);
  if (!is_device(destination_device) || !is_device(source_device)) {
    return fail(cudaErrorInvalidDevice);
  }
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  return fail(copy(stream, plain(destination, source, num_bytes, cudaMemcpyDeviceToDevice)));
}

SIMCUDA_EXPORT cudaError_t cudaMemcpy2DAsync(void* destination, size_t destination_pitch,
                                             const void* source, size_t source_pitch, size_t width,
                                             size_t height, cudaMemcpyKind kind,
                                             cudaStream_t handle) {
  SIMCUDA_ENTER(cudaMemcpy2DAsync, kHostCall);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  CopyRequest request{.destination = destination,
                      .source = source,
                      .shape = {width, height, destination_pitch, source_pitch},
                      .kind = kind};
  return fail(copy(stream, request));
}

SIMCUDA_EXPORT cudaError_t cudaMemcpy2D(void* destination, size_t destination_pitch,
                                        const void* source, size_t source_pitch, size_t width,
                                        size_t height, cudaMemcpyKind kind) {
  SIMCUDA_ENTER(cudaMemcpy2D, kHostCall);
  if (cudaError_t error = refuse_during_capture()) return fail(error);
  StreamPtr stream;
  if (cudaError_t error = open_stream(nullptr, stream)) return fail(error);
  CopyRequest request{.destination = destination,
                      .source = source,
                      .shape = {width, height, destination_pitch, source_pitch},
                      .kind = kind,
                      .blocking = true};
  return fail(copy(stream, request));
}

SIMCUDA_EXPORT cudaError_t cudaMemcpyBatchAsync(void* const* destinations,
                                                const void* const* sources, const size_t* num_bytes,
                                                size_t count, cudaMemcpyAttributes* attributes,
                                                size_t* attribute_starts, size_t num_attributes,
                                                cudaStream_t handle) {
  SIMCUDA_ENTER(cudaMemcpyBatchAsync, kHostCall);
  // The default stream is refused by the real one too.
  bool default_stream = handle == nullptr || handle == cudaStreamLegacy;
  if (default_stream || count == 0 || num_attributes == 0 || num_attributes > count) {
    return fail(cudaErrorInvalidValue);
  }
  if (attribute_starts[0] != 0) return fail(cudaErrorInvalidValue);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  std::vector<CopyRequest> requests;
  requests.reserve(count);
  size_t attribute = 0;
  for (size_t i = 0; i < count; ++i) {
    bool next_starts = attribute + 1 < num_attributes && attribute_starts[attribute + 1] == i;
    if (next_starts) ++attribute;
    CopyRequest request = plain(destinations[i], sources[i], num_bytes[i], cudaMemcpyDefault);
    request.source_ends =
        attributes[attribute].srcAccessOrder == cudaMemcpySrcAccessOrderDuringApiCall;
    requests.push_back(request);
  }
  return fail(copy_each(stream, requests));
}

SIMCUDA_EXPORT cudaError_t cudaMemset(void* destination, int value, size_t num_bytes) {
  SIMCUDA_ENTER(cudaMemset, kHostCall);
  if (cudaError_t error = refuse_during_capture()) return fail(error);
  StreamPtr stream;
  if (cudaError_t error = open_stream(nullptr, stream)) return fail(error);
  return fail(fill(stream, destination, value, {num_bytes, 1, num_bytes, 0}));
}

SIMCUDA_EXPORT cudaError_t cudaMemsetAsync(void* destination, int value, size_t num_bytes,
                                           cudaStream_t handle) {
  SIMCUDA_ENTER(cudaMemsetAsync, kHostCall);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  return fail(fill(stream, destination, value, {num_bytes, 1, num_bytes, 0}));
}

SIMCUDA_EXPORT cudaError_t cudaMemset2DAsync(void* destination, size_t pitch, int value,
                                             size_t width, size_t height, cudaStream_t handle) {
  SIMCUDA_ENTER(cudaMemset2DAsync, kHostCall);
  StreamPtr stream;
  if (cudaError_t error = open_stream(handle, stream)) return fail(error);
  return fail(fill(stream, destination, value, {width, height, pitch, 0}));
}
