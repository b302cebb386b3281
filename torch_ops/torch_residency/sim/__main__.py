"""Runs a script on a simulated CUDA card, and reports what it did there.

python -m torch_residency.sim --memory 24GiB train.py --epochs 1
python -m torch_residency.sim --dry --memory 80GiB -m package.train
"""

from __future__ import annotations

import argparse
import atexit
import os
import runpy
import signal
import sys
import threading
import types
from pathlib import Path

from torch_residency.sim import _library, _process, _report, control
from torch_residency.sim._watch import Watch

_SETTINGS = ("devices", "memory", "card", "h2d", "d2h")


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torch_residency.sim",
        description="Run a script on a simulated CUDA card, and report what it did there.",
        usage="%(prog)s [options] script.py [argument ...]\n"
        "       %(prog)s [options] program [argument ...]\n"
        "       %(prog)s [options] -m module [argument ...]",
        allow_abbrev=False,
    )
    parser.add_argument("--devices", metavar="N", help="how many cards (1)")
    parser.add_argument("--memory", metavar="SIZE", help="memory of each, such as 24GiB (1GiB)")
    parser.add_argument(
        "--dry",
        action="store_true",
        help="compute and store nothing: for the allocator's peak and the schedule of what would "
        "never fit here",
    )
    parser.add_argument("--card", help="card that times are modelled on: h200, a100, rtx4090, none")
    parser.add_argument("--h2d", metavar="RATE", help="copies to the device, such as 55GB/s")
    parser.add_argument("--d2h", metavar="RATE", help="copies to the host")
    parser.add_argument(
        "--set", metavar="KEY=VALUE", action="append", default=[], help="any other setting"
    )
    parser.add_argument(
        "--timeline", metavar="FILE", help="write every operation, for Perfetto or chrome://tracing"
    )
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON too")
    parser.add_argument(
        "-m", dest="module", metavar="module", nargs=argparse.REMAINDER, help="run a module"
    )
    parser.add_argument("script", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.program = options.script if options.module is None else options.module
    if not options.program:
        parser.error("which script? expected script.py, or -m module")
    if options.module is None and not Path(options.program[0]).is_file():
        parser.error(f"no script '{options.program[0]}'")
    options.is_program = options.module is None and is_program(options.program[0])
    if options.is_program and (options.json or options.timeline):
        parser.error("--json and --timeline are for Python scripts: programs make no report")

    for option in ("timeline", "json"):
        path = getattr(options, option)
        if path and (reason := why_not_writable(Path(path))):
            parser.error(f"argument --{option}: cannot write '{path}': {reason}")

    options.settings = {}
    for item in options.set:
        key, equals, value = item.partition("=")
        if not equals or not key:
            parser.error(f"argument --set: expected KEY=VALUE, not '{item}'")
        options.settings[key] = value
    for key in _SETTINGS:
        if (value := getattr(options, key)) is not None:
            options.settings[key] = value
    if options.dry:
        options.settings["mode"] = "dry"
    return options


def why_not_writable(path: Path) -> str:
    """Return why a file cannot be written there, or "" when it can."""
    if path.is_dir():
        return "it is a folder, expected a file"
    if path.exists():
        return "" if os.access(path, os.W_OK) else "it may not be written"
    folder = path.resolve().parent
    if not folder.is_dir():
        return f"there is no folder '{folder}'"
    return "" if os.access(folder, os.W_OK) else f"nothing may be written in '{folder}'"


def end_with_report_on_sigterm() -> None:
    """Make SIGTERM end the script as sys.exit would, which the report comes after.

    A script may set a handler of its own. Forked children are ended by it at once, as ever.
    """
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    forking = threading.local()

    def end(*_) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends it at once
        sys.exit(128 + signal.SIGTERM)

    # Blocked during a fork, since Python forgets what a child gets before it is set up.
    def before_fork() -> None:
        forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def after_fork() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)

    def after_fork_in_child() -> None:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after_fork()

    signal.signal(signal.SIGTERM, end)
    os.register_at_fork(
        before=before_fork, after_in_parent=after_fork, after_in_child=after_fork_in_child
    )


def prepare(options: argparse.Namespace) -> None:
    """Set up the simulated card, torch, and the report at exit."""
    # Of a run that this one is inside: this process makes a report of its own.
    os.environ.pop(_process.REPORTS_VARIABLE, None)
    _library.load(**options.settings)
    reports = _process.give_to_children(options.settings)
    import torch

    watch = Watch(os.path.abspath(options.program[0]))  # a name no file has, for a module
    watch.start()
    torch.cuda._lazy_call(watch.start_allocator)
    own_pid = os.getpid()
    if options.timeline:
        recorder = control.timeline(options.timeline)
        recorder.__enter__()

    # At exit and not after the script: its threads may still work, and its own handlers come first.
    def finish() -> None:
        if os.getpid() != own_pid:
            return
        if options.timeline:
            try:
                recorder.__exit__(None, None, None)
            except _library.SimulationError as error:
                print(f"torch_residency.sim: {error}", file=sys.stderr)
        children = _process.read_reports(reports)
        _report.show(_report.collect(watch), children, options.json)

    atexit.register(finish)
    end_with_report_on_sigterm()


def run_script(path: str, arguments: list[str]) -> None:
    """Run a file as `python path arguments...` would."""
    sys.argv = [path, *arguments]
    path = os.path.abspath(path)
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(path))
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __cached__=None)
    # Classes and functions of the script are found under this name when they are unpickled.
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def is_program(path: str) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"\x7fELF"


def become_program(command: list[str], settings: dict[str, str]) -> None:
    """Replace this process by a program that has the simulated card, and makes no report."""
    _process.give_to_children(settings)
    os.environ.pop(_process.REPORTS_VARIABLE, None)
    os.execv(os.path.abspath(command[0]), command)


def run_module(name: str, arguments: list[str]) -> None:
    """Run a module as `python -m name arguments...` would."""
    sys.argv = [name, *arguments]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def show_exception(error: BaseException) -> None:
    """Print a traceback that begins in the script."""
    trace = error.__traceback__
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def main() -> None:
    options = parse_arguments(sys.argv[1:])
    try:
        if options.is_program:
            become_program(options.program, options.settings)
        prepare(options)
    except _library.SimulationError as error:
        print(f"torch_residency.sim: {error}", file=sys.stderr)
        sys.exit(_process.REFUSED)
    try:
        if options.module is None:
            run_script(options.program[0], options.program[1:])
        else:
            run_module(options.program[0], options.program[1:])
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        show_exception(error)
        sys.exit(128 + signal.SIGINT)
    except BaseException as error:
        show_exception(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
