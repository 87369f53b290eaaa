"""Vectors and scores, as clients ask for them and get them."""

import sys
import uuid
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from trunkline.client.client_requests import lane_named
from trunkline.v1.inference_pb2 import (
    EmbedRequest,
    EmbedResponse,
    Input,
    PromptInfo,
    ScoreRequest,
    ScoreResponse,
    TokenIds,
    Usage,
)

GivenInput = str | Sequence[int]  # a text or token ids
GivenInputs = str | Sequence[GivenInput]  # a text, or several inputs


class PooledOptions(TypedDict, total=False):
    """The options that embed() and score() have in common."""

    model: str | None
    truncate_prompt_tokens: int | None
    raw: bool
    request_id: str
    timeout_s: float | None
    lane: str | None
    session: str


class EmbedOptions(PooledOptions, total=False):
    """The options of embed()."""

    dimensions: int
    prompt_name: str
    prompt: str | None


class ScoreOptions(PooledOptions, total=False):
    """The options of score()."""

    queries: str | Sequence[str]
    instruction: str


PooledRequest = EmbedRequest | ScoreRequest


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of several inputs, in their order, each an array of float32."""

    request_id: str
    vectors: "list[array[float]]"
    prompt: PromptInfo
    usage: Usage


@dataclass(frozen=True, slots=True)
class Scores:
    """The scores of several inputs, in their order: a value for each label, and one if the model ranks."""

    request_id: str
    values: list[list[float]]
    prompt: PromptInfo
    usage: Usage


def embed_request(inputs: GivenInputs, model: str, options: EmbedOptions) -> EmbedRequest:
    """A request with an id: a new one if there is none. Raises ValueError if the lane is unknown."""
    return EmbedRequest(
        model=model,
        inputs=map(_input, [inputs] if isinstance(inputs, str) else inputs),
        dimensions=options.get("dimensions", 0),
        prompt_name=options.get("prompt_name", ""),
        prompt=options.get("prompt"),
        truncate_prompt_tokens=options.get("truncate_prompt_tokens"),
        raw=options.get("raw", False),
        request_id=options.get("request_id") or uuid.uuid4().hex,
        lane=lane_named(options.get("lane")),
    )


def score_request(inputs: GivenInputs, model: str, options: ScoreOptions) -> ScoreRequest:
    """As embed_request()."""
    queries = options.get("queries", ())
    return ScoreRequest(
        model=model,
        inputs=map(_input, [inputs] if isinstance(inputs, str) else inputs),
        queries=[queries] if isinstance(queries, str) else queries,
        instruction=options.get("instruction", ""),
        truncate_prompt_tokens=options.get("truncate_prompt_tokens"),
        raw=options.get("raw", False),
        request_id=options.get("request_id") or uuid.uuid4().hex,
        lane=lane_named(options.get("lane")),
    )


def _input(given: GivenInput) -> Input:
    return Input(text=given) if isinstance(given, str) else Input(token_ids=TokenIds(ids=given))


@dataclass(slots=True)
class PooledCollector:
    """Adds up the responses to one request."""

    _vectors: "dict[int, array[float]]" = field(default_factory=dict)
    _scores: dict[int, list[float]] = field(default_factory=dict)
    _request_id: str = ""
    _prompt: PromptInfo = field(default_factory=PromptInfo)
    _usage: Usage = field(default_factory=Usage)

    def add(self, response: EmbedResponse | ScoreResponse) -> None:
        """Takes the next response."""
        self._request_id = response.request_id
        if response.HasField("prompt"):
            self._prompt = response.prompt
        if response.HasField("usage"):
            self._usage = response.usage
        if isinstance(response, EmbedResponse):
            for one in response.embeddings:
                self._vectors[one.index] = _floats(one.vector.values)
        else:
            for scored in response.scores:
                self._scores[scored.index] = list(scored.score.values)

    def embeddings(self) -> Embeddings:
        vectors = [self._vectors[index] for index in range(len(self._vectors))]
        return Embeddings(self._request_id, vectors, self._prompt, self._usage)

    def scores(self) -> Scores:
        values = [self._scores[index] for index in range(len(self._scores))]
        return Scores(self._request_id, values, self._prompt, self._usage)


def _floats(values: bytes) -> "array[float]":
    """The components of a vector, which are in little-endian order."""
    floats = array("f", values)
    if sys.byteorder == "big":
        floats.byteswap()
    return floats
