"""The messages that clients send, made from Python values."""

import uuid
from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from trunkline.v1.generation_pb2 import Lane, SamplingParams
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    DetokenizeRequest,
    GenerateRequest,
    TokenIds,
    TokenizeRequest,
)
from trunkline.validation import LANES

# A conversation as (role, content) pairs or {"role": …, "content": …} mappings.
Chat = Sequence[tuple[str, str]] | Sequence[Mapping[str, str]]
Prompt = str | Sequence[int] | Chat  # text, token ids, or a conversation


class Sampling(TypedDict, total=False):
    """The fields of SamplingParams (generation.proto). None leaves a field unset."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    min_tokens: int | None
    max_tokens: int | None
    seed: int | None
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    include_stop: bool | None
    keep_special_tokens: bool | None


class GenerateOptions(Sampling, total=False):
    """The options of generate() and complete()."""

    model: str | None
    n: int | None
    request_id: str
    timeout_s: float | None
    lane: str | None
    session: str


def generate_request(
    prompt: Prompt, *, model: str, n: int | None, request_id: str, lane: str | None, **sampling: Unpack[Sampling]
) -> GenerateRequest:
    """A request with an id: a new one if `request_id` is empty, so that a failure can be looked up in servers' logs.
    Raises ValueError if the lane or a field is unknown or has a wrong value."""
    request = GenerateRequest(
        model=model,
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]  # None is an unset field
        n=n,
        request_id=request_id or uuid.uuid4().hex,
        lane=_lane(lane),
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(item, int) for item in prompt):
        request.token_ids.CopyFrom(TokenIds(ids=prompt))  # type: ignore[arg-type]
    else:
        request.chat.CopyFrom(_chat(prompt))  # type: ignore[arg-type]
    return request


def tokenize_request(text: str | Chat, *, model: str, special_tokens: bool) -> TokenizeRequest:
    request = TokenizeRequest(model=model, omit_special_tokens=not special_tokens)
    if isinstance(text, str):
        request.text = text
    else:
        request.chat.CopyFrom(_chat(text))
    return request


def detokenize_request(token_ids: Sequence[int], *, model: str, keep_special_tokens: bool) -> DetokenizeRequest:
    return DetokenizeRequest(model=model, token_ids=token_ids, keep_special_tokens=keep_special_tokens)


def _chat(messages: Chat) -> ChatMessages:
    pairs = [(m["role"], m["content"]) if isinstance(m, Mapping) else m for m in messages]
    return ChatMessages(messages=[ChatMessage(role=role, content=content) for role, content in pairs])


def _lane(name: str | None) -> "Lane.ValueType":
    if name is None:
        return Lane.LANE_UNSPECIFIED
    if name not in LANES:
        raise ValueError(f"{name!r} is not a lane; allowed: {', '.join(LANES)}")
    return LANES[name]
