"""The secrets that routers and workers share. There are two while the key of a fleet is being changed: processes with
the new and the old key understand those that have only one of them.
"""

import hmac

from trunkline.v1.worker_pb2 import GetModelResponse

LEAST_KEY_BYTES = 32  # the length of a signature

_KEY_ID_DOMAIN = b"trunkline.v1.GetModelResponse.grant_key_id"
_KEY_ID_BYTES = 8


def grant_key_problem(key: str, previous: str = "") -> str | None:
    """Why --grant-key or --grant-key-previous cannot be used, in one line that does not disclose them; None if they
    can. Empty: no key."""
    for flag, value in (("--grant-key", key), ("--grant-key-previous", previous)):
        if value and len(value.encode()) < LEAST_KEY_BYTES:
            return f"{flag} has {len(value.encode())} bytes; allowed: {LEAST_KEY_BYTES} or more, random ones"
    return "--grant-key-previous needs --grant-key" if previous and not key else None


def key_id(key: bytes) -> bytes:
    """Identifies a key without disclosing it; empty for no key."""
    return hmac.digest(key, _KEY_ID_DOMAIN, "sha256")[:_KEY_ID_BYTES] if key else b""


class GrantKeys:
    """The keys of a process, newest first; empty ones are left out. False if there are none."""

    def __init__(self, *keys: bytes) -> None:
        self._by_id = {key_id(key): key for key in keys if key}

    @classmethod
    def of(cls, key: str, previous: str = "") -> "GrantKeys":
        """The keys of the settings --grant-key and --grant-key-previous."""
        return cls(key.encode(), previous.encode())

    def __bool__(self) -> bool:
        return bool(self._by_id)

    @property
    def newest(self) -> bytes:
        """The newest key; empty if there is none."""
        return next(iter(self._by_id.values()), b"")

    @property
    def ids(self) -> list[bytes]:
        """Identifies the keys without disclosing them."""
        return list(self._by_id)

    def of_worker(self, model: GetModelResponse) -> bytes:
        """The newest key that the worker has too; empty if there is none."""
        theirs = {model.grant_key_id, *model.grant_key_ids}
        return next((key for own_id, key in self._by_id.items() if own_id in theirs), b"")

    def candidates(self, named: bytes) -> list[bytes]:
        """The keys that may have made a signature.  named: the id that came with it; empty: any key"""
        if not named:
            return list(self._by_id.values())
        return [self._by_id[named]] if named in self._by_id else []
