"""Entries of quantization_config that several formats have."""

from collections.abc import Iterable
from typing import Any

from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError, shown

# Bounds far above any model.
MOST_BLOCK = 1 << 16
MOST_GROUP = 1 << 20
DEFAULT_GROUP = 128  # of AWQ and GPTQ


def check_known(config: Entries, known: Iterable[str]) -> None:
    """Raises ModelError with the first key that is not known, unless its value is empty: it may change what the stored
    tensors stand for."""
    for key in sorted(config.values.keys() - set(known)):
        if not _is_empty(config.values[key]):
            raise ModelError(
                f"{config.within}{shown(key)[1:-1]} {shown(config.values[key])} is not known, and may change what the "
                "weights stand for: if it does not, name it in --ignore-config-keys"
            )


def _is_empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def names(config: Entries, *keys: str) -> tuple[str, ...]:
    """Returns the list of names of the first of the keys that is present; none if all are absent or null."""
    for key in keys:
        if config.has(key):
            value = config.values[key]
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise config.refused(key, value, "a list of names")
            return tuple(value)
    return ()


def read_group(config: Entries) -> int | None:
    """Returns group_size; None: a whole row is a group."""
    group = config.integer("group_size", -1, MOST_GROUP, default=DEFAULT_GROUP)
    if group == 0:
        raise config.refused("group_size", group, f"-1 or an integer in [1, {MOST_GROUP}]")
    return None if group == -1 else group


def read_block(config: Entries, key: str) -> tuple[int, int]:
    """Returns the rows and the inner elements of a block."""
    value: Any = config.values.get(key)
    whole = isinstance(value, list) and len(value) == 2 and all(type(size) is int for size in value)
    if not whole or not all(1 <= size <= MOST_BLOCK for size in value):
        raise config.refused(key, value, f"a list of 2 integers in [1, {MOST_BLOCK}]")
    return value[0], value[1]
