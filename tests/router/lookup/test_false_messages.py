"""What others that can write to Redis may do to the questions of routers, and what a Redis may do that lies."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import redis.asyncio

from tests.router.cluster import PATIENCE_S, Cluster, refusal, until
from tests.router.lookup.lookup_rig import OTHER_SECRET, SECRET, fleet, new_prefix, seal_of, seal_of_grant_keys
from trunkline.grant import GrantKeys
from trunkline.v1.fleet_pb2 import (
    AttemptView,
    GetRequestRequest,
    GetRequestResponse,
    ListRequestsRequest,
    ListRequestsResponse,
    OtherRouters,
    RequestSummary,
)
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.access.access import Access
from trunkline_router.access.identity.fleet_secret import FleetSecret, derived_key, secret_of_one_router
from trunkline_router.observe.lookup.fleet_channel import MOST_QUEUED, FleetChannel
from trunkline_router.observe.lookup.question import Question
from trunkline_router.observe.lookup.question_budget import LIMITS
from trunkline_router.observe.lookup.request_book import Kind
from trunkline_router.observe.lookup.router_lookup import (
    MOST_AGE_S,
    MOST_ANSWER_BYTES,
    MOST_QUESTION_BYTES,
    shortened,
)
from trunkline_router.observe.lookup.sealed_messages import (
    ANSWER,
    PURPOSE,
    QUESTION,
    FleetMessage,
    MessageSeal,
    message_seal,
)
from trunkline_router.observe.lookup.viewer import Viewer

ANY = Viewer.of(Access().caller(()))
NOW_UNIX_S = 1_800_000_000.0


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


class Writer:
    """Reads and writes what routers exchange in Redis."""

    def __init__(self, client: Any, url: str, prefix: str) -> None:
        self.client = client
        self.seal = seal_of(url, prefix, SECRET)
        self.tag = f"{{{prefix.rstrip(':')}}}:lookup:1:0:"
        self.listens = asyncio.Event()
        self.heard: list[tuple[str, bytes]] = []

    async def publish(self, channel: str, message: bytes) -> None:
        assert await self.client.publish(self.tag + channel, message)

    async def ask(self, question_id: str = "q", body: bytes | None = None, **fields: Any) -> None:
        """Publishes a question that is sealed as the routers do."""
        asked = Question(ANY, request_id="there").written() if body is None else body
        given = {"sender": "writer", "house": "writer", "at_unix_s": NOW_UNIX_S, **fields}
        await self.publish("questions", self.seal.sealed(FleetMessage(QUESTION, question_id, body=asked, **given)))

    async def listen(self) -> None:
        async with self.client.pubsub() as channels:
            await channels.psubscribe(f"{self.tag}*")
            async for message in channels.listen():
                self.listens.set()
                if message["type"] == "pmessage":
                    self.heard.append((message["channel"].decode().removeprefix(self.tag), message["data"]))


@asynccontextmanager
async def attacked(url: str) -> AsyncIterator[tuple[Cluster, Cluster, Writer]]:
    """Two routers, the second of which has the request "there", and one that writes to their Redis."""
    prefix = new_prefix()
    async with redis.asyncio.from_url(url) as client, fleet(url, prefix=prefix, unix_s=lambda: NOW_UNIX_S) as routers:
        here, there = routers
        await there.answer([1, 2, 3], request_id="there")
        writer = Writer(client, url, prefix)
        listening = asyncio.create_task(writer.listen())
        await writer.listens.wait()
        yield here, there, writer
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)


async def is_found(here: Cluster) -> bool:
    found = await here.fleet.GetRequest(GetRequestRequest(request_id="there"), timeout=PATIENCE_S)
    return bool(found.summary.router == "router-2")


async def test_false_old_and_repeated_questions_are_not_answered(server: RedisServer) -> None:
    async with attacked(server.url) as (here, there, writer):
        strange = (
            seal_of(server.url, "another:", SECRET),
            seal_of(server.url, "x", OTHER_SECRET),
            MessageSeal([derived_key(b"", PURPOSE + "x")]),
        )
        message = FleetMessage(QUESTION, "forged", "w", "w", NOW_UNIX_S, Question(ANY, request_id="there").written())
        for seal in strange:
            await writer.publish("questions", seal.sealed(message))
        sealed = writer.seal.sealed(message)
        for false in (b"", b"\x01", b"x" * 100, sealed[:-1], sealed[:40] + b"!" + sealed[41:], b"\x02" + sealed[1:]):
            await writer.publish("questions", false)
        await writer.publish("questions", b"\x01" * (MOST_QUESTION_BYTES + 1))
        for at_unix_s in (NOW_UNIX_S - MOST_AGE_S - 1, NOW_UNIX_S + MOST_AGE_S + 1, float("inf"), 1e400):
            await writer.ask("old", at_unix_s=at_unix_s)
        for body in (
            b"",
            b"{}",
            b"[1]",
            b"\xff",
            b'{"viewer":["",1,1,1],"tenant":"","request_id":"there","kinds":[],"most":0}',
        ):
            await writer.ask("mad", body=body)
        for name in ("", "*", "a:b", "a" * 65, "\n"):
            await writer.ask("named", sender=name)
        await writer.ask("large", body=Question(ANY, request_id="x" * MOST_QUESTION_BYTES).written())
        await until(lambda: len(writer.heard) >= 24)
        assert (here.lookup.num_answered, there.lookup.num_answered) == (0, 0)
        assert {channel for channel, _ in writer.heard} == {"questions"}
        for _ in range(3):
            await writer.ask("once")
        assert await is_found(here), "the writer's questions were read before this one"
        assert there.lookup.num_answered == 2, "the writer's once, and this one"
        assert len([channel for channel, _ in writer.heard if channel == "answers:writer"]) == 2, "one of each router"
        assert here.lookup.num_answered == 1


async def test_false_answers_are_ignored(server: RedisServer) -> None:
    false = GetRequestResponse(summary=RequestSummary(request_id="there", router="false")).SerializeToString()
    is_over = asyncio.Event()

    async def lie(writer: Writer) -> None:
        """Answers each question at once, as far as the writer can."""
        answered = 0
        while not is_over.is_set():
            for channel, sealed in writer.heard[answered:]:
                answered += 1
                asked = writer.seal.opened(sealed) if channel == "questions" else None
                if asked is None:
                    continue
                answer = FleetMessage(ANSWER, asked.question_id, "liar", "liar", NOW_UNIX_S, false)
                for seal in (seal_of(server.url, "x", OTHER_SECRET), MessageSeal([derived_key(b"", PURPOSE + "x")])):
                    await writer.publish(f"answers:{asked.sender}", seal.sealed(answer))
                await writer.publish(f"answers:{asked.sender}", sealed)
                await writer.publish(f"answers:{asked.sender}", b"\x01" * (MOST_ANSWER_BYTES + 1000))
                another = FleetMessage(ANSWER, "another", "liar", "liar", NOW_UNIX_S, false)
                await writer.publish(f"answers:{asked.sender}", writer.seal.sealed(another))
            await asyncio.sleep(0)

    async with attacked(server.url) as (here, _, writer):
        lying = asyncio.create_task(lie(writer))
        for _ in range(5):
            assert await is_found(here)
        listed = await here.fleet.ListRequests(ListRequestsRequest(), timeout=PATIENCE_S)
        assert listed.others == OtherRouters(alive=1, answered=1)
        assert [shown.router for shown in listed.requests] == ["router-2"]
        is_over.set()
        await lying


async def test_a_router_that_says_nonsense_counts_once_and_hides_nothing(server: RedisServer) -> None:
    """Sealed with the fleet's secret: a router of another version, or one that was taken over."""
    async with attacked(server.url) as (here, _, writer):
        asking = asyncio.create_task(is_found(here))
        await until(lambda: any(channel == "questions" for channel, _ in writer.heard))
        assert await asking
        asked = writer.seal.opened(next(data for channel, data in writer.heard if channel == "questions"))
        assert asked is not None
        other = GetRequestResponse(summary=RequestSummary(request_id="other")).SerializeToString()
        heard_by = here.lookup
        question = Question(ANY, request_id="there")
        looking = asyncio.create_task(heard_by.ask(question))
        seen = len(writer.heard)
        await until(lambda: any(channel == "questions" for channel, _ in writer.heard[seen:]))
        (sealed,) = [data for channel, data in writer.heard[seen:] if channel == "questions"]
        asked = writer.seal.opened(sealed)
        assert asked is not None
        for body in (b"\xff\xff", other, b"", other):
            answer = FleetMessage(ANSWER, asked.question_id, "mad", "mad", NOW_UNIX_S, body)
            await writer.publish(f"answers:{asked.sender}", writer.seal.sealed(answer))
        heard = await looking
        assert all(answer.summary.router == "router-2" for answer in heard.answers)  # type: ignore[union-attr]


async def test_a_flood_of_questions_costs_a_bounded_number_of_answers(server: RedisServer) -> None:
    prefix, now_s = new_prefix(), 100.0
    async with (
        redis.asyncio.from_url(server.url) as client,
        fleet(server.url, prefix=prefix, unix_s=lambda: NOW_UNIX_S, steady_s=lambda: now_s) as (here, there),
    ):
        writer, channel = Writer(client, server.url, prefix), here.lookup.channel
        most = LIMITS.at_once - LIMITS.reserve + LIMITS.account_at_once
        for number in range(300):
            await writer.ask(f"{number}")
        await until(lambda: channel.num_heard == there.lookup.channel.num_heard == 300)
        assert here.lookup.num_answered == there.lookup.num_answered == most
        now_s += 12.5  # 25 questions above the reserve, and 25 of its share; a list of 1,500 costs 25
        lists = Question(ANY, kinds=tuple(Kind), most=500).written()
        for number in range(300, 310):
            await writer.ask(f"{number}", body=lists)
        await until(lambda: channel.num_heard == 310)
        assert here.lookup.num_answered == most + 2


async def test_what_routers_exchange_tells_readers_of_redis_nothing(server: RedisServer) -> None:
    async with attacked(server.url) as (here, _, writer):
        assert await is_found(here)
        await until(lambda: any(channel.startswith("answers:") for channel, _ in writer.heard))
        for _, data in writer.heard:
            for word in (b"there", b"router", b"tiny", b"w-2", b"viewer"):
                assert word not in data


def test_a_seal_is_the_fleets_own() -> None:
    message = FleetMessage(QUESTION, "id", "sender", "house", 1.5, b"body\nwith lines")
    url, no_keys = "redis://:password@localhost:1/0", GrantKeys()

    def seal(secret: FleetSecret, keys: GrantKeys = no_keys, prefix: str = "p:") -> MessageSeal:
        made = message_seal(secret, keys, url, prefix)
        assert made is not None
        return made

    seals = {
        "secret": seal(FleetSecret(SECRET)),
        "prefix": seal(FleetSecret(SECRET), prefix="q:"),
        "another": seal(FleetSecret(OTHER_SECRET)),
        "grant": seal(FleetSecret(), GrantKeys(b"a grant key")),
        "password": seal(FleetSecret()),
    }
    for name, one in seals.items():
        for other, opening in seals.items():
            assert (opening.opened(one.sealed(message)) == message) == (name == other)
    both = seal(FleetSecret(OTHER_SECRET, (SECRET,)))
    assert both.opened(seals["secret"].sealed(message)) == message
    assert len(both.all_sealed(message)) == 1, "another secret of the file only opens"
    of_one = FleetSecret(secret_of_one_router().encode())
    assert of_one.is_of_one_router
    assert not FleetSecret(SECRET).is_of_one_router
    assert seal(of_one).opened(seals["password"].sealed(message)) == message
    assert seals["secret"].sealed(message) != seals["secret"].sealed(message)


def test_old_and_new_grant_keys_open_what_a_router_with_both_seals() -> None:
    message = FleetMessage(QUESTION, "id", "sender", "house", 1.5, b"body")
    url, prefix, old, new = "redis://localhost:1/0", "p:", b"o" * 32, b"n" * 32
    seals = {
        "old": seal_of_grant_keys(url, prefix, old),
        "both": seal_of_grant_keys(url, prefix, new, old),
        "new": seal_of_grant_keys(url, prefix, new),
    }
    for names, opens in (("old both", True), ("both new", True), ("old new", False)):
        first, second = (seals[name] for name in names.split())
        for one, other in ((first, second), (second, first)):
            assert (message in [other.opened(sealed) for sealed in one.all_sealed(message)]) == opens


def test_a_fleet_without_any_secret_has_no_seal() -> None:
    for secret in (FleetSecret(), FleetSecret(secret_of_one_router().encode())):
        for url in ("redis://localhost:1/0", "redis://user:@localhost:1/0", "unix:///run/redis.sock"):
            assert message_seal(secret, GrantKeys(), url, "p:") is None


def test_an_answer_that_is_too_long_loses_its_details() -> None:
    story = GetRequestResponse(
        summary=RequestSummary(request_id="r"), attempts_made=[AttemptView(problem="x" * 1000)] * 1000
    )
    short = GetRequestResponse.FromString(shortened(story.SerializeToString(), Question(ANY, request_id="r")))
    assert (short.summary.request_id, len(short.attempts_made)) == ("r", 0)
    listed = ListRequestsResponse(requests=[RequestSummary(request_id=f"{n}" + "x" * 3000) for n in range(500)])
    cut = ListRequestsResponse.FromString(
        shortened(listed.SerializeToString(), Question(ANY, kinds=(Kind.ENDED,), most=500))
    )
    assert 0 < len(cut.requests) < 500
    assert cut.requests[0] == listed.requests[0]
    assert cut.ByteSize() <= MOST_ANSWER_BYTES


async def test_a_redis_that_is_emptied_hides_nothing_for_long(server: RedisServer) -> None:
    async with attacked(server.url) as (here, _, writer):
        for _ in range(3):
            await writer.client.flushall()
            assert (await here.fleet.ListRequests(ListRequestsRequest(), timeout=PATIENCE_S)).others.alive <= 1
        syncs = here.shared.syncs
        await until(lambda: here.shared.syncs > syncs + 1 and here.shared.num_neighbours == 1)
        assert await is_found(here)


async def test_a_redis_that_hangs_or_goes_away_costs_no_answer(redis: RedisServer) -> None:
    async with fleet(redis.url) as (here, there):
        await here.answer([1, 2, 3], request_id="here")
        await there.answer([1, 2, 3], request_id="there")
        assert await is_found(here)
        redis.hang()
        listed = await here.fleet.ListRequests(ListRequestsRequest(), timeout=PATIENCE_S)
        assert [shown.request_id for shown in listed.requests] == ["here"]
        missing = await refusal(here.fleet.GetRequest(GetRequestRequest(request_id="there"), timeout=PATIENCE_S))
        assert missing.reason == "REQUEST_NOT_FOUND"
        redis.go_on()
        redis.kill()
        await until(lambda: not here.lookup.channel.is_listening)
        assert (await here.fleet.ListRequests(ListRequestsRequest(), timeout=PATIENCE_S)).requests
        await here.answer([1, 2, 3], request_id="meanwhile")
        redis.start()
        await until(lambda: here.lookup.channel.is_listening and there.lookup.channel.is_listening)
        await until(lambda: here.shared.num_neighbours == 1)
        assert await is_found(here)


@pytest.mark.parametrize(
    "lie",
    [b"", b"+OK\r\n", b"-ERR no\r\n", b"*3\r\n", b"$99999999\r\n", b"*99999999\r\n", b"\x00" * 1000, b"*1\r\n" * 5000],
    ids=["nothing", "OK", "error", "half", "huge", "endless", "zeros", "deep"],
)
async def test_a_redis_that_lies_ends_nothing(lie: bytes) -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while await reader.read(4096):
            writer.write(lie)
            if not lie:
                break
        writer.close()

    false = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = false.sockets[0].getsockname()[1]
    channel = FleetChannel(f"redis://127.0.0.1:{port}/0", {b"heard": lambda _: None}, rng=Random(0))
    running = asyncio.create_task(channel.run())
    await until(lambda: connections >= 1)
    for _ in range(2 * MOST_QUEUED):
        channel.send(b"heard", b"message")
    await until(lambda: connections >= 2)
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    false.close()
    await false.wait_closed()
