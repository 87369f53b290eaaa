"""Reads tensors from safetensors files, or a GGUF file, by name. Pickled files are never opened."""

import json
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trunkline_kernels.quantized_weight import QuantizedWeight
from trunkline_worker.model.checkpoint.gguf_file import GgufFile, is_gguf
from trunkline_worker.model.checkpoint.gguf_tensors import GgufTensors, stored_name
from trunkline_worker.model.checkpoint.model_file import read_json
from trunkline_worker.model.checkpoint.other_formats import check_format
from trunkline_worker.model.checkpoint.refusals import ModelError, shown
from trunkline_worker.model.checkpoint.weight_check import WeightCheck
from trunkline_worker.model.checkpoint.weight_stream import WeightStream

EXPERT = re.compile(r"\.experts\.\d+\..*")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# By safetensors' names. Integers and 8-bit floats are left out: without the scales of a quantised weight, they have no
# meaning.
STORED_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SAFETENSORS_DTYPES = STORED_DTYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
BASE = "model."
OF_BASE = ("embed_tokens.", "layers.", "norm.")  # how names begin in a file of a decoder without its head


@dataclass(frozen=True, slots=True)
class BaseTensors:
    """The tensors of a file of a decoder without its head, under the names that they have beside a head. With methods
    of safetensors' safe_open()."""

    file: Any

    def get_slice(self, name: str) -> Any:
        return self.file.get_slice(name.removeprefix(BASE))

    def get_tensor(self, name: str) -> Any:
        return self.file.get_tensor(name.removeprefix(BASE))


class Checkpoint:
    """The tensors of a model directory, in a single file or in shards, or of a GGUF file. A context manager that closes
    the files.

    stream: copies tensors to a device other than the CPU
    may_be_base: a decoder's file may have been saved without its head: then names lack BASE
    """

    def __init__(self, directory: Path, stream: WeightStream | None = None, *, may_be_base: bool = False) -> None:
        self._directory = directory
        self._may_be_base = may_be_base
        self._stream = stream
        self._check = WeightCheck()
        self.files = weight_files(directory)
        self._stack = ExitStack()
        self._handles: dict[str, Any] = {}
        self._file_of: dict[str, Path] = {}
        self._unread: set[str] = set()
        self._zeros: set[str] = set()  # of skip_zeros()
        try:
            for file in self.files:
                self._open(file)
        except ModelError:
            self._stack.close()
            raise
        self._unread = set(self._handles)

    def _open(self, file: Path) -> None:
        try:
            handle: Any = (
                GgufTensors(GgufFile(file)) if is_gguf(file) else self._stack.enter_context(safe_open(file, "pt"))
            )
            names = list(handle.keys())
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise ModelError(f"{file} is damaged or cut short: {shown(str(error))}") from None
        if self._may_be_base and any(name.startswith(OF_BASE) for name in names):
            handle, names = BaseTensors(handle), [f"{BASE}{name}" for name in names]
        for name in names:
            if name in self._handles:
                raise ModelError(f"{file} has the tensor {_named(name)}, and so has {self._file_of[name].name}")
            self._handles[name] = handle
            self._file_of[name] = file

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._handles

    def check_header(self, target: Tensor, name: str) -> None:
        """Raises ModelError if the tensor is missing, or if its shape or dtype is wrong. Reads only the file's header
        and the shape of `target`, which may be on the meta device."""
        self._check_header(name, [list(target.shape)], tuple(STORED_DTYPES))

    def _check_header(self, name: str, shapes: Sequence[list[int]], dtypes: Sequence[str]) -> None:
        if name not in self._handles:
            fused = EXPERT.sub(".experts.gate_up_proj", name)
            if fused in self._handles:
                raise ModelError(
                    f"{self._directory} has the experts of a layer in one tensor, {fused}, which is not supported: "
                    "save the model with save_original_format=True"
                )
            raise ModelError(f"{self._directory} lacks the tensor {self._own(name)}")
        piece = self._handles[name].get_slice(name)
        shape, stored = piece.get_shape(), piece.get_dtype()
        if shape not in shapes:
            config = "its metadata" if is_gguf(self._directory) else "config.json"
            raise ModelError(f"{self._at(name)} has shape {shape}, {config} says {' or '.join(map(str, shapes))}")
        if stored not in dtypes:
            raise ModelError(
                f"{self._at(name)} is stored as {stored}, which is not supported; supported: {', '.join(dtypes)}"
            )

    def tensor(self, name: str, shapes: Sequence[list[int]], dtypes: Sequence[str], device: torch.device) -> Tensor:
        """Returns a tensor as it is stored. Raises ModelError if it is missing, or has none of the shapes and dtypes.

        dtypes: by safetensors' names; device: on the meta device, only the header is read
        """
        self._check_header(name, shapes, dtypes)
        if device.type == "meta":
            piece = self._handles[name].get_slice(name)
            return torch.empty(piece.get_shape(), dtype=SAFETENSORS_DTYPES[piece.get_dtype()], device=device)
        self._unread.discard(name)
        tensor = self._read(name).to(device)
        self._check.see(tensor, name)
        return tensor

    def see(self, values: Tensor, name: str) -> None:
        """Lets check_finite() know of values that were made of the tensor of this name."""
        self._check.see(values, name)

    def skip(self, name: str) -> None:
        """Counts a tensor, which may be missing, as read."""
        self._unread.discard(name)

    def skip_all(self, endings: tuple[str, ...]) -> None:
        """Counts the tensors whose names end so as read."""
        self._unread = {name for name in self._unread if not name.endswith(endings)}

    def skip_zeros(self, name: str) -> None:
        """Counts a tensor, which may be missing, as read if all its values are zero."""
        self._zeros.add(name)

    def refused(self, name: str, why: str) -> ModelError:
        """Returns the error for a tensor whose values are not allowed."""
        return ModelError(f"{self._at(name)} {why}")

    def quantized(self, name: str, rows: int, inner: int, device: torch.device) -> QuantizedWeight | None:
        """Returns a part of a product that the file's own format keeps quantised, or None. Raises ModelError as
        check_header() does.

        name: without ".weight"; device: on the meta device, only the header is read
        """
        name = f"{name}.weight"
        if not is_gguf(self._directory):
            return None
        self._check_header(name, [[rows, inner]], tuple(STORED_DTYPES))
        weight: QuantizedWeight | None = self._handles[name].quantized(name, device)
        if weight is not None and device.type != "meta":
            self._unread.discard(name)
            for numbers in (weight.scale, weight.offset):
                if numbers is not None:
                    self._check.see(numbers, name)
        return weight

    def stored_dtype(self, name: str) -> torch.dtype:
        """Returns the dtype in which a tensor is stored; float32 if it is missing or its dtype is not supported."""
        if name not in self:
            return torch.float32
        return STORED_DTYPES.get(self._handles[name].get_slice(name).get_dtype(), torch.float32)

    def read_into(self, target: Tensor, name: str) -> None:
        """Copies a tensor into `target`, converting its dtype. Raises ModelError as check_header() does."""
        self.check_header(target, name)
        tensor = self._read(name)
        if self._stream is None:
            target.copy_(tensor)
        else:
            self._stream.copy(target, tensor)
        self._check.see(target, name)
        self._unread.discard(name)

    def check_finite(self, dtype: torch.dtype) -> None:
        """Raises ModelError with the first tensor that has a non-finite value. It would make logits NaN, so that no
        request could be answered.

        dtype: the one into which tensors were read
        """
        name = self._check.broken()
        if name is None:
            return
        stored, kind = self._read(name), str(dtype).removeprefix("torch.")
        quantized = stored.itemsize == 1 or not stored.is_floating_point()
        least, greatest = torch.aminmax(stored.float() if quantized else stored)
        if not torch.isfinite(least) or not torch.isfinite(greatest):
            reason = "has NaN or infinite values: the file is damaged"
        elif quantized and dtype != torch.float16:
            reason = "stands for values that are not finite: the file is damaged"
        elif quantized:
            reason = f"stands for values past those of {kind}: use --dtype bfloat16"
        else:
            reason = f"has values from {least:g} to {greatest:g}, past those of {kind}: use --dtype bfloat16"
        raise ModelError(f"{self._at(name)} {reason}")

    def embedding_and_head(self, tied: bool) -> tuple[str, str | None]:
        """Returns the names of embedding and head; None: the head is the embedding.

        As in transformers 5: if the config ties the two, but the file has both and they differ, both are used. If the
        file has only the head, the head is the embedding too.
        """
        if not tied:
            return EMBEDDING, HEAD
        if HEAD not in self:
            return EMBEDDING, None
        if EMBEDDING not in self:
            return HEAD, None
        if not torch.equal(self._read(EMBEDDING), self._read(HEAD)):
            return EMBEDDING, HEAD
        self._unread.discard(HEAD)
        return EMBEDDING, None

    def check_all_read(self, ignore: tuple[str, ...]) -> None:
        """Raises ModelError if a tensor was never read, except names that end with one of `ignore`: the files then
        belong to a model that config.json does not describe."""
        left = sorted(name for name in self._unread if not name.endswith(ignore) and not self._is_skipped(name))
        if left:
            raise ModelError(
                f"{self._file_of[left[0]]}: unexpected tensor {_named(left[0])} ({len(left)} in all): "
                "not this architecture"
            )

    def _is_skipped(self, name: str) -> bool:
        return name in self._zeros and not self._read(name).any()

    def _read(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._handles[name].get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise ModelError(f"{self._at(name)} cannot be read: {shown(str(error))}") from None
        return tensor

    def _at(self, name: str) -> str:
        """Returns file and tensor, for errors."""
        return f"{self._file_of[name]}: tensor {self._own(name)}"

    def _own(self, name: str) -> str:
        """Returns the name that a tensor has in the file."""
        return stored_name(name) if is_gguf(self._directory) else name


def _named(name: str) -> str:
    """Returns a tensor's name for an error message; quoted if it is unusual."""
    return name if name.isascii() and name.isprintable() and len(name) < 100 else shown(name)


def weight_files(directory: Path) -> list[Path]:
    """Returns the GGUF file itself; or the safetensors files: the single file if it exists, or the shards that the
    index lists. As in transformers, the index is not read if the single file exists.

    Raises ModelError if there are none, or if a shard is missing.
    """
    if is_gguf(directory):
        return [directory]
    if os.path.isfile(directory / SINGLE):
        return [directory / SINGLE]
    files = _shards(directory / INDEX) if os.path.lexists(directory / INDEX) else []
    if not files:
        check_format(directory)
        raise ModelError(f"{directory} holds no {SINGLE} and no {INDEX}")
    return files


def _shards(index: Path) -> list[Path]:
    """Returns the files that an index lists, which may be none. Raises ModelError if one is missing."""
    named = read_json(index).get("weight_map", {})
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named.values()):
        raise ModelError(f"{index}: weight_map is not an object of file names")
    files = [index.parent / name for name in sorted(set(named.values()))]
    for file in files:
        if file.parent != index.parent or not os.path.isfile(file):
            raise ModelError(f"{index} names {_named(file.name)}, which is missing")
    return files


def fingerprint(directory: Path, weights: Sequence[bytes], *facts: str) -> str:
    """Returns a digest of everything that determines the logits: config, weights, and `facts` such as the dtype.

    weights: digests of the weight files
    """
    path = directory / "config.json"
    try:
        config = json.dumps(read_json(path), sort_keys=True)
    except RecursionError:
        raise ModelError(f"{path} cannot be read: it is nested too deeply") from None
    return digest_of(config, *facts, digests=weights)


def digest_of(*facts: str, digests: Sequence[bytes] = ()) -> str:
    """Returns a digest of facts and of digests of other things."""
    digest = xxhash.xxh3_128()
    for fact in facts:
        digest.update(len(fact).to_bytes(8, "little") + fact.encode())
    for part in digests:
        digest.update(part)
    return digest.hexdigest()
