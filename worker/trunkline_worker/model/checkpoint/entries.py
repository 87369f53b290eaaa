"""Typed access to the entries of a JSON object. A value of another type or out of range is refused by name."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trunkline_worker.model.checkpoint.refusals import ModelError, shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entries:
    """A JSON object. Its readers raise ModelError with the key and its allowed values. null counts as a value:
    transformers fails on it where it expects a number.

    within: prefix of the keys in errors, e.g. "rope_scaling."
    """

    values: dict[str, Any]
    within: str = ""

    def has(self, key: str) -> bool:
        """Whether the key is present with a value other than null."""
        return self.values.get(key) is not None

    def integer(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """Returns an integer; a boolean, or a float with an integral value, is refused. default: for an absent key"""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refused(key, value, f"an integer in [{least}, {most}]")
        return value

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """Returns a finite number. default: for an absent key"""
        value = self._value(key, default)
        if not is_number(value) or not least <= value <= most:
            raise self.refused(key, value, f"a number in [{least:g}, {most:g}]")
        return float(value)

    def positive(self, key: str, most: float, default: float | None = None) -> float:
        """Returns a number above 0. default: for an absent key"""
        value = self._value(key, default)
        if not is_number(value) or not 0 < value <= most:
            raise self.refused(key, value, f"a number in (0, {most:g}]")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns true or false. default: for an absent key"""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        """Returns a string."""
        value = self._value(key, None)
        if not isinstance(value, str):
            raise self.refused(key, value, "a string")
        return value

    def positives(self, key: str, count: int, most: float) -> tuple[float, ...]:
        """Returns a list of `count` numbers above 0."""
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != count or not all(is_number(x) and 0 < x <= most for x in value):
            raise self.refused(key, value, f"a list of {count} numbers in (0, {most:g}]")
        return tuple(map(float, value))

    def object(self, key: str) -> "Entries":
        """Returns the object of a key, which must be present. Errors name its keys with this key as prefix."""
        value = self.values[key]
        if not isinstance(value, dict):
            raise self.refused(key, value, "an object")
        return Entries(value, f"{self.within}{key}.")

    def refused(self, key: str, value: Any, allowed: str) -> ModelError:
        """Returns the error for a value that is not allowed."""
        return ModelError(f"{self.within}{key} {shown(value)} is not supported; supported: {allowed}")

    def one_of(self, key: str, value: T, choices: Sequence[T]) -> T:
        """Returns `value`, which was read from this key, if it is one of the choices."""
        if value not in choices:
            raise self.refused(key, value, listed(choices))
        return value

    def _value(self, key: str, default: Any) -> Any:
        if key not in self.values and default is None:
            raise ModelError(f"{self.within}{key} is missing")
        return self.values.get(key, default)


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def listed(choices: Iterable[Any]) -> str:
    """Returns the choices as a list for an error message."""
    return ", ".join(map(str, choices))


def without(config: dict[str, Any], ignored: tuple[str, ...]) -> dict[str, Any]:
    """Returns config.json without the keys that the operator has declared harmless. "a.b" is the key b of the object
    a."""
    kept = {}
    for key, value in config.items():
        if key not in ignored:
            within = tuple(name.removeprefix(f"{key}.") for name in ignored if name.startswith(f"{key}."))
            kept[key] = without(value, within) if within and isinstance(value, dict) else value
    return kept
