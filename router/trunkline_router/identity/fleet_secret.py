"""The secret that all routers of a fleet share, the keys that derive from it, and texts that it seals."""

import hmac
from pathlib import Path

from trunkline_router.identity.identity import IdentityError

LEAST_SECRET_BYTES = 32
MOST_FILE_BYTES = 4096

_DOMAIN = b"trunkline fleet secret: "


def read_fleet_secret(secret: str, path: str) -> bytes:
    """The secret of --fleet-secret or, if that is empty, of the file; empty if neither is given. Raises IdentityError.

    Whitespace around the secret does not count: most editors end a file with a line break.
    """
    shown = f"--fleet-secret-file={path}" if not secret else "--fleet-secret"
    content = secret.encode()
    if path and secret:
        raise IdentityError("--fleet-secret and --fleet-secret-file are both given; allowed: one of them")
    if path:
        try:
            with Path(path).open("rb") as file:
                content = file.read(MOST_FILE_BYTES + 1)
        except OSError as error:
            raise IdentityError(f"{shown}: {error.strerror}") from None
        if len(content) > MOST_FILE_BYTES:
            raise IdentityError(f"{shown} has more than {MOST_FILE_BYTES} bytes")
    content = content.strip()
    if (path or secret) and len(content) < LEAST_SECRET_BYTES:
        raise IdentityError(f"{shown} has {len(content)} bytes; allowed: {LEAST_SECRET_BYTES} or more, random ones")
    return content


def derived_key(secret: bytes, purpose: str) -> bytes:
    """A key of 32 bytes for one purpose. No key tells anything about the secret or another purpose's key."""
    return hmac.digest(secret, _DOMAIN + purpose.encode(), "sha256")


def sealed(key: bytes, text: str) -> str:
    """The text with its message authentication code before it."""
    return f"{hmac.digest(key, text.encode(), 'sha256').hex()}:{text}"


def unsealed(key: bytes, value: str) -> str | None:
    """The text of a sealed value; None if it was not sealed with this key, or was changed."""
    code, _, text = value.partition(":")
    wanted = hmac.digest(key, text.encode(errors="replace"), "sha256").hex()
    return text if hmac.compare_digest(wanted.encode(), code.encode(errors="replace")) else None
