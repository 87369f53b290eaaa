"""The tilings that were measured to be the fastest, by device, kernel and shape.

The table is tuned.json in this folder, or the file that TRUNKLINE_TUNED_TILINGS names, such as one that the sweeps of
`make bench-gpu` have written. Kernels and shapes without an entry use a tiling chosen without measuring. An entry of a
product without numbers means that the library's kernel was faster.
"""

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

SHIPPED = Path(__file__).with_name("tuned.json")
VARIABLE = "TRUNKLINE_TUNED_TILINGS"
LARGEST = 1 << 16  # bound of every number of a tiling: a larger one is a mistake
GATED, LINEAR, ADDED = PRODUCTS = ("gated_linear", "linear", "added_linear")


@dataclass(frozen=True, slots=True)
class TilingKey:
    """The kernel, device and shape of an attention tiling."""

    kernel: str  # name of the launcher
    device: str  # as torch reports it
    head_dim: int
    group: int  # query heads of a KV head
    dtype: str
    kv_dtype: str

    @classmethod
    def of(
        cls, kernel: str, *, device: str, head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> "TilingKey":
        return cls(kernel, device, head_dim, group, name_of(dtype), name_of(kv_dtype))


@dataclass(frozen=True, slots=True)
class ProductKey:
    """The kernel, device and shape of a matrix product's tiling."""

    kernel: str  # of PRODUCTS: with the gate of a feed-forward layer, alone, or added to the output
    device: str  # as torch reports it
    rows: int  # most rows of the activations that it is for
    columns: int  # of the result
    inner: int
    dtype: str  # of the weight


Key = TilingKey | ProductKey


def tuned(key: TilingKey) -> dict[str, int] | None:
    """Returns the fields of a tiling, or None if the table has no entry. Raises ValueError if the file is not a
    table."""
    return chosen_table().get(key)


def chosen_table() -> dict[Key, dict[str, int]]:
    """Returns the table that the engine uses. Raises ValueError (one line) if the file is not a table."""
    return table(Path(os.environ.get(VARIABLE) or SHIPPED))


@functools.cache
def table(path: Path) -> dict[Key, dict[str, int]]:
    """Returns the table in a file. Raises ValueError (one line) if the file is not a table."""
    try:
        entries = json.loads(path.read_text())
        if not isinstance(entries, list):
            raise ValueError("it holds no list")
        found = {_key(entry["for"]): _tiling(entry["tiling"]) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a table of tilings: {type(error).__name__}: {error}") from None
    if len(found) != len(entries):
        raise ValueError(f"{path} has two tilings for the same thing")
    return found


def write(path: Path, tilings: Mapping[Key, tuple[Mapping[str, int], Mapping[str, object]]]) -> None:
    """Writes tilings, with the measurements of each, to a file. Its entries for other keys are kept. Raises ValueError
    if the file is not a table."""
    entries: list[dict[str, Any]] = []
    if path.exists():
        table(path)
        entries = [entry for entry in json.loads(path.read_text()) if _key(entry["for"]) not in tilings]
    entries += [
        {"for": asdict(key), "tiling": dict(tiling), "measured": dict(measured)}
        for key, (tiling, measured) in tilings.items()
    ]
    path.write_text("[\n" + ",\n".join(map(json.dumps, entries)) + "\n]\n")  # a line for each
    table.cache_clear()


def _key(fields: dict[str, Any]) -> Key:
    return ProductKey(**fields) if "inner" in fields else TilingKey(**fields)


def _tiling(fields: dict[str, Any]) -> dict[str, int]:
    for name, value in fields.items():
        if type(value) is not int or not 0 < value <= LARGEST:
            raise ValueError(f"{name} is {value!r}")
    return fields


def name_of(dtype: torch.dtype) -> str:
    """Returns the name of a dtype in the table."""
    return str(dtype).removeprefix("torch.")
