"""Proofs: the caller of a method that is reserved for routers and operators proves that it has the worker's grant key.

A proof is sent in the call's metadata. It is valid for one method, one worker, one epoch of it, and a short time. It
does not disclose the key.
"""

import hmac
from collections.abc import Iterable

from trunkline.grant import GrantKeys, key_id
from trunkline.names import PROOF_KEY, PROOF_KEY_ID_KEY
from trunkline.status import CODE_UNAUTHENTICATED, UNAUTHENTICATED, RequestRefused

WINDOW_S = 10.0  # greatest age of a proof, and greatest difference of the clocks

_DOMAIN = b"trunkline.v1.WorkerService proof"

Metadata = tuple[tuple[str, str], ...]


def proof_metadata(key: bytes, method: str, *, worker_id: str, epoch: int, now_unix_ms: int) -> Metadata:
    """Metadata for a call of WorkerService.`method` on a worker's epoch; empty if there is no key."""
    if not key:
        return ()
    proof = f"{now_unix_ms}.{_proof(key, method, worker_id, epoch, now_unix_ms)}"
    return ((PROOF_KEY, proof), (PROOF_KEY_ID_KEY, key_id(key).hex()))


def check_proof(
    keys: GrantKeys,
    method: str,
    metadata: "Iterable[tuple[str, str | bytes]] | None",
    *,
    worker_id: str,
    epoch: int,
    now_unix_ms: int,
) -> None:
    """Raises RequestRefused (UNAUTHENTICATED) unless the metadata has a valid proof, or there is no key."""
    if not keys:
        return
    metadata = tuple(metadata or ())
    given = [str(value) for name, value in metadata if name == PROOF_KEY]
    if len(given) != 1:
        raise _refused(f"{method} is for routers and operators with this worker's --grant-key")
    made_at, _, proof = given[0].partition(".")
    if not (made_at.isascii() and made_at.isdigit() and len(made_at) <= 19):
        raise _refused(f"the proof for {method} cannot be read")
    made_unix_ms = int(made_at)
    made = (_proof(key, method, worker_id, epoch, made_unix_ms) for key in keys.candidates(_named_key(metadata)))
    if not any(hmac.compare_digest(one.encode(), proof.encode()) for one in made):
        raise _refused(
            f"the proof for {method} was not made with this worker's --grant-key, or is for another epoch of it"
        )
    if abs(now_unix_ms - made_unix_ms) > WINDOW_S * 1e3:
        when = "too long ago" if made_unix_ms < now_unix_ms else "in the future"
        raise _refused(f"the proof for {method} was made {when}: the clocks must agree to {WINDOW_S:g} s")


def _named_key(metadata: "Iterable[tuple[str, str | bytes]]") -> bytes:
    """The id of the proof's key; empty if it is not named, or not once in hex."""
    named = [str(value) for name, value in metadata if name == PROOF_KEY_ID_KEY]
    try:
        return bytes.fromhex(named[0]) if len(named) == 1 else b""
    except ValueError:
        return b""


def _proof(key: bytes, method: str, worker_id: str, epoch: int, made_unix_ms: int) -> str:
    numbers = (number.to_bytes(8, "little") for number in (epoch, made_unix_ms))
    parts = (_DOMAIN, method.encode(), worker_id.encode(), *numbers)
    signed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(key, signed, "sha256").hex()


def _refused(message: str) -> RequestRefused:
    return RequestRefused(CODE_UNAUTHENTICATED, UNAUTHENTICATED, message)
