"""Places for jobs: accounts take turns, and no place or job is ever lost."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.router.renderings import messages
from tests.router.tokenizer_files import CHAT_TEMPLATE, tokenizer_files
from trunkline.status import NO_WORKER, RequestRefused
from trunkline_router.prompts import helper_pool
from trunkline_router.prompts.helper_pool import JOB_BYTES, Helper, HelperPool, Helpers
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.prompts.tokenizer_files import TokenizerTraits

Work = Callable[[], Awaitable[bytes]]


class Places(HelperPool):
    """Its jobs are calls in this process."""

    async def _done(self, job: str, arguments: tuple[Any, ...], *_: object) -> bytes:
        return bytes(await arguments[0]())

    async def call(self, account: object, work: Work, num_bytes: int = 0) -> bytes:
        return await self.run(account, "render", work, limit_s=1.0, num_bytes=num_bytes)


class Held:
    """Runs until it is released."""

    def __init__(self) -> None:
        self.begun, self.released = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> bytes:
        self.begun.set()
        await self.released.wait()
        return b"held"


async def quick() -> bytes:
    return b"done"


async def turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_one_account_has_at_most_half_of_the_places() -> None:
    pool, works = Places(4), [Held() for _ in range(4)]
    tasks = [asyncio.create_task(pool.call("hog", work)) for work in works]
    await turns()
    assert [work.begun.is_set() for work in works] == [True, True, False, False]
    for _ in range(5):
        assert await pool.call("innocent", quick) == b"done"
    for work in works:
        work.released.set()
    assert await asyncio.gather(*tasks) == [b"held"] * 4
    assert not pool._accounts


async def test_accounts_that_wait_take_turns_one_job_each() -> None:
    pool, order = Places(1), list[str]()
    first = Held()
    tasks = [asyncio.create_task(pool.call("first", first))]
    await first.begun.wait()

    def noted(account: str) -> Work:
        async def work() -> bytes:
            order.append(account)
            return b""

        return work

    for account in "aaabbc":
        tasks.append(asyncio.create_task(pool.call(account, noted(account))))
        await turns()
    first.released.set()
    await asyncio.gather(*tasks)
    assert "".join(order) == "abcaba"
    assert not pool._accounts


async def test_an_account_gets_half_of_the_memory_that_the_others_leave() -> None:
    pool = Places(1, max_bytes=16 * JOB_BYTES)
    works = [Held() for _ in range(8)]
    tasks = [asyncio.create_task(pool.call("hog", work)) for work in works]
    await turns()
    for num_bytes in (0, JOB_BYTES):
        with pytest.raises(RequestRefused, match="too many") as refused:
            await pool.call("hog", quick, num_bytes)
        assert refused.value.reason == "OVERLOADED"
        assert refused.value.retry_delay_ms > 0
    with pytest.raises(RequestRefused, match="too many"):
        await pool.call("other", quick, 4 * JOB_BYTES)
    tasks.append(asyncio.create_task(pool.call("other", quick, 3 * JOB_BYTES)))
    await turns()
    for work in works:
        work.released.set()
    assert await asyncio.gather(*tasks) == [b"held"] * 8 + [b"done"]
    assert not pool._accounts


async def test_what_a_job_raises_is_raised_and_its_place_is_free_again() -> None:
    pool = Places(1)

    async def fails() -> bytes:
        raise TimeoutError("its own")

    for _ in range(3):
        with pytest.raises(TimeoutError, match="its own"):
            await pool.call("a", fails)
    assert await pool.call("a", quick) == b"done"
    assert not pool._accounts


async def test_conversations_and_texts_of_one_model_share_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    accounts = []

    async def run(pool: HelperPool, account: object, *_: object, **options: object) -> bytes:
        accounts.append(account)
        return b""

    monkeypatch.setattr(HelperPool, "run", run)
    files = tokenizer_files(chat_template=CHAT_TEMPLATE)
    tokenizer = PromptTokenizer(files, Helpers(), TokenizerTraits("", (), (), 64, 0, None))
    await tokenizer.encode_chat(messages(), tenant="acme")
    assert len(accounts) == 2
    assert len(set(accounts)) == 1


async def test_a_process_whose_job_leaves_while_it_starts_gets_the_next_job(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ready, num_started = asyncio.Event(), asyncio.Event(), 0

    class Started(Helper):
        def __init__(self) -> None:
            self.tokenizer = b""

        async def do(self, job: str, limit_s: float, *arguments: object) -> bytes:
            return b"done"

    async def start(niceness: int) -> Helper:
        nonlocal num_started
        num_started += 1
        begun.set()
        await ready.wait()
        return Started()

    monkeypatch.setattr(Helper, "start", start)
    pool = HelperPool(1)
    leaving = asyncio.create_task(pool.run("a", "render", limit_s=1.0))
    await begun.wait()
    leaving.cancel()
    staying = asyncio.create_task(pool.run("a", "render", limit_s=1.0))
    await turns()
    assert pool._num_busy == 1, "the process that starts keeps its place"
    ready.set()
    assert await staying == b"done"
    assert leaving.cancelled()
    assert num_started == 1
    assert not pool._accounts


@pytest.mark.parametrize(("module", "name", "value"), [
    (helper_pool, "PROGRAM", "no.such.module"), (sys, "executable", "/no/such/program"),
])  # fmt: skip
async def test_a_process_that_does_not_start_is_a_refusal(
    module: Any, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, name, value)
    pool = HelperPool(1)
    with pytest.raises(RequestRefused, match="does not start") as refused:
        await pool.run("a", "render", limit_s=1.0)
    assert refused.value.reason == NO_WORKER
    assert not pool._accounts


@pytest.mark.parametrize("seed", range(20))
async def test_callers_that_leave_at_any_moment_leave_no_place_taken(seed: int) -> None:
    draw, pool = Random(seed), Places(4, max_bytes=40 * JOB_BYTES)

    async def work() -> bytes:
        await turns(draw.randrange(20))
        return b""

    tasks: list[asyncio.Task[bytes]] = []
    for _ in range(300):
        tasks.append(asyncio.create_task(pool.call(draw.randrange(6), work)))
        await turns(draw.randrange(6))
        if draw.random() < 0.5:
            draw.choice(tasks).cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(one) for one in ended} >= {bytes, asyncio.CancelledError}
    assert {type(one) for one in ended} <= {bytes, asyncio.CancelledError, RequestRefused}
    assert not pool._accounts
    assert (pool._num_busy, pool._num_bytes) == (0, 0)
    assert await asyncio.gather(*(pool.call(account, quick) for account in range(6))) == [b"done"] * 6


def of_session(pid: int) -> str:
    """The niceness of a process's session, as the system tells it; empty if it has none."""
    try:
        return " ".join(Path(f"/proc/{pid}/autogroup").read_text().split()[1:])
    except FileNotFoundError:
        return ""


async def test_long_jobs_give_way_to_other_processes_and_sessions_of_the_machine() -> None:
    helper = await Helper.start(10)
    try:
        pid = helper._process.pid
        assert os.getpriority(os.PRIO_PROCESS, pid) == 10
        assert os.getsid(pid) == pid
        assert of_session(pid) in ("nice 10", "")
    finally:
        await helper.end()
