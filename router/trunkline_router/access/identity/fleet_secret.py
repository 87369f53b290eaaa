"""The secret that all routers of a fleet share, the keys that derive from it, and texts that it seals.

The secret is changed while requests run: the current one seals, and others, earlier ones and the next one, open what
they have sealed.
"""

import hmac
from dataclasses import dataclass, field
from pathlib import Path

from trunkline_router.access.identity.identity import IdentityError

LEAST_SECRET_BYTES = 32
MOST_FILE_BYTES = 4096
MOST_SECRETS = 4  # each record that none of them has sealed costs a hash for each

_DOMAIN = b"trunkline fleet secret: "


@dataclass(frozen=True, slots=True)
class FleetSecret:
    """The current secret of a fleet, and others that count too, in the order of the file. False if there is none. Its
    repr hides them."""

    current: bytes = field(default=b"", repr=False)
    others: tuple[bytes, ...] = field(default=(), repr=False)

    def __bool__(self) -> bool:
        return bool(self.current)

    def seal(self, purpose: str) -> "Seal":
        """The seal for one purpose."""
        return Seal(*(derived_key(secret, purpose) for secret in (self.current, *self.others)))


class Seal:
    """Seals texts with the first key, and opens what any of them has sealed, whatever their order."""

    def __init__(self, *keys: bytes) -> None:
        self._keys = keys

    def sealed(self, text: str) -> str:
        """The text with its message authentication code before it."""
        return f"{_code(self._keys[0], text)}:{text}"

    def opened(self, value: str) -> tuple[str, int] | None:
        """The text of a sealed value and the number of its key, 0 for the first; None if none of the keys has sealed
        it, or it was changed. Takes as long for each wrong code."""
        code, _, text = value.partition(":")
        given = code.encode(errors="replace")
        matching = [
            number for number, key in enumerate(self._keys) if hmac.compare_digest(_code(key, text).encode(), given)
        ]
        return (text, matching[0]) if matching else None


def read_fleet_secret(secret: str, path: str) -> FleetSecret:
    """The secret of --fleet-secret or, if that is empty, those of the file: one on each line, the current one first.
    Raises IdentityError.

    Whitespace around a secret does not count: most editors end a file with a line break.
    """
    if path and secret:
        raise IdentityError("--fleet-secret and --fleet-secret-file are both given; allowed: one of them")
    if path:
        return _read_file(path)
    return FleetSecret(_checked(secret.encode().strip(), "--fleet-secret") if secret else b"")


def derived_key(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for one purpose. No key tells anything about the secret or another purpose's key."""
    return hmac.digest(secret, _DOMAIN + purpose.encode(), "sha256")


def _read_file(path: str) -> FleetSecret:
    shown = f"--fleet-secret-file={path}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise IdentityError(f"{shown}: {error.strerror}") from None
    if len(content) > MOST_FILE_BYTES:
        raise IdentityError(f"{shown} has more than {MOST_FILE_BYTES} bytes")
    lines = [(number, line.strip()) for number, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    if len(lines) > MOST_SECRETS:
        raise IdentityError(f"{shown} has {len(lines)} secrets; allowed: {MOST_SECRETS}, one on each line")
    (_, current), *rest = lines or [(1, b"")]
    _checked(current, shown)
    return FleetSecret(current, tuple(_checked(line, f"{shown}: line {number}") for number, line in rest))


def _checked(secret: bytes, shown: str) -> bytes:
    if len(secret) < LEAST_SECRET_BYTES:
        raise IdentityError(f"{shown} has {len(secret)} bytes; allowed: {LEAST_SECRET_BYTES} or more, random ones")
    return secret


def _code(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode(errors="replace"), "sha256").hex()
