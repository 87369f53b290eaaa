"""Finds out which request of a dead worker killed it, and refuses convicted requests.

Only requests in the steps under way can be the cause: the suspects. Each suspect continues at a worker without another
suspect (a cell), which also gets no new requests if other workers can take them, until the suspect has survived a few
steps. If that engine dies too, and all other requests in the step had proved harmless, the suspect is convicted. A
request that becomes a suspect again must survive more steps.

All of this relies on the workers' reports, and two workers could report falsely. So a worker's report convicts only if
that worker is really gone. The deaths of one worker can convict only a few requests of one tenant per hour in the whole
fleet: see Witnesses. Beyond that, only this router refuses the request, for a minute: see Quarantine.

A conviction applies to the tenant of the request, and to requests that need the same computation. It is stored as a
keyed hash, which reveals nothing about the prompt.
"""

import secrets
from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from hashlib import blake2b
from typing import TypeVar

from trunkline.protocol import CLEARING_STEPS
from trunkline.status import CODE_FAILED_PRECONDITION, QUARANTINED, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_router.quotas.convictions import Convictions

CLEARING_STEPS_AGAIN = 32  # steps to survive for a request that is a suspect again
# The number of one tenant's requests that a worker's deaths may convict in the whole fleet within WITNESS_S, which is
# also the lifetime of a conviction. A worker that dies more often may be broken itself or report falsely. Each tenant
# has its own count, so that one tenant's deadly prompts do not use up the protection from another tenant's.
MOST_CONVICTIONS, WITNESS_S = 8, 3600.0
MOST_WITNESSES = 4096  # pairs of a tenant and a worker that are remembered
GONE_WITHIN_S = 5.0  # time from a worker's report that its engine has died until the worker is gone

Worker = TypeVar("Worker", bound=Hashable)


class Cells:
    """The workers that have a suspect of this router. `on_free` is called when a suspect leaves its worker."""

    def __init__(self, on_free: Callable[[], None]) -> None:
        self._on_free = on_free
        self._taken: set[Hashable] = set()

    def is_free(self, worker: Hashable) -> bool:
        """Whether a suspect may go to this worker."""
        return worker not in self._taken

    def free_of(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Those of the workers that have no suspect."""
        return [worker for worker in workers if worker not in self._taken] if self._taken else workers

    def enter(self, worker: Hashable) -> "Cell":
        """Reserves the worker, which must be free, for a suspect."""
        assert worker not in self._taken, "two suspects at one worker"
        self._taken.add(worker)
        return Cell(self, worker)

    def leave(self, worker: Hashable) -> None:
        """Frees the worker."""
        self._taken.discard(worker)
        self._on_free()


class Cell:
    """A suspect's stay at a worker."""

    def __init__(self, cells: Cells, worker: Hashable) -> None:
        self._cells = cells
        self._worker = worker
        self.is_held = True

    def leave(self) -> None:
        """Frees the worker. Repeated calls have no effect."""
        if self.is_held:
            self.is_held = False
            self._cells.leave(self._worker)


class Suspicion:
    """The history of one request as a suspect."""

    def __init__(self) -> None:
        self._deaths = 0
        self._cell: Cell | None = None
        self._was_isolated = False  # when its last attempt was interrupted
        self.is_suspect = False  # if so, it must go to a worker without another suspect

    def enter(self, cell: Cell) -> None:
        """Records that an attempt begins in this cell."""
        self._cell = cell

    def leave(self) -> None:
        """Records that the attempt is over."""
        if self._cell is not None:
            self._cell.leave()

    def broke_off(self) -> None:
        """Records that the attempt was interrupted. on_death() follows if an engine died."""
        self._was_isolated = self._cell is not None and self._cell.is_held
        self.leave()

    def on_progress(self, steps: int) -> None:
        """Records that the request has survived `steps` steps in its current attempt."""
        if self.is_suspect and steps >= (CLEARING_STEPS if self._deaths == 1 else CLEARING_STEPS_AGAIN):
            self.is_suspect = False
            self.leave()

    def on_death(self, *, sole_suspect: bool) -> bool:
        """Records that the attempt was interrupted because the engine died in one of its steps. Returns whether this
        convicts the request."""
        self._deaths += 1
        self.is_suspect = True
        return self._was_isolated and sole_suspect


class Witnesses:
    """Limits how many requests of a tenant the deaths of one worker convict. A worker is identified by its address,
    which stays the same after a restart. Pure: time is passed in."""

    def __init__(self) -> None:
        # Times of convictions by tenant and address, the oldest first.
        self._convicted_s: dict[tuple[str, str], deque[float]] = {}

    def believe(self, tenant: str, addresses: Collection[str], now_s: float) -> bool:
        """Whether the deaths of these workers convict a request of the tenant in the whole fleet. If so, the conviction
        counts against each of the workers."""
        pairs = [(tenant, address) for address in addresses]
        for pair in pairs:
            times = self._convicted_s.get(pair)
            while times and times[0] <= now_s - WITNESS_S:
                times.popleft()
            if times is not None and len(times) >= MOST_CONVICTIONS:
                return False
        for pair in pairs:
            # Reinserted at the end, because the first entries are forgotten.
            times = self._convicted_s.pop(pair, None) or deque()
            times.append(now_s)
            self._convicted_s[pair] = times
        while len(self._convicted_s) > MOST_WITNESSES:
            del self._convicted_s[next(iter(self._convicted_s))]
        return True


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
