"""The direct path of the client: a router chooses a worker and signs a grant, and the answer streams from the worker.

The call to the router lasts as long as the request, with two to four messages in all. If a worker is lost, the client
sends the router the ledger of its output and asks for another worker, which continues the answer without a gap. As long
as the worker is not lost, the router is not needed: an answer that has started survives the end of the router.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from trunkline.answer.answer_parser import PARSERS, parsers_of
from trunkline.answer.output_reader import AnswerContext
from trunkline.client.direct_answer import DirectAnswer
from trunkline.client.grant_call import GrantCall, NotOffered
from trunkline.client.worker_streams import Arrived, Lost, Workers, streams, time_left_s
from trunkline.tls import ClientTls
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse, GrantResponse
from trunkline.v1.worker_pb2 import WorkerServiceGenerateResponse

_log = logging.getLogger(__name__)

Metadata = Sequence[tuple[str, str]]


class DirectPath:
    """Channels to workers, and answers that stream over them.

    inter_token_timeout_s: after this time without output the client asks the router whether the worker is working. So a
    request may wait in a queue for any time, and a worker that hangs is abandoned.
    tls: of the connections to routers; None: plaintext. Connections to workers use ClientTls.for_workers().
    """

    def __init__(self, inter_token_timeout_s: float, tls: ClientTls | None = None) -> None:
        self._inter_token_timeout_s = inter_token_timeout_s
        self._workers = Workers(tls.for_workers() if tls is not None else None)
        self._has_warned = False

    async def close(self) -> None:
        await self._workers.close()

    def warn(self, not_offered: NotOffered) -> None:
        """Logs once that this client is not direct, although it was asked to be."""
        if not_offered.is_lasting and not self._has_warned:
            self._has_warned = True
            _log.warning("not direct, through the router: %s", not_offered)

    async def responses(
        self, router: Any, request: GenerateRequest, *, deadline_s: float | None, metadata: Metadata
    ) -> AsyncGenerator[GenerateResponse, None]:
        """The answer as the router would stream it. Raises TrunklineError, and NotOffered before the first response."""
        router_call = GrantCall(router.Grant(timeout=time_left_s(deadline_s), metadata=metadata))
        try:
            granted = await router_call.first(request)
            answer = _answer_to(request, granted)
            while not answer.is_complete:
                answer.begin(granted)
                attempt = self._attempt(router_call, granted, answer, deadline_s)
                try:
                    async with aclosing(attempt) as responses:
                        async for response in responses:
                            yield response
                except Lost as lost:
                    granted = await router_call.lost(answer, lost)
                    if answer.has_output:
                        answer.resumptions += 1
        finally:
            await router_call.close()

    async def _attempt(
        self, router_call: GrantCall, granted: GrantResponse, answer: DirectAnswer, deadline_s: float | None
    ) -> AsyncGenerator[GenerateResponse, None]:
        """The responses of one worker; returns when the answer is complete. Raises Lost and TrunklineError."""
        async with (
            self._workers.at(granted.worker_address) as stub,
            streams(stub, granted.grants, deadline_s) as arrived,
        ):
            has_started = False
            while not answer.is_complete:
                item: WorkerServiceGenerateResponse | Exception | None
                try:
                    async with asyncio.timeout(self._inter_token_timeout_s):
                        item = await arrived.get()
                except TimeoutError:
                    item = await _after_silence(arrived, router_call, answer)
                if item is None:
                    continue
                if isinstance(item, Exception):
                    raise item
                responses = answer.take(item)
                if not has_started:
                    has_started = True
                    router_call.started()
                if answer.is_complete:
                    router_call.end()
                for response in responses:
                    yield response
            await router_call.farewell()


def _answer_to(request: GenerateRequest, granted: GrantResponse) -> DirectAnswer:
    """The answer, before any output. Raises NotOffered."""
    answer_format, choices = granted.prompt.answer_format, request.n if request.HasField("n") else 1
    if answer_format and answer_format not in PARSERS:
        raise NotOffered(f"this client is older than the router: it cannot parse {answer_format}", is_lasting=True)
    chat, prompt_end = request.chat, granted.prompt.prompt_end
    context = AnswerContext(chat.tools, prompt_end, single_tool_call=chat.single_tool_call)
    return DirectAnswer(choices, parsers_of(answer_format, choices, context))


async def _after_silence(
    arrived: Arrived, router_call: GrantCall, answer: DirectAnswer
) -> WorkerServiceGenerateResponse | Exception | None:
    """Asks the router about a silent worker. Returns the worker's next item if one arrives first, or None if the router
    answers first that the worker is working. Raises the errors of GrantCall.silent()."""
    arriving = asyncio.create_task(arrived.get())
    asking = asyncio.create_task(router_call.silent(answer))
    try:
        await asyncio.wait({arriving, asking}, return_when=asyncio.FIRST_COMPLETED)
        if arriving.done():
            return arriving.result()
        asking.result()
        return None
    finally:
        arriving.cancel()
        asking.cancel()
        await asyncio.gather(arriving, asking, return_exceptions=True)
