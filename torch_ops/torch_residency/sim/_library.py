"""Finds the simulated libraries and puts them where torch will look for the real ones."""

import atexit
import contextlib
import ctypes
import functools
import os
import re
import sys
import threading
from pathlib import Path

# In the order they are loaded: the driver, NVML and CUPTI refer to the runtime.
RUNTIME_LIBRARIES = ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", "libcupti.so.13")
OPERATOR_LIBRARY = "libresidency_simcuda_operators.so"

#: Where the libraries are, when the package in use has none (a source tree).
LIBRARIES_VARIABLE = "RESIDENCY_SIM_LIBRARIES"

_PACKAGE = Path(__file__).resolve().parents[1]
_CONTROL_VERSION = 1


class SimulationError(RuntimeError):
    """The simulated card is not there, or refused a call; one line says what was expected."""


def libraries() -> Path:
    """Return the folder of the simulated libraries; all of them are there.

    Raises:
        SimulationError: there is no such folder, or a library is missing in it.
    """
    chosen = os.environ.get(LIBRARIES_VARIABLE)
    folder = Path(chosen) if chosen else _PACKAGE / "_sim"
    for name in (*RUNTIME_LIBRARIES, OPERATOR_LIBRARY):
        if not (folder / name).is_file():
            where = f"{LIBRARIES_VARIABLE}={chosen}" if chosen else str(folder)
            remedy = (
                "it names the folder of a build, as build/sim/lib/simcuda"
                if chosen
                else f"install torch_residency, or name a build's folder in {LIBRARIES_VARIABLE}"
            )
            raise SimulationError(f"no {name} in {where}: {remedy}")
    return folder


@functools.cache
def runtime() -> ctypes.CDLL | None:
    """Return the simulated runtime, or None when this process has none.

    It is in a process that called :func:`load`, or was started with the libraries preloaded.
    """
    process = ctypes.CDLL(None)
    return process if hasattr(process, "simcuda_present") else None


def is_active() -> bool:
    """Return whether PyTorch in this process runs, or would run, on the simulated card."""
    return runtime() is not None


def load(**settings: object) -> None:
    """Give this process the simulated card, and import torch.

    Only this process: `python -m torch_residency.sim` gives it to child processes too. Calling
    again only changes settings.

    Args:
        settings: as for :func:`set`, such as ``devices=2, memory="24GiB", mode="dry"``.

    Raises:
        SimulationError: a library is missing, torch is of another minor version than the libraries
            or was imported before without the simulated card, or a setting was refused.
    """
    from torch_residency.sim import control

    if not is_active():
        if "torch" in sys.modules:
            raise SimulationError(
                "torch was imported before the simulated card was loaded, and has the real "
                "runtime: call torch_residency.sim.load() before the first import of torch"
            )
        folder = libraries()
        check_allocator()
        _check_torch_version()
        for name in RUNTIME_LIBRARIES:
            try:
                # Global and first: the linker takes the first definition it meets, and finds a
                # library that a name was loaded under before it searches any path.
                ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise SimulationError(f"cannot load {folder / name}: {_one_line(error)}") from None
        # Triton looks for the driver by itself, and gives up before it could be told that its
        # kernels are not simulated.
        os.environ.setdefault("TRITON_LIBCUDA_PATH", str(folder))
        runtime.cache_clear()
    control.check_version(_CONTROL_VERSION)
    for key, value in settings.items():
        control.set(key, value)
    verify()
    load_operators()


_operators_loaded = False


def load_operators() -> None:
    """Import torch and give it the simulated operators. Does nothing when called again.

    Raises:
        SimulationError: the library is missing or does not fit this torch.
    """
    global _operators_loaded
    if _operators_loaded:
        return
    _operators_loaded = True  # before the import, in which torch may come here again
    import torch

    library = libraries() / OPERATOR_LIBRARY
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        _operators_loaded = False
        cause = _one_line(error.__cause__ or error)
        raise SimulationError(
            f"{library} does not fit torch {torch.__version__}: {cause}"
        ) from None
    # TorchScript runs operator by operator: what it fuses on a GPU is compiled for that.
    torch._C._jit_override_can_fuse_on_gpu(False)
    atexit.register(_wait_for_autograd, os.getpid())


def _wait_for_autograd(pid: int) -> None:
    """Wait until autograd's threads hold nothing of Python any more; at the end of the process.

    The thread of a device frees what a backward pass had of Python (its context, the exception that
    ended it) after the script goes on. It needs the interpreter for that, and where that has ended
    meanwhile the process is aborted; on a real card it is the same race. A thread that runs another
    pass is done with it.
    """
    import torch

    threads = Path("/proc/self/task").glob("*/comm")
    if os.getpid() != pid or not any("pt_autograd" in _read(name) for name in threads):
        return

    def run_passes() -> None:
        # A broken device has nothing to compute with, and then the race is open again.
        with contextlib.suppress(Exception):
            for device in range(torch.cuda.device_count()):
                # Without elements: nothing is allocated and nothing launched.
                x = torch.empty(0, device=f"cuda:{device}", requires_grad=True)
                # The engine itself: Tensor.backward would give the pass a context of Python's.
                torch.autograd.Variable._execution_engine.run_backward(
                    (x.clone(),), (x.detach(),), False, False, (), True, True
                )

    # A pass of the script may never end, and the process ends all the same. The time is enough on a
    # machine with much to do: this thread too must not be in a pass when the interpreter has ended.
    thread = threading.Thread(target=run_passes, daemon=True)
    thread.start()
    thread.join(timeout=5)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""  # the thread has ended


def check_allocator() -> None:
    """Check that the environment asks for no allocator that the card lacks.

    Raises:
        SimulationError: a variable names the backend cudaMallocAsync.
    """
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        options = os.environ.get(variable, "").replace(" ", "").split(",")
        if "backend:cudaMallocAsync" in options:
            raise SimulationError(
                f"{variable} asks for backend:cudaMallocAsync, which is not simulated: expected "
                "torch's own allocator, backend:native"
            )


def verify() -> None:
    """Check that torch's CUDA library calls the simulated runtime.

    Never a silent fall back to "no CUDA": a script would go on with the CPU.

    Raises:
        SimulationError: torch has another runtime.
    """
    import torch

    from torch_residency.sim import control

    # Nothing that counts devices, since torch and CUDA keep the number: CUDA_VISIBLE_DEVICES is for
    # the script to set. Nor torch.cuda.is_available(), which forbids CUDA in forked children.
    try:
        c10_cuda = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10_cuda.so"))
        get_device = c10_cuda._ZN3c104cuda9GetDeviceEPa
    except (OSError, AttributeError) as error:
        raise SimulationError(
            f"torch {torch.__version__} has no c10::cuda::GetDevice (a build without CUDA?): "
            f"{_one_line(error)}"
        ) from None
    before = control.calls("cudaGetDevice")
    get_device(ctypes.byref(ctypes.c_int8()))
    if control.calls("cudaGetDevice") == before or not torch.backends.cuda.is_built():
        raise SimulationError(
            f"torch {torch.__version__} does not call the simulated CUDA runtime: something loaded "
            "the real one before it"
        )


def _check_torch_version() -> None:
    # Read and not imported: the libraries come before torch.
    import importlib.util

    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SimulationError("the simulated card runs PyTorch, and there is no torch here")
    try:
        from torch_residency._built import TORCH_VERSION as built_for
    except ModuleNotFoundError:
        return  # a source tree: loading the operators will tell
    if os.environ.get(LIBRARIES_VARIABLE):
        return
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    version = found[1] if found else "of an unknown version"
    if _minor(version) != _minor(built_for):
        raise SimulationError(
            f"torch_residency was built for torch {_minor(built_for)} and this is torch {version}: "
            f"build it anew, or install torch {_minor(built_for)}"
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
