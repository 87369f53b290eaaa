"""The Python client.

async with Client("127.0.0.1:50051") as client:
    async for piece in client.generate("Once upon a time", max_tokens=64):
        print(piece.text, end="", flush=True)
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import cycle
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from trunkline.channel import KEEPALIVE_OPTIONS, MESSAGE_OPTIONS
from trunkline.direct import DirectPath
from trunkline.errors import DeadlineExceeded, error_of
from trunkline.grant_call import NotOffered
from trunkline.metadata import SESSION_KEY, TENANT_KEY
from trunkline.names import finish_name
from trunkline.v1.generation_pb2 import Lane, SamplingParams, TokenLogprobs
from trunkline.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    Model,
    PromptInfo,
    TokenIds,
    TokenizeRequest,
    Usage,
)
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub
from trunkline.validation import LANES, session_problem, tenant_problem
from trunkline.worker_streams import time_left_s

# Text, token ids, or a conversation as (role, content) pairs or {"role": …, "content": …} mappings.
Prompt = str | Sequence[int] | Sequence[tuple[str, str]] | Sequence[Mapping[str, str]]

RECONNECT_FIRST_MS, RECONNECT_MOST_MS = 200, 2_000  # the client reconnects to a restarted router within seconds

# grpc.health.v1 messages in serialized form, for ready(): they save clients a dependency.
HEALTH_WATCH = "/grpc.health.v1.Health/Watch"
ASKS_READINESS = b"\x0a\x09readiness"  # HealthCheckRequest(service="readiness")
SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)


@dataclass(frozen=True, slots=True)
class Piece:
    """New output of one choice."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None  # "stop", "length" or "abort" on the choice's last piece
    response: GenerateResponse  # the response that carried it: prompt, usage, request id


@dataclass(slots=True)
class Choice:
    """A choice's whole output."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    choices: list[Choice]
    prompt: PromptInfo
    usage: Usage

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text


class Client:
    """A client of a router, or of several routers behind one name. Use it as an async context manager, or close() it.
    Failed calls raise the errors of trunkline.errors.

    tenant: at most 128 bytes of printable ASCII; tenants of one lane share workers fairly.
    connections: requests use them in turn. Load balancers that distribute connections and not calls, such as a
    Kubernetes Service or a router with several processes, send all calls of one connection to one router; several
    connections spread the requests. If the name has several addresses, each connection connects to every address.
    direct: the router chooses a worker and signs a grant, and the answer streams from the worker, which the client must
    be able to reach. If routers or workers are not set up for it (--grant-key), answers come through the router, and
    the client logs that once. Quotas reserve max_tokens in full, or the whole context if it is unset; if that is more
    than the tenant's quotas ever allow, the answer comes through the router.
    inter_token_timeout_s: after this time without output a direct client asks the router whether the worker hangs.

    Raises ValueError if the tenant or the number of connections is not allowed.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        model: str = "",
        tenant: str = "",
        connections: int = 1,
        direct: bool = False,
        inter_token_timeout_s: float = 10.0,
    ) -> None:
        if connections < 1:
            raise ValueError(f"connections={connections} is out of range; allowed: 1 or more")
        if problem := tenant_problem(tenant):
            raise ValueError(f"tenant {tenant!r} {problem}")
        self._model = model
        self._address = address
        self._metadata = ((TENANT_KEY, tenant),) if tenant else ()
        self._channels = [_open_channel(address) for _ in range(connections)]
        # grpc.aio's stub type exists in the stub file only
        self._stubs: Iterator[Any] = cycle([InferenceServiceStub(channel) for channel in self._channels])
        self._direct = DirectPath(inter_token_timeout_s) if direct else None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._direct is not None:
            await self._direct.close()
        await asyncio.gather(*(channel.close() for channel in self._channels))

    async def generate(
        self,
        prompt: Prompt,
        *,
        model: str | None = None,
        n: int | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        lane: str | None = None,
        session: str = "",
        **sampling: Any,
    ) -> AsyncIterator[Piece]:
        """Streams the output as it arrives; leaving the loop cancels the request.

        lane: "interactive", "standard" (default) or "batch". The router's tenants file must grant the tenant the
        interactive lane; otherwise the request runs in the highest lane that the tenant has. `prompt.lane` of the first
        response is the lane that it runs in.
        session: groups requests of this tenant, for example by conversation; at most 256 bytes of printable ASCII.
        Under --policy session-affinity, a session's requests go to the worker of its last request.
        sampling: the fields of SamplingParams, such as max_tokens=64, temperature=0.0, stop=["\\n"].

        Raises ValueError if the lane or the session is not allowed, and TrunklineError if the request fails.
        """
        if problem := session_problem(session):
            raise ValueError(f"session {session!r} {problem}")
        request = GenerateRequest(
            model=self._model if model is None else model,
            sampling=SamplingParams(**sampling),
            n=n,
            request_id=request_id,
            lane=_lane(lane),
        )
        _set_prompt(request, prompt)
        async with aclosing(self._responses(request, timeout_s, session)) as responses:
            async for response in responses:
                for chunk in response.chunks:
                    yield Piece(
                        chunk.index,
                        chunk.text,
                        list(chunk.token_ids),
                        list(chunk.logprobs),
                        finish_name(chunk.finish_reason) if chunk.finish_reason else None,
                        response,
                    )

    async def _responses(
        self, request: GenerateRequest, timeout_s: float | None, session: str
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Raises TrunklineError."""
        router, metadata = next(self._stubs), (*_trace_metadata(), *self._metadata)
        if session:
            metadata += ((SESSION_KEY, session),)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        if self._direct is not None:
            try:
                direct = self._direct.responses(router, request, deadline_s=deadline_s, metadata=metadata)
                async with aclosing(direct) as responses:
                    async for response in responses:
                        yield response
                return
            except NotOffered as not_offered:
                self._direct.warn(not_offered)
        left_s = time_left_s(deadline_s)
        if left_s == 0.0:  # grpc would send the call all the same, and it might even be answered
            raise DeadlineExceeded(f"no answer within {timeout_s:g} s")
        call = router.Generate(request, timeout=left_s, metadata=metadata)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """Returns the whole answer when it is complete. Takes the options of generate(), and raises its errors."""
        choices: dict[int, Choice] = {}
        request_id, info, usage = "", PromptInfo(), Usage()
        async for piece in self.generate(prompt, **options):
            choice = choices.setdefault(piece.index, Choice())
            choice.text += piece.text
            choice.token_ids += piece.token_ids
            choice.logprobs += piece.logprobs
            choice.finish_reason = piece.finish_reason or choice.finish_reason
            request_id = piece.response.request_id
            if piece.response.HasField("prompt"):
                info = piece.response.prompt
            if piece.response.HasField("usage"):
                usage = piece.response.usage
        return Completion(request_id, [choices[index] for index in sorted(choices)], info, usage)

    async def tokenize(
        self,
        text: str | Sequence[Mapping[str, str]] | Sequence[tuple[str, str]],
        *,
        special_tokens: bool = True,
        model: str | None = None,
    ) -> list[int]:
        """Returns the tokens of a text, or of a conversation rendered with the model's chat template.

        special_tokens: whether the model's special tokens (such as BOS) are added to text. Raises TrunklineError.
        """
        request = TokenizeRequest(model=self._model if model is None else model, omit_special_tokens=not special_tokens)
        if isinstance(text, str):
            request.text = text
        else:
            request.chat.CopyFrom(_chat(text))
        return list((await self._call("Tokenize", request)).token_ids)

    async def detokenize(
        self, token_ids: Sequence[int], *, keep_special_tokens: bool = False, model: str | None = None
    ) -> str:
        """Returns the text of tokens. Raises TrunklineError."""
        request = DetokenizeRequest(
            model=self._model if model is None else model,
            token_ids=token_ids,
            keep_special_tokens=keep_special_tokens,
        )
        text: str = (await self._call("Detokenize", request)).text
        return text

    async def list_models(self) -> list[Model]:
        """Returns the models that have a ready worker. Raises TrunklineError."""
        return list((await self._call("ListModels", ListModelsRequest())).models)

    async def ready(self, timeout_s: float = 60.0) -> None:
        """Waits until the router is up and has a worker. Of a router with several processes, waits for each one that a
        connection of this client leads to. Raises DeadlineExceeded after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            await asyncio.gather(*(_ready(channel, deadline_s) for channel in self._channels))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceeded(f"{self._address} was not ready within {timeout_s:g} s") from None
            raise error_of(error) from None

    async def _call(self, method: str, request: Message) -> Any:
        try:
            return await getattr(next(self._stubs), method)(request, metadata=(*_trace_metadata(), *self._metadata))
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None


def _open_channel(address: str) -> grpc.aio.Channel:
    """A channel with its own TCP connections."""
    return grpc.aio.insecure_channel(
        address,
        options=(
            *MESSAGE_OPTIONS,
            *KEEPALIVE_OPTIONS,
            ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
            ("grpc.max_reconnect_backoff_ms", RECONNECT_MOST_MS),
            ("grpc.use_local_subchannel_pool", 1),  # otherwise all channels to one address share a connection
            ("grpc.lb_policy_name", "round_robin"),  # over the addresses of a headless service, one for each router
        ),
    )


async def _ready(channel: grpc.aio.Channel, deadline_s: float) -> None:
    """Waits for readiness. Raises AioRpcError, with DEADLINE_EXCEEDED after the deadline."""
    watch: Any = channel.unary_stream(HEALTH_WATCH)  # bytes to bytes
    while True:
        call = watch(ASKS_READINESS, timeout=max(0.0, deadline_s - time.monotonic()), wait_for_ready=True)
        try:
            async for status in call:
                if status == SERVING:
                    return
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:  # the router is restarting
                raise
        finally:
            call.cancel()


def _set_prompt(request: GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif all(isinstance(item, int) for item in prompt):
        request.token_ids.CopyFrom(TokenIds(ids=prompt))  # type: ignore[arg-type]
    else:
        request.chat.CopyFrom(_chat(prompt))  # type: ignore[arg-type]


def _chat(messages: Sequence[Mapping[str, str]] | Sequence[tuple[str, str]]) -> ChatMessages:
    pairs = [(m["role"], m["content"]) if isinstance(m, Mapping) else m for m in messages]
    return ChatMessages(messages=[ChatMessage(role=role, content=content) for role, content in pairs])


def _lane(name: str | None) -> "Lane.ValueType":
    if name is None:
        return Lane.LANE_UNSPECIFIED
    if name not in LANES:
        raise ValueError(f"{name!r} is not a lane; allowed: {', '.join(LANES)}")
    return LANES[name]


def _trace_metadata() -> tuple[tuple[str, str], ...]:
    """W3C trace context of the caller's span, if the caller uses OpenTelemetry."""
    try:
        from opentelemetry import propagate
    except ImportError:
        return ()
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    return tuple(carrier.items())
