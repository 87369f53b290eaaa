"""Log-probabilities in the shapes of completions, chat completions, and vLLM's prompt_logprobs."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from trunkline.v1.generation_pb2 import TokenLogprob, TokenLogprobs

LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have; vLLM's value

Json = dict[str, Any]


class TokenNames(Protocol):
    """The text and the bytes of each token, and how a decoder joins them: see TokenBytes."""

    @property
    def special(self) -> frozenset[int]: ...

    @property
    def single_bytes(self) -> frozenset[int]: ...

    @property
    def leading_blanks(self) -> int: ...

    def text(self, token_id: int) -> str: ...

    def chat_text(self, token_id: int) -> str: ...

    def __getitem__(self, token_id: int) -> bytes: ...


def finite(logprob: float) -> float:
    """Returns a log-probability that JSON can express."""
    return max(logprob, LEAST_LOGPROB)


def completion_logprobs(
    names: TokenNames,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprobs],
    *,
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
        logprobs.append(finite(entry.chosen.logprob) if is_scored else None)
        tops.append(_top(names, num_top, entry) if is_scored else None)
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}


def _top(names: TokenNames, num_top: int, entry: TokenLogprobs) -> dict[str, float]:
    """The likeliest tokens and the chosen one. Tokens with equal text share an entry, the likeliest one's."""
    top: dict[str, float] = {}
    for candidate in (*entry.top[:num_top], entry.chosen):
        top.setdefault(names.text(candidate.token_id), finite(candidate.logprob))
    return top


def chat_logprobs(names: TokenNames, entries: Iterable[TokenLogprobs], num_top: int) -> Json:
    """Returns the `logprobs` of a chat completion's choice."""
    content = [
        {**_chat_token(names, entry.chosen), "top_logprobs": [_chat_token(names, top) for top in entry.top[:num_top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(names: TokenNames, token: TokenLogprob) -> Json:
    return {
        "token": names.chat_text(token.token_id),
        "logprob": finite(token.logprob),
        "bytes": list(names[token.token_id]),
    }


def prompt_logprobs(names: TokenNames, entries: Iterable[TokenLogprobs]) -> list[Json | None]:
    """Returns vLLM's prompt_logprobs: for each token of the prompt null, or its and the likeliest tokens' by id."""
    return [
        {
            str(token.token_id): {
                "logprob": finite(token.logprob),
                "rank": token.rank,
                "decoded_token": names.text(token.token_id),
            }
            for token in (*entry.top, entry.chosen)
        }
        if entry.HasField("chosen")
        else None
        for entry in entries
    ]
