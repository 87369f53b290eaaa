"""What stands at the head of every report: what its figures need to be made again."""

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path


def facts(command: str, machine: str, packages: Sequence[str] = ("trunkline", "numpy")) -> dict[str, str]:
    """To be asked for before the runs, which take minutes: it is the code as it is then that they are of.

    command: the make target with its arguments; machine: what the cores did; packages: whose versions matter
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
    """Of the code that runs, or of another checkout; "-dirty" where a tracked file differs from it."""
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    try:
        told = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "not known: there is no git"
    return told.stdout.strip() if told.returncode == 0 else "not known: not a git checkout"
