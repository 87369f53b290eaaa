"""Tokens that scrapers of metrics present, from a file."""

import hashlib
import hmac
from pathlib import Path

LEAST_BYTES = 16
SCHEME = b"bearer"


class ScrapeTokenError(Exception):
    """The file of tokens cannot be used. The message is one line that names it, and no token."""


class ScrapeTokens:
    """Without any tokens, every caller may scrape. Only digests are kept."""

    def __init__(self, tokens: list[bytes]) -> None:
        self._digests = [hashlib.sha256(token).digest() for token in tokens]

    @classmethod
    def read(cls, path: str) -> "ScrapeTokens":
        """The tokens of a file, one a line. Raises ScrapeTokenError."""
        try:
            lines = Path(path).read_bytes().split(b"\n")
        except OSError as error:
            raise ScrapeTokenError(f"{path}: {error.strerror}") from None
        tokens = [line.strip() for line in lines if line.strip()]
        if not tokens or min(map(len, tokens)) < LEAST_BYTES:
            raise ScrapeTokenError(f"{path} must have tokens, one a line, of {LEAST_BYTES} bytes or more each")
        return cls(tokens)

    def allow(self, authorization: bytes) -> bool:
        """Whether a caller with this Authorization header may scrape."""
        scheme, _, token = authorization.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        known = [hmac.compare_digest(digest, one) for one in self._digests]
        return not known or (scheme.lower() == SCHEME and any(known))
