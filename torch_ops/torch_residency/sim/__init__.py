"""A simulated CUDA card: PyTorch's own CUDA code, on a machine without a GPU.

``python -m torch_residency.sim script.py`` runs a script on it. From Python::

    from torch_residency import sim

    sim.load(memory="24GiB")      # before the first import of torch
    import torch

    torch.ones(3, device="cuda")
    print(sim.counters())

See docs/simulated_cuda.md. Importing this package takes no time and needs no torch.
"""

from torch_residency.sim._library import SimulationError, is_active, load
from torch_residency.sim.control import (
    Copies,
    Counters,
    break_device,
    calls,
    counters,
    device_end_ns,
    fail,
    get,
    hold,
    is_deterministic,
    now_ns,
    peak_pinned_bytes,
    pending,
    pinned_bytes,
    release,
    reset_counters,
    set,
    set_capacity,
    step,
    timeline,
)

__all__ = [
    "Copies",
    "Counters",
    "SimulationError",
    "break_device",
    "calls",
    "counters",
    "device_end_ns",
    "fail",
    "get",
    "hold",
    "is_active",
    "is_deterministic",
    "load",
    "now_ns",
    "peak_pinned_bytes",
    "pending",
    "pinned_bytes",
    "release",
    "reset_counters",
    "set",
    "set_capacity",
    "step",
    "timeline",
]
