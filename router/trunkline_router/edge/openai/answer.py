"""What the answers of completions and chat completions have in common."""

from dataclasses import dataclass, field
from typing import Any

from trunkline.v1.generation_pb2 import FinishReason, OutputChunk, TokenLogprobs
from trunkline.v1.inference_pb2 import GenerateResponse, PromptInfo, Usage

Json = dict[str, Any]

FINISH_REASONS = {
    FinishReason.FINISH_REASON_STOP: "stop",
    FinishReason.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class AnswerId:
    """What every object of one answer repeats. `created` is in seconds since 1970."""

    id: str
    created: int
    sees_cache: bool  # the caller is told how many tokens came from the cache


def stop_reason(chunk: OutputChunk) -> int | str | None:
    """Returns vLLM's stop_reason: the stop string or the stop token that ended the choice."""
    kind = chunk.WhichOneof("matched")
    return None if kind is None else chunk.stop_string if kind == "stop_string" else chunk.stop_token_id


def usage_json(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Json:
    """Returns a usage object; cached_tokens: None if the caller may not see them."""
    usage: Json = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    return usage


@dataclass(slots=True)
class CollectedChoice:
    """One choice of an answer that is not streamed."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    last: OutputChunk = field(default_factory=OutputChunk)

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def finish_reason(self) -> str:
        return FINISH_REASONS.get(self.last.finish_reason, "stop")


class CollectedAnswer:
    """The whole answer to one prompt. Choices after the first one are made when they arrive: a body may ask for any
    number before the request is checked."""

    def __init__(self) -> None:
        self.choices = [CollectedChoice()]
        self.prompt = PromptInfo()
        self.usage = Usage()

    def take(self, response: GenerateResponse) -> None:
        """Takes the next response."""
        for chunk in response.chunks:
            while chunk.index >= len(self.choices):  # the shared path has checked that the choice was asked for
                self.choices.append(CollectedChoice())
            choice = self.choices[chunk.index]
            choice.texts.append(chunk.text)
            choice.token_ids += chunk.token_ids
            choice.logprobs += chunk.logprobs
            if chunk.finish_reason:
                choice.last = chunk
        if response.HasField("prompt"):
            self.prompt = response.prompt
        if response.HasField("usage"):
            self.usage = response.usage


@dataclass(slots=True)
class UsageSoFar:
    """Token counts while an answer is streamed, over all prompts of the request."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def take(self, response: GenerateResponse) -> None:
        """Counts the next response."""
        if response.HasField("prompt"):
            self.prompt_tokens += response.prompt.prompt_tokens
            self.cached_tokens += response.prompt.cached_tokens
        for chunk in response.chunks:
            self.completion_tokens += len(chunk.token_ids)

    def json(self, *, sees_cache: bool) -> Json:
        return usage_json(self.prompt_tokens, self.completion_tokens, self.cached_tokens if sees_cache else None)
