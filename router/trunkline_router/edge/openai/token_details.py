"""What an answer tells of its prompt and of tokens: ids, texts and log-probabilities.

All of it is found out once for all choices, after a request is admitted: a request that is refused costs no more than
others. Long work is done in pieces or in helper processes, so that other requests run in between.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import orjson

from trunkline.status import invalid
from trunkline.v1.generation_pb2 import TokenLogprob, TokenLogprobs
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.edge.http.json_body import json_list
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.openai.generation_fields import GenerationFields
from trunkline_router.edge.openai.openai_answer import Json
from trunkline_router.prompts.token_bytes import TokenBytes
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.request.request_call import PreparedRequest

LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; vLLM's value
MAX_PROMPT_LOGPROBS = 1 << 17  # of one body or event: to write them takes 60 ms, to read them up to 11 us each
PIECE = 64  # tokens of a prompt; a quarter of a millisecond to two with 0 to 20 top log-probabilities each


def chat_logprobs(names: TokenBytes, entries: Iterable[TokenLogprobs], num_top: int) -> Json:
    """Returns the `logprobs` of a chat completion's choice."""
    content = [
        {**_chat_token(names, entry.chosen), "top_logprobs": [_chat_token(names, top) for top in entry.top[:num_top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(names: TokenBytes, token: TokenLogprob) -> Json:
    return {
        "token": names.chat_text(token.token_id),
        "logprob": finite(token.logprob),
        "bytes": list(names[token.token_id]),
    }


def finite(logprob: float) -> float:
    """Returns a log-probability that JSON can express."""
    return max(logprob, LEAST_LOGPROB)


async def tokenizer_of(call: HttpCall, prepared: PreparedRequest) -> PromptTokenizer:
    """Returns the tokenizer of a request's model."""
    return (await call.edge.inference.preparer.pool(prepared.model, call.caller, None)).tokenizer


class LogprobsBound:
    """Bounds the log-probabilities of prompt tokens in one body or event.

    field: that asked for them;  per_token: how many are written
    """

    def __init__(self, field: str, per_token: int) -> None:
        self._field = field
        self._per_token = per_token
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Counts a prompt. Raises RequestRefused (INVALID_REQUEST) beyond MAX_PROMPT_LOGPROBS."""
        self._num_tokens += num_tokens
        if self._num_tokens * self._per_token > MAX_PROMPT_LOGPROBS:
            raise invalid(
                self._field, f"{self._num_tokens} prompt tokens have more than {MAX_PROMPT_LOGPROBS} log-probabilities"
            )


class PromptDetails:
    """What is told of one prompt, and the names of tokens. Parts that the answer does not need are empty.

    names: of the model's tokens; None: the answer has no log-probabilities
    bound: None: the prompt's tokens have none
    """

    def __init__(self, request: GenerationFields, bound: LogprobsBound | None, *, has_logprobs: bool) -> None:
        self.token_ids: Sequence[int] = ()
        self.names: TokenBytes | None = None
        self._ids_json = orjson.Fragment(b"[]")
        self._logprobs: list[Json | None] = []
        self._request = request
        self._bound = bound
        self._has_logprobs = has_logprobs

    async def find(self, call: HttpCall, prepared: PreparedRequest) -> None:
        """Call once the request is admitted. Raises RequestRefused."""
        self.token_ids = prepared.prompt
        if self._bound is not None:
            self._bound.add(len(prepared.prompt))
        if self._has_logprobs or self._bound is not None:
            self.names = await (await tokenizer_of(call, prepared)).token_bytes()
        if self._request.return_token_ids:
            self._ids_json = await json_list(prepared.prompt)

    def fields(self) -> Json:
        """Returns vLLM's fields of the prompt."""
        fields: Json = {}
        if self._request.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._logprobs
        if self._request.return_token_ids:
            fields["prompt_token_ids"] = self._ids_json
        return fields

    async def scored(self, responses: AsyncGenerator[GenerateResponse, None]) -> AsyncGenerator[GenerateResponse, None]:
        """Yields the responses, and takes the log-probabilities of the prompt's tokens from them."""
        async with aclosing(responses):
            async for response in responses:
                scores = response.prompt.logprobs
                for start in range(0, len(scores), PIECE):
                    await asyncio.sleep(0)
                    self._score(start, scores[start : start + PIECE])
                yield response

    def _score(self, start: int, scores: Sequence[TokenLogprobs]) -> None:
        """Takes the log-probabilities of the tokens from `start` on."""
        assert self.names is not None
        if self._request.prompt_logprobs is not None:
            self._logprobs += [_by_id(self.names, entry) for entry in scores]


def _by_id(names: TokenBytes, entry: TokenLogprobs) -> Json | None:
    """Returns an entry of vLLM's prompt_logprobs: null, or the token's and the likeliest tokens' by id."""
    if not entry.HasField("chosen"):
        return None
    return {
        str(token.token_id): {
            "logprob": finite(token.logprob),
            "rank": token.rank,
            "decoded_token": names.text(token.token_id),
        }
        for token in (*entry.top, entry.chosen)
    }
