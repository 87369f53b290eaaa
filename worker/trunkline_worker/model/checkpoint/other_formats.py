"""What is not served is refused with what to do instead: other formats of weights, and a directory of GGUF files."""

import os
from pathlib import Path

from trunkline_worker.model.checkpoint.gguf_file import SUFFIX
from trunkline_worker.model.checkpoint.refusals import ModelError

SAFETENSORS = ".safetensors"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def check_format(path: Path) -> None:
    """Raises ModelError if the path is a file in another format, or a directory with such a file and no safetensors."""
    files = [path] if os.path.isfile(path) else [file for file in sorted(path.glob("*")) if os.path.isfile(file)]
    if _first(files, SAFETENSORS):
        return  # files in other formats may be the state of a training
    if found := _first(files, SUFFIX):
        raise ModelError(
            f"{path} is a directory without safetensors: to serve a GGUF file, name the file itself, such as {found}"
        )
    if found := _first(files, *PICKLED):
        raise ModelError(f"refusing pickled weights {found}: loading them can run code; convert to safetensors")


def _first(files: list[Path], *suffixes: str) -> Path | None:
    return next((file for file in files if file.suffix.lower() in suffixes), None)
