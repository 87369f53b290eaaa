"""The head of every report: date, machine, versions, commit and command."""

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

# Instruction sets by their flags in /proc/cpuinfo, the latest first.
VECTORS = {"avx512_bf16": "AVX-512 and bfloat16", "avx512f": "AVX-512", "avx2": "AVX2"}


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
    """The CPU's name, and the largest of VECTORS that it has: clouds hide which model of a family it is."""
    told = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    found = {name.strip(): value for name, value in told.items()}
    flags = found.get("flags", "").split()
    vectors = next((f" with {name}" for flag, name in VECTORS.items() if flag in flags), "")
    return f"{found.get('model name', platform.machine()).strip()}{vectors}"


def commit(checkout: Path = Path(__file__).parent) -> str:
    """The commit of the running code, or of another checkout, with "-dirty" if a tracked file differs from it."""
    command = ("git", "describe", "--always", "--dirty", "--exclude=*")
    try:
        told = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown: git is not installed"
    return told.stdout.strip() if told.returncode == 0 else "unknown: not a git checkout"
