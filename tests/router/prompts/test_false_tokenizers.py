"""A worker that sends its tokenizer's files slowly, without end or under odd names holds up no other one."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.router.cluster import cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.liar import Liar, TokenizerLiar, innocents
from tests.router.tokenizer_files import tokenizer_files
from trunkline.tokenizer_digest import tokenizer_digest
from trunkline.v1.worker_pb2 import GetTokenizerResponse
from trunkline_router.prompts.tokenizer import TokenizerError
from trunkline_router.workers import tokenizer_pool
from trunkline_router.workers.tokenizer_pool import MAX_FILES, TURN_S, fetched

PIECE = b"x" * (1 << 20)


@pytest.mark.parametrize("copies_digest", [False, True])
async def test_good_workers_come_although_one_never_ends_to_send_its_files(copies_digest: bool) -> None:
    good = [Liar(f"good-{number}") for number in range(3)]
    slow = TokenizerLiar("slow", stands_still=True)
    slow.tokenizer_digest = tokenizer_digest(good[0].files) if copies_digest else b"its own"
    slow.may_speak.set()
    async with cluster(slow, *good, expected=(False,) * 4) as router:
        await until(lambda: slow.tokenizer_calls > 0)
        for worker in good:
            worker.may_speak.set()
        async with asyncio.timeout(TURN_S + 5):
            await router.until_workers(False, True, True, True)
        await innocents(router, "tiny")


class Flood:
    """A worker's call that sends without end; `sent` is how much of it was taken."""

    def __init__(self, *names: str, data: bytes = PIECE) -> None:
        self.names, self.data, self.sent, self.is_cancelled = names, data, 0, False

    def GetTokenizer(self, request: Any, **_: Any) -> "Flood":
        return self

    async def __aiter__(self) -> AsyncIterator[GetTokenizerResponse]:
        while not self.is_cancelled:
            for name in self.names:
                self.sent += len(self.data)
                yield GetTokenizerResponse(name=name, data=self.data)

    def cancel(self) -> None:
        self.is_cancelled = True


FLOODS = {
    "one file": (("tokenizer.json",), PIECE, "tokenizer.json has more than"),
    "unknown names": (("tokenizer.bin", "../etc/passwd"), PIECE, "tokenizer files have more than"),
    "many files": (tuple(f"additional_chat_templates/{n}.jinja" for n in range(1000)), b"x", "more than 64 tokenizer"),
    "names alone": (("n" * 100_000,), b"", "tokenizer files have more than"),
}


@pytest.mark.parametrize("name", FLOODS)
async def test_files_without_end_are_given_up_when_they_are_larger_than_any(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_pool, "MAX_FILE_BYTES", 4 << 20)
    monkeypatch.setattr(tokenizer_pool, "MAX_ALL_BYTES", 8 << 20)
    names, data, problem = FLOODS[name]
    flood: Any = Flood(*names, data=data)
    with pytest.raises(TokenizerError, match=problem):
        await fetched(flood)
    assert flood.sent <= 9 << 20
    assert flood.is_cancelled


async def test_a_worker_may_send_a_file_that_this_router_does_not_know() -> None:
    files = {**tokenizer_files(), "vocab.txt": b"x", "additional_chat_templates/../../x.jinja": b"y"}
    worker = FakeWorker("newer", files=files, tokenizer_digest=b"of its own")
    async with cluster(worker) as router:
        assert await router.answer("text")
    assert len(files) <= MAX_FILES


async def test_a_flood_costs_its_worker_its_place_and_no_innocent_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "MAX_FILE_BYTES", 4 << 20)
    good = FakeWorker("good")
    liar = TokenizerLiar("liar", pieces=[("tokenizer.json", PIECE)] * 16, tokenizer_digest=b"another")
    liar.may_speak.set()
    async with cluster(good, liar, expected=(True, False)) as router:
        await until(lambda: "more than" in router.links[1].problem)
        await innocents(router, "tiny")
        await until(lambda: liar.asked >= 2)
        assert liar.tokenizer_calls == 1, "in one life of a worker its files stay as they are"
