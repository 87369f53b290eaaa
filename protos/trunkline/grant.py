"""Grants: a router's signed permission to compute a request, which the client itself takes to the worker.

The whole Submit is signed, so no part of it (tenant, salt, lane, limits, prompt, sampling, ledger) can be changed on
the way. A grant is valid for one epoch of one worker, for a short time, and for one use.

Routers and workers share the secrets that sign grants. There are two while the key of a fleet is being changed:
processes with the new and the old key understand those that have only one of them.
"""

import hmac

from google.protobuf.message import DecodeError

from trunkline.status import forbidden, invalid
from trunkline.v1.worker_pb2 import GetModelResponse, Grant, Submit

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
        return next((key for own_id, key in self._by_id.items() if own_id in model.grant_key_ids), b"")

    def candidates(self, named: bytes) -> list[bytes]:
        """The keys that may have made a signature.  named: the id that came with it; empty: any key"""
        if not named:
            return list(self._by_id.values())
        return [self._by_id[named]] if named in self._by_id else []


# Time for a client to reach the worker: connecting, one or two retransmissions, clocks that differ by seconds.
LIFETIME_S = 30.0

_GRANT_DOMAIN = b"trunkline.v1.Grant"


def sign_grant(key: bytes, submit: Submit, *, epoch: int, expires_unix_ms: int) -> Grant:
    """A grant for the worker's epoch."""
    serialized = submit.SerializeToString()
    grant = Grant(submit=serialized, epoch=epoch, expires_unix_ms=expires_unix_ms, key_id=key_id(key))
    grant.signature = _signature(key, grant)
    return grant


def open_grant(keys: GrantKeys, grant: Grant, *, epoch: int, now_unix_ms: int) -> Submit:
    """The granted Submit. Raises RequestRefused (FORBIDDEN) unless the grant was signed with one of these keys for this
    epoch of the worker, and has not expired."""
    candidates = keys.candidates(grant.key_id)
    if not any(hmac.compare_digest(_signature(key, grant), grant.signature) for key in candidates):
        raise forbidden("the grant was not signed with this worker's key, or was changed")
    if grant.epoch != epoch:
        raise forbidden("the grant is for another worker, or for an earlier epoch of this one")
    if now_unix_ms >= grant.expires_unix_ms:
        raise forbidden("the grant has expired")
    submit = Submit()
    try:
        submit.ParseFromString(grant.submit)
    except DecodeError:
        raise invalid("grant.submit", "is signed, but is not a Submit: the router speaks another protocol") from None
    return submit


def _signature(key: bytes, grant: Grant) -> bytes:
    """Signs each part with its length before it, so that different grants never sign the same bytes."""
    parts = (
        _GRANT_DOMAIN,
        grant.submit,
        grant.epoch.to_bytes(8, "little"),
        grant.expires_unix_ms.to_bytes(8, "little"),
    )
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "little") + part for part in parts), "sha256")
