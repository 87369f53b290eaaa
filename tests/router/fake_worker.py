"""A worker without a model: a real gRPC server with a tiny prefix cache, whose output the test hands out."""

import asyncio
import time
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from tests.router.tokenizer_files import EOS, VOCAB_SIZE, tokenizer_files
from trunkline.block_hash import prompt_hashes, root_hash
from trunkline.grant import GrantKeys, open_grant
from trunkline.names import grammar_digest
from trunkline.proof import check_proof
from trunkline.protocol import OLDEST_PROTOCOL, PROTOCOL_VERSION
from trunkline.status import RequestRefused, no_worker
from trunkline.tokenizer_digest import tokenizer_digest
from trunkline.v1.generation_pb2 import (
    FinishReason,
    OutputChunk,
    PromptReport,
    SamplingParams,
    Score,
    TokenLogprob,
    TokenLogprobs,
    Vector,
)
from trunkline.v1.worker_pb2 import (
    Adapter,
    BlocksRemoved,
    BlocksStored,
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
    Capability,
    DrainRequest,
    DrainResponse,
    GetModelResponse,
    GetStatsResponse,
    GetTokenizerResponse,
    Grammar,
    GrantReport,
    LoadSample,
    OutputKind,
    PoolingModel,
    SequenceOutput,
    SessionRequest,
    SessionResponse,
    SessionWelcome,
    Submit,
    Task,
    Timeline,
    UndrainRequest,
    UndrainResponse,
    WatchCacheResponse,
    WorkerServiceGenerateResponse,
)
from trunkline.v1.worker_pb2_grpc import WorkerServiceServicer, add_WorkerServiceServicer_to_server
from trunkline_bench.servers.ports import free_port
from trunkline_runtime.errors import ErrorInterceptor

BLOCK = 4
END = object()
NO_ADAPTER = Adapter()
# A router's pings are welcome, as to a real worker.
OPTIONS = (("grpc.so_reuseport", 0), ("grpc.http2.max_ping_strikes", 0))


def vector_of(prompt: Sequence[int]) -> list[float]:
    """The vector that it answers for a prompt."""
    return [float(len(prompt)), float(prompt[-1])]


def score_of(prompt: Sequence[int]) -> float:
    """The score that it answers for a prompt: more for a longer one."""
    return 1.0 - 1.0 / len(prompt)


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Those of a token that is always the likeliest, followed by the ids after it: -0.5, -1.5, ..."""
    top = [TokenLogprob(token_id=token_id + rank, logprob=-0.5 - rank, rank=rank + 1) for rank in range(num_top)]
    return TokenLogprobs(chosen=TokenLogprob(token_id=token_id, logprob=-0.5, rank=1), top=top)


@dataclass(slots=True)
class FakeChoice:
    """A submit that arrived. The test says what becomes of it."""

    worker: "FakeWorker"
    session: "asyncio.Queue[Any]"
    submit: Submit
    cached_tokens: int
    sent: int = 0
    text_bytes: int = 0
    reported: bool = False  # its prompt
    taken_s: float = field(default_factory=time.monotonic)

    def tokens(
        self,
        count: int,
        *,
        finish: bool = False,
        text: str | None = None,
        ending: "FinishReason.ValueType" = FinishReason.FINISH_REASON_LENGTH,
        stop_string: str = "",
        timeline: Timeline | None = None,
    ) -> None:
        """Sends `count` tokens as one step's news. ending, stop_string: why it is finished"""
        new_text = "x" * count if text is None else text
        chunk = OutputChunk(
            index=self.submit.choice,
            first_token_index=self.sent,
            token_ids=range(self.sent, self.sent + count),
            text=new_text,
            text_offset=self.text_bytes,
            finish_reason=ending if finish else FinishReason.FINISH_REASON_UNSPECIFIED,
        )
        if stop_string:
            chunk.stop_string = stop_string
        if self.submit.sampling.HasField("logprobs"):
            chunk.logprobs.extend(logprobs_of(token_id, self.submit.sampling.logprobs) for token_id in chunk.token_ids)
        output = SequenceOutput(handle=self.submit.handle, chunk=chunk, timeline=timeline)
        if not self.reported:
            self.reported = True
            prompt = self.submit.prompt_token_ids
            output.prompt.CopyFrom(PromptReport(prompt_tokens=len(prompt), cached_tokens=self.cached_tokens))
            if self.submit.sampling.HasField("prompt_logprobs"):
                scored = (logprobs_of(token_id, self.submit.sampling.prompt_logprobs) for token_id in prompt[1:])
                output.prompt.logprobs.extend([TokenLogprobs(), *scored])
            self.worker.cache_prompt(prompt, self.submit.cache_salt, self.submit.work.adapter)
        self.sent += count
        self.text_bytes += len(new_text.encode())
        if finish:
            self.worker.forget(self)
        self.session.put_nowait(SessionResponse(outputs=[output]))

    def whole(self, **output: Any) -> None:
        """Ends it with an output that is no tokens: vector=… or score=…"""
        report = PromptReport(prompt_tokens=len(self.submit.prompt_token_ids), cached_tokens=self.cached_tokens)
        self.worker.forget(self)
        sent = SequenceOutput(handle=self.submit.handle, prompt=report, **output)
        self.session.put_nowait(SessionResponse(outputs=[sent]))

    def fail(
        self, refused: RequestRefused, *, suspect: bool = False, sole_suspect: bool = False, begun: bool = False
    ) -> None:
        self.worker.forget(self)
        output = SequenceOutput(
            handle=self.submit.handle,
            error=refused.to_proto(),
            suspect=suspect,
            sole_suspect=sole_suspect,
            begun=begun,
        )
        self.session.put_nowait(SessionResponse(outputs=[output]))


@dataclass
class FakeWorker(WorkerServiceServicer):
    """`answer` is how many tokens each choice gets at once; None leaves that to the test, through `arrived`."""

    worker_id: str
    model: str = "tiny"
    answer: int | None = 3
    epoch: int = 1
    fingerprint: str = "weights-1"
    context_length: int = 4096
    kv_token_capacity: int = 4096
    vocab_size: int = VOCAB_SIZE  # tokens are counted up from 0: long answers need a larger one
    block_size: int = BLOCK
    kv_blocks: int = 0  # not said
    files: dict[str, bytes] = field(default_factory=tokenizer_files)
    grant_key: bytes = b""
    previous_key: bytes = b""  # accepted too
    clock_ahead_s: float = 0.0
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    tokenizer_digest: bytes | None = None  # None: that of the files
    protocol_version: int = PROTOCOL_VERSION
    min_router_protocol: int = OLDEST_PROTOCOL
    answer_format: str = ""
    task: "Task.ValueType" = Task.TASK_UNSPECIFIED
    capabilities: "Iterable[Capability.ValueType]" = ()  # it computes nothing else for them than without
    pooling: PoolingModel = field(default_factory=PoolingModel)
    grammar_bytes: int = 1 << 20  # that it keeps for a session
    cached: set[bytes] = field(default_factory=set)
    sequence: int = 0
    port: int = 0
    # What happened:
    submits: list[Submit] = field(default_factory=list)
    grammars: dict[bytes, Grammar] = field(default_factory=dict)  # that the last session keeps
    faults: list[str] = field(default_factory=list)  # for which a real worker would refuse a submit or end the session
    messages: list[SessionRequest] = field(default_factory=list)
    aborted: list[Submit] = field(default_factory=list)
    snapshots: int = 0
    asked: int = 0  # for its model
    tokenizer_calls: int = 0
    hangs: bool = False
    answers_aborts: bool = True  # with a timeline
    stats: GetStatsResponse = field(default_factory=GetStatsResponse)
    drains: bool = False  # if it is asked to
    is_stopping: bool = False  # its drains do not end
    drained: list[DrainRequest] = field(default_factory=list)
    asked_for_stats: int = 0

    def __post_init__(self) -> None:
        self.arrived: asyncio.Queue[FakeChoice] = asyncio.Queue()
        self._running: dict[tuple[int, int], FakeChoice] = {}  # by session and handle
        self._sessions: dict[asyncio.Queue[Any], int] = {}  # by their numbers
        self._num_sessions = 0
        self._watches: set[asyncio.Queue[Any]] = set()
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def start(self) -> "FakeWorker":
        self._server = grpc.aio.server(interceptors=(ErrorInterceptor(),), options=OPTIONS)
        add_WorkerServiceServicer_to_server(self, self._server)
        self.port = self.port or free_port()  # it may come back to it, and meanwhile no connection may have it
        self._server.add_insecure_port(self.address)
        await self._server.start()
        return self

    async def die(self) -> None:
        """Its streams break at once."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    # The cache

    def hashes(self, prompt: Iterable[int], salt: bytes = b"", adapter: Adapter = NO_ADAPTER) -> list[bytes]:
        root = root_hash(self.fingerprint, adapter.id, adapter.version, salt)
        return prompt_hashes(root, list(prompt), self.block_size)

    def cache_prompt(self, prompt: Iterable[int], salt: bytes = b"", adapter: Adapter = NO_ADAPTER) -> None:
        """As after computing it: its blocks are held, and subscribers hear of it."""
        new = [digest for digest in self.hashes(prompt, salt, adapter) if digest not in self.cached]
        self.cached.update(new)
        if new:
            self.tell(CacheEvent(stored=BlocksStored(block_hashes=b"".join(new))))

    def evict(self, prompt: Iterable[int]) -> None:
        gone = self.hashes(prompt)
        self.cached.difference_update(gone)
        self.tell(CacheEvent(removed=BlocksRemoved(block_hashes=b"".join(gone))))

    def lose_an_event(self) -> None:
        """The next event follows a gap."""
        self.sequence += 1

    def end_sessions(self) -> None:
        for session in self._sessions:
            session.put_nowait(END)

    def end_watches(self) -> None:
        for watch in self._watches:
            watch.put_nowait(END)

    def send_load(self, **sample: Any) -> None:
        for watch in self._watches:
            watch.put_nowait(WatchCacheResponse(epoch=self.epoch, sequence=self.sequence, load=LoadSample(**sample)))

    def tell(self, *events: CacheEvent) -> None:
        self.sequence += 1
        item = WatchCacheResponse(epoch=self.epoch, sequence=self.sequence, events=CacheEvents(events=events))
        for watch in self._watches:
            watch.put_nowait(item)

    # The service

    def _check_proof(self, method: str, context: Any) -> None:
        now_unix_ms = int((time.time() + self.clock_ahead_s) * 1e3)
        check_proof(
            GrantKeys(self.grant_key, self.previous_key),
            method,
            context.invocation_metadata(),
            worker_id=self.worker_id,
            epoch=self.epoch,
            now_unix_ms=now_unix_ms,
        )

    def forget(self, choice: FakeChoice) -> None:
        self._running.pop((id(choice.session), choice.submit.handle), None)

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[SessionResponse]:
        self._check_proof("Session", context)
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._num_sessions += 1
        number = self._sessions[outbox] = self._num_sessions
        reading = asyncio.create_task(self._read(request_iterator, outbox))
        try:
            yield SessionResponse(welcome=SessionWelcome(worker_id=self.worker_id, epoch=self.epoch, session=number))
            while (item := await outbox.get()) is not END:
                yield item
        finally:
            reading.cancel()
            del self._sessions[outbox]
            for key in [key for key in self._running if key[0] == id(outbox)]:
                del self._running[key]

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[WorkerServiceGenerateResponse]:
        submit = open_grant(
            GrantKeys(self.grant_key, self.previous_key),
            request.grant,
            epoch=self.epoch,
            now_unix_ms=int(time.time() * 1e3),
        )
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        self._tell_of_grant(submit, GrantReport())
        choice = self._take(submit, outbox)
        report = GrantReport(ended=True)
        try:
            while (item := await outbox.get()) is not END:
                (output,) = item.outputs
                if output.HasField("error"):
                    report.given_up = True
                    raise RequestRefused.from_proto(output.error)
                prompt = output.prompt if output.HasField("prompt") else None
                yield WorkerServiceGenerateResponse(chunk=output.chunk, prompt=prompt)
                if output.chunk.finish_reason:
                    return
        finally:
            if self._running.pop((id(outbox), submit.handle), None) is not None:
                self.aborted.append(submit)
            if choice.sent > len(submit.resume.output_token_ids) or not report.given_up:
                report.prompt_tokens, report.output_tokens = len(submit.prompt_token_ids), choice.sent
                report.cached_tokens = choice.cached_tokens
            self._tell_of_grant(submit, report)

    def _tell_of_grant(self, submit: Submit, report: GrantReport) -> None:
        output = SequenceOutput(handle=submit.handle, granted=report)
        for session, number in self._sessions.items():
            if number == submit.report_session:
                session.put_nowait(SessionResponse(outputs=[output]))

    async def _read(self, requests: AsyncIterator[Any], outbox: "asyncio.Queue[Any]") -> None:
        kept = self.grammars = {}
        async for request in requests:
            self.messages.append(request)
            self._take_grammars(request, kept)
            for submit in request.submits:
                self._take(submit, outbox)
            for handle in request.abort_handles:
                choice = self._running.pop((id(outbox), handle), None)
                if choice is not None:
                    self.aborted.append(choice.submit)
                    if self.answers_aborts:
                        timeline = Timeline(ended_s=time.monotonic() - choice.taken_s)
                        output = SequenceOutput(handle=handle, timeline=timeline)
                        outbox.put_nowait(SessionResponse(outputs=[output]))

    def _take_grammars(self, request: SessionRequest, kept: dict[bytes, Grammar]) -> None:
        for submit in request.submits:
            grammar = submit.work.grammar
            if submit.work.HasField("grammar") and (grammar.digest not in kept or grammar.text):
                self.faults.append(f"{submit.request_id} names a grammar that is not kept, or brings it")
        for digest in request.dropped_grammars:
            if kept.pop(digest, None) is None:
                self.faults.append("a grammar is dropped that is not kept")
        for grammar in request.grammars:
            if grammar.digest in kept or grammar.digest != grammar_digest(grammar):
                self.faults.append("a grammar is sent twice, or under a wrong digest")
            kept[grammar.digest] = grammar
        if sum(len(grammar.text.encode()) for grammar in kept.values()) > self.grammar_bytes:
            self.faults.append("more is kept than there is room for")

    def _take(self, submit: Submit, outbox: "asyncio.Queue[Any]") -> FakeChoice:
        self.submits.append(submit)
        held = 0
        for digest in self.hashes(submit.prompt_token_ids, submit.cache_salt, submit.work.adapter):
            if digest not in self.cached:
                break
            held += 1
        cached_tokens = min(held * self.block_size, len(submit.prompt_token_ids) - 1)
        choice = FakeChoice(self, outbox, submit, cached_tokens)
        choice.sent, choice.text_bytes = len(submit.resume.output_token_ids), submit.resume.text_bytes_sent
        self._running[id(outbox), submit.handle] = choice
        if self.answer is None:
            self.arrived.put_nowait(choice)
        elif submit.work.output == OutputKind.OUTPUT_KIND_VECTOR:
            components = vector_of(submit.prompt_token_ids)[: submit.work.dimensions or None]
            choice.whole(vector=Vector(values=array("f", components).tobytes()))
        elif submit.work.output == OutputKind.OUTPUT_KIND_SCORE:
            choice.whole(score=Score(values=[score_of(submit.prompt_token_ids)]))
        else:
            left = submit.sampling.max_tokens - choice.sent if submit.sampling.HasField("max_tokens") else self.answer
            choice.tokens(min(self.answer, left), finish=True)
        return choice

    async def WatchCache(self, request: Any, context: Any) -> AsyncIterator[WatchCacheResponse]:
        self._check_proof("WatchCache", context)
        watch: asyncio.Queue[Any] = asyncio.Queue()
        self.snapshots += 1
        parts = [sorted(self.cached)[::2], sorted(self.cached)[1::2]]
        at = self.sequence
        self._watches.add(watch)
        try:
            for index, part in enumerate(parts):
                snapshot = CacheSnapshot(block_hashes=b"".join(part), first=index == 0, last=index == len(parts) - 1)
                yield WatchCacheResponse(epoch=self.epoch, sequence=at, snapshot=snapshot)
            while (item := await watch.get()) is not END:
                yield item
        finally:
            self._watches.discard(watch)

    async def GetModel(self, request: Any, context: Any) -> GetModelResponse:
        self.asked += 1
        return GetModelResponse(
            model=self.model,
            worker_id=self.worker_id,
            epoch=self.epoch,
            fingerprint=self.fingerprint,
            architecture="FakeForCausalLM",
            vocab_size=self.vocab_size,
            context_length=self.context_length,
            kv_token_capacity=self.kv_token_capacity,
            block_size=self.block_size,
            kv_blocks=self.kv_blocks,
            eos_token_ids=[EOS],
            default_sampling=self.default_sampling,
            tokenizer_digest=tokenizer_digest(self.files) if self.tokenizer_digest is None else self.tokenizer_digest,
            protocol_version=self.protocol_version,
            min_router_protocol=self.min_router_protocol,
            answer_format=self.answer_format,
            task=self.task,
            capabilities=self.capabilities,
            max_session_grammar_bytes=self.grammar_bytes,
            pooling=self.pooling,
            grant_key_ids=GrantKeys(self.grant_key, self.previous_key).ids,
        )

    async def Drain(
        self, request: DrainRequest, context: grpc.aio.ServicerContext[DrainRequest, DrainResponse]
    ) -> DrainResponse:
        self._check_proof("Drain", context)
        self.drained.append(request)
        if not self.drains:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this fake worker does not drain")
        self.send_load(draining=True)
        await asyncio.Event().wait()  # its requests do not end
        return DrainResponse()

    async def Undrain(
        self, request: UndrainRequest, context: grpc.aio.ServicerContext[UndrainRequest, UndrainResponse]
    ) -> UndrainResponse:
        self._check_proof("Undrain", context)
        if not self.drains:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this fake worker does not drain")
        if self.is_stopping:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "this fake worker is stopping")
        self.send_load(draining=False)
        return UndrainResponse()

    async def GetStats(self, request: Any, context: Any) -> GetStatsResponse:
        self._check_proof("GetStats", context)
        self.asked_for_stats += 1
        if self.hangs:
            await asyncio.Event().wait()
        return self.stats

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncIterator[GetTokenizerResponse]:
        self.tokenizer_calls += 1
        for name, data in self.files.items():
            for start in range(0, len(data), 1000):
                yield GetTokenizerResponse(name=name, data=data[start : start + 1000])


WORKER_DRAINS = no_worker("the worker drains")
