"""API keys, their records, and the file of records. Pure, but for the file.

A key is `tl-<id>-<secret>`: an id of 12 and a secret of 43 characters out of 62. Secret scanners find it with the
regular expression `\\btl-[0-9A-Za-z]{12}-[0-9A-Za-z]{43}\\b`. The id finds the record, which has the SHA-256 of the
secret. A slow hash is not needed: it protects secrets that can be guessed, and this one is 256 random bits.

The file is {"keys": {"<id>": {"hash": "sha256:…", "tenant": "acme", …}}}. It is replaced as a whole, so a reader sees
the old keys or the new ones.
"""

import contextlib
import fcntl
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import string
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

from trunkline_router.access.identity.identity import (
    JSON_ERRORS,
    TERMS,
    FieldError,
    Identity,
    IdentityError,
    identity_from,
    loaded,
)

NEW_MODE = 0o600
MOST_BYTES = 16 << 20  # of a file: some 40,000 keys; routers read no larger file

Entries = dict[str, dict[str, Any]]  # a record's fields but the id, by id
PREFIX = "tl-"
ID_CHARACTERS, SECRET_CHARACTERS = 12, 43  # 62 ** 43 > 2 ** 256
ALPHABET = string.digits + string.ascii_letters
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
    def new(cls) -> "ApiKey":
        return cls(_random_text(ID_CHARACTERS), _random_text(SECRET_CHARACTERS))

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


def new_record(
    key: ApiKey, terms: Mapping[str, Any], now_unix_s: float, expires_unix_s: float | None
) -> dict[str, Any]:
    """A key's record as JSON; `terms` has TERMS and `note`. Raises FieldError."""
    fields = {
        "id": key.key_id,
        "hash": f"sha256:{key.digest.hex()}",
        **{name: value for name, value in terms.items() if value is not None},
        "created": written_time(now_unix_s),
    }
    if expires_unix_s is not None:
        fields["expires"] = written_time(expires_unix_s)
    read_record(fields)
    if len(json.dumps(fields)) > MOST_RECORD_BYTES:
        raise FieldError("the record", f"has more than {MOST_RECORD_BYTES} bytes: too many or too long names")
    return fields


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


def written_time(unix_s: float) -> str:
    """A time as in records, such as 2026-01-31T12:00:00Z."""
    return datetime.fromtimestamp(int(unix_s), UTC).isoformat().replace("+00:00", "Z")


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


def _random_text(length: int) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(length))


class FileRecords:
    """Records in a file, for `trunkline keys`. Methods raise IdentityError."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def create(self, fields: Mapping[str, Any]) -> None:
        with changing(self._path) as entries:
            if fields["id"] in entries:
                raise IdentityError("the new key's id is taken: try again")
            entries[fields["id"]] = {name: value for name, value in fields.items() if name != "id"}

    def listed(self) -> list[tuple[KeyRecord, str]]:
        """The records, each with an empty text: nothing has sealed it."""
        return [(read_record({**fields, "id": key_id}), "") for key_id, fields in present(self._path).items()]

    def revoke(self, key_id: str, now: str) -> None:
        if not self._path.exists():
            raise IdentityError(f"{self._path}: No such file or directory")
        with changing(self._path) as entries:
            if key_id not in entries:
                raise IdentityError(f"{self._path} has no key {key_id}")
            entries[key_id].setdefault("revoked", now)


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


@contextlib.contextmanager
def changing(path: Path) -> Iterator[Entries]:
    """Lets the body change the entries, and then replaces the file; a body that raises changes nothing. Other
    processes that use this function wait. A missing file is created for its owner alone. Raises IdentityError."""
    _check_kind(path)
    path = path.resolve()  # a symbolic link stays one
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, NEW_MODE)
    except OSError as error:
        raise IdentityError(f"{path}.lock: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        entries = present(path) if path.exists() else {}
        yield entries
        text = json.dumps({"keys": entries}, indent=2) + "\n"
        if len(text) > MOST_BYTES:
            raise IdentityError(f"{path} would have more than {MOST_BYTES >> 20} MiB: remove keys that have ended")
        _replace(path, text)
    except OSError as error:
        raise IdentityError(f"{path}: {error.strerror}") from None
    finally:
        os.close(lock)


def present(path: Path) -> Entries:
    """The entries of a file. Raises IdentityError if it cannot be read or has an invalid part."""
    _check_kind(path)
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise IdentityError(f"has more than {MOST_BYTES >> 20} MiB")
        entries = read_entries(content)
        for key_id, fields in entries.items():
            record_of(key_id, fields)
    except OSError as error:
        raise IdentityError(f"{path}: {error.strerror}") from None
    except IdentityError as error:
        raise IdentityError(f"{path}: {error}") from None
    return entries


def _check_kind(path: Path) -> None:
    """Raises IdentityError for a folder, and for a pipe or a device, which could not be read to an end."""
    try:
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return
    except OSError as error:
        raise IdentityError(f"{path}: {error.strerror}") from None
    if not is_regular:
        raise IdentityError(f"{path} is not a regular file")


def _replace(path: Path, text: str) -> None:
    """Writes a new file beside the old one, with its owner and permissions, and puts it in its place."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            if path.exists():
                old = path.stat()
                os.fchmod(file.fileno(), old.st_mode & 0o777)
                made = os.fstat(file.fileno())
                if (old.st_uid, old.st_gid) != (made.st_uid, made.st_gid):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # or a crash could bring a revoked key back
    finally:
        os.close(folder)
