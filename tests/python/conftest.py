"""The package is tested as a user gets it: built into a wheel, and installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def python(*arguments, check=True, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        check=check, text=True, capture_output=True, **options,
    )  # fmt: skip


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = python(
        "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", folder, ROOT, check=False
    )
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
