"""What the command's arguments may be: types for argparse, and one line for whatever is none of them."""

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

MOST_PORT = 65_535
MOST_SECONDS = 1e8  # three years: gRPC knows no deadline beyond 2262
UINT32, UINT64, INT32 = (1 << 32) - 1, (1 << 64) - 1, (1 << 31) - 1  # what the contract's fields hold
HOST_AND_PORT = re.compile(r"(\[[^\[\]\s/]+\]|[^\[\]\s/:]+):(\d{1,5})", re.ASCII)
SCHEMES = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:")  # that gRPC resolves by itself


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage; so do its subcommands."""

    def error(self, message: str) -> NoReturn:
        """Exits with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def text(value: str) -> str:
    """Text that can be sent. Bytes that are not UTF-8 come from a shell as halves of surrogate pairs."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{value!r} is not UTF-8") from None
    return value


def server(value: str) -> str:
    """An address that gRPC can be given. A port that is out of range it would take for another one."""
    if text(value).startswith(SCHEMES):
        return value
    match = HOST_AND_PORT.fullmatch(value)
    if match is None or not 1 <= int(match[2]) <= MOST_PORT:
        raise argparse.ArgumentTypeError(f"{value!r} is not host:port with a port of 1 to {MOST_PORT}")
    return value


def host(value: str) -> str:
    """A name or an address to listen on."""
    if not value or re.search(r"[\s/\[\]]", value):
        raise argparse.ArgumentTypeError(f"{value!r} is no host name or IP address")
    return text(value)


def whole(least: int, most: int) -> Callable[[str], int]:
    """A type: a whole number within the bounds."""

    def convert(value: str) -> int:
        try:
            number = int(value)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{value!r} is not a whole number") from None
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{number} is out of range; allowed: {least} to {most}")
        return number

    return convert


def seconds(value: str) -> float:
    """A time, zero included."""
    try:
        number = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number") from None
    if not 0.0 <= number <= MOST_SECONDS:  # NaN is not either
        raise argparse.ArgumentTypeError(f"{number:g} is out of range; allowed: 0 to {MOST_SECONDS:g}")
    return number
