"""Requests that were convicted of killing workers (see suspicion.py), and are not computed again.

A conviction holds for the tenant whose request it was, and for requests that ask the same of a worker's steps. They are
known by a keyed hash, so that who can read the hashes learns nothing of the prompts.
"""

import secrets
from array import array
from hashlib import blake2b

from trunkline.status import CODE_FAILED_PRECONDITION, QUARANTINED, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_router.stores.convictions import Convictions

FINGERPRINT_BYTES = 16
KEY_BYTES = 32
# How long this router alone refuses a request that may not be convicted in the whole fleet (suspicion.Witnesses). It is
# short because the workers that say so may lie; without it the same prompt would kill engines on every try.
BRIEF_S = 60.0
MOST_BRIEF = 4096  # that are remembered
# What only sizes or randomises an answer, or cuts its text.
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
# What does nothing is as good as absent; so is a bias of 0. (logprobs=0 is not: it asks for the chosen token's.)
NEUTRAL = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}


def fingerprint_of(key: bytes, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams) -> bytes:
    """Names what a request asks of a worker's steps: its prompt, and what is computed beside the logits
    (log-probabilities) or done to them (penalties, biases).

    What only sizes or randomises the answer does not count: a client that tries again is given another seed or gives
    another max_tokens, and if that made it another request, it would cost two more workers each time. So an innocent
    request can be refused: one with the prompt, the model and the tenant of the convicted one. Nor does it count what
    is only said, and changes nothing.
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
    return RequestRefused(
        CODE_FAILED_PRECONDITION,
        QUARANTINED,
        "two workers died computing this request, or one like it: it is not tried again",
    )


class Quarantine:
    """`key`: equal among routers that share convictions; empty: a random one. `convictions`: the shared ones, whose
    clock is the caller's."""

    def __init__(self, key: bytes = b"", convictions: Convictions | None = None) -> None:
        self._key = key or secrets.token_bytes(KEY_BYTES)
        self._convictions = Convictions() if convictions is None else convictions
        self._brief: dict[bytes, float] = {}  # when they end, in s, by fingerprint; the next to end first

    def check(self, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams, now_s: float) -> None:
        """Raises RequestRefused (QUARANTINED) where the request must not be computed."""
        now_ms = now_s * 1e3
        self._forget_brief(now_s)
        if self._brief or self._convictions.hold_any(now_ms):
            fingerprint = fingerprint_of(self._key, tenant, model, prompt, sampling)
            if fingerprint in self._brief or self._convictions.holds(fingerprint, now_ms):
                raise quarantined()

    def convict(self, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams, now_s: float) -> None:
        """No router of the fleet admits it any more: here at once, elsewhere with the next news."""
        self._convictions.add(fingerprint_of(self._key, tenant, model, prompt, sampling), now_s * 1e3)

    def convict_briefly(
        self, tenant: str, model: str, prompt: "array[int]", sampling: SamplingParams, now_s: float
    ) -> None:
        """This router does not admit it for BRIEF_S from now on; no other router learns of it."""
        fingerprint = fingerprint_of(self._key, tenant, model, prompt, sampling)
        self._brief.pop(fingerprint, None)  # so that it stands behind those that end before
        self._brief[fingerprint] = now_s + BRIEF_S
        self._forget_brief(now_s)

    def _forget_brief(self, now_s: float) -> None:
        while self._brief:
            first = next(iter(self._brief))
            if self._brief[first] > now_s and len(self._brief) <= MOST_BRIEF:
                break
            del self._brief[first]
