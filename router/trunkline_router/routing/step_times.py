"""When the steps of a worker begin, as a router sees it. Pure: time is passed in.

A router has a message after each step that computed a token of its requests. By then the next step has run for as long
as the message took, and what the router sends now will arrive later still. So times are those of sending: a request
sent before a step's begin reached the worker before the step began.
"""

from collections import deque

LATEST_SHARE = 0.1  # weight of the latest request in the mean delay
LEAST_DELAY_S = 1e-4
KEPT_STEPS = 64  # more than a long prompt takes


class StepTimes:
    """Of one worker.

    begun_s: when its latest steps began, the last one that of the step under way; empty: not known
    delay_s: mean time that messages take to the worker and back, beside the time that it works; None: not known
    """

    def __init__(self) -> None:
        self.begun_s: deque[float] = deque(maxlen=KEPT_STEPS)
        self.delay_s: float | None = None

    def begins(self, now_s: float) -> None:
        """An idle worker is sent a request."""
        self.begun_s.clear()
        self.begun_s.append(now_s)

    def ended(self, now_s: float) -> None:
        """A message with the output of a step has arrived: the worker has begun the next one."""
        if self.delay_s is None:
            self.begun_s.clear()
        else:
            self.begun_s.append(now_s - self.delay_s)

    def num_ended(self, sent_s: float) -> int:
        """Returns how many steps have ended that began after a request arrived that was sent then."""
        return max(0, sum([begun_s >= sent_s for begun_s in self.begun_s]) - 1)

    def took(self, delay_s: float) -> None:
        """The first output of a request came this much later than the worker says that it took. A single delay counts
        at most twice the mean: the router itself may have stood still."""
        delay_s = max(delay_s, LEAST_DELAY_S)
        mean_s = delay_s if self.delay_s is None else self.delay_s
        self.delay_s = mean_s + LATEST_SHARE * min(delay_s - mean_s, mean_s)
