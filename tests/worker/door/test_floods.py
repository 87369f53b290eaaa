"""What strangers and routers gone wrong may open and send at a worker's port, and what others notice of it."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from tests.parameters import one_in
from tests.router.cluster import Refusal, refusal, until
from tests.worker.front.served_front import MODEL, ServedFront, raw_call, served_front
from trunkline.proof import proof_metadata
from trunkline.status import CONTEXT_LENGTH_EXCEEDED, INVALID_REQUEST, OVERLOADED, UNAUTHENTICATED, RequestRefused
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline.v1.worker_pb2 import (
    Resume,
    SessionRequest,
    SessionResponse,
    Submit,
    WatchCacheRequest,
    WorkerServiceGenerateRequest,
)
from trunkline_runtime.channel import open_channel
from trunkline_worker.front import session as session_module
from trunkline_worker.front.door import (
    BY_ROUTERS,
    GATED,
    KINDS,
    OF_STRANGERS,
    PER_CONNECTION,
    Bounds,
    Places,
    host_of,
    most_message_bytes,
)
from trunkline_worker.front.service import SERVICE
from trunkline_worker.front.session import MAX_ABORT_BYTES, MAX_SUBMITS, ROOM_BYTES
from trunkline_worker.front.submit_size import MOST_FIELDS, UNSEEN_BYTES

KEY = b"k" * 32
MIB = 1 << 20
MOST_STEP_S = 0.1  # hundreds of calls of the test itself begin and end in some; a whole message took seconds


class RawSession:
    """A Session stream that says what it is given."""

    def __init__(self, channel: grpc.aio.Channel, **named: Any) -> None:
        self.call: Any = channel.stream_stream(f"/{SERVICE}/Session", response_deserializer=SessionResponse.FromString)(
            **named
        )

    async def opened(self) -> "RawSession":
        assert (await self.call.read()).HasField("welcome")
        return self

    async def end(self) -> Refusal:
        """How it is ended by the worker."""

        async def read_on() -> None:
            while await self.call.read() is not grpc.aio.EOF:
                pass

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_on()
        return Refusal(caught.value)


class Innocent:
    """A router whose requests of one token go on all the time."""

    def __init__(self, session: RawSession) -> None:
        self._session = session
        self.num_answered = 0

    async def run(self) -> None:
        while True:
            handle = self.num_answered + 1
            submit = Submit(handle=handle, prompt_token_ids=[5, 6], sampling=SamplingParams(seed=1, max_tokens=1))
            await self._session.call.write(SessionRequest(submits=[submit]).SerializeToString())
            response = await self._session.call.read()
            assert response.outputs[0].chunk.token_ids == [5]
            self.num_answered += 1


@asynccontextmanager
async def innocent_at(worker: ServedFront) -> AsyncIterator[Innocent]:
    """It is answered all the time, and no step of the event loop is long: by the CPU time that it takes, since other
    tests share the machine."""
    steps_s: list[float] = []

    async def watch() -> None:
        while True:
            begun_s = time.thread_time()
            await asyncio.sleep(0)
            steps_s.append(time.thread_time() - begun_s)

    gc.collect()
    gc.disable()  # as in a worker, but for what the test itself leaves
    async with open_channel(worker.address) as channel:
        innocent = Innocent(await RawSession(channel).opened())
        tasks = [asyncio.create_task(innocent.run()), asyncio.create_task(watch())]
        try:
            yield innocent
            await until(lambda: innocent.num_answered > 0)
        finally:
            gc.enable()
            for task in tasks:
                task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ended), ended
        assert max(steps_s) < MOST_STEP_S


NO_MESSAGE: dict[str, tuple[bytes, str]] = {
    "empty submits": (b"\x12\x00" * (MAX_SUBMITS + 1), INVALID_REQUEST),
    "abort handles": (b"\x1a\xff\xff\x7f" + b"\x01" * ((1 << 21) - 1), INVALID_REQUEST),
    "a submit of stop strings": (
        SessionRequest(
            submits=[Submit(sampling=SamplingParams(stop=[""] * (MOST_FIELDS + UNSEEN_BYTES)))]
        ).SerializeToString(),
        INVALID_REQUEST,
    ),
    "a prompt beyond every model": (
        SessionRequest(submits=[Submit(prompt_token_ids=[5] * 2 * MIB)]).SerializeToString(),
        CONTEXT_LENGTH_EXCEEDED,
    ),
    "one abort handle each": (b"\x18\x01" * (MIB // 8), ""),
    "no message": (b"\x17" * MIB, INVALID_REQUEST),
    "a field that does not end": (b"\x12\xff\xff\xff\x7f" + bytes(MIB), INVALID_REQUEST),
    "unknown fields": (b"\xfa\x7f\x00" * (MIB // 8), ""),
}


@pytest.mark.parametrize("name", one_in(3, NO_MESSAGE))
async def test_a_session_message_of_any_kind_is_worked_on_in_pieces_and_its_session_alone_ends(name: str) -> None:
    raw, reason = NO_MESSAGE[name]
    async with served_front() as worker, innocent_at(worker), open_channel(worker.address) as channel:
        session = await RawSession(channel).opened()
        await session.call.write(raw)
        if reason:
            assert (await session.end()).reason == reason
        else:
            submit = Submit(handle=7, prompt_token_ids=[5, 6], sampling=SamplingParams(seed=1, max_tokens=1))
            await session.call.write(SessionRequest(submits=[submit]).SerializeToString())
            assert (await session.call.read()).outputs[0].handle == 7


async def test_more_than_any_message_may_have_is_not_read() -> None:
    most = most_message_bytes(MODEL)
    async with served_front() as worker, innocent_at(worker), open_channel(worker.address) as channel:
        session = await RawSession(channel).opened()
        await session.call.write(bytes(most + 1))
        assert (await session.end()).code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_router_that_does_not_read_its_refusals_is_read_no_further() -> None:
    async with served_front() as worker, innocent_at(worker), open_channel(worker.address) as channel:
        flood = await RawSession(channel).opened()
        writing = asyncio.create_task(write_on(flood))
        await until(lambda: any(waiting > ROOM_BYTES for waiting in worker.backlog._waiting.values()))
        for _ in range(2000):
            await asyncio.sleep(0)
        assert max(worker.backlog._waiting.values()) < 2 * ROOM_BYTES
        writing.cancel()


async def write_on(session: RawSession) -> None:
    while True:
        await session.call.write(b"\x12\x02\x08\x01" * (MAX_SUBMITS // 4))


@pytest.mark.parametrize("method", GATED)
async def test_a_stranger_s_request_is_refused_before_it_is_read(method: str) -> None:
    """It is larger than any message may be, which a worker that reads it says."""
    async with served_front(KEY) as worker, open_channel(worker.address) as channel:
        refused = await refusal(raw_call(channel, method, bytes(60 * MIB)))
        assert refused.reason == UNAUTHENTICATED
        await until(lambda: worker.num_calls == 0)


FEW = {**dict.fromkeys(BY_ROUTERS, OF_STRANGERS), "GetTokenizer": KINDS["GetTokenizer"]}


@pytest.mark.parametrize("kind", FEW)
async def test_a_connection_has_so_many_calls_of_a_kind_and_the_next_one_is_told_to_come_back(kind: str) -> None:
    most = FEW[kind].per_connection
    async with served_front() as worker, innocent_at(worker):
        before = worker.num_open(kind)
        async with open_channel(worker.address) as channel:
            calls: list[Any] = [channel.stream_stream(f"/{SERVICE}/{kind}")() for _ in range(50)]
            refused: list[Refusal] = []
            ended = [asyncio.create_task(note_end(call, refused)) for call in calls]
            await until(lambda: len(refused) == len(calls) - most)
            assert worker.num_open(kind) == before + most
            assert {(each.reason, each.retry_s) for each in refused} == {(OVERLOADED, 1.0)}
            async with open_channel(worker.address) as other:
                assert await raw_call(other, "GetTokenizer", b"").read()
            for call in calls:
                call.cancel()
            await asyncio.gather(*ended)
            await until(lambda: worker.num_open(kind) == before)


async def note_end(call: Any, refused: list[Refusal]) -> None:
    """Waits for the end of a call that reads nothing."""
    if await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        try:
            await call.read()
        except grpc.aio.AioRpcError as error:
            refused.append(Refusal(error))


async def test_calls_of_every_method_by_the_hundred_leave_a_worker_serving() -> None:
    """Health watches, reflection, watches of the cache, sessions, tokenizers that are not read, and requests of which
    the headers alone are sent."""
    health = HealthCheckRequest(service="liveness").SerializeToString()
    reflection = ServerReflectionRequest(list_services="").SerializeToString()
    submit = Submit(prompt_token_ids=[5, 6], sampling=SamplingParams(seed=1, max_tokens=1))
    methods = {
        "grpc.health.v1.Health/Watch": health,
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": reflection,
        f"{SERVICE}/WatchCache": WatchCacheRequest(stride=7).SerializeToString(),
        f"{SERVICE}/Session": b"",
        f"{SERVICE}/GetTokenizer": b"",
        f"{SERVICE}/Generate": WorkerServiceGenerateRequest(submit=submit).SerializeToString(),
        f"{SERVICE}/GetModel": b"",
        f"{SERVICE}/GetStats": b"",
    }
    async with served_front() as worker, innocent_at(worker) as innocent:
        # What three connections of one host may hold, and does not end by itself; the innocent router has one session.
        held = {"Watch": 48, "ServerReflectionInfo": 8, "WatchCache": 12, "Session": 13}
        channels = [open_channel(worker.address) for _ in range(3)]
        calls: list[Any] = []
        writing: list[asyncio.Task[None]] = []
        for index in range(150):
            for method, message in methods.items():
                call: Any = channels[index % 3].stream_stream(f"/{method}")()
                calls.append(call)
                if index % 2:
                    writing.append(asyncio.create_task(call.write(message)))
            await asyncio.sleep(0)
        await until(lambda: {kind: worker.num_open(kind) for kind in held} == held)
        answered = innocent.num_answered
        await until(lambda: innocent.num_answered > answered + 20)
        for call in calls:
            call.cancel()
        await asyncio.gather(*writing, return_exceptions=True)
        for channel in channels:
            await channel.close()
        await until(lambda: worker.num_calls <= 1)


async def test_slow_uploads_give_way_to_requests_that_are_there() -> None:
    """Headers without a message, on several connections, as many as are read at once and more."""
    async with served_front() as worker:
        uploads = worker.door._uploads
        num_channels = uploads._most // PER_CONNECTION + 1
        channels = [open_channel(worker.address) for _ in range(num_channels)]
        calls: list[Any] = [
            channel.stream_unary(f"/{SERVICE}/GetModel")() for channel in channels for _ in range(PER_CONNECTION + 1)
        ]
        await until(lambda: len(uploads._reading) == uploads._most)
        async with open_channel(worker.address) as channel:
            ask: Any = channel.unary_unary(f"/{SERVICE}/GetModel")
            for _ in range(20):
                assert await ask(b"")
        for call in calls:
            call.cancel()
        for channel in channels:
            await channel.close()
        await until(lambda: not uploads._turns)
        assert not uploads._reading


def test_places_are_counted_by_connection_host_and_in_all_however_calls_come_and_go() -> None:
    draw = Random(1)
    bounds = Bounds(per_connection=2, per_host=5, in_all=8)
    places = Places("calls", bounds)
    held: list[str] = []
    peers = [f"ipv4:10.0.0.{host}:{port}" for host in range(3) for port in range(4)]
    for _ in range(5000):
        if held and draw.random() < 0.45:
            places.give_back(held.pop(draw.randrange(len(held))))
            continue
        peer = draw.choice(peers)
        of_host = sum(host_of(other) == host_of(peer) for other in held)
        has_room = held.count(peer) < 2 and of_host < 5 and len(held) < 8
        try:
            places.take(peer)
            held.append(peer)
            assert has_room
        except RequestRefused:
            assert not has_room
        assert places.num_taken == len(held)
    for peer in held:
        places.give_back(peer)
    assert not places._taken


LEGAL: dict[str, Submit] = {
    "the longest prompt": Submit(prompt_token_ids=[2047] * 511),
    "the longest ledger": Submit(prompt_token_ids=[2047], resume=Resume(output_token_ids=[2047] * 510)),
    "every list as long as it may be": Submit(
        prompt_token_ids=[5],
        sampling=SamplingParams(
            stop=["\u00e9" * 512] * 16, stop_token_ids=range(100, 228), logit_bias=dict.fromkeys(range(1024), -1.5)
        ),
        tracestate="x" * 8192,
    ),
}


@pytest.mark.parametrize("name", LEGAL)
async def test_the_largest_legal_submits_are_answered(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "PART_BYTES", 64)
    submit = LEGAL[name]
    submit.handle, submit.sampling.seed = 1, 1
    async with served_front() as worker, open_channel(worker.address) as channel:
        session = await RawSession(channel).opened()
        await session.call.write(SessionRequest(submits=[submit]).SerializeToString())
        assert (await session.call.read()).outputs[0].chunk.token_ids == [5]
        call = raw_call(channel, "Generate", WorkerServiceGenerateRequest(submit=submit).SerializeToString())
        assert await call.read()


async def test_a_direct_request_with_more_entries_than_there_may_be_is_refused_unparsed() -> None:
    submit = Submit(prompt_token_ids=[5], sampling=SamplingParams(stop=[""] * (UNSEEN_BYTES + MOST_FIELDS)))
    request = WorkerServiceGenerateRequest(submit=submit).SerializeToString()
    async with served_front() as worker, open_channel(worker.address) as channel:
        refused = await refusal(raw_call(channel, "Generate", request))
        assert (refused.reason, refused.field) == (INVALID_REQUEST, "submit")


async def test_a_keyed_worker_takes_its_routers_sessions() -> None:
    proof = proof_metadata(
        KEY, "Session", worker_id=MODEL.worker_id, epoch=MODEL.epoch, now_unix_ms=int(time.time() * 1e3)
    )
    async with served_front(KEY) as worker, open_channel(worker.address) as channel:
        session = await RawSession(channel, metadata=proof).opened()
        await session.call.write(b"\x1a" + b"\xff\xff\x7f" + bytes(2 * MAX_ABORT_BYTES))
        assert (await session.end()).reason == INVALID_REQUEST
