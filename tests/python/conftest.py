"""The package is tested as a user gets it: built into a wheel, and installed."""

import fcntl
import gc
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sim_process import SimProcess

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments, check=True, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=check, text=True, capture_output=True, **options,
    )  # fmt: skip


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built once for all the processes among which pytest-xdist shares the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "wheel"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not list(folder.glob("*.whl")):
            build = python(
                "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", folder, ROOT,
                check=False,
            )  # fmt: skip
            assert build.returncode == 0, build.stdout + build.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="session")
def site_packages(wheel, tmp_path_factory) -> Path:
    """A folder with the installed package and, as in a real site-packages, torch beside it."""
    folder = tmp_path_factory.mktemp("site-packages")
    python("-m", "pip", "install", "--no-deps", "--no-index", "--target", folder, wheel)
    torch = Path(importlib.util.find_spec("torch").origin).parent
    (folder / "torch").symlink_to(torch)
    return folder


@pytest.fixture
def run_python(site_packages):
    """Runs a line of Python in which the installed package can be imported."""

    def run(code: str, path: Path = site_packages) -> subprocess.CompletedProcess:
        return python("-c", f"import sys; sys.path.insert(0, {str(path)!r}); {code}", check=False)

    return run


@pytest.fixture(scope="session")
def package_folder(request) -> Path:
    """A folder with the package: the source tree when a build is named, and else the wheel's."""
    if os.environ.get("RESIDENCY_SIM_LIBRARIES"):
        return ROOT / "torch_ops"
    return request.getfixturevalue("site_packages")


@pytest.fixture
def sim_process(package_folder, tmp_path) -> SimProcess:
    return SimProcess(package_folder, tmp_path)


@pytest.fixture(scope="session")
def sim(package_folder):
    """The module torch_residency.sim, after it gave this process two simulated cards of 1 GiB.

    Tests ask for it, or for `torch`, and do not import torch themselves: it comes after.
    """
    sys.path.insert(0, str(package_folder))
    from torch_residency import sim

    sim.load(devices=2, memory="1GiB")
    return sim


@pytest.fixture
def torch(sim):
    """The module torch on the simulated cards, with nothing left by another test."""
    import torch

    def clean():
        gc.collect()
        for device in range(2):
            torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        for device in range(2):
            torch.cuda.reset_peak_memory_stats(device)
            torch.cuda.reset_accumulated_memory_stats(device)
        torch.cuda.set_device(0)

    torch.cuda.init()
    clean()
    yield torch
    clean()
