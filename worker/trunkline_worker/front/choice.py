"""Unfinished submits: the state of each, and the count of those that wait in the engine."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass

from opentelemetry.trace import Span

from trunkline.engine.v1.engine_pb2 import EngineOutput
from trunkline.protocol import CLEARING_STEPS
from trunkline.v1.worker_pb2 import SequenceOutput, Timeline
from trunkline_worker.front.telemetry.timeline import TEXT_STRIDE, ChoiceTimeline, StepTimes
from trunkline_worker.front.text.output_stream import OutputStream
from trunkline_worker.step.lanes import Lane, QueueBounds

Deliver = Callable[[SequenceOutput], None]


@dataclass(slots=True, eq=False)
class Choice:
    """One unfinished submit."""

    handle: int  # the engine's
    caller_handle: int
    request_id: str
    tenant: str
    lane: Lane
    number: int  # index among the choices of its request
    stream: OutputStream
    deliver: Deliver
    span: Span
    timeline: ChoiceTimeline
    num_prompt: int
    num_ledger: int  # output tokens that came with the submit
    suspect: bool  # submitted as a suspect
    steps: int = 0  # engine outputs with tokens received here
    deadline: asyncio.TimerHandle | None = None
    ended: Timeline | None = None  # once it ends

    def take(self, output: EngineOutput, now_s: Callable[[], float], times: StepTimes) -> SequenceOutput:
        """As OutputStream.take(). Few outputs are timed, because it takes a microsecond."""
        if self.steps % TEXT_STRIDE:
            return self.stream.take(output)
        begun_s = now_s()
        result = self.stream.take(output)
        self.timeline.add_timed_output(self.steps, now_s() - begun_s, times)
        return result

    @property
    def is_proven(self) -> bool:
        """Whether it has shown that engines survive it. One step is enough for a choice that is not a suspect."""
        return self.steps >= (CLEARING_STEPS if self.suspect else 1)


def are_of_one_request(choices: Collection[Choice]) -> bool:
    """Whether they seem to be choices of one request. A session carries requests of many tenants, and clients choose
    their request ids, so two requests may have the same id. Choices of one request have different numbers and prompts
    of one length."""
    choices = set(choices)
    requests = {(choice.deliver, choice.tenant, choice.request_id, choice.num_prompt) for choice in choices}
    return len(requests) == 1 and len({choice.number for choice in choices}) == len(choices)


@dataclass(slots=True)
class TenantQueue:
    """The waiting choices of one tenant in one lane."""

    weight: float
    count: int = 0
    num_tokens: int = 0


class FrontQueue:
    """Choices that the front has passed to the engine, and whose admission the engine has not yet reported.

    With it a full queue refuses a submit without waiting for a step.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self._bounds = QueueBounds(max_requests, max_tokens)
        self.count = [0 for _ in Lane]
        self._tokens = [0 for _ in Lane]
        self._tenants: list[dict[str, TenantQueue]] = [{} for _ in Lane]
        self._weights: defaultdict[Lane, float] = defaultdict(float)  # sum over the tenants with waiting choices
        self._entries: dict[int, tuple[Lane, str, int]] = {}  # by handle: lane, tenant, tokens

    def admits(self, lane: Lane, tenant: str, weight: float, num_tokens: int) -> bool:
        """Whether one more choice may wait, by the rules of QueueBounds."""
        queue = self._tenants[lane].get(tenant)
        own = queue.weight if queue else 0.0
        return self._bounds.admits(
            lane,
            num_tokens,
            waiting=self.count,
            waiting_tokens=self._tokens,
            of_tenant=queue.count if queue else 0,
            tokens_of_tenant=queue.num_tokens if queue else 0,
            share=weight / (weight + max(0.0, self._weights[lane] - own)),
        )

    def put(self, handle: int, lane: Lane, tenant: str, weight: float, num_tokens: int) -> None:
        """Adds a choice that was passed to the engine."""
        self._entries[handle] = (lane, tenant, num_tokens)
        self.count[lane] += 1
        self._tokens[lane] += num_tokens
        queue = self._tenants[lane].get(tenant)
        if queue is None:
            queue = self._tenants[lane][tenant] = TenantQueue(weight)
            self._weights[lane] += weight
        queue.count += 1
        queue.num_tokens += num_tokens

    def holds(self, handle: int) -> bool:
        """Whether the choice waits."""
        return handle in self._entries

    def admitted(self, handle: int) -> None:
        """Removes a choice that the engine took into its running set. Does nothing if it is not here."""
        entry = self._entries.pop(handle, None)
        if entry is None:
            return
        lane, tenant, num_tokens = entry
        self.count[lane] -= 1
        self._tokens[lane] -= num_tokens
        queue = self._tenants[lane][tenant]
        queue.count -= 1
        queue.num_tokens -= num_tokens
        if not queue.count:
            del self._tenants[lane][tenant]
            self._weights[lane] -= queue.weight

    left = admitted  # removes a choice that ended, possibly before it ran
