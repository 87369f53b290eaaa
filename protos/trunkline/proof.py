"""Proofs: who calls what only routers and operators may call shows that it has the worker's grant key.

A proof travels in the call's metadata. It is for one method, one life of one worker of this name, and a short time;
the key itself is never told.
"""

import hmac
from collections.abc import Iterable

from trunkline.metadata import PROOF_KEY
from trunkline.status import CODE_UNAUTHENTICATED, UNAUTHENTICATED, RequestRefused

WINDOW_S = 10.0  # by which a proof may be old, and by which clocks may differ

_DOMAIN = b"trunkline.v1.WorkerService proof"

Metadata = tuple[tuple[str, str], ...]


def proof_metadata(key: bytes, method: str, *, worker_id: str, epoch: int, now_unix_ms: int) -> Metadata:
    """For a call of WorkerService.`method` at the worker's life `epoch`; nothing where there is no key."""
    return ((PROOF_KEY, f"{now_unix_ms}.{_proof(key, method, worker_id, epoch, now_unix_ms)}"),) if key else ()


def check_proof(
    key: bytes,
    method: str,
    metadata: "Iterable[tuple[str, str | bytes]] | None",
    *,
    worker_id: str,
    epoch: int,
    now_unix_ms: int,
) -> None:
    """Raises RequestRefused (UNAUTHENTICATED) unless there is a proof, or no key."""
    if not key:
        return
    given = [str(value) for name, value in metadata or () if name == PROOF_KEY]
    if len(given) != 1:
        raise _refused(f"{method} is for routers and operators with this worker's --grant-key")
    made_at, _, proof = given[0].partition(".")
    if not (made_at.isascii() and made_at.isdigit() and len(made_at) <= 19):
        raise _refused(f"the proof for {method} cannot be read")
    made_unix_ms = int(made_at)
    if not hmac.compare_digest(_proof(key, method, worker_id, epoch, made_unix_ms).encode(), proof.encode()):
        raise _refused(
            f"the proof for {method} was not made with this worker's --grant-key, or not for this life of it"
        )
    if abs(now_unix_ms - made_unix_ms) > WINDOW_S * 1e3:
        when = "too long ago" if made_unix_ms < now_unix_ms else "in the future"
        raise _refused(f"the proof for {method} was made {when}: the clocks must agree to {WINDOW_S:g} s")


def _proof(key: bytes, method: str, worker_id: str, epoch: int, made_unix_ms: int) -> str:
    numbers = (number.to_bytes(8, "little") for number in (epoch, made_unix_ms))
    parts = (_DOMAIN, method.encode(), worker_id.encode(), *numbers)
    signed = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hmac.digest(key, signed, "sha256").hex()


def _refused(message: str) -> RequestRefused:
    return RequestRefused(CODE_UNAUTHENTICATED, UNAUTHENTICATED, message)
