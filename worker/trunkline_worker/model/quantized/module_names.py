"""Which parts of a model a list of names means, by the rules of the software that writes it."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trunkline_worker.model.checkpoint.entries import Entries
from trunkline_worker.model.checkpoint.refusals import ModelError, shown

IsNamed = Callable[[str], bool]


def names(config: Entries, *keys: str) -> tuple[str, ...]:
    """Returns the list of names of the first of the keys that is present; none if all are absent or null."""
    for key in keys:
        if config.has(key):
            value = config.values[key]
            if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
                raise config.refused(key, value, "a list of names")
            return tuple(value)
    return ()


def compiled(regex: str) -> re.Pattern[str]:
    """Returns a regular expression of a file. Raises ModelError if it is none."""
    try:
        return re.compile(regex)
    except (re.error, RecursionError, OverflowError) as error:
        raise ModelError(f"{shown(regex)} is no regular expression: {shown(str(error))}") from None


def skipped(names: Sequence[str]) -> IsNamed:
    """As in transformers: a key is the start of a name up to a dot, such a start as a regular expression, or an end."""
    starts = [compiled(rf"(?:{name})(?:(?<=\.)|(?=\.|$))") for name in names]
    return lambda name: any(start.match(name) for start in starts) or name.endswith(tuple(names))


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
