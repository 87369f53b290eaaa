"""Processes of one router find each other's requests, over real Unix sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from tests.router.cluster import Cluster, cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.watch.watch_rig import ids
from trunkline.status import RequestRefused
from trunkline_router.access.access import Access
from trunkline_router.observe.lookup.fleet_requests import FleetRequests
from trunkline_router.observe.lookup.question import Question
from trunkline_router.observe.lookup.request_book import Kind
from trunkline_router.observe.lookup.sibling_requests import SUFFIX, SiblingRequests
from trunkline_router.observe.lookup.viewer import Viewer

OPERATOR = Viewer.of(Access().caller(()))
ACME = replace(OPERATOR, tenant="acme", is_operator=False)


def sockets_in(folder: Path) -> list[Path]:
    return list(folder.glob(f"*{SUFFIX}"))


@asynccontextmanager
async def processes(folder: Path, count: int = 2) -> AsyncIterator[list[tuple[Cluster, FleetRequests]]]:
    """As many routers as a router may have processes."""
    async with AsyncExitStack() as stack:
        made, tasks = [], []
        for number in range(count):
            router = await stack.enter_async_context(cluster(FakeWorker("a")))
            book = router.watch.requests.book
            siblings = SiblingRequests(folder, str(number), book)
            tasks.append(asyncio.create_task(siblings.run()))
            made.append((router, FleetRequests(book, siblings)))
        await until(lambda: len(sockets_in(folder)) == count)
        yield made
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not sockets_in(folder)


async def test_each_process_finds_and_lists_the_requests_of_all(tmp_path: Path) -> None:
    async with processes(tmp_path, 3) as made:
        for number, (router, _) in enumerate(made):
            await router.answer([1, 2, 3], request_id=f"of-{number}")
        for _, requests in made:
            listed = await requests.list(OPERATOR, Kind.ENDED, 10)
            assert ids(listed.requests) == ["of-2", "of-1", "of-0"]
            assert ids((await requests.list(OPERATOR, Kind.ENDED, 2)).requests) == ["of-2", "of-1"]
            for number in range(3):
                told = await requests.find(OPERATOR, f"of-{number}", "")
                assert told.summary.request_id == f"of-{number}"
                assert told.placements[0].candidates
            with pytest.raises(RequestRefused, match="no recent request"):
                await requests.find(OPERATOR, "of-none", "")


async def test_rights_count_in_every_process(tmp_path: Path) -> None:
    async with processes(tmp_path) as ((_, requests), (other, _)):
        await other.answer([1, 2, 3], request_id="of-third")
        assert ids((await requests.list(OPERATOR, Kind.ENDED, 10)).requests) == ["of-third"]
        assert not (await requests.list(ACME, Kind.ENDED, 10)).requests
        with pytest.raises(RequestRefused):
            await requests.find(ACME, "of-third", "")


async def test_a_process_that_is_dead_mute_or_mad_is_left_out(tmp_path: Path) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def half_an_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(bytes([10, 127]) + b"of 127 bytes")
        writer.close()

    async with processes(tmp_path) as ((own, requests), (other, _)):
        (tmp_path / f"dead{SUFFIX}").touch()
        server = await asyncio.start_unix_server(mute, tmp_path / f"mute{SUFFIX}")
        half = await asyncio.start_unix_server(half_an_answer, tmp_path / f"half{SUFFIX}")
        await own.answer([1, 2, 3], request_id="own")
        await other.answer([1, 2, 3], request_id="there")
        assert ids((await requests.list(OPERATOR, Kind.ENDED, 10)).requests) == ["there", "own"]
        assert (await requests.find(OPERATOR, "there", "")).summary.request_id == "there"
        for stopped in (server, half):
            stopped.close()
            await stopped.wait_closed()
        for name in ("dead", "mute", "half"):
            (tmp_path / f"{name}{SUFFIX}").unlink(missing_ok=True)
        for asked in (b"", b"{}\n", b"no\n", b"x" * (1 << 17)):
            reader, writer = await asyncio.open_unix_connection(tmp_path / f"1{SUFFIX}")
            writer.write(asked)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
            await writer.wait_closed()
        assert (await requests.find(OPERATOR, "there", "")).summary.request_id == "there"


def test_a_question_says_what_a_viewer_may_see() -> None:
    for viewer in (OPERATOR, ACME, replace(ACME, sees_cache=False), replace(ACME, sees_requests=False)):
        question = Question(viewer, "acme", "id\n\0", (Kind.NOTABLE, Kind.RUNNING), 7)
        read = Question.read(question.written())
        assert read.viewer.rights == viewer.rights
        assert replace(read, viewer=viewer) == question


@pytest.mark.parametrize(
    "change",
    [{"viewer": ["acme", 1, True, True]}, {"viewer": ["acme", True]}, {"tenant": None}, {"request_id": 7},
     {"request_id": "x" * 5000}, {"kinds": "ended"}, {"kinds": ["all"]}, {"most": 501}, {"most": -1}, {"most": True}],
    ids=str,
)  # fmt: skip
def test_what_is_no_question_is_refused(change: dict[str, object]) -> None:
    fields = orjson.loads(Question(OPERATOR, kinds=(Kind.ENDED,), most=7).written())
    with pytest.raises((ValueError, TypeError, KeyError)):
        Question.read(orjson.dumps({**fields, **change}))
