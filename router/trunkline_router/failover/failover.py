"""Whether and when a request that broke off at one worker goes on at another. Pure: the time is told."""

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline.status import NO_WORKER, OVERLOADED, RequestRefused

# This many workers may turn a new request away because they are full. It costs them little, but where all are full
# every request would ask every worker, at the worst time.
MAX_FULL = 4
# Attempts in a row that were lost without a token: whatever it is, more of the same does not help.
MAX_WITHOUT_PROGRESS = 4
# How long a request that has lost its worker waits for another one to come, or to have room.
PATIENCE_S = 30.0
# Before a retry of a request that nobody has begun to answer: what is lost together should not come back together.
MAX_JITTER_S = 0.05


@dataclass(frozen=True, slots=True)
class FailoverLimits:
    """max_resumptions: how often a request may go on elsewhere; 0: never, nor is it tried a second time."""

    max_resumptions: int = 8
    patience_s: float = PATIENCE_S


class Recovery:
    """What has gone wrong with one request so far."""

    def __init__(self, limits: FailoverLimits) -> None:
        self._limits = limits
        self._refusals: list[RequestRefused] = []  # since it last made progress
        self._progress = 0  # tokens at the last refusal
        self._lost = 0  # attempts, not counting full workers
        self._waits_since_s: float | None = None  # for a worker

    @property
    def lost_last(self) -> bool:
        """Whether the last attempt was lost, not turned away by a full worker."""
        return bool(self._refusals) and self._refusals[-1].reason != OVERLOADED

    def last_word(self) -> RequestRefused:
        """What the client is told, should nothing else be tried."""
        return last_word(self._refusals)

    def stop_waiting(self) -> None:
        """A worker is there, and will be free."""
        self._waits_since_s = None

    def on_refusal(
        self,
        refused: RequestRefused,
        *,
        num_tokens: int,
        has_output: bool,
        can_resume: bool,
        handed_over: bool = False,
    ) -> None:
        """An attempt ended with this; the request has `num_tokens` of output. Raises what the client is told where
        that was the last attempt. `handed_over`: by a worker that is going away, which is nobody's failure."""
        made_progress = num_tokens > self._progress
        if made_progress:
            self._progress = num_tokens
            self._refusals.clear()
            self._waits_since_s = None
        if refused.reason not in (NO_WORKER, OVERLOADED) or not (self._limits.max_resumptions and can_resume):
            raise refused
        self._refusals.append(refused)
        if refused.reason == OVERLOADED:
            if not has_output and not self._lost and self._count(OVERLOADED) >= MAX_FULL:
                raise last_word(self._refusals)
            return
        if made_progress and handed_over:
            return
        self._lost += 1
        if self._lost > self._limits.max_resumptions or self._count(NO_WORKER) >= MAX_WITHOUT_PROGRESS:
            raise last_word(self._refusals)

    def wait_s(self, now_s: float, nobody: RequestRefused, *, has_output: bool) -> float:
        """Nobody is left to go to: how long to wait, at most, for that to change. Raises what the client is told where
        waiting makes no sense: `nobody` or what workers have said."""
        if not self.lost_last and not self._lost and not has_output:
            # Nothing was begun, so nothing is lost: the client knows best whether to come back.
            raise last_word(self._refusals) if self._refusals else nobody
        if self._waits_since_s is None:
            self._waits_since_s = now_s
        left_s = self._waits_since_s + self._limits.patience_s - now_s
        if left_s <= 0:
            raise last_word(self._refusals) if self._refusals else nobody
        return left_s

    def _count(self, reason: str) -> int:
        return sum(refused.reason == reason for refused in self._refusals)


def last_word(refusals: Sequence[RequestRefused]) -> RequestRefused:
    """What a client is told of several workers' refusals: full ones will have room, the first one soonest."""
    full = [refused for refused in refusals if refused.reason == OVERLOADED]
    if not full:
        return refusals[-1]
    return min(full, key=lambda refused: refused.retry_delay_ms or float("inf"))
