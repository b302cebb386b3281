"""What a test or a script sets and reads of the simulated card.

Every function may be called from any thread, and raises SimulationError when there is no simulated
card in the process or when the runtime refuses the call (nothing has changed then). Devices are
ordinals; -1 stands for all together. Streams are torch.cuda.Stream objects, raw handles, or None
for the current device's default stream. Times are nanoseconds of the virtual clock, sizes bytes.
Source: include/residency/simcuda/control.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_residency.sim import _library

if TYPE_CHECKING:
    import torch

    StreamLike = torch.cuda.Stream | int | None

_DIRECTIONS = ("h2d", "d2h", "d2d", "peer")

_u64 = ctypes.c_uint64


class _Counters(ctypes.Structure):
    """struct simcuda_counters, in its order."""

    _fields_ = [
        ("copies", _u64 * 4),
        ("copied_bytes", _u64 * 4),
        ("pageable_copies", _u64 * 2),
        ("pageable_bytes", _u64 * 2),
        ("copy_time", _u64 * 4),
        ("kernels", _u64),
        ("kernel_time", _u64),
        ("overlap_time", _u64),
        ("host_syncs", _u64),
        ("busy_host_syncs", _u64),
        ("blocked_time", _u64),
        ("device_bytes", _u64),
        ("peak_device_bytes", _u64),
        ("failed_allocations", _u64),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "present": (ctypes.c_int, []),
    "message": (ctypes.c_char_p, []),
    "set": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_char_p]),
    "get": (ctypes.c_char_p, [ctypes.c_char_p]),
    "set_capacity": (ctypes.c_int, [ctypes.c_int, _u64]),
    "read_counters": (ctypes.c_int, [ctypes.c_int, ctypes.POINTER(_Counters)]),
    "calls": (_u64, [ctypes.c_char_p]),
    "pinned_bytes": (_u64, []),
    "peak_pinned_bytes": (_u64, []),
    "reset_counters": (None, []),
    "now": (_u64, []),
    "device_end": (_u64, [ctypes.c_int]),
    "deterministic": (ctypes.c_int, []),
    "record_timeline": (None, [ctypes.c_int]),
    "write_timeline": (ctypes.c_int, [ctypes.c_char_p]),
    "hold": (ctypes.c_int, [ctypes.c_void_p]),
    "step": (ctypes.c_int, [ctypes.c_void_p, _u64]),
    "release": (ctypes.c_int, [ctypes.c_void_p]),
    "pending": (_u64, [ctypes.c_void_p]),
    "fail": (ctypes.c_int, [ctypes.c_char_p, _u64, _u64, ctypes.c_int]),
    "break_device": (ctypes.c_int, [ctypes.c_int, ctypes.c_int]),
}


@dataclass(frozen=True)
class Copies:
    """Copies in one direction.

    Attributes:
        count: copies, pageable ones included.
        bytes: bytes they moved.
        pageable_count: those from or to pageable host memory, which the host waits for.
        pageable_bytes: bytes of those.
        time_ns: modelled time that the direction's engine was busy.
    """

    count: int = 0
    bytes: int = 0
    pageable_count: int = 0
    pageable_bytes: int = 0
    time_ns: int = 0


@dataclass(frozen=True)
class Counters:
    """What happened since the start or the last :func:`reset_counters`.

    Attributes:
        h2d: host to device.
        d2h: device to host.
        d2d: within a device.
        peer: between devices.
        kernels: operators and other kernels that ran on a stream.
        kernel_time_ns: modelled time that at least one kernel ran.
        overlap_time_ns: modelled time that a kernel and a copy from or to the host ran at once.
        host_syncs: calls that make the host wait for the device: synchronise, pageable and blocking
            copies, cudaFree.
        busy_host_syncs: of these, entered while the device had work left.
        blocked_time_ns: modelled time that the host waited in them.
        device_bytes: held by cudaMalloc and mapped memory now.
        peak_device_bytes: the most that was held.
        failed_allocations: refused for lack of memory, injected faults excluded. The allocator of
            PyTorch may have retried them with success.
    """

    h2d: Copies
    d2h: Copies
    d2d: Copies
    peer: Copies
    kernels: int
    kernel_time_ns: int
    overlap_time_ns: int
    host_syncs: int
    busy_host_syncs: int
    blocked_time_ns: int
    device_bytes: int
    peak_device_bytes: int
    failed_allocations: int


def _function(name: str) -> Any:
    runtime = _library.runtime()
    if runtime is None:
        raise _library.SimulationError(
            "there is no simulated card in this process: start it with python -m "
            "torch_residency.sim, or call torch_residency.sim.load() before torch is imported"
        )
    try:
        function = getattr(runtime, f"simcuda_{name}")
    except AttributeError:
        raise _library.SimulationError(
            f"the simulated runtime has no simcuda_{name}: it and this package are not of one build"
        ) from None
    function.restype, function.argtypes = _SIGNATURES[name]
    return function


def _call(name: str, *arguments: object) -> None:
    # The message is the calling thread's, so it is asked for in the same call chain.
    if _function(name)(*arguments) != 0:
        raise _library.SimulationError(_function("message")().decode())


def check_version(expected: int) -> None:
    """Raise SimulationError when the runtime has not this version of the control interface."""
    found = _function("present")()
    if found != expected:
        raise _library.SimulationError(
            f"the simulated runtime has version {found} of its control interface, and this package "
            f"expects {expected}: they are not of one build"
        )


def set(key: str, value: object) -> None:
    """Change a setting: control.h and docs/simulated_cuda.md list them.

    Raises:
        SimulationError: there is no such setting, it cannot take the value, or it can be set before
            the first use of a device only.
    """
    _call("set", key.encode(), str(value).encode())


def get(key: str) -> str:
    """Return the value in force, as text that :func:`set` takes."""
    value = _function("get")(key.encode())
    if value is None:
        raise _library.SimulationError(f"the simulated card has no setting '{key}'")
    return value.decode()


def set_capacity(device: int, capacity_bytes: int) -> None:
    """Change one device's memory at any time. Below what is in use, it only refuses more."""
    _call("set_capacity", device, capacity_bytes)


def counters(device: int = -1) -> Counters:
    """Return what happened on one device, or on all together (peaks are summed then)."""
    raw = _Counters()
    _call("read_counters", device, ctypes.byref(raw))
    directions = {
        name: Copies(
            count=raw.copies[i],
            bytes=raw.copied_bytes[i],
            pageable_count=raw.pageable_copies[i] if i < 2 else 0,
            pageable_bytes=raw.pageable_bytes[i] if i < 2 else 0,
            time_ns=raw.copy_time[i],
        )
        for i, name in enumerate(_DIRECTIONS)
    }
    return Counters(
        **directions,
        kernels=raw.kernels,
        kernel_time_ns=raw.kernel_time,
        overlap_time_ns=raw.overlap_time,
        host_syncs=raw.host_syncs,
        busy_host_syncs=raw.busy_host_syncs,
        blocked_time_ns=raw.blocked_time,
        device_bytes=raw.device_bytes,
        peak_device_bytes=raw.peak_device_bytes,
        failed_allocations=raw.failed_allocations,
    )


def calls(entry_point: str) -> int:
    """Return how often an entry point of the runtime or driver ("cudaMalloc") was called."""
    return _function("calls")(entry_point.encode())


def pinned_bytes() -> int:
    """Return the page-locked host bytes, in whole pages."""
    return _function("pinned_bytes")()


def peak_pinned_bytes() -> int:
    """Return the most page-locked host bytes there were."""
    return _function("peak_pinned_bytes")()


def reset_counters() -> None:
    """Set counters and call counts to zero, and peaks to what is held. The clock runs on."""
    _function("reset_counters")()


def now_ns() -> int:
    """Return the host's present time on the virtual clock."""
    return _function("now")()


def device_end_ns(device: int = -1) -> int:
    """Return when everything enqueued on a device will be done. Held streams count as idle."""
    return _function("device_end")(device)


def is_deterministic() -> bool:
    """Return whether one host thread at a time has enqueued, so that figures repeat exactly."""
    return bool(_function("deterministic")())


@contextlib.contextmanager
def timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record every operation in the block, and write them for chrome://tracing or Perfetto.

    Written also when the block raises. Blocks do not nest.
    """
    record = _function("record_timeline")
    record(1)
    try:
        yield
    finally:
        record(0)
        _call("write_timeline", os.fsencode(path))


def hold(stream: StreamLike = None) -> None:
    """Stop a stream before its next operation; what waits for it waits."""
    _call("hold", _handle(stream))


def step(stream: StreamLike = None, count: int = 1) -> None:
    """Let a held stream run so many operations more."""
    _call("step", _handle(stream), count)


def release(stream: StreamLike = None) -> None:
    """Let a held stream run on."""
    _call("release", _handle(stream))


def pending(stream: StreamLike = None) -> int:
    """Return how many operations of a stream are enqueued and not really done."""
    return _function("pending")(_handle(stream))


def fail(entry_point: str, *, error: int, skip: int = 0, count: int = 1) -> None:
    """Make coming calls of an entry point fail without doing anything.

    Args:
        entry_point: of the runtime or driver, such as "cudaMalloc" or "cuMemCreate".
        error: the cudaError_t or CUresult that is returned; 2 is out of memory in both.
        skip: calls that still pass.
        count: calls that fail after those; 0 takes an earlier order back.
    """
    _call("fail", entry_point.encode(), skip, count, error)


def break_device(device: int, error: int = 700) -> None:
    """Make a device fail for good: every call on it returns the error (700: illegal address)."""
    _call("break_device", device, error)


def _handle(stream: StreamLike) -> int | None:
    if stream is None or isinstance(stream, int):
        return stream
    return stream.cuda_stream
