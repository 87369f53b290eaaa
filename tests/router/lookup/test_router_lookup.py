"""Routers that share a Redis find each other's requests. Redis and the routers are real."""

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.router.cluster import PATIENCE_S, Cluster, cluster, refusal, share_with_nobody, until
from tests.router.fake_worker import FakeWorker
from tests.router.lookup.lookup_rig import (
    OTHER_SECRET,
    SECRET,
    fleet,
    looking_up,
    new_prefix,
    seal_of_grant_keys,
    sharing,
    until_they_know,
)
from tests.router.watch.watch_rig import ACME, BLIND, OPERATOR, OTHER, KeyRing, ids, until_view, watch, watched_router
from trunkline.v1.fleet_pb2 import GetRequestRequest, GetRequestResponse, ListRequestsRequest, OtherRouters
from trunkline_bench.servers.redis_server import RedisServer
from trunkline_router.access.access import Access
from trunkline_router.access.identity.fleet_secret import secret_of_one_router
from trunkline_router.assembly import lookup_of
from trunkline_router.identity_settings import IdentitySettings
from trunkline_router.observe.lookup import router_lookup
from trunkline_router.observe.lookup.question import Question
from trunkline_router.observe.lookup.question_budget import LIMITS
from trunkline_router.observe.lookup.request_book import Kind, RequestBook
from trunkline_router.observe.lookup.router_lookup import RouterLookup
from trunkline_router.observe.lookup.viewer import Viewer
from trunkline_router.observe.recent.recent_requests import RecentRequests
from trunkline_router.settings import RouterSettings
from trunkline_router.workers.pool import Pools

ANY = Viewer.of(Access().caller(()))
OLD, NEW = b"o" * 32, b"n" * 32  # grant keys


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which every router answers, however long that takes."""
    monkeypatch.setattr(router_lookup, "ANSWER_S", PATIENCE_S)


PATIENT = pytest.mark.usefixtures("patience")


async def told(router: Cluster, request_id: str) -> GetRequestResponse:
    found = await router.fleet.GetRequest(GetRequestRequest(request_id=request_id), timeout=PATIENCE_S)
    assert isinstance(found, GetRequestResponse)
    return found


@PATIENT
async def test_each_router_finds_and_lists_the_requests_of_all(redis_of_all: RedisServer) -> None:
    async with fleet(redis_of_all.url, count=3) as routers:
        for number, router in enumerate(routers, 1):
            await router.answer([1, 2, 3], request_id=f"of-{number}")
        for router in routers:
            for number in (1, 2, 3):
                found = await told(router, f"of-{number}")
                assert (found.summary.request_id, found.summary.router) == (f"of-{number}", f"router-{number}")
                assert found.summary.worker_id == f"w-{number}"
                assert found.placements[0].candidates
            listed = await router.fleet.ListRequests(ListRequestsRequest(limit=2), timeout=PATIENCE_S)
            assert ids(listed.requests) == ["of-3", "of-2"]
            assert listed.others == OtherRouters(alive=2, answered=2)
            missing = await refusal(router.fleet.GetRequest(GetRequestRequest(request_id="of-4"), timeout=PATIENCE_S))
            assert missing.reason == "REQUEST_NOT_FOUND"
            assert missing.message.endswith("known here, nor at the fleet's other router processes (2)")


@PATIENT
async def test_a_stream_shows_the_requests_of_all_and_asks_seldom(server: RedisServer) -> None:
    async with fleet(server.url) as (here, there):
        await there.answer([1, 2, 3], request_id="there")
        calls = [watch(here, {}) for _ in range(3)]
        for call in calls:
            view = await until_view(call, lambda view: ids(view.requests) == ["there"])
            assert view.others == OtherRouters(alive=1, answered=1)
            assert view.requests[0].router == "router-2"
        for _ in range(5):
            await calls[0].read()
        assert there.lookup.num_answered <= 2, "of all watchers and samples together, in less than a few seconds"
        for call in calls:
            call.cancel()


@PATIENT
async def test_nobody_sees_more_of_another_router_than_of_its_own(server: RedisServer, tmp_path: Path) -> None:
    keys, prefix = KeyRing(tmp_path), new_prefix()
    async with AsyncExitStack() as stack:
        here, there = [
            await stack.enter_async_context(
                watched_router(
                    keys,
                    FakeWorker(f"w-{name}"),
                    name=name,
                    allows_anonymous=True,
                    share=sharing(server.url, prefix, name),
                    lookup=looking_up(server.url, prefix, SECRET),
                )
            )
            for name in ("here", "there")
        ]
        await until_they_know(here.inner, there.inner)
        for who in (ACME, OTHER):
            await there.generate(keys.headers(who), text=f"of {who}", request_id=f"of-{who}")
        for who, seen in (
            (OPERATOR, [OTHER, ACME]),
            (ACME, [ACME]),
            (OTHER, [OTHER]),
            (BLIND, [OTHER, ACME]),
            ("", []),
        ):
            headers = tuple(keys.headers(who).items())
            listed = await here.fleet.ListRequests(ListRequestsRequest(), metadata=headers, timeout=PATIENCE_S)
            assert ids(listed.requests) == [f"of-{tenant}" for tenant in seen]
            for tenant in (ACME, OTHER):
                asked = GetRequestRequest(request_id=f"of-{tenant}")
                call = here.fleet.GetRequest(asked, metadata=headers, timeout=PATIENCE_S)
                if tenant not in seen:
                    unknown = here.fleet.GetRequest(
                        GetRequestRequest(request_id="of-xxx"), metadata=headers, timeout=PATIENCE_S
                    )
                    message = (await refusal(call)).message
                    assert message.replace(f"of-{tenant}", "of-xxx") == (await refusal(unknown)).message, (
                        "as if there were none"
                    )
                    continue
                found = await call
                assert bool(found.placements) == (who != BLIND)
                assert bool(found.summary.worker_id) == (who != BLIND)
                assert any(placement.candidates for placement in found.placements) == (who == OPERATOR)


async def test_what_a_router_of_another_version_tells_too_much_is_left_out(server: RedisServer) -> None:
    async with fleet(server.url) as (_, there):
        await there.answer([1, 2, 3], request_id="there")
        question = Question(ANY, request_id="there")
        story = question.answer_of(there.watch.requests.book)
        acme = replace(ANY, tenant="acme", is_operator=False)
        assert question.read_answer(story) is not None
        assert replace(question, viewer=acme).read_answer(story) is None
        assert replace(question, tenant="acme").read_answer(story) is None
        assert replace(question, request_id="another").read_answer(story) is None
        lists = Question(ANY, kinds=(Kind.ENDED, Kind.RUNNING), most=3)
        listed = lists.answer_of(there.watch.requests.book)
        for asked, seen in ((lists, 1), (replace(lists, viewer=acme), 0), (replace(lists, most=0), 0)):
            answer = asked.read_answer(listed)
            assert answer is not None
            assert len(answer.requests) == seen  # type: ignore[union-attr]


async def test_a_router_that_does_not_answer_is_told_of_and_the_others_count(server: RedisServer) -> None:
    prefix = new_prefix()
    async with (
        fleet(server.url, prefix=prefix) as (here, there),
        fleet(server.url, OTHER_SECRET, prefix=prefix, count=1) as (stranger,),
    ):
        await until_they_know(here, there, stranger)
        for router, name in ((here, "here"), (there, "there"), (stranger, "stranger")):
            await router.answer([1, 2, 3], request_id=name)
        assert (await told(here, "there")).summary.router == "router-2"
        listed = await here.fleet.ListRequests(ListRequestsRequest(), timeout=PATIENCE_S)
        assert (ids(listed.requests), listed.others) == (["there", "here"], OtherRouters(alive=2, answered=1))
        missing = await refusal(here.fleet.GetRequest(GetRequestRequest(request_id="stranger"), timeout=PATIENCE_S))
        assert missing.message.endswith("here; of the fleet's other router processes, 1 of 2 did not answer")


@PATIENT
async def test_while_the_secret_changes_routers_answer_each_other(server: RedisServer) -> None:
    prefix = new_prefix()
    async with (
        fleet(server.url, SECRET, OTHER_SECRET, prefix=prefix, count=1) as (old,),
        fleet(server.url, OTHER_SECRET, SECRET, prefix=prefix, count=1) as (new,),
    ):
        await until_they_know(old, new)
        await old.answer([1, 2, 3], request_id="old")
        await new.answer([1, 2, 3], request_id="new")
        assert (await told(old, "new")).summary.request_id == "new"
        assert (await told(new, "old")).summary.request_id == "old"


async def test_while_the_grant_key_changes_routers_answer_each_other(server: RedisServer) -> None:
    """As docs/operations.md changes it: no router has all keys, and of each two, the same one in each step."""
    prefix = new_prefix()
    async with (
        fleet(server.url, OLD, prefix=prefix, count=1, sealing=seal_of_grant_keys) as (old,),
        fleet(server.url, NEW, OLD, prefix=prefix, count=1, sealing=seal_of_grant_keys) as (both,),
        fleet(server.url, NEW, prefix=prefix, count=1, sealing=seal_of_grant_keys) as (new,),
    ):
        await until_they_know(old, both, new)
        for name, router in (("old", old), ("both", both), ("new", new)):
            await router.answer([1, 2, 3], request_id=name)
        for asker, asked in ((old, "both"), (both, "old"), (both, "new"), (new, "both")):
            assert (await told(asker, asked)).summary.request_id == asked
        answered = both.lookup.num_answered
        assert (await told(old, "both")).summary.request_id == "both"
        assert both.lookup.num_answered == answered + 1
        listed = await both.fleet.ListRequests(ListRequestsRequest(), timeout=PATIENCE_S)
        assert (set(ids(listed.requests)), listed.others.answered) == ({"old", "both", "new"}, 2)


@PATIENT
async def test_processes_of_one_router_are_asked_but_once(server: RedisServer) -> None:
    async with fleet(server.url, house="a" * 32) as (here, there):
        await there.answer([1, 2, 3], request_id="there")
        listed = await here.fleet.ListRequests(ListRequestsRequest(), timeout=PATIENCE_S)
        assert (ids(listed.requests), listed.others) == ([], OtherRouters(alive=1, answered=1))


@PATIENT
async def test_a_viewer_that_asks_in_a_loop_costs_the_others_a_bounded_number_of_questions(server: RedisServer) -> None:
    now_s = 100.0
    async with fleet(server.url, steady_s=lambda: now_s) as (here, there):
        await here.answer([1, 2, 3], request_id="here")
        asked = [here.lookup.ask(Question(ANY, request_id=f"{number}")) for number in range(100)]
        heard = await asyncio.gather(*asked)
        most = LIMITS.at_once - LIMITS.reserve + LIMITS.account_at_once
        assert there.lookup.num_answered == most
        assert sum(one.routers.answered for one in heard) == most
        assert (await told(here, "here")).summary.request_id == "here"
        viewer = replace(ANY, tenant="another")
        assert (await here.lookup.ask(Question(viewer, request_id="x"))).routers == OtherRouters(alive=1, answered=1)
        strangers = replace(ANY, sees_requests=False)
        for question in (Question(strangers, request_id="x"), Question(viewer, "t" * 5000, "x"), Question(viewer)):
            assert (await here.watch.requests.ask_routers(question)).routers == OtherRouters(), "there is no answer"
        now_s += 1.0
        heard = await asyncio.gather(*(here.lookup.ask(Question(ANY, request_id="x")) for _ in range(100)))
        assert 1 <= sum(one.routers.answered for one in heard) <= LIMITS.account_per_s, "two viewers share it"


class Questions:
    """Counts the questions that all routers have sent, and those that each has read. Made before the routers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent = 0
        self.read: Counter[RouterLookup] = Counter()
        sends, hear = RouterLookup._sends, RouterLookup._hear_question

        def noted_sends(lookup: RouterLookup, channel: bytes, messages: Sequence[bytes], most_bytes: int) -> bool:
            are_sent = sends(lookup, channel, messages, most_bytes)
            self.sent += are_sent and channel == lookup._questions
            return are_sent

        def noted_hear(lookup: RouterLookup, sealed: bytes) -> None:
            hear(lookup, sealed)
            self.read[lookup] += 1

        monkeypatch.setattr(RouterLookup, "_sends", noted_sends)
        monkeypatch.setattr(RouterLookup, "_hear_question", noted_hear)


async def test_a_tenant_that_asks_through_many_routers_leaves_operators_and_other_tenants_theirs(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, questions = 100.0, Questions(monkeypatch)
    async with fleet(server.url, count=5, steady_s=lambda: now_s) as routers:
        *askers, last = routers
        await last.answer([1, 2, 3], request_id="slow")
        acme, other = (replace(ANY, tenant=tenant, is_operator=False) for tenant in (ACME, OTHER))
        slow = Question(ANY, request_id="slow")
        for second in range(4):
            flood = [asker.lookup.ask(Question(acme, request_id=f"{n}")) for asker in askers for n in range(50)]
            heard = await asyncio.gather(*flood)
            # Those that were given up may still be on their way.
            await until(lambda: all(questions.read[router.lookup] == questions.sent for router in routers))
            of_last = last.lookup.num_answered
            assert not second or sum(one.routers.answered < 4 for one in heard) > 100, "it is too much for the fleet"
            with monkeypatch.context() as patch:
                patch.setattr(router_lookup, "ANSWER_S", PATIENCE_S)  # this is about budgets, and not about times
                assert (await askers[0].lookup.ask(slow)).answers, "an operator's question"
                assert (await askers[1].lookup.ask(Question(other, request_id="x"))).routers.answered == 4
            assert last.lookup.num_answered == of_last + 2
            now_s += 1.0


@PATIENT
async def test_a_processes_own_siblings_cost_its_budget_nothing(server: RedisServer) -> None:
    now_s = 100.0
    lists = Question(ANY, kinds=tuple(Kind), most=500)  # the most that one may cost
    async with fleet(server.url, house="a" * 32, count=6, steady_s=lambda: now_s) as routers:
        *askers, last = routers
        for asker in askers:
            for _ in range(2):
                assert (await asker.lookup.ask(lists)).routers == OtherRouters(alive=5, answered=5)
        assert last.lookup.num_answered == 10, "questions that cost 250 in all, of 100"


async def test_without_any_secret_of_the_fleet_a_router_asks_nobody_and_says_so(server: RedisServer) -> None:
    prefix = new_prefix()
    async with (
        cluster(FakeWorker("w-1"), share=sharing(server.url, prefix, "here")) as here,
        cluster(FakeWorker("w-2"), share=sharing(server.url, prefix, "there")) as there,
    ):
        await until(lambda: here.shared.num_neighbours == there.shared.num_neighbours == 1)
        await there.answer([1, 2, 3], request_id="there")
        missing = await refusal(here.fleet.GetRequest(GetRequestRequest(request_id="there"), timeout=PATIENCE_S))
        assert missing.message == (
            "no recent request 'there' is known here; the fleet's other router processes (1) are not asked, because "
            "the fleet has no secret, no grant key and no password of Redis"
        )
        await until_view(watch(here, {}), lambda view: not view.router.asks_routers)


async def test_a_router_looks_up_requests_only_with_a_secret_of_the_fleet(capsys: pytest.CaptureFixture[str]) -> None:
    shared, book = share_with_nobody(Pools(Random(0)), Random(0)), RequestBook(RecentRequests(), {}, lambda: 0.0)

    def lookup(**settings: Any) -> RouterLookup | None:
        made = RouterSettings(workers=("127.0.0.1:1",), **{"redis_url": "redis://127.0.0.1:1", **settings})
        return lookup_of(made, book, shared, Random(0), None)

    assert lookup(redis_url="redis://:password@127.0.0.1:1")
    assert lookup(grant_key="g" * 32)
    assert lookup(identity=IdentitySettings(fleet_secret="s" * 32))
    assert lookup(redis_url="") is None
    assert "other routers" not in capsys.readouterr().out
    assert lookup() is None
    assert lookup(identity=IdentitySettings(fleet_secret=secret_of_one_router())) is None
    said = capsys.readouterr().out
    assert said.count("other routers are not asked for their requests, because the fleet has no secret") == 2
    assert said.count("set --fleet-secret-file or --grant-key, or a password in --redis-url") == 2


@PATIENT
async def test_while_nobody_asks_a_router_has_one_idle_connection(server: RedisServer) -> None:
    async with fleet(server.url) as (here, there):
        assert (here.lookup.channel.num_connections, there.lookup.channel.num_connections) == (1, 1)
        await here.answer([1, 2, 3], request_id="here")
        await told(there, "here")
        assert (here.lookup.channel.num_connections, there.lookup.channel.num_connections) == (2, 2)


async def test_a_router_without_others_asks_nobody(server: RedisServer) -> None:
    async with fleet(server.url, count=1) as (alone,):
        await until_they_know(alone)
        missing = await refusal(alone.fleet.GetRequest(GetRequestRequest(request_id="x"), timeout=PATIENCE_S))
        assert missing.message == "no recent request 'x' is known here"
        assert alone.lookup.channel.num_connections == 1
