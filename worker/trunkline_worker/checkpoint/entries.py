"""Entries of a JSON object, each read as one type within a range. Whatever else stands there is refused by name."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trunkline_worker.checkpoint.errors import ModelError, shown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Entries:
    """A JSON object. Every method raises ModelError naming the key and what it may be. null is a value like any other:
    transformers fails on it where a number is wanted.

    within: what stands before the keys in errors, "rope_scaling." for example
    """

    values: dict[str, Any]
    within: str = ""

    def has(self, key: str) -> bool:
        """Whether the key is there with a value that is not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, least: int, most: int, default: int | None = None) -> int:
        """An integer; neither a boolean nor a float with an integral value. default: for an absent key."""
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refused(key, value, f"an integer in [{least}, {most}]")
        return value

    def number(self, key: str, least: float, most: float, default: float | None = None) -> float:
        """A finite number. default: for an absent key."""
        value = self._value(key, default)
        if not is_number(value) or not least <= value <= most:
            raise self.refused(key, value, f"a number in [{least:g}, {most:g}]")
        return float(value)

    def positive(self, key: str, most: float, default: float | None = None) -> float:
        """A number above 0. default: for an absent key."""
        value = self._value(key, default)
        if not is_number(value) or not 0 < value <= most:
            raise self.refused(key, value, f"a number in (0, {most:g}]")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false. default: for an absent key."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise self.refused(key, value, "true or false")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self._value(key, None)
        if not isinstance(value, str):
            raise self.refused(key, value, "a string")
        return value

    def positives(self, key: str, count: int, most: float) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        value = self._value(key, None)
        if not isinstance(value, list) or len(value) != count or not all(is_number(x) and 0 < x <= most for x in value):
            raise self.refused(key, value, f"a list of {count} numbers in (0, {most:g}]")
        return tuple(map(float, value))

    def object(self, key: str) -> "Entries":
        """The object under a key, which is there; its keys are named after this one in errors."""
        value = self.values[key]
        if not isinstance(value, dict):
            raise self.refused(key, value, "an object")
        return Entries(value, f"{self.within}{key}.")

    def refused(self, key: str, value: Any, allowed: str) -> ModelError:
        """The error of a value that is not allowed."""
        return ModelError(f"{self.within}{key} {shown(value)} is not supported; supported: {allowed}")

    def one_of(self, key: str, value: T, choices: Sequence[T]) -> T:
        """A value that was read from this key, if it is among the choices."""
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
    """Choices as they stand in an error."""
    return ", ".join(map(str, choices))
