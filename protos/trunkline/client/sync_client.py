"""The blocking client.

It uses gRPC's blocking API and not an event loop on a thread of its own. A blocking call works in every thread, also in
one that runs an event loop, as notebooks do; it can be interrupted with Ctrl-C; and no token passes from one thread's
loop to another. gRPC's asynchronous API does not support several event loops in one process well. The price is that the
direct path, which is asynchronous, is missing here.
"""

import os
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from itertools import cycle
from types import TracebackType
from typing import Any, Self, Unpack, cast

import grpc
from google.protobuf.message import Message

from trunkline.client.api_key import BlockingApiKey, Metadata
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
from trunkline.client.completion import Collector, Completion, Piece, Pieces
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
from trunkline.tls import ClientTls, open_blocking_channel
from trunkline.v1.inference_pb2 import GenerateRequest, ListModelsRequest, Model
from trunkline.v1.inference_pb2_grpc import InferenceServiceStub


class SyncClient:
    """The blocking form of trunkline.Client, with the same arguments and errors; there is no direct path. Threads may
    share it. Use it as a context manager, or close() it. After a fork, make a new one in the child process.

    api_key: a key, or an ordinary function that returns the current one.

    Raises ValueError if an argument is not allowed, or a file of `tls` cannot be used.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:50051",
        *,
        api_key: BlockingApiKey | None = None,
        tls: ClientTls | None = None,
        model: str = "",
        tenant: str = "",
        timeout_s: float | None = None,
        retries: int = DEFAULT_RETRIES,
        connections: int = 1,
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
        self._channels = [open_blocking_channel(address, terms.channel_options(), tls) for _ in range(connections)]
        self._stubs: Iterator[Any] = cycle([InferenceServiceStub(channel) for channel in self._channels])
        self._closed = threading.Event()
        self._process = os.getpid()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls of this client, in all threads, with a TrunklineError, and closes its connections."""
        self._closed.set()
        if os.getpid() == self._process:  # the connections belong to the process that made them
            for channel in self._channels:
                channel.close()

    def generate(
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
    ) -> Generator[Piece, None, None]:
        """Yields the output as it arrives; leaving the loop, or close() of the generator, cancels the request. The
        options and errors are those of Client.generate()."""
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
        for response in self._responses(request, timeout_s, session):
            yield from pieces.of(response)

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Returns the whole answer when it is complete. Takes the options of generate(), and raises its errors."""
        collector = Collector()
        for piece in self.generate(prompt, **options):
            collector.add(piece)
        return collector.completion()

    def embed(self, inputs: GivenInputs, **options: Unpack[EmbedOptions]) -> Embeddings:
        """Returns a vector for each input. The options and errors are those of Client.embed()."""
        request = embed_request(inputs, self._terms.model(options.get("model")), options)
        return self._pooled("Embed", request, options).embeddings()

    def score(self, inputs: GivenInputs, **options: Unpack[ScoreOptions]) -> Scores:
        """Returns a score for each input. The options and errors are those of Client.score()."""
        request = score_request(inputs, self._terms.model(options.get("model")), options)
        return self._pooled("Score", request, options).scores()

    def _pooled(self, method: str, request: PooledRequest, options: PooledOptions) -> PooledCollector:
        """Raises TrunklineError."""
        collector = PooledCollector()
        for response in self._responses(request, options.get("timeout_s"), options.get("session", ""), method):
            collector.add(response)
        return collector

    def tokenize(
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
        return list(self._call("Tokenize", request, timeout_s).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        keep_special_tokens: bool = False,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        """Returns the text of tokens. Raises TrunklineError."""
        request = detokenize_request(token_ids, model=self._terms.model(model), keep_special_tokens=keep_special_tokens)
        text: str = self._call("Detokenize", request, timeout_s).text
        return text

    def list_models(self, *, timeout_s: float | None = None) -> list[Model]:
        """Returns the models that have a ready worker. Raises TrunklineError."""
        return list(self._call("ListModels", ListModelsRequest(), timeout_s).models)

    def ready(self, timeout_s: float = 60.0) -> None:
        """Waits until the router is up and has a worker. Of a router with several processes, waits for each one that a
        connection of this client leads to. Raises DeadlineExceeded after `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        for channel in self._channels:
            while (failed := self._watch(channel, deadline_s)) is not None:
                if failed.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise self._terms.not_ready(timeout_s)
                if failed.code() is not grpc.StatusCode.UNAVAILABLE:  # the router is restarting
                    raise self._error(failed)
                self._pause(WATCH_AGAIN_S)

    def _watch(self, channel: grpc.Channel, deadline_s: float) -> grpc.Call | None:
        """Waits for readiness; returns the call if it failed before."""
        metadata = self._terms.metadata(self._terms.key.metadata_now())
        self._check_open()
        watch: Any = channel.unary_stream(HEALTH_WATCH)  # bytes to bytes
        left_s = max(0.0, deadline_s - time.monotonic())
        call = watch(ASKS_READINESS, metadata=metadata, timeout=left_s, wait_for_ready=True)
        try:
            for status in call:
                if status == SERVING:
                    return None
        except grpc.RpcError as failed:
            return cast("grpc.Call", failed)
        finally:
            call.cancel()
        return cast("grpc.Call", call)

    def _responses(
        self, request: GenerateRequest | PooledRequest, timeout_s: float | None, session: str, method: str = "Generate"
    ) -> Generator[Any, None, None]:
        """Yields the responses of a call with a stream of them. Raises TrunklineError."""
        tries = self._terms.tries(timeout_s, time.monotonic())
        while True:
            has_output, call = False, None
            try:
                metadata = self._terms.metadata(self._terms.key.metadata_now(), session)
                call = self._start(method, request, tries, metadata)
                for response in call:
                    has_output = True
                    yield response
                return
            except grpc.RpcError as failed:
                error = self._error(cast("grpc.Call", failed))
            except TrunklineError as refused:
                error = refused
            finally:
                if call is not None:
                    call.cancel()
            error.request_id = request.request_id
            if has_output:
                raise error
            self._wait_after(error, tries)

    def _call(self, method: str, request: Message, timeout_s: float | None) -> Any:
        """A call with one response. Raises TrunklineError."""
        tries = self._terms.tries(timeout_s, time.monotonic())
        while True:
            metadata = self._terms.metadata(self._terms.key.metadata_now())
            try:
                return self._start(method, request, tries, metadata)
            except grpc.RpcError as failed:
                error = self._error(cast("grpc.Call", failed))
            self._wait_after(error, tries)

    def _start(self, method: str, request: Message, tries: Tries, metadata: Metadata) -> Any:
        """Starts the next try; returns its response, or its stream of responses. Raises RpcError and TrunklineError."""
        self._check_open()
        left_s = time_left_s(tries.deadline_s)
        if left_s == 0.0:
            raise late()
        try:
            return getattr(next(self._stubs), method)(request, timeout=left_s, metadata=metadata)
        except ValueError:
            self._check_open()  # the channel was closed by another thread
            raise

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise closed()
        if os.getpid() != self._process:
            raise TrunklineError("the client was made before a fork: make a new one in the child process")

    def _wait_after(self, error: TrunklineError, tries: Tries) -> None:
        """Waits until the next try. Raises the error if there is none."""
        delay_s = tries.delay_s(error, time.monotonic())
        if delay_s is None:
            raise error
        self._pause(delay_s)

    def _pause(self, delay_s: float) -> None:
        """Raises TrunklineError if the client is closed meanwhile."""
        if self._closed.wait(delay_s):
            raise closed()

    def _error(self, failed: grpc.Call) -> TrunklineError:
        if failed.code() is grpc.StatusCode.CANCELLED and self._closed.is_set():
            return closed()
        return error_of(failed)
