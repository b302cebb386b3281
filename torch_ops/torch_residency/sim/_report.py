"""What is said at the end of a run, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from torch_residency.sim import control
from torch_residency.sim._watch import Watch, is_followed

_DIRECTIONS = {
    "h2d": "to the device",
    "d2h": "to the host",
    "d2d": "within a device",
    "peer": "between devices",
}


def collect(watch: Watch) -> dict:
    """Return this process's report as JSON types: bytes, nanoseconds, counts."""
    import torch

    statistics = watch.statistics()
    total = control.counters()
    devices = []
    visible = visible_cards()
    for device, card in enumerate(visible):
        counters = control.counters(device)
        devices.append(
            {
                "card": card,
                "peak_allocated_bytes": statistics.get((device, "allocated_bytes.all.peak"), 0),
                "peak_reserved_bytes": statistics.get((device, "reserved_bytes.all.peak"), 0),
                "peak_device_bytes": counters.peak_device_bytes,
                "alloc_retries": statistics.get((device, "num_alloc_retries"), 0),
                "out_of_memory": statistics.get((device, "num_ooms"), 0),
            }
        )
    return {
        "pid": os.getpid(),
        "card": {key: control.get(key) for key in ("devices", "memory", "mode", "card", "host")},
        "visible_devices": visible,
        "allocator": torch.cuda.get_allocator_backend(),
        "devices": devices,
        "out_of_memory": [dataclasses.asdict(event) for event in watch.out_of_memory],
        "optimizer_steps": watch.steps,
        "backward_calls": watch.backwards,
        "peak_pinned_bytes": control.peak_pinned_bytes(),
        "copies": {name: dataclasses.asdict(getattr(total, name)) for name in _DIRECTIONS},
        "kernels": total.kernels,
        "kernel_time_ns": total.kernel_time_ns,
        "overlap_time_ns": total.overlap_time_ns,
        "host_syncs": total.host_syncs,
        "busy_host_syncs": total.busy_host_syncs,
        "blocked_time_ns": total.blocked_time_ns,
        "modelled_time_ns": max(control.now_ns(), control.device_end_ns()),
        "deterministic": control.is_deterministic(),
    }


def used_card() -> bool:
    """Return whether this process has had memory on a card, or done anything there."""
    total = control.counters()
    return any(
        (
            total.peak_device_bytes,
            total.failed_allocations,
            total.kernels,
            total.host_syncs,
            control.peak_pinned_bytes(),
            *(getattr(total, name).count for name in _DIRECTIONS),
        )
    )


def visible_cards() -> list[int]:
    """Return the places in the machine of the devices that this process sees."""
    return [int(card) for card in control.get("visible_devices").split(",") if card]


def as_text(report: dict) -> str:
    card = report["card"]
    memory = card["memory"]
    lines = [
        f"{card['devices']} x {card['card']} with "
        f"{size(int(memory)) if memory.isdigit() else memory}, {card['mode']}"
    ]
    visible = report["visible_devices"]
    if visible != list(range(int(card["devices"]))):
        names = ", ".join(map(str, visible)) or "none"
        lines.append(f"CUDA_VISIBLE_DEVICES shows the script {len(visible)} of them: {names}")
    for i, device in enumerate(report["devices"]):
        if not is_followed(report["allocator"]):
            peak = size(device["peak_device_bytes"])
            lines.append(f"device {i}: peak {peak}, by an allocator of the script's own")
            continue
        lines.append(
            f"device {i}: peak allocated {size(device['peak_allocated_bytes'])}, "
            f"peak reserved {size(device['peak_reserved_bytes'])}, "
            f"allocator retries {device['alloc_retries']}, "
            f"out of memory {device['out_of_memory']}"
        )
    if report["out_of_memory"]:
        first = report["out_of_memory"][0]
        at = f" at {first['where']}" if first["where"] else ""
        lines.append(
            f"first out of memory: {size(first['requested_bytes'])} on device {first['device']}"
            f"{at}, after {count(first['steps'], 'optimizer step')} and "
            f"{count(first['backwards'], 'backward call')}"
        )
    lines.append(f"page-locked on the host: peak {size(report['peak_pinned_bytes'])}")
    copies = []
    for name, words in _DIRECTIONS.items():
        direction = report["copies"][name]
        text = f"{size(direction['bytes'])} {words}"
        if direction["pageable_bytes"]:
            text += f" ({size(direction['pageable_bytes'])} pageable)"
        copies.append(text)
    lines.append("copied: " + ", ".join(copies))
    lines.append(
        f"the host waited for the device: {count(report['host_syncs'], 'call')}, "
        f"{report['busy_host_syncs']} of them while it was busy, "
        f"{duration(report['blocked_time_ns'])}"
    )
    lines.append(f"modelled time: {duration(report['modelled_time_ns'])}")
    lines.append(f"order: {'deterministic' if report['deterministic'] else 'not deterministic'}")
    return "\n".join(lines)


def show(report: dict, children: list[dict], json_path: str | None) -> None:
    """Print to standard error, which leaves the script's output as it was, and write the JSON."""
    sys.stdout.flush()
    texts = [f"--- simulated card: {as_text(report)}"]
    for child in children:
        texts.append(f"--- child process {child['pid']}: {as_text(child)}")
    print("\n".join(texts), file=sys.stderr, flush=True)
    if json_path:
        text = json.dumps({**report, "children": children}, indent=1) + "\n"
        try:
            Path(json_path).write_text(text)
        except OSError as error:
            print(f"torch_residency.sim: cannot write '{json_path}': {error}", file=sys.stderr)


def size(num_bytes: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.2f} {unit}"
    return f"{num_bytes} B"


def duration(ns: int) -> str:
    for unit, factor in (("s", 10**9), ("ms", 10**6), ("us", 10**3)):
        if ns >= factor:
            return f"{ns / factor:.3f} {unit}"
    return f"{ns} ns"


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
