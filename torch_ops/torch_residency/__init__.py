"""Decides, explains and carries out where tensors live."""

from pathlib import Path

from torch_residency._libraries import load_libraries

__version__ = "0.1.0"

#: Where CMake finds the package ``residency``: a value for ``CMAKE_PREFIX_PATH``.
cmake_prefix_path: str = str(Path(__file__).resolve().parent)

__all__ = ["__version__", "cmake_prefix_path", "load_libraries"]
