"""What becomes of a request whose worker is lost: whether it continues at another one, and whether it killed the
worker. Pure: time is passed in.

A dead engine may have been killed by a request in the steps under way, and by no other: the suspects. Each suspect
continues at a worker without another suspect (a cell), which also gets no new requests if other workers can take them,
until the suspect has survived a few steps. If that engine dies too, and all other requests in the step had proved
harmless, the suspect is convicted. A request that becomes a suspect again must survive more steps.

All of this relies on the workers' reports, and two workers could report falsely. So a worker's report convicts only if
that worker is really gone. The deaths of one worker can convict only a few requests of one tenant per hour in the whole
fleet: see Witnesses. Beyond that, only this router refuses the request, for a minute: see Quarantine.

A conviction applies to a tenant's requests with the same model, prompt and work, whatever their sampling parameters. If
another prompt with the same grammar is convicted already, the grammar may be the cause: the conviction then applies to
all requests of the tenant with the same model and grammar. It is stored as a keyed hash, which reveals nothing about
prompt and grammar.
"""

import secrets
from array import array
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, TypeVar

from trunkline.protocol import CLEARING_STEPS
from trunkline.status import CODE_FAILED_PRECONDITION, NO_WORKER, OVERLOADED, QUARANTINED, RequestRefused
from trunkline_router.quotas.convictions import Convictions
from trunkline_router.record.rate_limits import TokenBucket

# The number of full workers that may refuse a new request. A refusal costs little, but when all workers are full, every
# request would ask every worker at the worst time.
MAX_FULL = 4
# Consecutive attempts that were lost without a token: whatever the cause, more attempts do not help.
MAX_WITHOUT_PROGRESS = 4
# How long a request that has lost its worker waits until another worker connects or has room.
PATIENCE_S = 30.0
# Delay before a request without output is retried, so that requests lost together do not all come back at once.
MAX_JITTER_S = 0.05


@dataclass(frozen=True, slots=True)
class FailoverLimits:
    """`max_resumptions`: how often a request may continue at another worker; 0 disables retries as well."""

    max_resumptions: int = 8
    patience_s: float = PATIENCE_S


class Recovery:
    """The failures of one request so far, and the decision whether it is retried."""

    def __init__(self, limits: FailoverLimits) -> None:
        self._limits = limits
        self._refusals: list[RequestRefused] = []  # since it last made progress
        self._progress = 0  # AnswerLedger.progress at the last refusal
        self._lost = 0  # attempts, not counting full workers
        self._waiting_since_s: float | None = None  # for a worker

    @property
    def lost_last(self) -> bool:
        """Whether the last attempt was lost, as opposed to refused by a full worker."""
        return bool(self._refusals) and self._refusals[-1].reason != OVERLOADED

    def last_word(self) -> RequestRefused:
        """The refusal for the client if the request is not retried: that of the full worker with the shortest retry
        delay, else the last one."""
        full = [refused for refused in self._refusals if refused.reason == OVERLOADED]
        return min(full, key=lambda refused: refused.retry_delay_ms or float("inf"), default=self._refusals[-1])

    def stop_waiting(self) -> None:
        """Ends the wait for a worker because there is one that will have room."""
        self._waiting_since_s = None

    def on_refusal(
        self,
        refused: RequestRefused,
        *,
        progress: int,
        has_output: bool,
        can_resume: bool,
        handed_over: bool = False,
    ) -> None:
        """Records that an attempt ended with `refused` after this progress of the answer in total. `handed_over`: the
        worker is draining, so the attempt did not fail. Raises the refusal for the client if there is no further
        attempt."""
        made_progress = progress > self._progress
        if made_progress:
            self._progress = progress
            self._refusals.clear()
            self._waiting_since_s = None
        if refused.reason not in (NO_WORKER, OVERLOADED) or not (self._limits.max_resumptions and can_resume):
            raise refused
        self._refusals.append(refused)
        if refused.reason == OVERLOADED:
            if not has_output and not self._lost and self._count(OVERLOADED) >= MAX_FULL:
                raise self.last_word()
            return
        if made_progress and handed_over:
            return
        self._lost += 1
        if self._lost > self._limits.max_resumptions or self._count(NO_WORKER) >= MAX_WITHOUT_PROGRESS:
            raise self.last_word()

    def wait_s(self, now_s: float, unavailable: RequestRefused, *, has_output: bool) -> float:
        """How long to wait, at most, for a worker when there is none to send the request to. Raises the refusal for the
        client if the request should not wait: that of the workers, or `unavailable` if none has refused it."""
        if not self.lost_last and not self._lost and not has_output:
            # No attempt was begun, so no work is lost, and the client can decide whether to retry.
            raise self.last_word() if self._refusals else unavailable
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        left_s = self._waiting_since_s + self._limits.patience_s - now_s
        if left_s <= 0:
            raise self.last_word() if self._refusals else unavailable
        return left_s

    def _count(self, reason: str) -> int:
        return sum(refused.reason == reason for refused in self._refusals)


RETRY_SHARE = 0.2  # retries per new request
LEAST_PER_S = 10.0  # retries per second that are always allowed, so that a router with few requests may retry them all
MOST_AT_ONCE = 1024.0  # burst: as many requests as one worker may have had waiting
MOST_WAIT_S = 5.0  # a retry that would have to wait longer is refused


class RetryBudget:
    """A token bucket that requests and time fill and retries empty. Without tokens, a retry waits or is refused."""

    def __init__(self, now_s: float) -> None:
        self._retries = TokenBucket(LEAST_PER_S, MOST_AT_ONCE, now_s)

    def on_request(self) -> None:
        """Adds RETRY_SHARE of a retry for a new request."""
        self._retries.add(RETRY_SHARE)

    def left(self, now_s: float) -> float:
        """Retries that may be made at once."""
        return max(0.0, self._retries.left(now_s))

    def take(self, now_s: float) -> float | None:
        """Takes one retry. Returns the seconds that it must wait, or None if too many retries are ahead of it."""
        wait_s = max(0.0, (1.0 - self._retries.left(now_s)) / LEAST_PER_S)
        if wait_s > MOST_WAIT_S:
            return None
        self._retries.charge(1.0, now_s)
        return wait_s


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
            self.clear()

    def on_death(self, *, sole_suspect: bool) -> bool:
        """Records that the attempt was interrupted because the engine died in one of its steps. Returns whether this
        convicts the request."""
        self._deaths += 1
        self.is_suspect = True
        return self._was_isolated and sole_suspect

    def clear(self) -> None:
        """Records that whatever made the request a suspect has been computed."""
        self.is_suspect = False
        self.leave()


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
# How long only this router refuses a request that Witnesses does not let it convict in the whole fleet. It is
# short because the workers' reports may be false; without it, the same prompt would kill engines on every retry.
BRIEF_S = 60.0
MOST_BRIEF = 4096  # brief convictions that are remembered
MOST_GRAMMARS = 4096  # grammars of convicted requests that are remembered


class Computation(NamedTuple):
    """What kills engines."""

    tenant: str
    model: str
    prompt: "array[int]"
    work: bytes = b""  # a serialized Work: another adapter, for example, is another computation; empty: none
    grammar: bytes = b""  # the digest of its grammar, which `work` leaves out; empty: none


def quarantined(index: int | None = None) -> RequestRefused:
    """The refusal of a convicted request.  index: of the input that kills workers; None: it has one prompt"""
    what = "this request" if index is None else f"input {index} of this request"
    message = f"two workers died while computing {what} or one like it: it is not retried"
    return RequestRefused(CODE_FAILED_PRECONDITION, QUARANTINED, message)


class Quarantine:
    """Refuses convicted requests.

    key: key of the fingerprints, equal in routers that share convictions; empty for a random one
    convictions: the shared convictions, which use the caller's clock
    """

    def __init__(self, key: bytes = b"", convictions: Convictions | None = None) -> None:
        self._key = key or secrets.token_bytes(KEY_BYTES)
        self._convictions = Convictions() if convictions is None else convictions
        self._brief: dict[bytes, float] = {}  # expiry in s by fingerprint, the earliest first
        self._with_grammar: dict[bytes, bytes] = {}  # a request that was convicted, by its grammar: both fingerprints
        self.witnesses = Witnesses()
        self.convicted = self.convicted_briefly = 0  # so far

    def check(self, request: Computation, now_s: float) -> None:
        """Raises RequestRefused (QUARANTINED) if the request must not be computed."""
        self.check_all([request], now_s, are_inputs=False)

    def check_all(self, requests: Iterable[Computation], now_s: float, *, are_inputs: bool) -> None:
        """Raises RequestRefused (QUARANTINED) if one of the inputs of a request, or its only prompt, must not be
        computed."""
        now_ms = now_s * 1e3
        self._forget_brief(now_s)
        if self._brief or self._convictions.hold_any(now_ms):
            for index, request in enumerate(requests):
                for fingerprint in self._fingerprints(request):
                    if fingerprint in self._brief or self._convictions.holds(fingerprint, now_ms):
                        raise quarantined(index if are_inputs else None)

    def convict(self, request: Computation, addresses: Collection[str], now_s: float) -> bool:
        """Convicts a request that has killed these workers: in the whole fleet, here at once and in other routers with
        their next sync, and returns True; or here alone for BRIEF_S, if the workers have convicted too many of the
        tenant's requests."""
        is_believed = self.witnesses.believe(request.tenant, addresses, now_s)
        self.convicted += is_believed
        self.convicted_briefly += not is_believed
        self._forget_brief(now_s)
        fingerprint = self._convicted_as(request, now_s, is_believed)
        if is_believed:
            self._convictions.add(fingerprint, now_s * 1e3)
        else:
            self._brief.pop(fingerprint, None)  # keeps the order by expiry
            self._brief[fingerprint] = now_s + BRIEF_S
        self._forget_brief(now_s)
        return is_believed

    def num_in_force(self, now_s: float) -> int:
        """Convictions that this router knows, brief ones too."""
        self._forget_brief(now_s)
        return len(self._brief) + self._convictions.num_in_force(now_s * 1e3)

    def _convicted_as(self, request: Computation, now_s: float, is_believed: bool) -> bytes:
        """Returns the request's fingerprint; or its grammar's, if this router has convicted another prompt with it, and
        that conviction is in force: in the whole fleet, if this one is believed."""
        own, *grammars = self._fingerprints(request)
        for grammar in grammars:
            other = self._with_grammar.pop(grammar, own)
            is_held = self._convictions.holds(other, now_s * 1e3) or (not is_believed and other in self._brief)
            if is_held and other != own:
                own = grammar
            self._with_grammar[grammar] = other if is_held else own
            if len(self._with_grammar) > MOST_GRAMMARS:
                del self._with_grammar[next(iter(self._with_grammar))]
        return own

    def _fingerprints(self, request: Computation) -> list[bytes]:
        """Identify a computation, whatever the sampling parameters: a retry has another seed or max_tokens, and if it
        counted as another request, each retry could kill two more workers. The second one, if it has a grammar,
        identifies the grammar."""
        tenant, model, prompt, work, grammar = request
        whose = [tenant.encode(), model.encode()]
        found = [self._fingerprint([*whose, prompt.tobytes(), *filter(None, (work, grammar))])]
        if grammar:
            found.append(self._fingerprint([*whose, b"grammar", grammar]))  # no prompt: four bytes are a token
        return found

    def _fingerprint(self, parts: Sequence[bytes]) -> bytes:
        named = blake2b(key=self._key, digest_size=FINGERPRINT_BYTES)
        for part in parts:
            named.update(len(part).to_bytes(8, "little"))
            named.update(part)
        return named.digest()

    def _forget_brief(self, now_s: float) -> None:
        while self._brief:
            first = next(iter(self._brief))
            if self._brief[first] > now_s and len(self._brief) <= MOST_BRIEF:
                break
            del self._brief[first]
