"""The GPUs of local workers, and each worker's share of them."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
QUERY_TIMEOUT_S = 20.0


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """GPU names as in CUDA_VISIBLE_DEVICES. Empty if there is no GPU, or no driver that lists them."""
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1"))
    if shutil.which(QUERY[0]) is None:
        return ()
    try:
        found = subprocess.run(QUERY, capture_output=True, text=True, check=True, timeout=QUERY_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(line.strip() for line in found.stdout.splitlines() if line.strip())


def gpu_environment(gpus: Sequence[str], index: int) -> dict[str, str]:
    """Variables for a worker's environment that assign it one GPU; workers get the GPUs in turn."""
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}


def memory_share(gpus: Sequence[str], workers: int, index: int) -> float | None:
    """A worker's share of its GPU's memory; None if it has no GPU, or does not share it."""
    if not gpus:
        return None
    sharing = len(range(index % len(gpus), workers, len(gpus)))
    return round(1 / sharing, 3) if sharing > 1 else None
