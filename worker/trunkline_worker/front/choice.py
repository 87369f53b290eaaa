"""A choice from the front's point of view: one unfinished submit."""

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass

from opentelemetry.trace import Span

from trunkline.engine.v1.engine_pb2 import EngineOutput
from trunkline.protocol import CLEARING_STEPS
from trunkline.v1.worker_pb2 import SequenceOutput, Timeline
from trunkline_worker.front.telemetry.choice_timeline import TEXT_STRIDE, ChoiceTimeline
from trunkline_worker.front.telemetry.step_times import StepTimes
from trunkline_worker.front.text.output_stream import OutputStream
from trunkline_worker.lanes.lanes import Lane

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
