"""Reads the standard OTEL_* variables. An empty variable counts as unset, by OpenTelemetry's rules."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class VariableError(ValueError):
    """An OTEL_* variable is invalid. The message is one line for a person."""


@contextmanager
def valid_variables(program: str) -> Iterator[None]:
    """Exits with status 2 and one line on standard error if a variable is invalid, as for any other setting."""
    try:
        yield
    except VariableError as error:
        print(f"{program}: {error}", file=sys.stderr)
        sys.exit(2)


def is_disabled() -> bool:
    return os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"


def one_of(allowed: Sequence[str], variable: str, default: str) -> str:
    """The value of a variable. Raises VariableError."""
    given = os.environ.get(variable) or default
    if given not in allowed:
        raise VariableError(f"{variable}={given} is not supported; allowed: {', '.join(allowed)}")
    return given


def number_of(variable: str, default: int, most: int) -> int:
    """The value of a variable, from 1 to `most`. Raises VariableError."""
    given = os.environ.get(variable) or str(default)
    if not given.isascii() or not given.isdecimal() or not 1 <= int(given) <= most:
        raise VariableError(f"{variable}={given} is not supported; allowed: a number from 1 to {most}")
    return int(given)
