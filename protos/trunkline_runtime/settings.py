"""Typed settings: a frozen dataclass whose values come from flags, the environment, a file or defaults, in this order.

The file (`--config FILE`) is a JSON object whose names are the fields' names and whose values have their types; null
means the default. A field's metadata may have `help`, `metavar`, `minimum`, `maximum` and `choices`. Fields that are
dataclasses themselves are flattened: their fields are flags like all others.
"""

import argparse
import json
import os
import socket
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from importlib.metadata import version
from ipaddress import ip_address
from typing import Any, TypeVar

ENVIRONMENT_PREFIX = "TRUNKLINE_"
# What the help shows for a number, by the end of the setting's name.
METAVARS = {"_ms": "MILLISECONDS", "_s": "SECONDS", "_mib": "MIB", "port": "PORT"}

T = TypeVar("T")


class SettingError(Exception):
    """A setting is missing or invalid. The message is one line that names the setting and the allowed values."""


def setting(default: Any = MISSING, *, help: str, **limits: Any) -> Any:
    """A dataclass field that is a setting.

    limits: minimum, maximum (both inclusive), choices; metavar: what the help shows for the value
    """
    return field(default=default, metadata={"help": help, **limits})


def load_settings(cls: type[T], argv: Sequence[str], *, prog: str, description: str = "") -> T:
    """Settings from flags, environment, file and defaults. Exits with status 2 and one line if a setting is invalid."""
    try:
        return parse_settings(cls, argv, os.environ, prog=prog, description=description)
    except SettingError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        sys.exit(2)


def parse_settings(
    cls: type[T], argv: Sequence[str], environment: Mapping[str, str], *, prog: str, description: str = ""
) -> T:
    """Settings from flags, environment, file and defaults. Raises SettingError."""
    parser = _Parser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"{prog} {version('trunkline')}")
    parser.add_argument(
        "--config", metavar="FILE", help="JSON file with settings, named like the flags but with _; flags override it"
    )
    for item, hint in flat_fields(cls):
        flag = "--" + item.name.replace("_", "-")
        if base_type(hint) is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=_help(item))
        else:
            parser.add_argument(flag, default=None, metavar=_metavar(item, base_type(hint)), help=_help(item))
    given = vars(parser.parse_args(argv))
    path = given.pop("config") or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    sources = _Sources(given, environment, path or "", _read_file(path, cls) if path else {})
    return _build(cls, sources)


@dataclass(frozen=True, slots=True)
class _Sources:
    """The sources of values."""

    flags: Mapping[str, Any]
    environment: Mapping[str, str]
    path: str
    file: Mapping[str, Any]

    def value_of(self, item: Field[Any], hint: Any) -> Any:
        """The value of a setting; None if no source has one. Raises SettingError."""
        raw = self.flags.get(item.name)
        if raw is None:
            raw = self.environment.get(ENVIRONMENT_PREFIX + item.name.upper())
        if raw is not None:
            return _convert(item, hint, raw)
        value = self.file.get(item.name)
        if value is None:
            return None
        base, shown = base_type(hint), f"{self.path}: {item.name}={json.dumps(value)}"
        if not _has_json_type(value, base):
            raise SettingError(f"{shown} is not {_kind(base)}; allowed: {_allowed(item, base)}")
        return _checked(item, base, tuple(value) if base is tuple else base(value), shown)


def _read_file(path: str, cls: type) -> dict[str, Any]:
    """The settings of a file, unchecked. Raises SettingError if it cannot be read or has unknown settings."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file, object_pairs_hook=_without_repetition)
    except OSError as error:
        raise SettingError(f"--config={path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise SettingError(f"--config={path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise SettingError(f"--config={path} is not a JSON object")
    unknown = sorted(values.keys() - {item.name for item, _ in flat_fields(cls)})
    if unknown:
        raise SettingError(f"--config={path}: there is no setting {', '.join(unknown)}")
    return values


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's entries. Raises ValueError if a name is repeated: json would silently keep the last value."""
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is set twice")
    return made


def _has_json_type(value: Any, base: type) -> bool:
    if base is tuple:
        return isinstance(value, list) and all(isinstance(part, str) for part in value)
    if isinstance(value, bool) or base is bool:
        return isinstance(value, bool) and base is bool
    return isinstance(value, (int, float) if base is float else base)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise SettingError(message)


def _build(cls: type[T], sources: _Sources) -> T:
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in fields(cls):  # type: ignore[arg-type]
        hint = hints[item.name]
        if is_dataclass(hint):
            values[item.name] = _build(typing.cast("type[Any]", hint), sources)
            continue
        value = sources.value_of(item, hint)
        if value is not None:
            values[item.name] = value
        elif item.default is MISSING:
            raise SettingError(f"--{item.name.replace('_', '-')} is missing: {item.metadata.get('help', '')}")
    return cls(**values)


def _convert(item: Field[Any], hint: Any, raw: Any) -> Any:
    shown = f"--{item.name.replace('_', '-')}={raw}"
    base = base_type(hint)
    value: Any
    try:
        if base is bool:
            value = raw if isinstance(raw, bool) else {"1": True, "true": True, "0": False, "false": False}[raw.lower()]
        elif base is tuple:
            value = tuple(part.strip() for part in raw.split(",") if part.strip())
        else:
            value = base(raw)
    except (ValueError, KeyError):
        raise SettingError(f"{shown} is not {_kind(base)}; allowed: {_allowed(item, base)}") from None
    return _checked(item, base, value, shown)


def _checked(item: Field[Any], base: type, value: Any, shown: str) -> Any:
    least, most, choices = (item.metadata.get(name) for name in ("minimum", "maximum", "choices"))
    fits = (least is None or value >= least) and (most is None or value <= most) and value == value  # false for NaN
    if not fits or (choices is not None and value not in choices):
        raise SettingError(f"{shown} is out of range; allowed: {_allowed(item, base)}")
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
    return {int: "a whole number", float: "a number", bool: "true or false", tuple: "a list of texts"}.get(base, "text")


def _metavar(item: Field[Any], base: type) -> str:
    """What the help shows for the value."""
    if metavar := item.metadata.get("metavar"):
        return str(metavar)
    if choices := item.metadata.get("choices"):
        return f"{{{','.join(map(str, choices))}}}"
    if base in (int, float):
        return next((shown for ending, shown in METAVARS.items() if item.name.endswith(ending)), "N")
    return "TEXT"


def _help(item: Field[Any]) -> str:
    """The meaning, and the default if there is one; defaults of None and empty ones are part of the meaning."""
    if item.default is MISSING:
        default = " (required)"
    else:
        shown = ",".join(item.default) if isinstance(item.default, tuple) else item.default
        default = "" if shown in (None, "") else f" (default: {shown})"
    return f"{item.metadata.get('help', '')}{default}".replace("%", "%%")


def flat_fields(cls: type) -> Iterator[tuple[Field[Any], Any]]:
    """Every setting with its type, including those of nested dataclasses."""
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        if is_dataclass(hints[item.name]):
            yield from flat_fields(hints[item.name])
        else:
            yield item, hints[item.name]


def base_type(hint: Any) -> type:
    """`int` of `int | None`, `tuple` of `tuple[str, ...]`."""
    if isinstance(hint, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    origin = typing.get_origin(hint)
    return typing.cast("type", origin or hint)


def instance_name(host: str, port: int) -> str:
    """The name of a process among those of its service, if its settings give it none: host:port. If it listens on all
    addresses, which processes of other machines do too, with the machine's name."""
    return f"{socket.gethostname() if _is_wildcard(host) else host}:{port}"


def _is_wildcard(host: str) -> bool:
    try:
        return not host or ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
