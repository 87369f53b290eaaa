"""What an answer tells of its prompts and of tokens: log-probabilities, texts of tokens, and where they begin.

All of it is found out once for all choices, after a request is admitted: a request that is refused costs no more than
others. Long work is done in pieces or in helper processes, so that other requests run in between.
"""

import asyncio
import codecs
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from trunkline.status import invalid
from trunkline.v1.generation_pb2 import TokenLogprob, TokenLogprobs
from trunkline.v1.inference_pb2 import GenerateResponse
from trunkline_router.edge.http.json_body import json_list
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.openai.openai_requests import ChatRequest, CompletionRequest, Prompt
from trunkline_router.prompts.token_bytes import TokenBytes
from trunkline_router.request.request_call import NO_EXTRAS, Extras, PreparedRequest

LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; vLLM's value
MAX_PROMPT_LOGPROBS = 1 << 17  # of one body or event
PIECE = 64  # tokens of a prompt; a quarter of a millisecond to two with 0 to 20 top log-probabilities each
REPLACEMENT = "\ufffd"  # stands for bytes that are not valid UTF-8
CHARACTER_BYTES = 4  # most bytes of a character in UTF-8
NO_IDS = orjson.Fragment(b"[]")

Json = dict[str, Any]


def completion_logprobs(
    names: TokenBytes,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs],
    num_top: int,
    offsets: Sequence[int],
) -> Json:
    """Returns the `logprobs` of a completion's choice: columns of tokens. A token without an entry, such as the first
    of a prompt, has null values."""
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        tokens.append(names.text(token_id))
        is_scored = entry.HasField("chosen")
        logprobs.append(_finite(entry.chosen.logprob) if is_scored else None)
        tops.append(_top(names, num_top, entry) if is_scored else None)
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}


def _top(names: TokenBytes, num_top: int, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens and the chosen one. Tokens with equal text share an entry, the likeliest one's."""
    top: dict[str, float] = {}
    for candidate in (*entry.top[:num_top], entry.chosen):
        top.setdefault(names.text(candidate.token_id), _finite(candidate.logprob))
    return top


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
        "logprob": _finite(token.logprob),
        "bytes": list(names[token.token_id]),
    }


def prompt_logprobs(names: TokenBytes, entries: Iterable[TokenLogprobs]) -> list[Json | None]:
    """Returns vLLM's prompt_logprobs: for each token of the prompt null, or its and the likeliest tokens' by id."""
    return [
        {
            str(token.token_id): {
                "logprob": _finite(token.logprob),
                "rank": token.rank,
                "decoded_token": names.text(token.token_id),
            }
            for token in (*entry.top, entry.chosen)
        }
        if entry.HasField("chosen")
        else None
        for entry in entries
    ]


def _finite(logprob: float) -> float:
    """Returns a log-probability that JSON can express."""
    return max(logprob, LEAST_LOGPROB)


class TextOffsets:
    """The offsets of tokens in the text that a decoder makes of them, in characters.

    The offset of a token is the number of characters before it. A token within a character has the offset of that
    character, and a token without text, such as a special token that is left out, that of the text after it. Offsets
    are computed as tokens come: a byte that makes its run of byte tokens invalid UTF-8 turns the whole run into U+FFFD,
    one for each byte. Offsets are right from that byte on, and earlier ones are not corrected. Text that a stop string
    cuts off counts.
    """

    def __init__(self, names: TokenBytes, *, keeps_special: bool) -> None:
        self._names = names
        self._keeps_special = keeps_special
        self._blanks = names.leading_blanks  # that the decoder still removes
        self._offset = 0  # number of characters that are complete
        self._incomplete = b""  # the bytes after them
        self._run_start = 0  # offset of the byte tokens that the tokens so far end in
        self._run_length = 0  # their number
        self._is_text = True  # whether they may be valid UTF-8

    async def pass_prompt(self, token_ids: Sequence[int], offset: int) -> None:
        """Takes a prompt. The output begins at this offset, and may complete a character that the prompt has begun."""
        beginning = 0
        while self._blanks and beginning < len(token_ids):
            self._next(token_ids[beginning])
            beginning += 1
            if beginning % PIECE == 0:
                await asyncio.sleep(0)
        self.of_output(token_ids[max(beginning, len(token_ids) - CHARACTER_BYTES) :])
        self._offset = offset
        self._run_length = len(self._incomplete) if self._names.single_bytes else 0
        self._run_start, self._is_text = offset - self._run_length, True

    def of_output(self, token_ids: Iterable[int]) -> list[int]:
        """Returns the offsets of the next tokens."""
        return [self._next(token_id) for token_id in token_ids]

    def _next(self, token_id: int) -> int:
        names = self._names
        if not self._keeps_special and token_id in names.special:
            return self._offset
        data = names[token_id]
        if self._blanks and data:
            num_blanks = min(self._blanks, len(data) - len(data.lstrip(b" ")))
            data = data[num_blanks:]
            self._blanks = 0 if data else self._blanks - num_blanks
        if token_id in names.single_bytes:
            return self._next_byte(data)
        if self._run_length and self._incomplete:
            self._end_invalid_run()
        self._run_length, self._is_text = 0, True
        at, joined = self._offset, self._incomplete + data
        text, used = codecs.utf_8_decode(joined, "replace", False)
        if self._incomplete and text.startswith(REPLACEMENT) and not joined.startswith(REPLACEMENT.encode()):
            at += len(self._incomplete.decode(errors="replace"))  # the token does not complete that character
        self._offset += len(text)
        self._incomplete = joined[used:]
        return at

    def _next_byte(self, data: bytes) -> int:
        """Returns the offset of a byte token, which the decoder takes together with those beside it."""
        if not self._run_length:
            self._run_start = self._offset
        self._run_length += 1
        if self._is_text:
            joined = self._incomplete + data
            try:
                text, used = codecs.utf_8_decode(joined, "strict", False)
            except UnicodeDecodeError:
                self._is_text = False
            else:
                at = self._offset
                self._offset += len(text)
                self._incomplete = joined[used:]
                return at
        self._end_invalid_run()
        return self._offset - 1

    def _end_invalid_run(self) -> None:
        """Each byte token of the run so far is one U+FFFD."""
        self._offset, self._incomplete = self._run_start + self._run_length, b""


class LogprobsBound:
    """Bounds the log-probabilities of prompt tokens in one body or event. To read one takes 1 to 11 us, in pieces. The
    body is written as JSON in one step, which takes half a microsecond for each: 60 ms for the most.
    """

    def __init__(self, request: ChatRequest | CompletionRequest) -> None:
        times = 1 if isinstance(request, ChatRequest) else request.n or 1  # that they are written
        self._per_token = 0 if request.prompt_top is None else times * (request.prompt_top + 1)
        self._field = "logprobs" if request.prompt_logprobs is None else "prompt_logprobs"
        self._num_tokens = 0

    def add(self, num_tokens: int) -> None:
        """Counts a prompt. Raises RequestRefused (INVALID_REQUEST) beyond MAX_PROMPT_LOGPROBS."""
        self._num_tokens += num_tokens
        if self._num_tokens * self._per_token > MAX_PROMPT_LOGPROBS:
            raise invalid(
                self._field, f"{self._num_tokens} prompt tokens have more than {MAX_PROMPT_LOGPROBS} log-probabilities"
            )


@dataclass(slots=True)
class PromptDetails:
    """What is told of one prompt. Parts that the answer does not need are empty.

    prompt: of a completion
    text: of an echo
    ids_json: its tokens, as JSON
    tokens: of the model; None if the answer needs none
    offsets: where its tokens begin in its text
    output_offsets: tells where the tokens of the output begin; each choice uses a copy
    columns: its tokens' log-probabilities as completion_logprobs() has them
    logprobs: the same as vLLM's prompt_logprobs
    """

    request: ChatRequest | CompletionRequest
    bound: LogprobsBound
    prompt: Prompt = ""
    text: str = ""
    token_ids: Sequence[int] = ()
    ids_json: orjson.Fragment = NO_IDS
    tokens: TokenBytes | None = None
    offsets: list[int] = field(default_factory=list)
    output_offsets: TextOffsets | None = None
    columns: dict[str, list[Any]] = field(default_factory=dict)
    logprobs: list[Json | None] = field(default_factory=list)

    def extras(self, call: HttpCall) -> Extras:
        """Returns how the prompt is treated, and what finds its details once it is admitted."""
        request = self.request
        is_plain = request.num_top is None and request.prompt_top is None and not request.return_token_ids
        if isinstance(request, ChatRequest):
            return NO_EXTRAS if is_plain else Extras(on_admission=partial(self._find, call))
        return Extras(
            token_ids=None if isinstance(self.prompt, str) else self.prompt,
            special_tokens=request.add_special_tokens is not False,
            on_admission=None if is_plain and not request.echo else partial(self._find, call),
        )

    async def _find(self, call: HttpCall, prepared: PreparedRequest) -> None:
        request, self.token_ids = self.request, prepared.prompt
        self.bound.add(len(prepared.prompt))
        tokenizer = (await call.edge.inference.found(prepared.model, call.caller, None)).tokenizer
        if request.num_top is not None or request.prompt_top is not None:
            self.tokens = await tokenizer.token_bytes()
        if request.return_token_ids:
            self.ids_json = await json_list(prepared.prompt)
        if isinstance(request, ChatRequest):
            return
        if request.echo and isinstance(self.prompt, str):
            self.text = self.prompt
        elif request.echo:
            self.text = (await tokenizer.decode(prepared.prompt, keep_special=True, tenant=call.caller.tenant)).decode()
        if request.logprobs is None or self.tokens is None:
            return
        self.output_offsets = TextOffsets(self.tokens, keeps_special=request.skip_special_tokens is False)
        await self.output_offsets.pass_prompt(self.token_ids, len(self.text))
        if request.echo and isinstance(self.prompt, str):
            special, tenant = request.add_special_tokens is not False, call.caller.tenant
            starts = await tokenizer.offsets(self.text, special_tokens=special, tenant=tenant)
            self.offsets = starts.tolist()
        elif request.echo:
            self.offsets = await _decoded_offsets(self.tokens, self.token_ids, len(self.text))

    def scored(self, responses: AsyncGenerator[GenerateResponse, None]) -> AsyncGenerator[GenerateResponse, None]:
        """Returns the responses, and takes the log-probabilities of the prompt's tokens from them as they pass."""
        return responses if self.request.prompt_top is None else self._scored(responses)

    async def _scored(
        self, responses: AsyncGenerator[GenerateResponse, None]
    ) -> AsyncGenerator[GenerateResponse, None]:
        async with aclosing(responses):
            async for response in responses:
                if response.HasField("prompt"):
                    await self._score(response.prompt.logprobs)
                yield response

    async def _score(self, scores: Sequence[TokenLogprobs]) -> None:
        assert self.tokens is not None
        request = self.request
        top = request.logprobs if isinstance(request, CompletionRequest) and request.echo else None
        for start in range(0, len(scores), PIECE):
            await asyncio.sleep(0)
            at = slice(start, start + PIECE)
            if top is not None:
                columns = completion_logprobs(self.tokens, self.token_ids[at], scores[at], top, self.offsets[at])
                for name, column in columns.items():
                    self.columns.setdefault(name, []).extend(column)
            if request.prompt_logprobs is not None:
                self.logprobs += prompt_logprobs(self.tokens, scores[at])


async def _decoded_offsets(tokens: TokenBytes, token_ids: Sequence[int], num_characters: int) -> list[int]:
    """Returns where tokens begin in the text that was decoded from them."""
    offsets, found = TextOffsets(tokens, keeps_special=True), []
    for start in range(0, len(token_ids), PIECE):
        await asyncio.sleep(0)
        found += [min(at, num_characters) for at in offsets.of_output(token_ids[start : start + PIECE])]
    return found
