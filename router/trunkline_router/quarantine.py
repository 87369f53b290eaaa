"""Requests that were convicted of killing workers (see suspicion.py), and are not computed again.

A conviction holds for the tenant whose request it was, and for requests that would compute the same. They are known by
a keyed hash, so that who can read the hashes learns nothing of the prompts.
"""

import secrets
from array import array
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

from trunkline.status import CODE_FAILED_PRECONDITION, QUARANTINED, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams

CONVICTION_S = 3600.0
MAX_CONVICTIONS = 10_000
FINGERPRINT_BYTES = 16
KEY_BYTES = 32


def fingerprint_of(key: bytes, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams) -> bytes:
    """Names what a request computes. The seed does not count: a client that tries again may be given another one."""
    same = SamplingParams()
    same.CopyFrom(sampling)
    same.ClearField("seed")
    named = blake2b(key=key, digest_size=FINGERPRINT_BYTES)
    for part in (tenant.encode(), model.encode(), same.SerializeToString(deterministic=True), prompt.tobytes()):
        named.update(len(part).to_bytes(8, "little"))
        named.update(part)
    return named.digest()


def quarantined() -> RequestRefused:
    return RequestRefused(
        CODE_FAILED_PRECONDITION, QUARANTINED, "two workers died computing this request: it is not tried again"
    )


class Quarantine:
    """`key`: equal among routers that share convictions; empty: a random one. `publish` tells the others."""

    def __init__(self, key: bytes = b"", publish: Callable[[bytes], None] = lambda fingerprint: None) -> None:
        self._key = key or secrets.token_bytes(KEY_BYTES)
        self._publish = publish
        self._convictions = Convictions()

    def check(self, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams, now_s: float) -> None:
        """Raises RequestRefused (QUARANTINED) where the request must not be computed."""
        if self._convictions:
            fingerprint = fingerprint_of(self._key, tenant, model, prompt, sampling)
            if self._convictions.holds(fingerprint, now_s):
                raise quarantined()

    def convict(self, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams, now_s: float) -> None:
        fingerprint = fingerprint_of(self._key, tenant, model, prompt, sampling)
        self._convictions.add(fingerprint, now_s)
        self._publish(fingerprint)

    def learn(self, fingerprint: bytes, now_s: float) -> None:
        """Another router's conviction."""
        self._convictions.add(fingerprint, now_s)


class Convictions:
    """Fingerprints of convicted requests; the oldest are forgotten first. Pure: the time is told."""

    def __init__(self) -> None:
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._until_s)

    def add(self, fingerprint: bytes, now_s: float) -> None:
        self._until_s[fingerprint] = now_s + CONVICTION_S
        self._until_s.move_to_end(fingerprint)
        if len(self._until_s) > MAX_CONVICTIONS:
            self._until_s.popitem(last=False)

    def holds(self, fingerprint: bytes, now_s: float) -> bool:
        """Whether a request with this fingerprint must not be computed."""
        until_s = self._until_s.get(fingerprint)
        if until_s is None:
            return False
        if now_s >= until_s:
            del self._until_s[fingerprint]
            return False
        return True
