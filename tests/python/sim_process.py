"""Runs scripts on the simulated card, each in a process of its own."""

import json
import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    """How a script ended. `report` is what --json wrote, None when there was no run."""

    status: int
    output: str
    errors: str
    report: dict | None


class SimProcess:
    """Starts processes that find the package `torch_residency` in a folder.

    Without an installed package, RESIDENCY_SIM_LIBRARIES names the folder with the libraries.
    """

    def __init__(self, package_folder: Path, work_folder: Path):
        self.work_folder = work_folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(package_folder),
            "OMP_NUM_THREADS": "1",
        }

    def script(self, code: str, name: str = "script.py") -> Path:
        path = self.work_folder / name
        path.write_text(textwrap.dedent(code))
        return path

    def run(self, *arguments, timeout: float = 300, **environment) -> Run:
        """Runs `python -m torch_residency.sim ARGUMENTS`."""
        report = self.work_folder / "report.json"
        report.unlink(missing_ok=True)
        command = ["-m", "torch_residency.sim", "--json", report, *arguments]
        process = self.python(*command, timeout=timeout, **environment)
        return Run(
            process.returncode,
            process.stdout,
            process.stderr,
            json.loads(report.read_text()) if report.exists() else None,
        )

    def run_code(self, code: str, *options, arguments=(), **keywords) -> Run:
        """Runs a script of this text, with options of the runner and arguments of its own."""
        return self.run(*options, self.script(code), *arguments, **keywords)

    def python(self, *arguments, timeout: float = 300, **environment):
        """Runs Python without the runner, but where the package can be imported."""
        return subprocess.run(
            [sys.executable, *map(str, arguments)],
            text=True,
            capture_output=True,
            cwd=self.work_folder,
            env={**self.environment, **environment},
            timeout=timeout,
        )
