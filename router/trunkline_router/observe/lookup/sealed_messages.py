"""Messages between the routers of a fleet, which others that read or write in Redis can neither read nor make.

Each message has a key of its own, derived from the fleet's with a random salt, so no nonce repeats. The cipher is
ChaCha20-Poly1305 (RFC 8439), which authenticates what it encrypts.
"""

import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from redis.asyncio.connection import parse_url

from trunkline.grant import GrantKeys
from trunkline_router.access.identity.fleet_secret import FleetSecret, derived_key

PURPOSE = "questions among routers of "
FORMAT = b"\x01"
SALT_BYTES, TAG_BYTES = 16, 16
NONCE = bytes(12)  # each key seals one message
MOST_HEAD_BYTES = 512
LONGEST_NAME = 64
ANY_KEY = b""  # names no grant key
SEALED_MORE_BYTES = len(FORMAT) + SALT_BYTES + TAG_BYTES + MOST_HEAD_BYTES + 1  # than the body

QUESTION, ANSWER = "question", "answer"


@dataclass(frozen=True, slots=True)
class FleetMessage:
    """A question or its answer.

    sender: the router process that sends it, by a random name
    house: the router whose process that is, by a random name
    """

    kind: str
    question_id: str
    sender: str
    house: str
    at_unix_s: float
    body: bytes = b""


class MessageSeal:
    """Seals messages, and opens what any of the keys has sealed.

    num_sealing: the first ones of the keys are those that routers may have without the others. Each of them seals every
        message, separately: the holder of one key learns nothing of another one's messages
    """

    def __init__(self, keys: Sequence[bytes], num_sealing: int = 1) -> None:
        self._keys = keys
        self._sealing = keys[:num_sealing]

    def all_sealed(self, message: FleetMessage) -> list[bytes]:
        """Returns the encrypted message, once for each key that seals."""
        return [_sealed(message, key) for key in self._sealing]

    def sealed(self, message: FleetMessage) -> bytes:
        """Returns the message, encrypted with the first key."""
        return _sealed(message, self._keys[0])

    def opened(self, sealed: bytes) -> FleetMessage | None:
        """Returns a message; None if none of the keys has sealed it, or it was changed."""
        if not sealed.startswith(FORMAT):
            return None
        salt, rest = sealed[len(FORMAT) :][:SALT_BYTES], sealed[len(FORMAT) + SALT_BYTES :]
        for key in self._keys:
            try:
                return _read(_cipher(key, salt).decrypt(NONCE, rest, FORMAT))
            except InvalidTag:
                continue
        return None


def message_seal(secret: FleetSecret, grant_keys: GrantKeys, redis_url: str, key_prefix: str) -> MessageSeal | None:
    """The seal of a fleet: of its secret. Without one it derives from the grant keys, which workers know, too, or else
    from the password of Redis. None without any of them: there is nothing that only the fleet knows.

    While the grant key changes, a router with both keys and those with one of them answer each other.
    """
    purpose = PURPOSE + key_prefix.rstrip(":")
    if secret and not secret.is_of_one_router:
        return MessageSeal([derived_key(one, purpose) for one in (secret.current, *secret.others)])
    if grant_keys:
        keys = [derived_key(one, purpose) for one in grant_keys.candidates(ANY_KEY)]
        return MessageSeal(keys, num_sealing=len(keys))
    password = parse_url(redis_url).get("password") or ""
    return MessageSeal([derived_key(str(password).encode(), purpose)]) if password else None


def _sealed(message: FleetMessage, key: bytes) -> bytes:
    head = (message.kind, message.question_id, message.sender, message.house, message.at_unix_s)
    salt = secrets.token_bytes(SALT_BYTES)
    plain = orjson.dumps(head) + b"\n" + message.body
    return FORMAT + salt + _cipher(key, salt).encrypt(NONCE, plain, FORMAT)


def _cipher(key: bytes, salt: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(hmac.digest(key, salt, "sha256"))


def _read(plain: bytes) -> FleetMessage | None:
    """Reads a message of a router, perhaps of another version; None if this one does not know its like."""
    head, _, body = plain.partition(b"\n")
    try:
        fields: Any = orjson.loads(head[:MOST_HEAD_BYTES])
        kind, question_id, sender, house, at_unix_s, *_ = fields
        names_fit = all(_is_name(name) for name in (question_id, sender, house))
        if names_fit and kind in (QUESTION, ANSWER) and isinstance(at_unix_s, int | float):
            return FleetMessage(kind, question_id, sender, house, float(at_unix_s), body)
    except (ValueError, TypeError):
        pass
    return None


def _is_name(value: Any) -> bool:
    """Whether it is a random name, which may be a part of a channel's."""
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isalnum() and value.isascii()
