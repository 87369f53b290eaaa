"""When the steps of a worker begin, as a router sees it. Pure: time is passed in.

A router has a message after each step that computed a token of its requests. By then the next step has run for as long
as the message took, and what the router sends now will arrive later still. So times are those of sending: a request
sent before `begun_s` reached the worker before the step began.
"""

LATEST_SHARE = 0.1  # weight of the latest request in the mean delay
LEAST_DELAY_S = 1e-4


class StepTimes:
    """Of one worker.

    begun_s: when the latest known step began; None: not known
    delay_s: mean time that messages take to the worker and back, beside the time that it works; None: not known
    """

    def __init__(self) -> None:
        self.begun_s: float | None = None
        self.delay_s: float | None = None

    def begins(self, now_s: float) -> None:
        """An idle worker is sent a request."""
        self.begun_s = now_s

    def ended(self, now_s: float) -> None:
        """A message with the output of a step has arrived: the worker has begun the next one."""
        self.begun_s = None if self.delay_s is None else now_s - self.delay_s

    def took(self, delay_s: float) -> None:
        """The first output of a request came this much later than the worker says that it took. A single delay counts
        at most twice the mean: the router itself may have stood still."""
        delay_s = max(delay_s, LEAST_DELAY_S)
        mean_s = delay_s if self.delay_s is None else self.delay_s
        self.delay_s = mean_s + LATEST_SHARE * min(delay_s - mean_s, mean_s)
