"""Types of the command's arguments for argparse, and a parser whose errors take one line."""

import argparse
import re
from collections.abc import Callable
from typing import NoReturn

MOST_PORT = 65_535
MOST_SECONDS = 1e8  # three years: gRPC cannot represent deadlines beyond 2262
UINT32, UINT64, INT32 = (1 << 32) - 1, (1 << 64) - 1, (1 << 31) - 1  # largest values of the contract's fields
HOST_AND_PORT = re.compile(r"(\[[^\[\]\s/]+\]|[^\[\]\s/:]+):(\d{1,5})", re.ASCII)
SCHEMES = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:")  # schemes that gRPC resolves


class Parser(argparse.ArgumentParser):
    """Reports errors in one line without the usage text. Its subcommands do the same."""

    def error(self, message: str) -> NoReturn:
        """Prints the message and exits with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def text(value: str) -> str:
    """Text in UTF-8. Other bytes arrive from a shell as halves of surrogate pairs, and cannot be sent."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{value!r} is not UTF-8") from None
    return value


def server(value: str) -> str:
    """An address for gRPC. The port is checked, because gRPC would silently replace a port that is out of range."""
    if text(value).startswith(SCHEMES):
        return value
    match = HOST_AND_PORT.fullmatch(value)
    if match is None or not 1 <= int(match[2]) <= MOST_PORT:
        raise argparse.ArgumentTypeError(f"{value!r} is not host:port with a port of 1 to {MOST_PORT}")
    return value


def host(value: str) -> str:
    """A host name or an IP address to listen on."""
    if not value or re.search(r"[\s/\[\]]", value):
        raise argparse.ArgumentTypeError(f"{value!r} is not a host name or IP address")
    return text(value)


def whole(least: int, most: int) -> Callable[[str], int]:
    """The type of a whole number from `least` to `most`."""

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
    """A time in seconds, from 0 to MOST_SECONDS."""
    try:
        number = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number") from None
    if not 0.0 <= number <= MOST_SECONDS:  # also refuses NaN
        raise argparse.ArgumentTypeError(f"{number:g} is out of range; allowed: 0 to {MOST_SECONDS:g}")
    return number
