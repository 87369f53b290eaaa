"""Reading tensors out of safetensors files, by name. Nothing that is pickled is ever opened."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trunkline_worker.model.errors import ModelError
from trunkline_worker.model.spec import read_json
from trunkline_worker.model.weight_stream import WeightStream

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
HASH_CHUNK_BYTES = 1 << 24


class Checkpoint:
    """The tensors of a model directory, single file or shards; a context manager that closes them.

    stream: how tensors get to a device other than the CPU
    """

    def __init__(self, directory: Path, stream: WeightStream | None = None) -> None:
        self._stream = stream
        self.files = weight_files(directory)
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, Path] = {}
        self._unread: set[str] = set()
        for file in self.files:
            try:
                handle = self._stack.enter_context(safe_open(file, framework="pt"))
            except (SafetensorError, OSError, ValueError) as error:
                self._stack.close()
                raise ModelError(f"{file} is damaged or cut short: {error}") from None
            for name in handle.keys():  # noqa: SIM118 - not a dict
                self._handles[name] = handle
                self._file_of[name] = file
        self._unread = set(self._handles)

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def read_into(self, target: Tensor, name: str) -> None:
        """Copies a tensor into `target`, converting its dtype. Raises ModelError if missing or of another shape."""
        if name not in self._handles:
            raise ModelError(f"{self.files[0].parent} lacks the tensor {name}")
        try:
            tensor: Tensor = self._handles[name].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self._file_of[name]}: tensor {name} cannot be read: {error}") from None
        if tensor.shape != target.shape:
            raise ModelError(
                f"{self._file_of[name]}: tensor {name} has shape {list(tensor.shape)}, "
                f"config.json says {list(target.shape)}"
            )
        if self._stream is None:
            target.copy_(tensor)
        else:
            self._stream.copy(target, tensor)
        self._unread.discard(name)

    def check_all_read(self, ignore: tuple[str, ...]) -> None:
        """Raises ModelError for tensors that no part of the model asked for: the config describes another model."""
        left = sorted(name for name in self._unread if not name.endswith(ignore))
        if left:
            raise ModelError(
                f"{self._file_of[left[0]]}: unexpected tensor {left[0]} ({len(left)} in all): not this architecture"
            )


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files. Raises ModelError where there are none, or a shard is missing."""
    if (directory / INDEX).is_file():
        names = sorted(set(read_json(directory / INDEX).get("weight_map", {}).values()))
        files = [directory / name for name in names]
        for file in files:
            if file.parent != directory or not file.is_file():
                raise ModelError(f"{directory / INDEX} names {file.name}, which is missing")
        if files:
            return files
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    pickled = sorted(path.name for pattern in PICKLED for path in directory.glob(pattern))
    if pickled:
        raise ModelError(
            f"refusing pickled weights {directory / pickled[0]}: loading them can run code; convert to safetensors"
        )
    raise ModelError(f"{directory} holds no {SINGLE} and no {INDEX}")


def fingerprint(directory: Path, files: list[Path], *facts: str) -> str:
    """A digest of everything that decides the logits: config, weights, and `facts` such as the dtype."""
    digest = xxhash.xxh3_128()
    config = json.dumps(read_json(directory / "config.json"), sort_keys=True)
    for part in (config, *facts):
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    for file in files:
        for chunk in _chunks(file):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: Path) -> Iterator[bytes]:
    with file.open("rb") as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            yield chunk
