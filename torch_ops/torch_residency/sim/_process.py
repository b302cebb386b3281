"""Child processes of a run: they have the simulated card too, and report what they did on it."""

from __future__ import annotations

import atexit
import json
import os
import sys
import sysconfig
from pathlib import Path

from torch_residency.sim import _library, _report
from torch_residency.sim._watch import Watch

REPORTS_VARIABLE = "RESIDENCY_SIM_REPORTS"
# Exit status when the card cannot be had as it was asked for, as argparse's own.
REFUSED = 2
_SETTING_PREFIX = "SIMCUDA_"

# torch finds the entry point torch.backends = start in it. A folder of its own, which only children
# of a run have on their path: torch elsewhere hears nothing of it.
_ENTRY_POINT = Path(__file__).resolve().parent / "_children"


def give_to_children(settings: dict[str, str]) -> int:
    """Set the environment that child processes are started with.

    The libraries are preloaded there, and torch calls :func:`start` when it is imported.

    Returns:
        A file in which children write their reports, one a line. It has no name in any folder, so
        that nothing is left however this process ends.
    """
    folder = _library.libraries()
    preload = [str(folder / name) for name in _library.RUNTIME_LIBRARIES]
    _prepend("LD_PRELOAD", preload)
    package = Path(__file__).resolve().parents[2]
    paths = [str(_ENTRY_POINT)]
    sys.path.append(str(_ENTRY_POINT))  # multiprocessing's "spawn" gives its children this list
    if package not in (Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")):
        paths.append(str(package))
    _prepend("PYTHONPATH", paths)
    for key, value in settings.items():
        os.environ[_SETTING_PREFIX + key.upper()] = value
    reports = os.memfd_create("residency-sim-reports")
    os.environ[REPORTS_VARIABLE] = f"/proc/{os.getpid()}/fd/{reports}"
    return reports


def start() -> None:
    """Called by torch while it is imported in a child process (the entry point torch.backends)."""
    if not _library.is_active():
        return
    try:
        _library.check_allocator()
    except _library.SimulationError as error:
        print(f"torch_residency.sim: {error}", file=sys.stderr)
        sys.exit(REFUSED)
    _library.load_operators()
    reports = os.environ.get(REPORTS_VARIABLE)
    if reports:
        import torch

        # Too early to follow: torch is not imported in full. In the call that comes later, another
        # _lazy_call would wait for itself (torch 2.11 holds a plain lock).
        torch.cuda._lazy_call(lambda: _follow(reports))


def read_reports(reports: int) -> list[dict]:
    """Return the children's reports in the order of their process ids."""
    os.lseek(reports, 0, os.SEEK_SET)
    with os.fdopen(os.dup(reports), "rb") as file:
        lines = file.read().split(b"\n")
    # The last is empty, or of a child that was killed while it wrote.
    return sorted((json.loads(line) for line in lines[:-1]), key=lambda report: report["pid"])


def _follow(reports: str) -> None:
    watch = Watch(os.path.abspath(sys.argv[0]) if sys.argv else "")
    watch.start()
    watch.start_allocator()
    pid = os.getpid()

    def write() -> None:
        if os.getpid() != pid or not _report.used_card():
            return
        line = json.dumps(_report.collect(watch)).encode() + b"\n"
        try:
            file = os.open(reports, os.O_WRONLY | os.O_APPEND)
        except OSError:
            return  # the run has ended
        os.write(file, line)
        os.close(file)

    atexit.register(write)


def _prepend(variable: str, entries: list[str]) -> None:
    old = [entry for entry in os.environ.get(variable, "").split(":") if entry]
    os.environ[variable] = ":".join(entries + [entry for entry in old if entry not in entries])
