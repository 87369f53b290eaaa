"""Reads the header of a GGUF file: its metadata, and where each tensor is and how it is stored.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from trunkline_worker.model.checkpoint.refusals import ModelError, shown

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_DIMENSIONS = 4
MOST_VALUES = 1 << 24  # of an array: the largest vocabularies have a sixteenth of it
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9


@dataclass(frozen=True, slots=True)
class Format:
    """How values are stored: blocks of so many values, along a row, in so many bytes."""

    name: str
    values: int
    num_bytes: int


FORMATS = {  # by their numbers
    0: Format("F32", 1, 4),
    1: Format("F16", 1, 2),
    2: Format("Q4_0", 32, 18),
    3: Format("Q4_1", 32, 20),
    8: Format("Q8_0", 32, 34),
    12: Format("Q4_K", 256, 144),
    14: Format("Q6_K", 256, 210),
    30: Format("BF16", 1, 2),
}
OTHER_FORMATS = {
    **{6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS"},
    **{18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16"},
    **{26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is, and how it is stored."""

    format: Format
    shape: list[int]  # as torch has it: rows first
    start: int  # bytes, from the beginning of the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Texts:
    """An array of strings, which is decoded only if it is needed: a vocabulary has hundreds of thousands."""

    data: mmap.mmap
    start: int
    count: int

    def __str__(self) -> str:
        return "an array of strings"

    def decoded(self) -> list[str]:
        cursor = Cursor(self.data, self.start)
        return [cursor.text() for _ in range(self.count)]


SIZE = struct.Struct("<Q")


class Cursor:
    """Reads values one after another. Raises struct.error past the end of the file, or ValueError."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self.at = at

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        """Returns the values of a format of `struct`."""
        values = struct.unpack_from("<" + kinds, self._data, self.at)
        self.at += struct.calcsize("<" + kinds)
        return values

    def text(self) -> str:
        (size,) = SIZE.unpack_from(self._data, self.at)
        start = self.at + SIZE.size
        if size > len(self._data) - start:
            raise ValueError("a string is longer than the file")
        self.at = start + size
        return self._data[start : self.at].decode()

    def value(self) -> Any:
        """Returns a value of the type whose number precedes it."""
        (kind,) = self.numbers("I")
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self._scalars(kind, 1)[0]
        kind, count = self.numbers("IQ")
        if kind != STRING:
            return self._scalars(kind, count)
        if count > MOST_VALUES:
            raise ValueError(f"an array has {count} values")
        texts = Texts(self._data, self.at, count)
        for _ in range(count):
            self.at += SIZE.size + SIZE.unpack_from(self._data, self.at)[0]
        return texts

    def _scalars(self, kind: int, count: int) -> list[Any]:
        if kind not in SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        if count > min(len(self._data), MOST_VALUES):
            raise ValueError(f"an array has {count} values")
        values = list(self.numbers(f"{count}{SCALARS[kind]}"))
        if kind == FLOAT32:  # the shortest decimal number that means the same: 1e-05, not 9.999999747378752e-06
            values = [float(str(np.float32(value))) for value in values]
        return values


class GgufFile:
    """The header of a file, of which the tensors are read when they are asked for.

    Raises ModelError (one line, with the tensor if it is about one) if the file is damaged, cut short, or stores
    tensors in a format that is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = _mapped(path)
        if self._data[:4] != MAGIC:
            raise ModelError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        cursor = Cursor(self._data, len(MAGIC))
        try:
            (version,) = cursor.numbers("I")
            if version not in VERSIONS:
                raise ModelError(f"{path} has version {version} of GGUF; supported: 2 and 3, little-endian")
            num_tensors, num_values = cursor.numbers("QQ")
            for _ in range(num_values):
                key = cursor.text()
                if key in self.metadata:
                    raise ValueError(f"the key {shown(key)} repeats")
                self.metadata[key] = cursor.value()
            stored = [(cursor.text(), *self._dimensions(cursor), *cursor.numbers("IQ")) for _ in range(num_tensors)]
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            raise ModelError(f"{path} is damaged or cut short: {shown(str(error))}") from None
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or not 0 < alignment <= mmap.PAGESIZE:
            raise ModelError(f"{path} is damaged: general.alignment is {shown(alignment)}")
        data_start = -(-cursor.at // alignment) * alignment
        for name, shape, number, offset in stored:
            if name in self.tensors:
                raise ModelError(f"{path} is damaged: it has the tensor {shown(name)} twice")
            self.tensors[name] = self._tensor(name, shape, number, data_start + offset)

    def _dimensions(self, cursor: Cursor) -> tuple[list[int]]:
        (count,) = cursor.numbers("I")
        if count > MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {count} dimensions")
        return (list(cursor.numbers(f"{count}Q"))[::-1],)

    def _tensor(self, name: str, shape: list[int], number: int, start: int) -> StoredTensor:
        at = f"{self.path}: tensor {shown(name)[1:-1]}"
        if number not in FORMATS:
            raise ModelError(
                f"{at} is stored as {OTHER_FORMATS.get(number, f'type {number}')}, which is not supported; supported: "
                f"{', '.join(each.name for each in FORMATS.values())}: convert the file with llama-quantize, for "
                "example to Q8_0"
            )
        form = FORMATS[number]
        if not shape or not all(shape) or shape[-1] % form.values:
            raise ModelError(f"{at} has shape {shape}, which {form.name} cannot store: the file is damaged")
        num_bytes = prod(shape) // form.values * form.num_bytes
        if start + num_bytes > len(self._data):
            raise ModelError(
                f"{at} ends at byte {start + num_bytes}, and the file has {len(self._data)}: it is cut short"
            )
        return StoredTensor(form, shape, start, num_bytes)

    def stored(self, name: str) -> memoryview:
        """Returns the bytes of a tensor as they are stored. Their memory is the file's."""
        tensor = self.tensors[name]
        return memoryview(self._data)[tensor.start : tensor.start + tensor.num_bytes]

    def text(self, key: str) -> str | None:
        """Returns a string of the metadata; None if there is none. Raises ModelError for another value."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelError(f"{self.path}: {key} is {shown(value)}, not a string")
        return value

    def texts(self, key: str) -> list[str]:
        """Returns an array of strings. Raises ModelError if there is none, or if one is not UTF-8."""
        array = self.metadata.get(key)
        if not isinstance(array, Texts):
            raise ModelError(f"{self.path}: {key} is {'missing' if array is None else 'not an array of strings'}")
        try:
            return array.decoded()
        except (struct.error, ValueError) as error:
            raise ModelError(f"{self.path} is damaged: {key}: {shown(str(error))}") from None


def _mapped(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ModelError(f"{path} is empty") from None


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file, by its name."""
    return path.suffix.lower() == SUFFIX and path.is_file()
