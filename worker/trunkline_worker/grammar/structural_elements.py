"""Elements of a structural tag, in xgrammar's notation: JSON objects whose fields are checked as they are read."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from trunkline.status import RequestRefused, invalid
from trunkline_worker.grammar.lark_text import MAX_REPEATS

MAX_ELEMENTS = 1_000
MAX_MARKS = 128  # triggers and ends of one free text, and what it excludes
FIELDS = {
    "const_string": {"value"},
    "json_schema": {"json_schema", "style", "strict"},
    "regex": {"pattern"},
    "grammar": {"grammar"},
    "any_text": {"excludes", "max_tokens", "strict"},
    "any_tokens": {"exclude_tokens", "strict"},
    "sequence": {"elements"},
    "or": {"elements"},
    "optional": {"content"},
    "star": {"content"},
    "plus": {"content"},
    "repeat": {"content", "min", "max"},
    "tag": {"begin", "content", "end"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
}


class Element(NamedTuple):
    """A JSON object, at a JSON pointer."""

    fields: Mapping[str, Any]
    at: str

    @classmethod
    def of(cls, value: Any, at: str) -> "Element":
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind not in FIELDS:
            raise refused_at(at, f"must be an object whose `type` is one of {', '.join(FIELDS)}")
        for name, field in value.items():
            is_absent = field is None or field is False or field == []  # as clients write what they do not use
            if name != "type" and name not in FIELDS[kind] and not is_absent:
                raise refused_at(at, f"`{name[:64]}` is not supported")
        return cls(value, at)

    def text(self, name: str) -> str:
        text = self.fields.get(name)
        if not isinstance(text, str):
            raise refused_at(f"{self.at}/{name}", "must be a string")
        return text

    def texts(self, name: str, least: int = 0) -> list[str]:
        """Strings that are not empty."""
        texts = self.fields.get(name, [])
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise refused_at(f"{self.at}/{name}", "must be an array of strings that are not empty")
        if not least <= len(texts) <= MAX_MARKS:
            raise refused_at(f"{self.at}/{name}", f"must have {least} to {MAX_MARKS} members")
        return texts

    def flag(self, name: str, default: bool = False) -> bool:
        flag = self.fields.get(name, default)
        if not isinstance(flag, bool):
            raise refused_at(f"{self.at}/{name}", "must be true or false")
        return flag

    def integer(self, name: str, least: int, most: int = MAX_REPEATS) -> int:
        count = self.fields.get(name)
        if not isinstance(count, int) or isinstance(count, bool) or not least <= count <= most:
            raise refused_at(f"{self.at}/{name}", f"must be an integer from {least} to {most}")
        return count

    def inner(self, name: str = "content") -> "Element":
        return self.of(self.fields.get(name), f"{self.at}/{name}")

    def each(self, name: str) -> list["Element"]:
        values = self.fields.get(name)
        if not isinstance(values, list) or not 0 < len(values) <= MAX_ELEMENTS:
            raise refused_at(f"{self.at}/{name}", f"must be an array of 1 to {MAX_ELEMENTS} elements")
        return [self.of(value, f"{self.at}/{name}/{index}") for index, value in enumerate(values)]


@contextmanager
def refusals_at(at: str) -> Iterator[None]:
    """Names the element in refusals of what it contains."""
    try:
        yield
    except RequestRefused as refused:
        raise refused_at(at, refused.message.removeprefix("grammar: ")) from None


def refused_at(at: str, why: str) -> RequestRefused:
    return invalid("grammar", f"{at[-128:]}: {why}")
