"""Streams of requests, without a dispatcher."""

import time

from trunkline.answer.answer_parser import AnswerParsers
from trunkline.v1.inference_pb2 import PromptInfo
from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.quotas.reservation import OutputMeter
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request.client_buffer import Backlog
from trunkline_router.request.dispatch import WorkerAttempt
from trunkline_router.request.request_stream import Fanout, RequestStream


def stream_of(
    record: RequestRecord,
    choices: int,
    prompt: PromptInfo,
    *,
    fanout: Fanout | None = None,
    backlog: Backlog | None = None,
    meter: OutputMeter | None = None,
    parsers: AnswerParsers | None = None,
) -> RequestStream:
    fanout = fanout or Fanout(time.monotonic)
    meter = meter or OutputMeter()
    return RequestStream(record, choices, prompt, fanout, backlog or Backlog(), meter, parsers=parsers)


class Told(WorkerAttempt):
    """An attempt at no worker, which notes what it is told."""

    def __init__(self, *, is_watched: bool = False) -> None:
        self.is_watched = is_watched
        self.heard: list[str | int] = []
        self.timelines: list[Timeline] = []
        self.computed_tokens = 0

    def gave_up(self) -> None:
        self.heard.append("gave up")

    def broke_off(self) -> None:
        self.heard.append("broke off")

    def choice_ended(self, timeline: Timeline) -> None:
        self.timelines.append(timeline)

    def has_computed(self, tokens: int) -> None:
        self.computed_tokens += tokens

    def progressed(self, steps: int) -> None:
        self.heard.append(steps)
