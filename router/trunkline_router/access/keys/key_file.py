"""The file of API keys, which is replaced as a whole: a reader sees the old keys or the new ones."""

import contextlib
import fcntl
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trunkline_router.access.identity.api_keys import Entries, KeyRecord, read_entries, read_record, record_of
from trunkline_router.access.identity.identity import IdentityError

NEW_MODE = 0o600
MOST_BYTES = 16 << 20  # some 40,000 keys; routers read no larger file


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
