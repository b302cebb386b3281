"""Follows a script: its steps, where memory ran out, and peaks that the script itself resets."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

_LIBRARY_FOLDERS = tuple(
    os.path.join(folder, "")
    for folder in {
        sysconfig.get_path("purelib"),
        sysconfig.get_path("platlib"),
        sysconfig.get_path("stdlib"),
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
    }
)


@dataclass(frozen=True)
class OutOfMemory:
    """One refused allocation.

    Attributes:
        device: ordinal.
        requested_bytes: what was asked of the device, rounded by the allocator.
        steps: optimizer steps done before.
        backwards: calls of backward begun before.
        where: "file:line" of the script, or "" when no line of it was running.
    """

    device: int
    requested_bytes: int
    steps: int
    backwards: int
    where: str


class Watch:
    """What has happened in this process so far. Thread-safe."""

    def __init__(self, script: str) -> None:
        self.script = script
        self.steps = 0
        self.backwards = 0
        self.out_of_memory: list[OutOfMemory] = []
        # By (device, name of the statistic), as they were before the script reset them.
        self.peaks: dict[tuple[int, str], int] = {}
        self.sums: dict[tuple[int, str], int] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Follow torch, which has been imported in full. CUDA is not initialised."""
        import torch
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(self._after_step)
        self._wrap(torch.autograd, "backward", self._before_backward)
        for owner, name, keep in (
            (torch._C, "_cuda_resetPeakMemoryStats", self._keep_peaks),
            (torch._C, "_accelerator_resetPeakStats", self._keep_peaks),
            (torch._C, "_cuda_resetAccumulatedMemoryStats", self._keep_sums),
            (torch._C, "_accelerator_resetAccumulatedStats", self._keep_sums),
        ):
            self._wrap(owner, name, keep)

    def start_allocator(self) -> None:
        """Follow the device allocator: when CUDA is initialised, as there is none before."""
        import torch

        if is_followed(torch.cuda.get_allocator_backend()):
            torch._C._cuda_attach_out_of_memory_observer(self._on_out_of_memory)

    @staticmethod
    def _wrap(owner: object, name: str, before: Callable[..., None]) -> None:
        original = getattr(owner, name)

        def wrapper(*arguments, **options):
            before(*arguments)
            return original(*arguments, **options)

        wrapper.__wrapped__ = original
        wrapper.__name__ = name
        wrapper.__doc__ = original.__doc__
        setattr(owner, name, wrapper)

    def _after_step(self, *_) -> None:
        with self._lock:
            self.steps += 1

    def _before_backward(self, *_) -> None:
        with self._lock:
            self.backwards += 1

    def _on_out_of_memory(self, device: int, requested: int, total: int, free: int) -> None:
        where = self._line_of_script()
        with self._lock:
            self.out_of_memory.append(
                OutOfMemory(device, requested, self.steps, self.backwards, where)
            )

    def _line_of_script(self) -> str:
        # Autograd's threads have no frames of the script: then it is waiting in backward.
        for thread in (threading.get_ident(), threading.main_thread().ident):
            # The dictionary holds this frame too: kept in a variable, it would keep the tensors of
            # the step that failed until the garbage collector comes by.
            frame: FrameType | None = sys._current_frames().get(thread)
            while frame is not None:
                file = frame.f_code.co_filename
                if file == self.script or not file.startswith(("<", *_LIBRARY_FOLDERS)):
                    return f"{min(file, os.path.relpath(file), key=len)}:{frame.f_lineno}"
                frame = frame.f_back
        return ""

    def _keep_peaks(self, *_) -> None:
        for key, value in current_statistics().items():
            if key[1] in _PEAKS:
                self.peaks[key] = max(value, self.peaks.get(key, 0))

    def _keep_sums(self, device: int, *_) -> None:
        for key, value in current_statistics().items():
            if key[1] in _SUMS and key[0] == device:
                self.sums[key] = value + self.sums.get(key, 0)

    def statistics(self) -> dict[tuple[int, str], int]:
        """Return torch.cuda.memory_stats over the whole run, by (device, name)."""
        result = current_statistics()
        for key, value in self.peaks.items():
            result[key] = max(value, result.get(key, 0))
        for key, value in self.sums.items():
            result[key] = value + result.get(key, 0)
        return result


_PEAKS = ("allocated_bytes.all.peak", "reserved_bytes.all.peak")
_SUMS = ("num_alloc_retries", "num_ooms")


def is_followed(allocator: str) -> bool:
    """Return whether it has figures; one of the script's own (CUDAPluggableAllocator) has none."""
    return allocator == "native"


def current_statistics() -> dict[tuple[int, str], int]:
    """Return the figures that a report needs, by (device, name); none before CUDA is in use."""
    import torch

    if not torch.cuda.is_initialized():
        return {}
    if not is_followed(torch.cuda.get_allocator_backend()):
        return {}
    return {
        (device, name): statistics.get(name, 0)
        for device in range(torch.cuda.device_count())
        for statistics in [torch.cuda.memory_stats(device)]
        for name in (*_PEAKS, *_SUMS)
    }
