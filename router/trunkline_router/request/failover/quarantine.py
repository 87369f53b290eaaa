"""Refuses requests that were convicted of killing workers (see suspicion.py).

A conviction applies to the tenant of the request, and to requests that need the same computation. It is stored as a
keyed hash, which reveals nothing about the prompt.
"""

import secrets
from array import array
from hashlib import blake2b

from trunkline.status import CODE_FAILED_PRECONDITION, QUARANTINED, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_router.quotas.stores.convictions import Convictions

FINGERPRINT_BYTES = 16
KEY_BYTES = 32
# How long only this router refuses a request that suspicion.Witnesses does not let it convict in the whole fleet. It is
# short because the workers' reports may be false; without it, the same prompt would kill engines on every retry.
BRIEF_S = 60.0
MOST_BRIEF = 4096  # brief convictions that are remembered
# Parameters that only change the length or randomness of an answer, or cut its text.
NOT_COUNTED = (
    "seed",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "min_tokens",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "include_stop",
    "keep_special_tokens",
)
# Values without effect, which count as unset, like a bias of 0. (logprobs=0 has an effect: it requests that of the
# chosen token.)
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def fingerprint_of(key: bytes, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams) -> bytes:
    """Identifies the computation that a request needs: its prompt, and whatever is computed from the logits
    (log-probabilities) or changes them (penalties, biases).

    Parameters that only change the length or randomness of the answer do not count: a retry has another seed or
    max_tokens, and if it counted as another request, each retry could kill two more workers. So a harmless request with
    the same prompt, model and tenant can be refused. Values without effect do not count either.
    """
    same = SamplingParams()
    same.CopyFrom(sampling)
    for name in NOT_COUNTED:
        same.ClearField(name)  # type: ignore[arg-type]
    for name, neutral in NEUTRAL.items():
        if getattr(same, name) == neutral:
            same.ClearField(name)  # type: ignore[arg-type]
    for token_id in [token_id for token_id, bias in same.logit_bias.items() if not bias]:
        del same.logit_bias[token_id]
    same.DiscardUnknownFields()
    named = blake2b(key=key, digest_size=FINGERPRINT_BYTES)
    for part in (tenant.encode(), model.encode(), same.SerializeToString(deterministic=True), prompt.tobytes()):
        named.update(len(part).to_bytes(8, "little"))
        named.update(part)
    return named.digest()


def quarantined() -> RequestRefused:
    """The refusal of a convicted request."""
    return RequestRefused(
        CODE_FAILED_PRECONDITION,
        QUARANTINED,
        "two workers died while computing this request or one like it: it is not retried",
    )


class Quarantine:
    """Refuses convicted requests.

    key: key of the fingerprints, equal in routers that share convictions; empty for a random one
    convictions: the shared convictions, which use the caller's clock
    """

    def __init__(self, key: bytes = b"", convictions: Convictions | None = None) -> None:
        self._key = key or secrets.token_bytes(KEY_BYTES)
        self._convictions = Convictions() if convictions is None else convictions
        self._brief: dict[bytes, float] = {}  # expiry in s by fingerprint, the earliest first
        self.convicted = self.convicted_briefly = 0  # so far

    def check(self, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams, now_s: float) -> None:
        """Raises RequestRefused (QUARANTINED) if the request must not be computed."""
        now_ms = now_s * 1e3
        self._forget_brief(now_s)
        if self._brief or self._convictions.hold_any(now_ms):
            fingerprint = fingerprint_of(self._key, tenant, model, prompt, sampling)
            if fingerprint in self._brief or self._convictions.holds(fingerprint, now_ms):
                raise quarantined()

    def convict(self, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams, now_s: float) -> None:
        """Convicts the request in the whole fleet: here at once, and in other routers with their next sync."""
        self.convicted += 1
        self._convictions.add(fingerprint_of(self._key, tenant, model, prompt, sampling), now_s * 1e3)

    def convict_briefly(
        self, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams, now_s: float
    ) -> None:
        """Convicts the request in this router only, for BRIEF_S."""
        self.convicted_briefly += 1
        fingerprint = fingerprint_of(self._key, tenant, model, prompt, sampling)
        self._brief.pop(fingerprint, None)  # keeps the order by expiry
        self._brief[fingerprint] = now_s + BRIEF_S
        self._forget_brief(now_s)

    def num_in_force(self, now_s: float) -> int:
        """Convictions that this router knows, brief ones too."""
        self._forget_brief(now_s)
        return len(self._brief) + self._convictions.num_in_force(now_s * 1e3)

    def _forget_brief(self, now_s: float) -> None:
        while self._brief:
            first = next(iter(self._brief))
            if self._brief[first] > now_s and len(self._brief) <= MOST_BRIEF:
                break
            del self._brief[first]
