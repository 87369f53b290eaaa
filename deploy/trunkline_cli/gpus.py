"""Which GPUs local workers may use, and how they share them out."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
QUERY_TIMEOUT_S = 20.0


def visible_gpus(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """As CUDA_VISIBLE_DEVICES would name them; none where there are none, or where no driver tells."""
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
    """What a worker's environment adds: one GPU each, in turn."""
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {}


def memory_share(gpus: Sequence[str], workers: int, index: int) -> float | None:
    """Part of its GPU's memory for a worker; None where it has no GPU, or one for itself."""
    if not gpus:
        return None
    sharing = len(range(index % len(gpus), workers, len(gpus)))
    return round(1 / sharing, 3) if sharing > 1 else None
