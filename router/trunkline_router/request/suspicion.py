"""Finds out which request of a dead worker killed it, and refuses convicted requests.

Only requests in the steps under way can be the cause: the suspects. Each suspect continues at a worker without another
suspect (a cell), which also gets no new requests if other workers can take them, until the suspect has survived a few
steps. If that engine dies too, and all other requests in the step had proved harmless, the suspect is convicted. A
request that becomes a suspect again must survive more steps.

All of this relies on the workers' reports, and two workers could report falsely. So a worker's report convicts only if
that worker is really gone. The deaths of one worker can convict only a few requests of one tenant per hour in the whole
fleet: see Witnesses. Beyond that, only this router refuses the request, for a minute: see Quarantine.

A conviction applies to a tenant's requests with the same model and prompt, whatever their sampling parameters. It is
stored as a keyed hash, which reveals nothing about the prompt.
"""

import secrets
from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from hashlib import blake2b
from typing import TypeVar

from trunkline.protocol import CLEARING_STEPS
from trunkline.status import CODE_FAILED_PRECONDITION, QUARANTINED, RequestRefused
from trunkline_router.quotas.convictions import Convictions

CLEARING_STEPS_AGAIN = 32  # steps to survive for a request that is a suspect again
# The number of one tenant's requests that a worker's deaths may convict in the whole fleet within WITNESS_S, which is
# also the lifetime of a conviction. A worker that dies more often may be broken itself or report falsely. Each tenant
# has its own count, so that one tenant's deadly prompts do not use up the protection from another tenant's.
MOST_CONVICTIONS, WITNESS_S = 8, 3600.0
MOST_WITNESSED = 4096  # convictions that are remembered with their workers
GONE_WITHIN_S = 5.0  # time from a worker's report that its engine has died until the worker is gone

Worker = TypeVar("Worker", bound=Hashable)


class Cells:
    """The workers that have a suspect of this router. `on_free` is called when a suspect leaves its worker."""

    def __init__(self, on_free: Callable[[], None]) -> None:
        self._on_free = on_free
        self.taken: set[Hashable] = set()

    def free_of(self, workers: Sequence[Worker]) -> Sequence[Worker]:
        """Those of the workers that have no suspect."""
        return [worker for worker in workers if worker not in self.taken] if self.taken else workers

    def enter(self, worker: Hashable) -> None:
        """Reserves the worker, which must be free, for a suspect."""
        assert worker not in self.taken, "two suspects at one worker"
        self.taken.add(worker)

    def leave(self, worker: Hashable) -> None:
        """Frees the worker."""
        self.taken.remove(worker)
        self._on_free()


class Suspicion:
    """The history of one request as a suspect."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._cell: Hashable | None = None  # the worker that it has for itself
        self._deaths = 0
        self._was_isolated = False  # when its last attempt was interrupted
        self.is_suspect = False  # if so, it must go to a worker without another suspect

    def enter(self, worker: Hashable) -> None:
        """Records that an attempt begins at this worker, which gets no other suspect meanwhile."""
        self._cells.enter(worker)
        self._cell = worker

    def leave(self) -> None:
        """Frees the worker. Repeated calls have no effect."""
        if self._cell is not None:
            self._cells.leave(self._cell)
            self._cell = None

    def broke_off(self) -> None:
        """Records that the attempt was interrupted. on_death() follows if an engine died."""
        self._was_isolated = self._cell is not None
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
    which stays the same after a restart."""

    def __init__(self) -> None:
        # Time, tenant and addresses of each conviction, the oldest first.
        self._convictions: deque[tuple[float, str, frozenset[str]]] = deque(maxlen=MOST_WITNESSED)

    def believe(self, tenant: str, addresses: Collection[str], now_s: float) -> bool:
        """Whether the deaths of these workers convict a request of the tenant in the whole fleet. If so, the conviction
        counts against each of the workers."""
        known = self._convictions
        while known and known[0][0] <= now_s - WITNESS_S:
            known.popleft()
        for address in addresses:
            if sum(whose == tenant and address in those for _, whose, those in known) >= MOST_CONVICTIONS:
                return False
        known.append((now_s, tenant, frozenset(addresses)))
        return True


FINGERPRINT_BYTES = 16
KEY_BYTES = 32
# How long only this router refuses a request that suspicion.Witnesses does not let it convict in the whole fleet. It is
# short because the workers' reports may be false; without it, the same prompt would kill engines on every retry.
BRIEF_S = 60.0
MOST_BRIEF = 4096  # brief convictions that are remembered

Computation = tuple[str, str, "array[int]"]  # what kills engines: a tenant, its model and prompt


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
        self.witnesses = Witnesses()
        self.convicted = self.convicted_briefly = 0  # so far

    def check(self, request: Computation, now_s: float) -> None:
        """Raises RequestRefused (QUARANTINED) if the request must not be computed."""
        now_ms = now_s * 1e3
        self._forget_brief(now_s)
        if self._brief or self._convictions.hold_any(now_ms):
            fingerprint = self._fingerprint(request)
            if fingerprint in self._brief or self._convictions.holds(fingerprint, now_ms):
                raise quarantined()

    def convict(self, request: Computation, addresses: Collection[str], now_s: float) -> bool:
        """Convicts a request that has killed these workers: in the whole fleet, here at once and in other routers with
        their next sync, and returns True; or here alone for BRIEF_S, if the workers have convicted too many of the
        tenant's requests."""
        fingerprint = self._fingerprint(request)
        if is_believed := self.witnesses.believe(request[0], addresses, now_s):
            self.convicted += 1
            self._convictions.add(fingerprint, now_s * 1e3)
        else:
            self.convicted_briefly += 1
            self._brief.pop(fingerprint, None)  # keeps the order by expiry
            self._brief[fingerprint] = now_s + BRIEF_S
            self._forget_brief(now_s)
        return is_believed

    def num_in_force(self, now_s: float) -> int:
        """Convictions that this router knows, brief ones too."""
        self._forget_brief(now_s)
        return len(self._brief) + self._convictions.num_in_force(now_s * 1e3)

    def _fingerprint(self, request: Computation) -> bytes:
        """Identifies a prompt, whatever the sampling parameters: a retry has another seed or max_tokens, and if it
        counted as another request, each retry could kill two more workers."""
        tenant, model, prompt = request
        named = blake2b(key=self._key, digest_size=FINGERPRINT_BYTES)
        for part in (tenant.encode(), model.encode(), prompt.tobytes()):
            named.update(len(part).to_bytes(8, "little"))
            named.update(part)
        return named.digest()

    def _forget_brief(self, now_s: float) -> None:
        while self._brief:
            first = next(iter(self._brief))
            if self._brief[first] > now_s and len(self._brief) <= MOST_BRIEF:
                break
            del self._brief[first]
