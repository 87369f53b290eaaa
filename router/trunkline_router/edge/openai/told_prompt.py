"""What an answer tells of its prompts: their text, their tokens, and the names of tokens.

All of it is found out once for all choices, after a request is admitted: a request that is refused costs no more than
others. Long work is done in pieces or in helper processes, so that other requests run in between.
"""

import asyncio
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from trunkline.status import invalid
from trunkline.v1.generation_pb2 import TokenLogprobs
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.long_lists import json_list
from trunkline_router.edge.openai.logprobs import Json, TokenNames, completion_logprobs, prompt_logprobs
from trunkline_router.edge.openai.text_offsets import TextOffsets
from trunkline_router.request.request_call import OnAdmission, PreparedRequest

MAX_PROMPT_LOGPROBS = 1 << 17  # of one body or event
PIECE = 64  # tokens of a prompt; a quarter of a millisecond to two with 0 to 20 top log-probabilities each


@dataclass(slots=True)
class ToldPrompt:
    """What is told of one prompt. Parts that the answer does not need are empty.

    ids_json: its tokens, as JSON
    names: of all tokens; None if the answer needs none
    offsets: where its tokens begin in its text
    output_offsets: tells where the tokens of the output begin; each choice uses a copy
    columns: its tokens' log-probabilities as completion_logprobs() has them
    logprobs: the same as vLLM's prompt_logprobs
    """

    text: str = ""
    token_ids: "array[int]" = field(default_factory=lambda: array("i"))
    ids_json: orjson.Fragment = field(default_factory=lambda: orjson.Fragment(b"[]"))
    names: TokenNames | None = None
    offsets: list[int] = field(default_factory=list)
    output_offsets: TextOffsets | None = None
    columns: dict[str, list[Any]] = field(default_factory=dict)
    logprobs: list[Json | None] = field(default_factory=list)

    async def scored(
        self, responses: AsyncGenerator[GenerateResponse, None], *, columns_top: int | None, has_logprobs: bool
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Passes the responses on, and takes the log-probabilities of the prompt's tokens from them.

        columns_top: how many of each token are in `columns`, beside its own; None: no columns
        has_logprobs: the answer has vLLM's prompt_logprobs
        """
        async with aclosing(responses):
            async for response in responses:
                if response.HasField("prompt"):
                    await self._take(response.prompt.logprobs, columns_top, has_logprobs)
                yield response

    async def _take(self, scores: Sequence[TokenLogprobs], columns_top: int | None, has_logprobs: bool) -> None:
        assert self.names is not None
        for start in range(0, len(scores), PIECE):
            await asyncio.sleep(0)
            at = slice(start, start + PIECE)
            if columns_top is not None:
                columns = completion_logprobs(
                    self.names, self.token_ids[at], scores[at], num_top=columns_top, offsets=self.offsets[at]
                )
                for name, column in columns.items():
                    self.columns.setdefault(name, []).extend(column)
            if has_logprobs:
                self.logprobs += prompt_logprobs(self.names, scores[at])


class LogprobsBound:
    """Bounds the log-probabilities of prompt tokens in one body or event. To read one takes 1 to 11 us, in pieces. The
    body is written as JSON in one step, which takes half a microsecond for each: 60 ms for the most.

    num_top: of each token, beside its own
    choices: how often they are written
    field: what is refused
    """

    def __init__(self, num_top: int, choices: int, field: str) -> None:
        self._per_token = choices * (num_top + 1)
        self._field = field
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Counts a prompt. Raises RequestRefused (INVALID_REQUEST) beyond MAX_PROMPT_LOGPROBS."""
        self._num_tokens += num_tokens
        if self._num_tokens * self._per_token > MAX_PROMPT_LOGPROBS:
            raise invalid(
                self._field, f"{self._num_tokens} prompt tokens have more than {MAX_PROMPT_LOGPROBS} log-probabilities"
            )


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """What a request asks to be told of its prompt and its tokens."""

    names: bool = False
    token_ids: bool = False
    decoded: bool = False  # the text of a prompt that is given as tokens
    offsets: bool = False  # of the output's tokens, and with an echo of the prompt's
    echo: bool = False  # the answer's text begins with the prompt
    adds_special: bool = True  # a prompt that is a text gets the model's special tokens
    keeps_special: bool = False  # the output's text has special tokens

    def on_admission(self, call: HttpCall, told: ToldPrompt, bound: LogprobsBound | None) -> OnAdmission | None:
        """Returns the function that fills in `told` when the prompt is admitted; None: the request asks for nothing."""
        if not (self.names or self.token_ids or self.decoded or bound):
            return None
        return partial(self._tell, call, told, bound)

    async def _tell(
        self, call: HttpCall, told: ToldPrompt, bound: LogprobsBound | None, prepared: PreparedRequest
    ) -> None:
        told.token_ids = prepared.prompt
        if bound is not None:
            bound.add(len(prepared.prompt))
        pool, caller = await call.edge.inference.found(prepared.model, call.caller, None), call.caller
        if self.names:
            told.names = await pool.tokenizer.token_bytes()
        if self.token_ids:
            told.ids_json = await json_list(prepared.prompt)
        if self.decoded:
            utf8 = await pool.tokenizer.decode(prepared.prompt, keep_special=True, tenant=caller.tenant)
            told.text = utf8.decode()
        if self.offsets and told.names is not None:
            told.output_offsets = TextOffsets(told.names, keeps_special=self.keeps_special)
            await told.output_offsets.pass_prompt(told.token_ids, len(told.text))
            if self.echo and self.decoded:
                told.offsets = await _decoded_offsets(told.names, told.token_ids, len(told.text))
            elif self.echo:
                starts = await pool.tokenizer.offsets(told.text, special_tokens=self.adds_special, tenant=caller.tenant)
                told.offsets = starts.tolist()


async def _decoded_offsets(names: TokenNames, token_ids: "array[int]", num_characters: int) -> list[int]:
    """Returns where tokens begin in the text that was decoded from them."""
    offsets, told = TextOffsets(names, keeps_special=True), []
    for start in range(0, len(token_ids), PIECE):
        await asyncio.sleep(0)
        told += [min(at, num_characters) for at in offsets.of_output(token_ids[start : start + PIECE])]
    return told
