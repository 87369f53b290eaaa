"""Counts what an answer consists of: its tool calls, and the tokens of its reasoning."""

import asyncio
import time
from contextlib import suppress

from trunkline.answer.answer_parser import AnswerParsers
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import GenerateResponse, Usage
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request.request_call import PreparedRequest

MOST_WAIT_S = 2.0  # for the tokens of the reasoning: the last response waits for them

_counting = set[asyncio.Task[int | None]]()  # an event loop alone does not keep its tasks


def note_calls(parsers: AnswerParsers | None, record: RequestRecord) -> None:
    """Notes how many tool calls an answer had when it ended, whole or not."""
    if parsers is not None:
        record.tool_calls, record.complete_tool_calls = parsers.tool_calls, parsers.complete_tool_calls


def end_of(response: GenerateResponse) -> GenerateResponse:
    """Moves the end of an answer, its usage and why its last choices ended, out of its last response. Returns it as a
    response of its own, which may wait for the count of tokens: readers get the output before."""
    end = GenerateResponse(request_id=response.request_id, usage=response.usage)
    response.ClearField("usage")
    for chunk in response.chunks:
        if chunk.finish_reason:
            last = end.chunks.add(
                index=chunk.index,
                first_token_index=chunk.first_token_index + len(chunk.token_ids),
                text_offset=chunk.text_offset + len(chunk.text.encode()),
                finish_reason=chunk.finish_reason,
            )
            if matched := chunk.WhichOneof("matched"):
                setattr(last, matched, getattr(chunk, matched))
                chunk.ClearField(matched)
            chunk.ClearField("finish_reason")
    return end


async def count_reasoning(
    parsers: AnswerParsers, prepared: PreparedRequest, record: RequestRecord, usage: Usage
) -> None:
    """Adds the tokens of the reasoning to the usage of a whole answer, and to its record."""
    counting = asyncio.create_task(_reasoning_tokens(parsers, prepared, time.monotonic() + MOST_WAIT_S))
    _counting.add(counting)
    counting.add_done_callback(_counting.discard)
    # Neither a late count nor a client that goes ends it: that would kill the process that has begun to count.
    done, _ = await asyncio.wait([counting], timeout=MOST_WAIT_S)
    if done and (num_tokens := counting.result()) is not None:
        # The model may have written the same text with fewer tokens.
        record.reasoning_tokens = usage.reasoning_tokens = min(num_tokens, usage.completion_tokens)


async def _reasoning_tokens(parsers: AnswerParsers, prepared: PreparedRequest, until_s: float) -> int | None:
    """Returns None if the count takes too long, or the tokenizer refuses the text or does not start: that fails no
    answer."""
    num_tokens, tokenizer, tenant = 0, prepared.tokenizer, prepared.scheduling.tenant
    with suppress(RequestRefused):
        for text in filter(None, map("".join, parsers.reasoning)):
            if time.monotonic() >= until_s:
                return None
            tokenizer.check_fits(text)
            num_tokens += len(await tokenizer.encode(text, special_tokens=False, tenant=tenant))
        return num_tokens
    return None
