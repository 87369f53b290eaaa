"""Counts what an answer consists of, while it streams: its tool calls, and the tokens of its reasoning."""

import asyncio
from collections import defaultdict
from contextlib import suppress

from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request.request_call import PreparedRequest

MOST_WAIT_S = 2.0  # for the tokens of the reasoning: the last response waits for them


class AnswerCounts:
    """The counts of a parsed answer, for its record and its usage."""

    def __init__(self, prepared: PreparedRequest, record: RequestRecord) -> None:
        self._prepared = prepared
        self._record = record
        self._reasoning = defaultdict[int, list[str]](list)  # by choice

    async def take(self, response: GenerateResponse) -> None:
        """Counts the parts of the next response. Completes the usage of the last one."""
        record = self._record
        for part in response.parts:
            kind = part.WhichOneof("part")
            if kind == "reasoning":
                self._reasoning[part.index].append(part.reasoning)
            elif kind == "tool_call":
                record.tool_calls += 1
            elif kind == "tool_call_end":
                record.complete_tool_calls += 1
        if response.HasField("usage"):
            # A tokenizer that refuses the text, is busy (TimeoutError is an OSError) or does not start fails no answer:
            # then the count is absent.
            with suppress(RequestRefused, OSError, RuntimeError):
                async with asyncio.timeout(MOST_WAIT_S):
                    num_tokens = await self._reasoning_tokens()
                # The model may have written the same text with fewer tokens.
                record.reasoning_tokens = min(num_tokens, response.usage.completion_tokens)
                response.usage.reasoning_tokens = record.reasoning_tokens

    async def _reasoning_tokens(self) -> int:
        """Raises RequestRefused."""
        num_tokens, tokenizer, tenant = 0, self._prepared.tokenizer, self._prepared.scheduling.tenant
        for text in map("".join, self._reasoning.values()):
            tokenizer.check_fits(text)
            num_tokens += len(await tokenizer.encode(text, special_tokens=False, tenant=tenant))
        return num_tokens
