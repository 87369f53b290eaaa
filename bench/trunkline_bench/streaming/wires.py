"""The protocols of a load's streams. Each decodes as little of an answer as possible."""

import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest, GenerateResponse, TokenIds
from trunkline.v1.worker_pb2 import Submit, WorkerServiceGenerateRequest, WorkerServiceGenerateResponse
from trunkline_bench.servers.demo_model import DEMO_MODEL
from trunkline_bench.streaming.completions import open_connections
from trunkline_bench.streaming.letters import age_s
from trunkline_bench.streaming.source import DEFAULT_MODEL, STAMP_DIGITS
from trunkline_runtime.channel import open_channel

TEXT = "Once upon a time there was a " * 4

Call = Callable[[bytes], AsyncIterator[bytes]]  # from a request to its responses
Connect = Callable[[], Call]


@dataclass(frozen=True, slots=True)
class Ask:
    """A request.

    text: send TEXT instead of the token ids, if the wire accepts both; model: for HTTP
    """

    token_ids: list[int]
    max_tokens: int
    text: bool = False
    logprobs: int | None = None
    model: str = DEFAULT_MODEL

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, ignore_eos=True, temperature=0, seed=1, logprobs=self.logprobs
        )


class Wire(Protocol):
    def open(self, address: str) -> AbstractAsyncContextManager[Connect]: ...

    def request(self, ask: Ask) -> bytes: ...

    def ages_ms(self, response: bytes, now_s: float, steps_per_s: float) -> Iterator[float]:
        """Ages of the response's tokens; `now_s` is of the monotonic clock."""

    def check_last(self, response: bytes, max_tokens: int) -> None:
        """Raises AssertionError unless the stream ended with all of its tokens."""


class _Grpc:
    """A gRPC method, with one connection for all streams."""

    method: str

    @asynccontextmanager
    async def open(self, address: str) -> AsyncIterator[Connect]:
        async with open_channel(address) as channel:
            await channel.channel_ready()
            generate: Any = channel.unary_stream(self.method)  # generic only in the type stubs
            yield lambda: generate


class Edge(_Grpc):
    """The router's Generate."""

    method = "/trunkline.v1.InferenceService/Generate"

    def request(self, ask: Ask) -> bytes:
        if ask.text:
            return GenerateRequest(text=TEXT, sampling=ask.sampling()).SerializeToString()
        return GenerateRequest(token_ids=TokenIds(ids=ask.token_ids), sampling=ask.sampling()).SerializeToString()

    def ages_ms(self, response: bytes, now_s: float, steps_per_s: float) -> Iterator[float]:
        return _stamped_ages_ms(GenerateResponse.FromString(response).chunks[0].text, now_s)

    def check_last(self, response: bytes, max_tokens: int) -> None:
        last = GenerateResponse.FromString(response)
        assert last.usage.completion_tokens == max_tokens, last
        _check_ended(last.chunks[0], max_tokens)


class Worker(_Grpc):
    """A worker's Generate, also through the passthrough."""

    method = "/trunkline.v1.WorkerService/Generate"

    def request(self, ask: Ask) -> bytes:
        submit = Submit(prompt_token_ids=ask.token_ids, sampling=ask.sampling())
        return WorkerServiceGenerateRequest(submit=submit).SerializeToString()

    def ages_ms(self, response: bytes, now_s: float, steps_per_s: float) -> Iterator[float]:
        return _stamped_ages_ms(WorkerServiceGenerateResponse.FromString(response).chunk.text, now_s)

    def check_last(self, response: bytes, max_tokens: int) -> None:
        _check_ended(WorkerServiceGenerateResponse.FromString(response).chunk, max_tokens)


def _stamped_ages_ms(text: str, now_s: float) -> Iterator[float]:
    for at in range(0, len(text), STAMP_DIGITS):
        yield now_s * 1e3 - int(text[at : at + STAMP_DIGITS]) / 1e3


def _check_ended(chunk: Any, max_tokens: int) -> None:
    assert chunk.finish_reason
    assert chunk.first_token_index + len(chunk.token_ids) == max_tokens, chunk


class Vllm(_Grpc):
    """vLLM's gRPC, for direct calls to the worker behind a gateway."""

    method = "/vllm.grpc.engine.VllmEngine/Generate"

    def __init__(self) -> None:
        from smg_grpc_proto import vllm_engine_pb2  # installed only for comparisons with SMG

        self._messages = vllm_engine_pb2
        vocabulary = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
        self._texts = {token_id: text for text, token_id in vocabulary.items()}

    def request(self, ask: Ask) -> bytes:
        request: bytes = self._messages.GenerateRequest(
            tokenized=self._messages.TokenizedInput(input_ids=ask.token_ids),
            sampling_params=self._messages.SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True, temperature=0),
            stream=True,
        ).SerializeToString()
        return request

    def ages_ms(self, response: bytes, now_s: float, steps_per_s: float) -> Iterator[float]:
        for token_id in self._messages.GenerateResponse.FromString(response).chunk.token_ids:
            yield age_s(self._texts[token_id], now_s, steps_per_s) * 1e3

    def check_last(self, response: bytes, max_tokens: int) -> None:
        complete = self._messages.GenerateResponse.FromString(response).complete
        assert complete.finish_reason == "length", complete
        assert complete.completion_tokens == max_tokens, complete


class _OpenAi:
    """OpenAI completions over HTTP: a connection per stream."""

    @asynccontextmanager
    async def open(self, address: str) -> AsyncIterator[Connect]:
        async with open_connections(address) as connect:
            yield lambda: connect().events

    def check_last(self, response: bytes, max_tokens: int) -> None:
        last = json.loads(response)
        assert last["usage"]["completion_tokens"] == max_tokens, last


class Completions(_OpenAi):
    """A gateway's completions, which make text from a source of letters; prompts are always text."""

    def request(self, ask: Ask) -> bytes:
        return _completion_request(TEXT, ask, stream=True)

    def ages_ms(self, response: bytes, now_s: float, steps_per_s: float) -> Iterator[float]:
        for choice in json.loads(response)["choices"]:
            for letter in choice["text"]:
                yield age_s(letter, now_s, steps_per_s) * 1e3


class Http(_OpenAi):
    """The router's completions, streamed."""

    def request(self, ask: Ask) -> bytes:
        return _completion_request(TEXT if ask.text else ask.token_ids, ask, stream=True)

    def ages_ms(self, response: bytes, now_s: float, steps_per_s: float) -> Iterator[float]:
        for choice in json.loads(response)["choices"]:
            yield from _stamped_ages_ms(choice["text"], now_s)


class Chat(_OpenAi):
    """The router's chat completions, streamed."""

    @asynccontextmanager
    async def open(self, address: str) -> AsyncIterator[Connect]:
        async with open_connections(address, "/v1/chat/completions") as connect:
            yield lambda: connect().events

    def request(self, ask: Ask) -> bytes:
        return _request({"messages": [{"role": "user", "content": TEXT}]}, ask, stream=True)

    def ages_ms(self, response: bytes, now_s: float, steps_per_s: float) -> Iterator[float]:
        for choice in json.loads(response)["choices"]:
            yield from _stamped_ages_ms(choice["delta"].get("content") or "", now_s)


class HttpWhole(Http):
    """The router's completions, each as one JSON object."""

    @asynccontextmanager
    async def open(self, address: str) -> AsyncIterator[Connect]:
        async with open_connections(address) as connect:
            yield lambda: connect().body

    def request(self, ask: Ask) -> bytes:
        return _completion_request(TEXT if ask.text else ask.token_ids, ask, stream=False)


def _completion_request(prompt: str | list[int], ask: Ask, *, stream: bool) -> bytes:
    return _request({"prompt": prompt}, ask, stream=stream)


def _request(prompt: dict[str, Any], ask: Ask, *, stream: bool) -> bytes:
    body = {
        "model": ask.model,
        **prompt,
        "max_tokens": ask.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        **({"stream": True, "stream_options": {"include_usage": True}} if stream else {}),
    }
    return json.dumps(body).encode()


WIRES: dict[str, Callable[[], Wire]] = {
    "edge": Edge,
    "worker": Worker,
    "vllm": Vllm,
    "completions": Completions,
    "http": Http,
    "http whole": HttpWhole,
    "chat": Chat,
}


def wire_named(name: str) -> Wire:
    return WIRES[name]()
