"""What routers have sent to workers. They exchange it so that they do not all choose the same worker. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Credit:
    """Requests that were sent to one worker and have not ended."""

    choices: int
    tokens: int  # uncached tokens of requests without a first output


NO_CREDIT = Credit(0, 0)
