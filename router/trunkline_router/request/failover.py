"""Decides whether and when an interrupted request continues at another worker. Pure: time is passed in."""

from dataclasses import dataclass

from trunkline.status import NO_WORKER, OVERLOADED, RequestRefused
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
        self._progress = 0  # tokens at the last refusal
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
        num_tokens: int,
        has_output: bool,
        can_resume: bool,
        handed_over: bool = False,
    ) -> None:
        """Records that an attempt ended with `refused` after `num_tokens` of output in total. `handed_over`: the worker
        is draining, so the attempt did not fail. Raises the refusal for the client if there is no further attempt."""
        made_progress = num_tokens > self._progress
        if made_progress:
            self._progress = num_tokens
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
