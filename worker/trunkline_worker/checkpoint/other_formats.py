"""Formats of weights that are not served, each refused with what to do instead."""

from pathlib import Path

from trunkline_worker.checkpoint.errors import ModelError

GGUF = ("*.gguf",)
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


def check_format(path: Path) -> None:
    """Raises ModelError if a path that is no directory with safetensors is, or has, weights in another format."""
    if found := _first(path, GGUF):
        raise ModelError(
            f"{found} is GGUF, which is not supported: serve the directory of the checkpoint that it was made of, with "
            "config.json, tokenizer.json and safetensors"
        )
    if found := _first(path, PICKLED):
        raise ModelError(f"refusing pickled weights {found}: loading them can run code; convert to safetensors")


def _first(path: Path, patterns: tuple[str, ...]) -> Path | None:
    """Returns the path itself, or the first file in the directory, that has one of these names."""
    candidates = [path, *sorted(path.glob("*"))]
    return next((file for file in candidates if any(file.match(pattern) for pattern in patterns)), None)
