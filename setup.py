"""Builds the wheel: CMake makes the libraries, setuptools packs them.

The wheel serves every Python version (nothing in it links libpython) and one torch minor version.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


def version_in(file: Path) -> str:
    return re.search(r"^__version__ = ['\"]([^'\"]+)", file.read_text(), re.MULTILINE)[1]


def torch_folder() -> Path:
    # Not imported: that takes seconds, and version.py says all that is needed.
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(
            f"torch-residency is built against the torch it will run with, and {sys.executable} "
            "has none: install torch there and build with --no-build-isolation."
        )
    return Path(spec.origin).parent


VERSION = version_in(ROOT / "torch_ops/torch_residency/__init__.py")
TORCH_FOLDER = torch_folder()
TORCH_VERSION = version_in(TORCH_FOLDER / "version.py").partition("+")[0]
TORCH_MINOR = ".".join(TORCH_VERSION.split(".")[:2])
BUILD = ROOT / "build" / f"wheel-torch-{TORCH_MINOR}"


class BuildWithCMake(build_py):
    """Adds lib/, include/ and lib/cmake/residency to the package."""

    def run(self):
        package = Path(self.build_lib) / "torch_residency"
        # setuptools keeps what earlier builds left here, and would pack it.
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        (package / "_built.py").write_text(f'TORCH_VERSION = "{TORCH_VERSION}"\n')

        for command in (
            ["cmake", "-S", ROOT, "-B", BUILD, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
             "-DRESIDENCY_WHEEL=ON", "-DRESIDENCY_WITH_TORCH=ON", "-DBUILD_SHARED_LIBS=ON",
             f"-DRESIDENCY_TORCH_DIR={TORCH_FOLDER}"],
            ["cmake", "--build", BUILD],
            ["cmake", "--install", BUILD, "--prefix", package.resolve(), "--strip"],
        ):  # fmt: skip
            subprocess.run(command, check=True)


class NativeDistribution(Distribution):
    """Goes where native code goes, though setuptools compiles none of it."""

    def has_ext_modules(self):
        return True


class PlatformWheel(bdist_wheel):
    """Tags the wheel py3-none-<platform>: native libraries, but none that knows Python."""

    def get_tag(self):
        return ("py3", "none", super().get_tag()[2])


BUILD.mkdir(parents=True, exist_ok=True)
setup(
    version=VERSION,
    distclass=NativeDistribution,
    install_requires=[f"torch=={TORCH_MINOR}.*"],
    cmdclass={"build_py": BuildWithCMake, "bdist_wheel": PlatformWheel},
    options={
        # Out of the source tree, and apart for each torch version.
        "build": {"build_base": str(BUILD / "setuptools")},
        "egg_info": {"egg_base": str(BUILD)},
    },
)
