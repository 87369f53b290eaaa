"""Bodies for the HTTP endpoints, made from the models that the endpoints themselves check bodies with.

Most fields of most bodies are valid, so that many bodies come further than the first check; each value may be at an
edge, or beyond it, or of another type.
"""

import json
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trunkline_router.edge.anthropic.anthropic_requests import CountRequest, MessageRequest
from trunkline_router.edge.openai.chat import ChatRequest
from trunkline_router.edge.openai.completion_request import CompletionRequest
from trunkline_router.edge.openai.models_and_tokens import DetokenizeBody, TokenizeBody
from trunkline_router.edge.pooling.pooling_fields import (
    ClassifyRequest,
    CohereRerankRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreBody,
)
from trunkline_router.edge.request_fields import Fields
from trunkline_router.edge.responses.response_request import ResponseRequest

Json = Any
Values = st.SearchStrategy[Any]

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
RERANK = {"model": "tiny", "query": "hi", "documents": ["ho"]}
# By path: the model of the body, and the smallest body that is answered.
ENDPOINTS: Mapping[str, tuple[type[Fields], Mapping[str, Json]]] = {
    "/v1/completions": (CompletionRequest, {"model": "tiny", "prompt": "hi", "max_tokens": 2}),
    "/v1/chat/completions": (ChatRequest, {**CHAT, "max_tokens": 2}),
    "/v1/messages": (MessageRequest, {**CHAT, "max_tokens": 2}),
    "/v1/messages/count_tokens": (CountRequest, CHAT),
    "/v1/responses": (ResponseRequest, {"model": "tiny", "input": "hi", "max_output_tokens": 2}),
    "/tokenize": (TokenizeBody, {"prompt": "hi"}),
    "/detokenize": (DetokenizeBody, {"tokens": [100, 101]}),
    "/v1/embeddings": (EmbeddingRequest, {"model": "tiny", "input": "hi"}),
    "/pooling": (EmbeddingRequest, {"model": "tiny", "input": "hi"}),
    "/classify": (ClassifyRequest, {"model": "tiny", "input": "hi"}),
    "/v1/rerank": (RerankRequest, RERANK),
    "/rerank": (RerankRequest, RERANK),
    "/v2/rerank": (CohereRerankRequest, RERANK),
    "/v1/score": (ScoreBody, {"model": "tiny", "text_1": "hi", "text_2": "ho"}),
    "/score": (ScoreBody, {"model": "tiny", "queries": "hi", "items": ["ho"]}),
}

EDGES = [0, -1, 1, 2, 5, 16, 20, 21, 255, 256, 4095, 4096, 4097, 2**16, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32,
         2**63 - 1, 2**63, -(2**63), 2**64 - 1, 2**64, 10**30, -(10**30)]  # fmt: skip
FLOATS = [0.0, -0.0, 5e-324, 1e-45, 1e-30, 1e-5, 0.01, 0.5, 1.0, 1.0000001, 2.0, 2.0000001, 100.0, 3.4e38, 3.5e38,
          1.7e308, -1e-45, -1.0, -2.0, -100.0, -3.5e38, float("nan"), float("inf"), float("-inf")]  # fmt: skip
TEXTS = ["", " ", "a", "\x00", "\n", "\r\n\r\n", "é", "😀", "\ud800", "\udfff\ud800", "\ufffe", "\u202e", "</s>", "<s>",
         "null", "0", "100", "-1", "{{ 7 * 7 }}", "{% for i in range(10**9) %}", "text", "user", "assistant", "system",
         "tool", "disabled", "auto", "none", "json_schema", "x" * 256, "x" * 257, "ab" * 2100,
             "😀" * 20_000]  # fmt: skip
JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.sampled_from(EDGES), st.sampled_from(FLOATS), st.sampled_from(TEXTS)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(TEXTS), inner, max_size=3)),
    max_leaves=6,
)
# Instead of a value, sometimes.
STRANGE = st.one_of(JUNK, st.sampled_from([[[[]]] * 3, {}, [], [None], [{}], {"": ""}, [1] * 5000, ["a"] * 300]))
ONE_IN = 12  # values are strange


def _strange_sometimes(values: Values) -> Values:
    return st.integers(0, ONE_IN - 1).flatmap(lambda drawn: STRANGE if drawn == ONE_IN // 2 else values)


def _numbers(edges: list[Any], metadata: list[Any]) -> list[Any]:
    """The edges, and those that the limits of a field have."""
    found = list(edges)
    for limit in metadata:
        for name in ("ge", "gt", "le", "lt"):
            value = getattr(limit, name, None)
            if value is not None:
                found += [value - 1, value, value + 1]
    return found


def _texts(metadata: list[Any]) -> list[str]:
    lengths = [limit.max_length for limit in metadata if isinstance(limit, annotated_types.MaxLen)]
    return TEXTS + ["y" * length for most in lengths for length in (most, most + 1)]


def values_of(annotation: Any, metadata: list[Any]) -> Values:
    """Values of a type, mostly."""
    return _strange_sometimes(_plain(annotation, metadata))


def _plain(annotation: Any, metadata: list[Any]) -> Values:  # one line for each kind of type
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _plain(arguments[0], [*metadata, *_flattened(arguments[1:])])
    if origin in (Union, types.UnionType):
        return st.one_of([_plain(argument, metadata) for argument in arguments])
    if origin is Literal:
        return st.sampled_from([*arguments, "other"])
    if origin is list:
        return st.lists(st.deferred(lambda: values_of(arguments[0], [])), max_size=4)
    if origin is dict:
        keys = st.sampled_from([text for text in _texts([]) if len(text) < 300])
        return st.dictionaries(keys, st.deferred(lambda: values_of(arguments[1], [])), max_size=4)
    simple: dict[Any, Callable[[], Values]] = {
        type(None): st.none,
        bool: st.booleans,
        int: lambda: st.sampled_from(_numbers(EDGES, metadata)),
        float: lambda: st.sampled_from(_numbers(FLOATS, metadata)),
        str: lambda: st.sampled_from(_texts(metadata)),
        Any: lambda: JUNK,
    }
    if annotation in simple:
        return simple[annotation]()
    assert issubclass(annotation, BaseModel), annotation
    return st.deferred(lambda: bodies_of(annotation, {}))


def _flattened(metadata: tuple[Any, ...]) -> Iterator[Any]:
    for item in metadata:
        yield from item.metadata if isinstance(item, FieldInfo) else [item]


def _names(model: type[Fields]) -> dict[str, Values]:
    """Values for each name that a field may have: those of the model, and others that are known and not served."""
    named = [(field.alias or name, field) for name, field in model.model_fields.items()]
    fields = {name: values_of(field.annotation, field.metadata) for name, field in named}
    return {
        **dict.fromkeys([*model.ignored, *model.unserved, "unknown", "__class__", "model_fields", ""], JUNK),
        **fields,
    }


@st.composite
def bodies_of(draw: st.DrawFn, model: type[Fields], base: Mapping[str, Json]) -> dict[str, Json]:
    """An object for this model: its base, some more fields, and sometimes without one of its own."""
    names = _names(model)
    own = [field.alias or name for name, field in model.model_fields.items()]
    wanted = draw(st.lists(st.sampled_from([*own, *own, *own, *names]), max_size=6 if base else 3, unique=True))
    body = dict(base)
    if not base:
        wanted += [field.alias or name for name, field in model.model_fields.items() if field.is_required()]
    for name in wanted:
        body[name] = draw(names[name])
    if draw(st.integers(0, 19)) == 7 and body:
        del body[draw(st.sampled_from(sorted(body)))]
    return body


# Within the range of 32 bits, so that many fields accept them: enough to fill the memory, were as many things made.
LARGE_NUMBERS = (2**32 - 1, 2**31 - 1, 4_000_000)


def with_large_numbers(model: type[Fields], base: Mapping[str, Json]) -> Iterator[dict[str, Json]]:
    """The base with each number of the model at its largest, streamed and not, and those that count for each prompt
    with many prompts, too."""
    numbers = [name for name, field in model.model_fields.items() if int in _simple_types(field.annotation)]
    given = [{**base, name: number} for name in [*numbers, "best_of"] for number in LARGE_NUMBERS]
    if model is CompletionRequest:
        many: list[Json] = [["hi"] * 256, [[100, 101]] * 256]
        given += [
            {**base, "prompt": prompts, name: number}
            for prompts in many
            for name in ("n", "max_tokens")
            for number in LARGE_NUMBERS
        ]
    for body in given:
        yield body
        if "stream" in model.model_fields:
            yield {**body, "stream": True}


def _simple_types(annotation: Any) -> set[Any]:
    """The types that a value of this one may have, without those of elements."""
    if get_origin(annotation) is Annotated:
        return _simple_types(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return {kind for argument in get_args(annotation) for kind in _simple_types(argument)}
    return {annotation}


def json_bytes(body: Json) -> bytes:
    return json.dumps(body).encode()


PIECES = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\\u", b"\\ud800", b"\x00", b"\xff", b"\xed\xa0\x80", b"-",
          b"1e999", b"NaN", b"null", b"tru", b"0" * 5000, b"[" * 70, b'{"a":' * 70, b" " * 300, b"\xef\xbb\xbf",
          b'"stream":true,', b'"n":17,', b'"n":4294967295,')  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes with a few of them cut out, repeated, overwritten or added."""
    data = whole
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from([0, 1, 2, 8, 1 << 20])))
        kind = draw(st.sampled_from(["cut", "repeat", "overwrite", "add"]))
        if kind == "cut":
            data = data[:at] + data[end:]
        elif kind == "repeat":
            data = data[:end] + data[at:end] + data[end:]
        else:
            piece = draw(st.one_of(st.sampled_from(PIECES), st.binary(max_size=3)))
            data = data[:at] + piece + data[end if kind == "overwrite" else at :]
    return data
