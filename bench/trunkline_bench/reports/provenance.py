"""The head of every report: date, machine, versions, commit and command."""

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def facts(command: str, machine: str, packages: Sequence[str] = ("trunkline", "numpy")) -> dict[str, str]:
    """The head of a report, by name. Call it before the runs, which last minutes: the code may change meanwhile.

    command: the make target with its arguments; machine: what used the cores; packages: those whose versions matter
    """
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores ({machine})",
        "versions": f"{versions}, Python {platform.python_version()}",
        "code": f"commit {commit()}",
        "command": f"`{command}`",
    }


def make_command(target: str, arguments: Sequence[str]) -> str:
    return f"make {target}" + (f" ARGS='{shlex.join(arguments)}'" if arguments else "")


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit(checkout: Path = Path(__file__).parent) -> str:
    """The commit of the running code, or of another checkout, with "-dirty" if a tracked file differs from it."""
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    try:
        told = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown: git is not installed"
    return told.stdout.strip() if told.returncode == 0 else "unknown: not a git checkout"
