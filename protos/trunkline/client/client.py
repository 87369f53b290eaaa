"""The asynchronous client. sync_client.py has the blocking one.

async with Client("127.0.0.1:50051") as client:
    async for piece in client.generate("Once upon a time", max_tokens=64):
        print(piece.text, end="", flush=True)
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from itertools import cycle
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from google.protobuf.message import Message

from trunkline.client.api_key import ApiKey, Metadata
from trunkline.client.call_terms import ASKS_READINESS, HEALTH_WATCH, SERVING, WATCH_AGAIN_S, CallTerms, closed, late
from trunkline.client.client_requests import (
    Chat,
    GenerateOptions,
    GivenGrammar,
    GivenTool,
    GivenToolChoice,
    Prompt,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from trunkline.client.completion import Choice, Collector, Completion, Piece, Pieces
from trunkline.client.direct import DirectPath
from trunkline.client.grant_call import NotOffered
from trunkline.client.pooled import (
    Embeddings,
    EmbedOptions,
    GivenInputs,
    PooledCollector,
    PooledOptions,
    PooledRequest,
    ScoreOptions,
    Scores,
    embed_request,
    score_request,
)
from trunkline.client.retries import DEFAULT_RETRIES, Tries
from trunkline.client.worker_streams import time_left_s
from trunkline.errors import TrunklineError, error_of
from trunkline.sampling_params import Sampling
from trunkline.tls import ClientTls, open_channel
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest, Model
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub

__all__ = ["Choice", "Client", "Completion", "Piece", "Prompt"]


class Client:
    """A client of a router, or of several routers behind one name. Use it as an async context manager, or close() it.
    Failed calls raise the errors of trunkline.errors.

    api_key: sent with every call. A function, asynchronous or not, is called before every try and returns the current
    key or token; it should keep the token until it is about to expire, and must not block. Its errors reach the caller
    of the method unchanged.
    tls: None: plaintext. Then a key is sent to loopback addresses only, unless allow_insecure_key is set.
    tenant: at most 128 bytes of printable ASCII; tenants of one lane share workers fairly.
    timeout_s: deadline of calls that set none; None: no deadline.
    retries: how often a call is sent again if it was refused with a delay (Overloaded, NoWorker) or the connection
    failed, and no output has arrived. The client waits for the delay, and longer each time. If the delay would pass the
    deadline or exceeds 30 s, the error is raised at once. 0: never.
    connections: requests use them in turn. Load balancers that distribute connections and not calls, such as a
    Kubernetes Service or a router with several processes, send all calls of one connection to one router; several
    connections spread the requests. If the name has several addresses, each connection connects to every address.
    direct: the router chooses a worker and signs a grant, and the answer streams from the worker, which the client must
    be able to reach. If routers or workers are not set up for it (--grant-key), answers come through the router, and
    the client logs that once. Quotas reserve max_tokens in full, or the whole context if it is unset; if that is more
    than the tenant's quotas ever allow, the answer comes through the router.
    inter_token_timeout_s: after this time without output a direct client asks the router whether the worker hangs.

    Raises ValueError if an argument is not allowed, or a file of `tls` cannot be used.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        api_key: ApiKey | None = None,
        tls: ClientTls | None = None,
        model: str = "",
        tenant: str = "",
        timeout_s: float | None = None,
        retries: int = DEFAULT_RETRIES,
        connections: int = 1,
        direct: bool = False,
        inter_token_timeout_s: float = 10.0,
        allow_insecure_key: bool = False,
    ) -> None:
        self._terms = terms = CallTerms(
            address,
            api_key=api_key,
            tls=tls,
            allow_insecure_key=allow_insecure_key,
            model=model,
            tenant=tenant,
            connections=connections,
            timeout_s=timeout_s,
            retries=retries,
        )
        self._channels = [open_channel(address, terms.channel_options(), tls) for _ in range(connections)]
        # grpc.aio's stub type exists in the stub file only
        self._stubs: Iterator[Any] = cycle([InferenceServiceStub(channel) for channel in self._channels])
        self._direct = DirectPath(inter_token_timeout_s, tls) if direct else None
        self._closed = asyncio.Event()
        self._streams: set[Any] = set()  # calls that stream; to close a channel does not reliably end them

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends all calls of this client with a TrunklineError, and closes its connections."""
        self._closed.set()
        for call in self._streams:
            call.cancel()
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
        tools: Sequence[GivenTool] = (),
        tool_choice: GivenToolChoice = "auto",
        max_reasoning_tokens: int | None = None,
        reasoning_effort: str = "",
        grammar: GivenGrammar | None = None,
        **sampling: Unpack[Sampling],
    ) -> AsyncGenerator[Piece, None]:
        """Streams the output as it arrives; leaving the loop cancels the request.

        request_id: names the request in servers' logs; the client chooses one if it is empty.
        timeout_s: from the first try to the end of the answer; None: the client's; math.inf: no deadline.
        lane: "interactive", "standard" (default) or "batch". The router's tenants file must grant the tenant the
        interactive lane; otherwise the request runs in the highest lane that the tenant has. `prompt.lane` of the first
        response is the lane that it runs in.
        session: groups requests of this tenant, for example by conversation; at most 256 bytes of printable ASCII.
        Under --policy session-affinity, a session's requests go to the worker of its last request.
        tools: that the model may call, in a conversation.
        tool_choice: "required": the answer is at least one call; {"type": "function", "function": {"name": …}}: it is
        one call of this tool; "none": it has no call, and the model is not told of the tools.
        max_reasoning_tokens: after so many tokens of reasoning its end is forced. None: no limit.
        reasoning_effort: how much the model reasons, such as "low" or "none". Empty: as much as it does by itself.
        grammar: what the answer must be: {"json_schema": {…}}, {"regex": "[0-9]+"}, {"choice": ["yes", "no"]}, or
        another kind. A choice ends where its grammar ends; one that max_tokens cuts off is incomplete.
        sampling: the parameters of sampling_params.Sampling, such as max_tokens=64, temperature=0.0, stop=["\\n"].

        Raises ValueError if the lane, the session, the choice or the grammar's kind is not allowed, and TrunklineError
        if the request fails.
        """
        request = generate_request(
            prompt,
            model=self._terms.model(model),
            n=n,
            request_id=request_id,
            lane=lane,
            tools=tools,
            tool_choice=tool_choice,
            max_reasoning_tokens=max_reasoning_tokens,
            reasoning_effort=reasoning_effort,
            grammar=grammar,
            **sampling,
        )
        pieces = Pieces()
        async with aclosing(self._responses(request, timeout_s, session)) as responses:
            async for response in responses:
                for piece in pieces.of(response):
                    yield piece

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Returns the whole answer when it is complete. Takes the options of generate(), and raises its errors."""
        collector = Collector()
        async for piece in self.generate(prompt, **options):
            collector.add(piece)
        return collector.completion()

    async def embed(self, inputs: GivenInputs, **options: Unpack[EmbedOptions]) -> Embeddings:
        """Returns a vector for each input. All inputs are one request, which goes to one worker.

        inputs: a text, or up to 2048 texts or lists of token ids. dimensions: fewer components than all; the model must
        offer this number. prompt_name, prompt: which prompt of the model, or what text, is put before each text.
        truncate_prompt_tokens: cut inputs to so many tokens, 0: to what the model takes; None: long ones are refused.
        raw: the values as the model computes them, not normalized. The others are those of generate().

        Raises ValueError if the lane or the session is not allowed, and TrunklineError if the request fails.
        """
        request = embed_request(inputs, self._terms.model(options.get("model")), options)
        return (await self._pooled("Embed", request, options)).embeddings()

    async def score(self, inputs: GivenInputs, **options: Unpack[ScoreOptions]) -> Scores:
        """Returns a score for each input: of itself, or as a document for one of `queries`, which are one text or as
        many as there are inputs. instruction: what makes a document relevant, for models that read that. The other
        options and the errors are those of embed()."""
        request = score_request(inputs, self._terms.model(options.get("model")), options)
        return (await self._pooled("Score", request, options)).scores()

    async def _pooled(self, method: str, request: PooledRequest, options: PooledOptions) -> PooledCollector:
        """Raises TrunklineError."""
        collector = PooledCollector()
        given = self._responses(request, options.get("timeout_s"), options.get("session", ""), method)
        async with aclosing(given) as responses:
            async for response in responses:
                collector.add(response)
        return collector

    async def tokenize(
        self,
        text: str | Chat,
        *,
        special_tokens: bool = True,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Returns the tokens of a text, or of a conversation rendered with the model's chat template.

        special_tokens: whether the model's special tokens (such as BOS) are added to text. Raises TrunklineError.
        """
        request = tokenize_request(text, model=self._terms.model(model), special_tokens=special_tokens)
        return list((await self._call("Tokenize", request, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Returns the text of tokens. Raises TrunklineError."""
        request = detokenize_request(token_ids, model=self._terms.model(model), keep_special_tokens=keep_special_tokens)
        text: str = (await self._call("Detokenize", request, timeout_s)).text
        return text

    async def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        """Returns the models that have a ready worker. Raises TrunklineError."""
        return list((await self._call("ListModels", ListModelsRequest(), timeout_s)).models)

    async def ready(self, timeout_s: float = 60.0) -> None:
        """Waits until the router is up and has a worker. Of a router with several processes, waits for each one that a
        connection of this client leads to. Raises DeadlineExceeded after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        watches = [asyncio.create_task(self._ready(channel, deadline_s)) for channel in self._channels]
        try:
            await asyncio.gather(*watches)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._terms.not_ready(timeout_s) from None
            raise error_of(error) from None
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)

    async def _ready(self, channel: grpc.aio.Channel, deadline_s: float) -> None:
        """Waits for readiness. Raises AioRpcError, with DEADLINE_EXCEEDED after the deadline, and TrunklineError."""
        watch: Any = channel.unary_stream(HEALTH_WATCH)  # bytes to bytes
        while True:
            metadata = self._terms.metadata(await self._terms.key.metadata())
            with self._ends_when_closed():
                left_s = max(0.0, deadline_s - time.monotonic())
                call = watch(ASKS_READINESS, metadata=metadata, timeout=left_s, wait_for_ready=True)
                try:
                    with self._stream(call):
                        async for status in call:
                            if status == SERVING:
                                return
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:  # the router is restarting
                        raise
            await self._pause(WATCH_AGAIN_S)

    async def _responses(
        self, request: GenerateRequest | PooledRequest, timeout_s: float | None, session: str, method: str = "Generate"
    ) -> AsyncGenerator[Any, None]:
        """Yields the responses of a call with a stream of them. Raises TrunklineError."""
        tries = self._terms.tries(timeout_s, time.monotonic())
        direct = self._direct if isinstance(request, GenerateRequest) else None
        while True:
            has_output = False
            try:
                metadata = await self._metadata(tries, session)
                async with self._answer(direct, method, request, tries.deadline_s, metadata) as responses:
                    async for response in responses:
                        has_output = True
                        yield response
                return
            except NotOffered as not_offered:
                if direct is not None:
                    direct.warn(not_offered)
                direct = None
            except TrunklineError as error:
                error.request_id = request.request_id
                if has_output:
                    raise
                await self._wait_after(error, tries)

    @asynccontextmanager
    async def _answer(
        self, direct: DirectPath | None, method: str, request: Any, deadline_s: float | None, metadata: Metadata
    ) -> AsyncIterator[AsyncIterable[Any]]:
        """The responses of one try. Raises TrunklineError, and NotOffered if `direct` is not None."""
        router = next(self._stubs)
        with self._ends_when_closed():
            if direct is not None:
                answer = direct.responses(router, request, deadline_s=deadline_s, metadata=metadata)
                async with aclosing(answer) as responses:
                    yield responses
                return
            left_s = time_left_s(deadline_s)
            if left_s == 0.0:
                raise late()
            call = getattr(router, method)(request, timeout=left_s, metadata=metadata)
            try:
                with self._stream(call):
                    yield call
            except grpc.aio.AioRpcError as error:
                raise self._error(error) from None

    async def _call(self, method: str, request: Message, timeout_s: float | None) -> Any:
        """A call with one response. Raises TrunklineError."""
        tries = self._terms.tries(timeout_s, time.monotonic())
        while True:
            metadata = await self._metadata(tries)
            try:
                with self._ends_when_closed():
                    left_s = time_left_s(tries.deadline_s)
                    if left_s == 0.0:
                        raise late()
                    return await getattr(next(self._stubs), method)(request, timeout=left_s, metadata=metadata)
            except grpc.aio.AioRpcError as failed:
                error = self._error(failed)
            await self._wait_after(error, tries)

    async def _metadata(self, tries: Tries, session: str = "") -> Metadata:
        """The metadata of the next try. Raises DeadlineExceeded if the function that returns the key takes too long."""
        bound = asyncio.timeout(time_left_s(tries.deadline_s))
        try:
            async with bound:
                key = await self._terms.key.metadata()
        except TimeoutError:
            if not bound.expired():  # the function's own
                raise
            raise late() from None
        return self._terms.metadata(key, session)

    async def _wait_after(self, error: TrunklineError, tries: Tries) -> None:
        """Waits until the next try. Raises the error if there is none."""
        delay_s = tries.delay_s(error, time.monotonic())
        if delay_s is None:
            raise error
        await self._pause(delay_s)

    async def _pause(self, delay_s: float) -> None:
        """Raises TrunklineError if the client is closed meanwhile."""
        try:
            async with asyncio.timeout(delay_s):
                await self._closed.wait()
        except TimeoutError:
            return
        raise closed()

    def _error(self, failed: grpc.aio.AioRpcError) -> TrunklineError:
        if failed.code() is grpc.StatusCode.CANCELLED and self._closed.is_set():
            return closed()
        return error_of(failed)

    @contextmanager
    def _stream(self, call: Any) -> Iterator[None]:
        """Cancels the call at the end, or when the client is closed."""
        self._streams.add(call)
        try:
            yield
        finally:
            self._streams.discard(call)
            call.cancel()

    @contextmanager
    def _ends_when_closed(self) -> Iterator[None]:
        """Raises TrunklineError if the client is closed. gRPC reports that as if the caller's task were cancelled."""
        if self._closed.is_set():
            raise closed()
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._closed.is_set() or task is None or task.cancelling():
                raise
            raise closed() from None
