"""Measures what the simulated card costs: start-up, enqueue, copies, operators.

Run by benchmarks/run, and told as Google Benchmark's programs are: it takes their options and
writes what they write.
"""

import argparse
import ctypes
import functools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MIB = 2**20
COPY_BYTES = 64 * 10**6


def elapsed_s(function) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def startup_s() -> float:
    """Start of a script that only imports torch, on the card less off it; the two by turns."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text("import torch\n")

        def start(*arguments):
            command = [sys.executable, *arguments, script]
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)

        start()  # into the page cache
        return statistics.median(
            elapsed_s(lambda: start("-m", "torch_residency.sim")) - elapsed_s(start)
            for _ in range(3)
        )


@functools.cache
def card():
    """Gives this process the card; returns the module torch."""
    from torch_residency import sim

    sim.load(memory="2GiB")
    import torch

    torch.set_num_threads(1)
    return torch


def copy_pair(torch):
    source = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target.copy_(source)  # first touch
    torch.cuda.synchronize()
    return source, target


def enqueue_64mb_ms() -> float:
    """A copy of 64 MB from page-locked memory until the call returns."""
    torch = card()
    source, target = copy_pair(torch)
    times = []
    for _ in range(9):
        times.append(elapsed_s(lambda: target.copy_(source, non_blocking=True)))
        torch.cuda.synchronize()
    return statistics.median(times) * 1e3


def copy_ratio() -> float:
    """The same copy until it is done, over memcpy of as much; the two by turns."""
    torch = card()
    source, target = copy_pair(torch)
    other = torch.ones(COPY_BYTES, dtype=torch.uint8)
    ratios = []

    def copy():
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    def memcpy():
        ctypes.memmove(other.data_ptr(), source.data_ptr(), COPY_BYTES)

    for _ in range(15):
        ratios.append(elapsed_s(copy) / elapsed_s(memcpy))
    return statistics.median(ratios)


def operator_overhead_us() -> float:
    """Of an operator on a few numbers: enqueued and done, less the same on the CPU.

    The mean over add, addmm, gelu and layer_norm.
    """
    torch = card()
    functional = torch.nn.functional
    repeats = 500
    added = []
    for name in ("add", "addmm", "gelu", "layer_norm"):
        times = {}
        for device in ("cpu", "cuda"):
            a, b = torch.ones(4, 8, device=device), torch.ones(8, 8, device=device)
            weight = torch.ones(8, device=device)
            operator = {
                "add": lambda a=a: torch.add(a, a),
                "addmm": lambda a=a, b=b, w=weight: torch.addmm(w, a, b),
                "gelu": lambda a=a: functional.gelu(a),
                "layer_norm": lambda a=a, w=weight: functional.layer_norm(a, (8,), w, w),
            }[name]

            def batch(operator=operator):
                for _ in range(repeats):
                    operator()
                torch.cuda.synchronize()

            with torch.no_grad():
                batch()
                times[device] = statistics.median(elapsed_s(batch) for _ in range(7)) / repeats
        added.append((times["cuda"] - times["cpu"]) * 1e6)
        print(f"{name}: {added[-1]:.1f} us added", file=sys.stderr)
    return statistics.mean(added)


BENCHMARKS = {
    f"sim/{function.__name__}": function
    for function in (startup_s, enqueue_64mb_ms, copy_ratio, operator_overhead_us)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--benchmark_filter", default=".")
    parser.add_argument("--benchmark_repetitions", type=int, default=1)
    parser.add_argument("--benchmark_out", type=Path)
    parser.add_argument("--benchmark_out_format", choices=["json"], default="json")
    options = parser.parse_args()

    runs = []
    for name, function in BENCHMARKS.items():
        if not re.search(options.benchmark_filter, name):
            continue
        for _ in range(options.benchmark_repetitions):
            value = function()
            print(f"{name:<44} {value:.4g}", flush=True)
            runs.append({"name": name, "run_name": name, "run_type": "iteration", "value": value})
    if options.benchmark_out and runs:
        options.benchmark_out.write_text(json.dumps({"benchmarks": runs}))


if __name__ == "__main__":
    main()
