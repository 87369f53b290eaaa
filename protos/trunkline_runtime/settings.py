"""Typed settings: a frozen dataclass filled from flags, then the environment, then defaults. Fails loudly.

A field's metadata may hold `help`, `minimum`, `maximum` and `choices`. Fields that are dataclasses themselves are
flattened: their fields are flags like any other.
"""

import argparse
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from typing import Any, TypeVar

ENVIRONMENT_PREFIX = "TRUNKLINE_"

T = TypeVar("T")


class SettingError(Exception):
    """A setting is missing or makes no sense. One line for a person, naming it and what is allowed."""


def setting(default: Any = MISSING, *, help: str, **limits: Any) -> Any:
    """A dataclass field that is a setting. Limits: minimum, maximum (inclusive), choices."""
    return field(default=default, metadata={"help": help, **limits})


def load_settings(cls: type[T], argv: Sequence[str], *, prog: str, description: str = "") -> T:
    """Settings from the command line, or exits with status 2 and one line on standard error."""
    try:
        return parse_settings(cls, argv, os.environ, prog=prog, description=description)
    except SettingError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)


def parse_settings(
    cls: type[T], argv: Sequence[str], environment: Mapping[str, str], *, prog: str, description: str = ""
) -> T:
    """Settings from flags, environment and defaults. Raises SettingError."""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    for item, hint in _flat_fields(cls):
        flag = "--" + item.name.replace("_", "-")
        if _base_type(hint) is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=_help(item))
        else:
            parser.add_argument(flag, default=None, metavar=_base_type(hint).__name__.upper(), help=_help(item))
    given = vars(parser.parse_args(argv))
    return _build(cls, given, environment)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise SettingError(message)


def _build(cls: type[T], given: Mapping[str, Any], environment: Mapping[str, str]) -> T:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]
        hint = hints[item.name]
        if is_dataclass(hint):
            values[item.name] = _build(typing.cast("type[Any]", hint), given, environment)
            continue
        raw = given.get(item.name)
        if raw is None:
            raw = environment.get(ENVIRONMENT_PREFIX + item.name.upper())
        if raw is not None:
            values[item.name] = _convert(item, hint, raw)
        elif item.default is MISSING:
            raise SettingError(f"--{item.name.replace('_', '-')} is missing: {item.metadata.get('help', '')}")
    return cls(**values)


def _convert(item: Field[Any], hint: Any, raw: Any) -> Any:
    flag = "--" + item.name.replace("_", "-")
    base = _base_type(hint)
    value: Any
    try:
        if base is bool:
            value = raw if isinstance(raw, bool) else {"1": True, "true": True, "0": False, "false": False}[raw.lower()]
        elif base is tuple:
            value = tuple(part.strip() for part in raw.split(",") if part.strip())
        else:
            value = base(raw)
    except (ValueError, KeyError):
        raise SettingError(f"{flag}={raw} is not {_kind(base)}; allowed: {_allowed(item, base)}") from None
    least, most, choices = (item.metadata.get(name) for name in ("minimum", "maximum", "choices"))
    fits = (least is None or value >= least) and (most is None or value <= most) and value == value  # NaN is not
    if not fits or (choices is not None and value not in choices):
        raise SettingError(f"{flag}={raw} is out of range; allowed: {_allowed(item, base)}")
    return value


def _allowed(item: Field[Any], base: type) -> str:
    least, most, choices = (item.metadata.get(name) for name in ("minimum", "maximum", "choices"))
    if choices is not None:
        return ", ".join(map(str, choices))
    if least is not None and most is not None:
        return f"{least} to {most}"
    if least is not None:
        return f"{least} or more"
    return f"{most} or less" if most is not None else _kind(base)


def _kind(base: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(base, "text")


def _help(item: Field[Any]) -> str:
    default = "required" if item.default is MISSING else f"default: {item.default}"
    return f"{item.metadata.get('help', '')} ({default})".replace("%", "%%")


def _flat_fields(cls: type) -> Iterator[tuple[Field[Any], Any]]:
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        if is_dataclass(hints[item.name]):
            yield from _flat_fields(hints[item.name])
        else:
            yield item, hints[item.name]


def _base_type(hint: Any) -> type:
    """`int` of `int | None`, `tuple` of `tuple[str, ...]`."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    origin = typing.get_origin(hint)
    return typing.cast("type", origin or hint)
