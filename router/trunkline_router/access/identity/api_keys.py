"""API keys, their records, and the content of a file of records. Pure.

A key is `tl-<id>-<secret>`: an id of 12 and a secret of 43 characters out of 62. Secret scanners find it with the
regular expression `\\btl-[0-9A-Za-z]{12}-[0-9A-Za-z]{43}\\b`. The id finds the record, which has the SHA-256 of the
secret. A slow hash is not needed: it protects secrets that can be guessed, and this one is 256 random bits.

The file is {"keys": {"<id>": {"hash": "sha256:…", "tenant": "acme", …}}}. It is replaced as a whole, so a reader sees
the old keys or the new ones.
"""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeGuard

from trunkline_router.access.identity.identity import Identity, IdentityError
from trunkline_router.access.identity.terms import JSON_ERRORS, TERMS, FieldError, identity_from, loaded

Entries = dict[str, dict[str, Any]]  # a record's fields but the id, by id
PREFIX = "tl-"
ID_CHARACTERS, SECRET_CHARACTERS = 12, 43  # 62 ** 43 > 2 ** 256
LONGEST_NOTE = 200
MOST_RECORD_BYTES = 1 << 14  # as JSON
FIELDS = ("id", "hash", *TERMS, "created", "expires", "revoked", "note")

_KEY = re.compile(rf"{PREFIX}([0-9A-Za-z]{{{ID_CHARACTERS}}})-([0-9A-Za-z]{{{SECRET_CHARACTERS}}})", re.ASCII)
_ID = re.compile(rf"[0-9A-Za-z]{{{ID_CHARACTERS}}}", re.ASCII)
_HASH = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key in the clear. Its repr hides the secret."""

    key_id: str
    secret: str

    @classmethod
    def parse(cls, credential: str) -> "ApiKey | None":
        """The key; None if the credential does not have the form of one."""
        found = _KEY.fullmatch(credential)
        return None if found is None else cls(found[1], found[2])

    @property
    def credential(self) -> str:
        return f"{PREFIX}{self.key_id}-{self.secret}"

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.secret.encode()).digest()

    def __repr__(self) -> str:
        return f"ApiKey({self.key_id})"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What is stored of an API key. Times are in Unix seconds."""

    key_id: str
    digest: bytes  # SHA-256 of the secret
    identity: Identity
    created_unix_s: float
    revoked_unix_s: float | None
    note: str

    @property
    def expires_unix_s(self) -> float | None:
        return self.identity.expires_unix_s

    def is_of(self, key: ApiKey) -> bool:
        """Whether the record is this key's; takes as long for each wrong secret."""
        return hmac.compare_digest(self.digest, key.digest)


def read_record(fields: Any) -> KeyRecord:
    """The record in a JSON object. Raises FieldError.

    Unknown fields are refused: one that is misspelt, or that only a later version knows, may restrict the key.
    """
    if not isinstance(fields, dict):
        raise FieldError("the record", "must be an object")
    if not fields.keys() <= set(FIELDS):
        raise FieldError("the record", f"has an unknown field; allowed: {', '.join(FIELDS)}")
    key_id, digest = fields.get("id"), fields.get("hash")
    if not is_key_id(key_id):
        raise FieldError("id", f"must be {ID_CHARACTERS} digits and letters")
    found = _HASH.fullmatch(digest) if isinstance(digest, str) else None
    if found is None:
        raise FieldError("hash", "must be sha256: and 64 hexadecimal digits")
    created = _time(fields, "created")
    if created is None:
        raise FieldError("created", "is missing")
    note = fields.get("note", "")
    if not isinstance(note, str) or len(note) > LONGEST_NOTE or not note.isprintable():
        raise FieldError("note", f"must be one line of at most {LONGEST_NOTE} characters")
    identity = identity_from(f"key:{key_id}", fields, _time(fields, "expires"))
    return KeyRecord(key_id, bytes.fromhex(found[1]), identity, created, _time(fields, "revoked"), note)


def is_key_id(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def _time(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    try:
        time = datetime.fromisoformat(value)
        if time.tzinfo is None:
            raise ValueError
        return time.timestamp()
    except (ValueError, TypeError, OverflowError):
        raise FieldError(name, "must be a time such as 2026-01-31T12:00:00Z") from None


def read_entries(content: bytes) -> Entries:
    """The entries, whose fields are not checked yet. Raises IdentityError."""
    try:
        found = loaded(content)
    except JSON_ERRORS as error:
        problem = "is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise IdentityError(f"is not JSON: {problem}") from None
    keys = found.get("keys") if isinstance(found, dict) and found.keys() == {"keys"} else None
    if not isinstance(keys, dict):
        raise IdentityError('must be an object of keys by id: {"keys": {"<id>": {…}}}')
    for number, (key_id, fields) in enumerate(keys.items(), 1):
        if not is_key_id(key_id):  # the message does not repeat it: it may be a whole key
            raise IdentityError(f"entry {number} does not have the id of a key as its name")
        if not isinstance(fields, dict) or "id" in fields:
            raise IdentityError(f"key {key_id} must be an object without an id")
    return dict(keys)


def record_of(key_id: str, fields: Mapping[str, Any]) -> KeyRecord:
    """The record of an entry. Raises IdentityError."""
    try:
        return read_record({**fields, "id": key_id})
    except FieldError as error:
        raise IdentityError(f"key {key_id}: {error}") from None
