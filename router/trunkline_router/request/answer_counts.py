"""Counts what an answer consists of: its tool calls, and the tokens of its reasoning."""

import asyncio
from contextlib import suppress

from trunkline.answer.answer_parser import AnswerParsers
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import Usage
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request.request_call import PreparedRequest

MOST_WAIT_S = 2.0  # for the tokens of the reasoning: the last response waits for them


def note_calls(parsers: AnswerParsers | None, record: RequestRecord) -> None:
    """Notes how many tool calls an answer had when it ended, whole or not."""
    if parsers is not None:
        record.tool_calls, record.complete_tool_calls = parsers.tool_calls, parsers.complete_tool_calls


async def count_reasoning(
    parsers: AnswerParsers, prepared: PreparedRequest, record: RequestRecord, usage: Usage
) -> None:
    """Adds the tokens of the reasoning to the usage of a whole answer, and to its record."""
    # A tokenizer that refuses the text, is busy (TimeoutError is an OSError) or does not start fails no answer: then
    # the count is absent.
    with suppress(RequestRefused, OSError, RuntimeError):
        async with asyncio.timeout(MOST_WAIT_S):
            num_tokens = await _reasoning_tokens(parsers, prepared)
        # The model may have written the same text with fewer tokens.
        record.reasoning_tokens = usage.reasoning_tokens = min(num_tokens, usage.completion_tokens)


async def _reasoning_tokens(parsers: AnswerParsers, prepared: PreparedRequest) -> int:
    """Raises RequestRefused."""
    num_tokens, tokenizer, tenant = 0, prepared.tokenizer, prepared.scheduling.tenant
    for text in filter(None, map("".join, parsers.reasoning)):
        tokenizer.check_fits(text)
        num_tokens += len(await tokenizer.encode(text, special_tokens=False, tenant=tenant))
    return num_tokens
