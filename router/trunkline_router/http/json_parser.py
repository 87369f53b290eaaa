"""Parses JSON strictly, and long JSON in steps: the standard library's parser would hold the event loop, from a thread
as well, because it keeps the interpreter's lock."""

import asyncio
import codecs
import json
import math
import re
from json.decoder import JSONDecoder
from typing import Any, NoReturn

from trunkline.status import RequestRefused, invalid
from trunkline_router.request.steps import STEP_BYTES

VALUES_PER_STEP = 1024
_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = r"[ \t\n\r]*-?(?:0|[1-9]\d{0,30})(?:\.\d{1,30})?(?:[eE][+-]?\d{1,3})?[ \t\n\r]*"
_NUMBERS = re.compile(rf"(?:{_NUMBER},){{16,4096}}")


class _NotJson(ValueError):
    """The message says what is wrong, without quoting the text."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise _NotJson("an object has a name twice")  # two components could each use a different value
    return made


def _constant(name: str) -> NoReturn:
    raise _NotJson(f"{name} is not a JSON number")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _NotJson("a number is too large")
    return value


_DECODER = JSONDecoder(object_pairs_hook=_object, parse_constant=_constant, parse_float=_float)


async def parse_json(raw: bytes) -> Any:
    """The value. Raises RequestRefused (INVALID_REQUEST), also for invalid UTF-8, NaN, Infinity, and objects with a
    name twice. Call check_shape() first: this trusts that the depth is bounded."""
    try:
        text = await _decode(raw)
        if len(raw) <= STEP_BYTES:
            return _DECODER.decode(text)
        return await _Parser(text).parse()
    except UnicodeDecodeError:
        raise invalid("body", "is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise _problem(f"{error.msg} at character {error.pos}") from None
    except _NotJson as error:
        raise _problem(str(error)) from None
    except (RecursionError, ValueError):  # ValueError: a number with thousands of digits
        raise _problem("it is nested too deeply or has a number with too many digits") from None


def _problem(what: str) -> RequestRefused:
    return invalid("body", f"is not valid JSON: {what}")


async def _decode(raw: bytes) -> str:
    if len(raw) <= STEP_BYTES:
        return raw.decode()
    decoder, parts = codecs.getincrementaldecoder("utf-8")(), []
    for start in range(0, len(raw), STEP_BYTES):
        parts.append(decoder.decode(raw[start : start + STEP_BYTES], start + STEP_BYTES >= len(raw)))
        await asyncio.sleep(0)
    return "".join(parts)


class _Parser:
    """Parses one text. Strings, and runs of numbers, are parsed by the standard library."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._num_values = 0  # since the last pause

    async def parse(self) -> Any:
        value = await self._value()
        if self._skip_space() != len(self._text):
            raise json.JSONDecodeError("Extra data", "", self._at)
        return value

    def _skip_space(self) -> int:
        found = _SPACE.match(self._text, self._at)
        assert found is not None  # it matches the empty text
        self._at = found.end()
        return self._at

    def _next(self) -> str:
        at = self._skip_space()
        return self._text[at : at + 1]

    async def _value(self) -> Any:
        self._num_values += 1
        if self._num_values > VALUES_PER_STEP:
            self._num_values = 0
            await asyncio.sleep(0)
        first = self._next()
        if first == "{":
            return await self._pairs()
        if first == "[":
            return await self._list()
        began = self._at
        value, self._at = self._scalar()
        if self._at - began > STEP_BYTES:
            await asyncio.sleep(0)
        return value

    def _scalar(self) -> tuple[Any, int]:
        return _DECODER.raw_decode(self._text, self._at)

    async def _pairs(self) -> dict[str, Any]:
        self._at += 1
        made: dict[str, Any] = {}
        if self._next() == "}":
            self._at += 1
            return made
        while True:
            if self._next() != '"':
                raise self._expected("a name in double quotes")
            name, self._at = self._scalar()
            if self._next() != ":":
                raise self._expected("':'")
            self._at += 1
            if name in made:
                raise _NotJson("an object has a name twice")
            made[name] = await self._value()
            if not self._continues("}"):
                return made

    async def _list(self) -> list[Any]:
        self._at += 1
        made: list[Any] = []
        if self._next() == "]":
            self._at += 1
            return made
        while True:
            numbers = _NUMBERS.match(self._text, self._at)
            while numbers is not None:
                made += _DECODER.decode(f"[{numbers[0][:-1]}]")
                self._at = numbers.end()
                await asyncio.sleep(0)
                numbers = _NUMBERS.match(self._text, self._at)
            made.append(await self._value())
            if not self._continues("]"):
                return made

    def _continues(self, end: str) -> bool:
        found = self._next()
        if found not in (",", end):
            raise self._expected(f"',' or '{end}'")
        self._at += 1
        return found == ","

    def _expected(self, what: str) -> json.JSONDecodeError:
        return json.JSONDecodeError(f"Expecting {what}", "", self._at)
