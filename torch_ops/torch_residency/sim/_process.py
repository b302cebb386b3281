"""Child processes of a run: they have the simulated card too, and report what they did on it."""

from __future__ import annotations

import atexit
import json
import os
import sys
import sysconfig
import tempfile
from pathlib import Path

from torch_residency.sim import _library, _report
from torch_residency.sim._watch import Watch

REPORTS_VARIABLE = "RESIDENCY_SIM_REPORTS"
# Exit status when the card cannot be had as it was asked for, as argparse's own.
REFUSED = 2
_SETTING_PREFIX = "SIMCUDA_"

_METADATA = "Metadata-Version: 2.1\nName: torch-residency-sim\nVersion: 0\n"
_ENTRY_POINTS = f"[torch.backends]\ntorch_residency_sim = {__name__}:start\n"


def give_to_children(settings: dict[str, str]) -> Path:
    """Set the environment that child processes are started with.

    The libraries are preloaded there, and torch calls :func:`start` when it is imported. It finds
    that entry point in a folder of this run's only: torch elsewhere hears nothing of it.

    Returns:
        That folder, in which children write their reports. The caller removes it.
    """
    folder = _library.libraries()
    preload = [str(folder / name) for name in _library.RUNTIME_LIBRARIES]
    _prepend("LD_PRELOAD", preload)
    package = Path(__file__).resolve().parents[2]
    own = Path(tempfile.mkdtemp(prefix="residency-sim-"))
    distribution = own / "torch_residency_sim.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text(_METADATA)
    (distribution / "entry_points.txt").write_text(_ENTRY_POINTS)
    paths = [str(own)]
    sys.path.append(str(own))  # multiprocessing's "spawn" gives its children this list
    if package not in (Path(sysconfig.get_path(key)) for key in ("purelib", "platlib")):
        paths.append(str(package))
    _prepend("PYTHONPATH", paths)
    for key, value in settings.items():
        os.environ[_SETTING_PREFIX + key.upper()] = value
    os.environ[REPORTS_VARIABLE] = str(own)
    return own


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
        torch.cuda._lazy_call(lambda: _follow(Path(reports)))


def read_reports(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def _follow(folder: Path) -> None:
    watch = Watch(os.path.abspath(sys.argv[0]) if sys.argv else "")
    watch.start()
    watch.start_allocator()
    pid = os.getpid()

    def write() -> None:
        if os.getpid() == pid and folder.is_dir():
            text = json.dumps(_report.collect(watch))
            partial = folder / f"{pid}.partial"
            partial.write_text(text)
            partial.rename(folder / f"{pid}.json")

    atexit.register(write)


def _prepend(variable: str, entries: list[str]) -> None:
    old = [entry for entry in os.environ.get(variable, "").split(":") if entry]
    os.environ[variable] = ":".join(entries + [entry for entry in old if entry not in entries])
