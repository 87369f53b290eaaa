"""What a completion tells of its prompt and of tokens: beside what chats tell, an echo, and where tokens begin."""

import asyncio
import codecs
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from trunkline.v1.generation_pb2 import TokenLogprobs
from trunkline_router.edge.http_call import HttpCall
from trunkline_router.edge.openai.completion_request import CompletionRequest, Prompt
from trunkline_router.edge.openai.openai_answer import Json
from trunkline_router.edge.openai.token_details import PIECE, LogprobsBound, PromptDetails, finite, tokenizer_of
from trunkline_router.prompts.token_bytes import TokenBytes
from trunkline_router.request.request_call import Extras, PreparedRequest

CHARACTER_BYTES = 4  # most bytes of a character in UTF-8


class TextOffsets:
    """The offsets of tokens in the text that a decoder makes of them, in characters.

    The offset of a token is the number of characters before it. A token within a character has the offset of that
    character, and a token without text, such as a special token that is left out, that of the text after it. Text that
    a stop string cuts off counts. Offsets after bytes that are not UTF-8 may be too small: some decoders make a U+FFFD
    of each byte token there.
    """

    def __init__(self, names: TokenBytes, *, keeps_special: bool) -> None:
        self._names = names
        self._left_out = frozenset[int]() if keeps_special else names.special
        self._blanks = names.leading_blanks  # that the decoder still removes
        self._offset = 0  # number of characters that are complete
        self._incomplete = b""  # the bytes after them

    def pass_prompt(self, token_ids: Sequence[int], offset: int) -> None:
        """Takes a prompt. The output begins at this offset, and may complete a character that the prompt has begun."""
        self.of_output(token_ids[:PIECE])  # the decoder removes blanks here
        self._incomplete = b""
        self.of_output(token_ids[-CHARACTER_BYTES:])
        self._offset = offset

    def of_output(self, token_ids: Iterable[int]) -> list[int]:
        """Returns the offsets of the next tokens."""
        return [self._next(token_id) for token_id in token_ids]

    def _next(self, token_id: int) -> int:
        at, data = self._offset, b"" if token_id in self._left_out else self._names[token_id]
        if self._blanks and data:
            num_blanks = min(self._blanks, len(data) - len(data.lstrip(b" ")))
            data = data[num_blanks:]
            self._blanks = 0 if data else self._blanks - num_blanks
        if self._incomplete and data:
            text, used = codecs.utf_8_decode(self._incomplete + data[:1], "replace", False)
            at += len(text) - (used > len(self._incomplete))  # where the character of its first byte begins
        joined = self._incomplete + data
        text, used = codecs.utf_8_decode(joined, "replace", False)
        self._offset += len(text)
        self._incomplete = joined[used:]
        return at


class CompletionDetails(PromptDetails):
    """What is told of one prompt of a completion. Parts that the answer does not need are empty.

    text: of an echo
    columns: log-probabilities of the tokens of an echo, as completion_logprobs() has them
    output_offsets: tells where the tokens of the output begin; each choice uses a copy
    """

    def __init__(self, request: CompletionRequest, prompt: Prompt, bound: LogprobsBound | None) -> None:
        super().__init__(request, bound, has_logprobs=request.logprobs is not None)
        self.prompt = prompt
        self.text = ""
        self.columns: dict[str, list[Any]] = {}
        self.output_offsets: TextOffsets | None = None
        self._request: CompletionRequest = request
        self._offsets: list[int] = []  # where the prompt's tokens begin in its text

    def extras(self, call: HttpCall) -> Extras:
        """Returns how the prompt is treated, and what finds its details once it is admitted."""
        request = self._request
        is_plain = request.logprobs is None and request.prompt_top is None and not request.return_token_ids
        return Extras(
            token_ids=None if isinstance(self.prompt, str) else self.prompt,
            special_tokens=request.add_special_tokens is not False,
            on_admission=None if is_plain and not request.echo else partial(self.find, call),
        )

    async def find(self, call: HttpCall, prepared: PreparedRequest) -> None:
        await super().find(call, prepared)
        request, prompt, tenant = self._request, self.prompt, call.caller.tenant
        tokenizer = await tokenizer_of(call, prepared)
        if request.echo and isinstance(prompt, str):
            self.text = prompt
        elif request.echo:
            self.text = (await tokenizer.decode(prepared.prompt, keep_special=True, tenant=tenant)).decode()
        if request.logprobs is None or self.names is None:
            return
        self.output_offsets = TextOffsets(self.names, keeps_special=request.skip_special_tokens is False)
        self.output_offsets.pass_prompt(self.token_ids, len(self.text))
        if request.echo and isinstance(prompt, str):
            special = request.add_special_tokens is not False
            self._offsets = (await tokenizer.offsets(prompt, special_tokens=special, tenant=tenant)).tolist()
        elif request.echo:
            self._offsets = await _decoded_offsets(self.names, self.token_ids, len(self.text))

    def _score(self, start: int, scores: Sequence[TokenLogprobs]) -> None:
        super()._score(start, scores)
        request, at = self._request, slice(start, start + len(scores))
        if request.echo and request.logprobs is not None and self.names is not None:
            columns = completion_logprobs(
                self.names, self.token_ids[at], scores, num_top=request.logprobs, offsets=self._offsets[at]
            )
            for name, column in columns.items():
                self.columns.setdefault(name, []).extend(column)


async def _decoded_offsets(names: TokenBytes, token_ids: Sequence[int], num_characters: int) -> list[int]:
    """Returns where tokens begin in the text that was decoded from them."""
    offsets, found = TextOffsets(names, keeps_special=True), []
    for start in range(0, len(token_ids), PIECE):
        await asyncio.sleep(0)
        found += [min(at, num_characters) for at in offsets.of_output(token_ids[start : start + PIECE])]
    return found


def completion_logprobs(
    names: TokenBytes,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs],
    *,
    num_top: int,
    offsets: Sequence[int],
) -> Json:
    """Returns the `logprobs` of a completion's choice: columns of tokens. A token without an entry, such as the first
    of a prompt, has null values."""
    scored = [entry if entry.HasField("chosen") else None for entry in entries]
    return {
        "text_offset": offsets,
        "token_logprobs": [entry and finite(entry.chosen.logprob) for entry in scored],
        "tokens": [names.text(token_id) for token_id in token_ids],
        "top_logprobs": [entry and _top(names, num_top, entry) for entry in scored],
    }


def _top(names: TokenBytes, num_top: int, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens and the chosen one. Tokens with equal text share an entry, the likeliest one's."""
    top: dict[str, float] = {}
    for candidate in (*entry.top[:num_top], entry.chosen):
        top.setdefault(names.text(candidate.token_id), finite(candidate.logprob))
    return top
