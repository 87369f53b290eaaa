"""Grants: a router's signed permission to compute a request, which the client itself takes to the worker.

The whole Submit is signed, so no part of it (tenant, salt, lane, limits, prompt, sampling, ledger) can be changed on
the way. A grant is valid for one epoch of one worker, for a short time, and for one use.
"""

import hmac

from google.protobuf.message import DecodeError

from trunkline.grant_keys import GrantKeys, key_id
from trunkline.status import CODE_PERMISSION_DENIED, FORBIDDEN, RequestRefused, invalid
from trunkline.v1.worker_pb2 import Grant, Submit

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


def forbidden(message: str) -> RequestRefused:
    """A refusal with PERMISSION_DENIED and the reason FORBIDDEN."""
    return RequestRefused(CODE_PERMISSION_DENIED, FORBIDDEN, message)


def _signature(key: bytes, grant: Grant) -> bytes:
    """Signs each part with its length before it, so that different grants never sign the same bytes."""
    parts = (
        _GRANT_DOMAIN,
        grant.submit,
        grant.epoch.to_bytes(8, "little"),
        grant.expires_unix_ms.to_bytes(8, "little"),
    )
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "little") + part for part in parts), "sha256")
