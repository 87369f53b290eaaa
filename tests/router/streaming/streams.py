"""Streams of requests, without a dispatcher."""

import time

from trunkline.v1.inference_pb2 import PromptInfo
from trunkline_router.quotas.reservation import OutputMeter
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request.client_buffer import Backlog
from trunkline_router.request.request_stream import Fanout, RequestStream


def stream_of(
    record: RequestRecord,
    choices: int,
    prompt: PromptInfo,
    *,
    fanout: Fanout | None = None,
    backlog: Backlog | None = None,
    meter: OutputMeter | None = None,
) -> RequestStream:
    fanout = fanout or Fanout(time.monotonic)
    return RequestStream(record, choices, prompt, fanout, backlog or Backlog(), meter or OutputMeter())
