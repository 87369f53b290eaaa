"""Tilings that a sweep on a device has found to be the fastest, by device, kernel and shape.

They stand in tuned.json beside this file; TRUNKLINE_TUNED_TILINGS names another file instead, such as one that the
sweep of `make bench-gpu` has just written. What has no entry gets the tiling that is chosen without measuring.
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
LARGEST = 1 << 16  # of any number of a tiling: what is larger is a mistake


@dataclass(frozen=True, slots=True)
class TilingKey:
    """What a tiling is for."""

    kernel: str  # name of the launcher
    device: str  # as torch names it
    head_dim: int
    group: int  # query heads of a KV head
    dtype: str
    kv_dtype: str

    @classmethod
    def of(
        cls, kernel: str, *, device: str, head_dim: int, group: int, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> "TilingKey":
        return cls(kernel, device, head_dim, group, _name(dtype), _name(kv_dtype))


def tuned(key: TilingKey) -> dict[str, int] | None:
    """The fields of a tiling, or None where nothing was measured. Raises ValueError where the file is not such a
    table."""
    return chosen_table().get(key)


def chosen_table() -> dict[TilingKey, dict[str, int]]:
    """The table that the engine uses. Raises ValueError where the file is not one."""
    return table(Path(os.environ.get(VARIABLE) or SHIPPED))


@functools.cache
def table(path: Path) -> dict[TilingKey, dict[str, int]]:
    """What a file holds. Raises ValueError, one line."""
    try:
        entries = json.loads(path.read_text())
        if not isinstance(entries, list):
            raise ValueError("it holds no list")
        found = {TilingKey(**entry["for"]): _tiling(entry["tiling"]) for entry in entries}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a table of tilings: {type(error).__name__}: {error}") from None
    if len(found) != len(entries):
        raise ValueError(f"{path} has two tilings for the same thing")
    return found


def write(path: Path, tilings: Mapping[TilingKey, tuple[Mapping[str, int], Mapping[str, object]]]) -> None:
    """A table of tilings and what was measured of each."""
    entries = [
        {"for": asdict(key), "tiling": dict(tiling), "measured": dict(measured)}
        for key, (tiling, measured) in tilings.items()
    ]
    path.write_text(json.dumps(entries, indent=1) + "\n")
    table.cache_clear()


def _tiling(fields: dict[str, Any]) -> dict[str, int]:
    for name, value in fields.items():
        if type(value) is not int or not 0 < value <= LARGEST:
            raise ValueError(f"{name} is {value!r}")
    return fields


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
