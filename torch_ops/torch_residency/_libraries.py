"""Loads the native libraries, which fit one torch minor version."""

import ctypes
from pathlib import Path

_LIB = Path(__file__).resolve().parent / "lib"


def load_libraries() -> None:
    """Load the native libraries of this package into the process, and torch with them.

    Importing the package does not: it takes no time and needs no torch. Calling again does nothing.

    Raises:
        ImportError: torch is missing or of another minor version than the one the libraries were
            built for, or the package is used from a source tree, where there are no libraries.
    """
    try:
        from torch_residency._built import TORCH_VERSION
    except ModuleNotFoundError:
        raise ImportError(
            "torch_residency has no native libraries here (a source tree?); "
            "install it with: pip install --no-build-isolation ."
        ) from None

    try:
        import torch
    except ModuleNotFoundError:
        raise ImportError(
            f"torch_residency needs torch {_minor(TORCH_VERSION)}; "
            f"install it with: pip install 'torch=={_minor(TORCH_VERSION)}.*'"
        ) from None

    # Compared before anything is loaded: the linker would only name a missing C++ symbol.
    if _minor(torch.__version__) != _minor(TORCH_VERSION):
        raise ImportError(
            f"torch_residency was built for torch {_minor(TORCH_VERSION)} and this is torch "
            f"{torch.__version__}; rebuild it with: pip install --no-build-isolation "
            "--force-reinstall torch-residency (from its source), or install torch "
            f"{_minor(TORCH_VERSION)}"
        )

    for name in ("core", "aten"):
        ctypes.CDLL(str(_LIB / f"libresidency_{name}.so"))
    ops = _LIB / "libresidency_ops.so"
    if ops.exists():
        torch.ops.load_library(str(ops))


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
