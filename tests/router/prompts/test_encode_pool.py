"""Long texts are tokenized by processes of their own: exactly as here, without holding anybody up."""

import asyncio
import os
import signal
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from tests.parameters import one_in
from tests.router.cluster import cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.loop_work import watched_loop
from tests.router.tokenizer_files import BOS, DEMO_MODEL, tokenizer_files
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import TokenizeRequest
from trunkline_router.prompts.encode_pool import PROCESSES, EncodePool, EncoderSource
from trunkline_router.prompts.fair_turns import Bounds
from trunkline_router.prompts.render_pool import RenderPool
from trunkline_router.prompts.tokenizer import MAX_TEXT_BYTES, THREAD_CHARACTERS, THREAD_TOKENS, PromptTokenizer

DEMO = EncoderSource((DEMO_MODEL / "tokenizer.json").read_bytes())
BYTES = EncoderSource(tokenizer_files()["tokenizer.json"])
LONG = "x" * (THREAD_CHARACTERS + 1)
SECONDS = "The little dog ran to the park, and saw 12 birds there. " * 18_000  # a MiB
MOST_WORK_S = 0.2  # of the router and of its client, which share the loop
HERE = Path("/proc/self/statm")


@pytest.fixture
async def pool() -> AsyncIterator[EncodePool]:
    made = EncodePool()
    yield made
    await made.close()
    assert made.is_idle


def rss_mib(pid: int | str = "self") -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) / 256


async def encoded(pool: EncodePool, text: str, source: EncoderSource = BYTES, tenant: str = "") -> "array[int]":
    return await pool.encode(source, text, special_tokens=False, tenant=tenant)


TEXTS = {
    "prose": "Once upon a time, Lily's 3 friends\n\nwent home.  ",
    "letters of all widths": "aé漢🦊\u0301 ",
    "punctuation": "! ?",
    "one letter": "a",
    "blanks": " ",
    "special tokens": "<s></s>x<unk>",
    "nothing printable": "\0\x01\r\n",
}


@pytest.mark.parametrize("special_tokens", one_in(2, [False, True]))
@pytest.mark.parametrize("model", [DEMO_MODEL, "tokenizers/tinyllama", "tokenizers/phi-3-mini"], ids=str)
async def test_long_texts_become_the_same_tokens_as_short_ones(
    model: Path | str, special_tokens: bool, shared: Path, renderers: RenderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared / model  # of an absolute path nothing but it is left
    files = {path.name: path.read_bytes() for path in folder.glob("tokenizer*")}
    tokenizer = PromptTokenizer(files, renderers)
    for text in TEXTS.values():
        long = (text * THREAD_CHARACTERS * 2)[: THREAD_CHARACTERS + 100]
        ids = await tokenizer.encode(long, special_tokens=special_tokens)
        assert isinstance(ids, array), "it came from a process"
        with monkeypatch.context() as patched:
            patched.setattr("trunkline_router.prompts.tokenizer.THREAD_CHARACTERS", len(long))
            assert ids.tolist() == await tokenizer.encode(long, special_tokens=special_tokens)


@pytest.mark.parametrize("keep_special", [True, False])
@pytest.mark.parametrize("model", [DEMO_MODEL, "tokenizers/tinyllama", "tokenizers/phi-3-mini"], ids=str)
async def test_many_tokens_become_the_same_text_as_few(
    model: Path | str, keep_special: bool, shared: Path, renderers: RenderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in (shared / model).glob("tokenizer*")}
    tokenizer, draw = PromptTokenizer(files, renderers), Random(0)
    for vocabulary in (3, 300, 500):  # special tokens and bytes that make no characters, often or at times
        ids = array("i", (draw.randrange(vocabulary) for _ in range(THREAD_TOKENS + 1)))
        text = await tokenizer.decode(ids, keep_special=keep_special)
        with monkeypatch.context() as patched:
            patched.setattr("trunkline_router.prompts.tokenizer.THREAD_TOKENS", len(ids))
            assert text == await tokenizer.decode(ids, keep_special=keep_special)


@pytest.mark.slow
@pytest.mark.skipif(not HERE.exists(), reason="memory is looked up in /proc")
async def test_the_longest_text_holds_nobody_up_and_leaves_no_memory_behind() -> None:
    text = "! " * (MAX_TEXT_BYTES // 2)
    request = TokenizeRequest(text=text)
    async with cluster(FakeWorker("a")) as router:
        await router.answer("x")
        before = rss_mib()
        assert (await router.stub.Tokenize(TokenizeRequest(text=LONG))).token_ids[0] == BOS
        answers = 0
        async with watched_loop() as work:
            call = asyncio.ensure_future(router.stub.Tokenize(request, timeout=60))
            while not call.done():
                await router.answer("x")
                answers += 1
                await asyncio.sleep(0.02)  # leaves the core to what encodes
        assert len((await call).token_ids) == MAX_TEXT_BYTES + 1
        assert answers > 5
        assert work.longest_s < MOST_WORK_S
        assert rss_mib() - before < 150


@pytest.mark.parametrize("num_hostile", [1, 2, pytest.param(5, marks=pytest.mark.slow)])
async def test_hostile_tenants_with_long_texts_hold_up_another_ones_for_a_slice_or_two(
    num_hostile: int, pool: EncodePool
) -> None:
    await asyncio.gather(*(encoded(pool, LONG, DEMO, str(tenant)) for tenant in range(PROCESSES)))  # all are there
    hostile = [f"hostile {number}" for number in range(num_hostile)]
    hogging = [asyncio.create_task(encoded(pool, SECONDS * 3, DEMO, tenant)) for tenant in hostile for _ in range(3)]
    await asyncio.sleep(0)
    for source in (BYTES, DEMO, BYTES):
        assert await encoded(pool, LONG, source, "innocent")
        assert not all(task.done() for task in hogging), "the innocent waited for all of them"
    for task in hogging:
        task.cancel()
    await asyncio.gather(*hogging, return_exceptions=True)


@pytest.mark.slow
async def test_a_text_that_gave_way_is_encoded_all_the_same(pool: EncodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool._places, "_slice_s", 0.01)
    tenants = [f"hostile {number}" for number in range(PROCESSES)]
    tasks = [asyncio.create_task(encoded(pool, SECONDS, DEMO, tenant)) for tenant in tenants]
    await until(lambda: pool._places._turns._num_slow == PROCESSES)
    assert len(await encoded(pool, LONG, tenant="innocent")) == len(LONG)
    assert not all(task.done() for task in tasks), "one of them gave way"
    first, *others = await asyncio.gather(*tasks)
    assert all(ids == first for ids in others)


async def test_a_tenants_texts_take_one_process_at_a_time(pool: EncodePool) -> None:
    texts = [asyncio.create_task(encoded(pool, LONG, tenant="one")) for _ in range(4)]
    await asyncio.gather(*texts)
    assert len(pool._idle) == 1


async def test_text_without_measure_is_told_to_come_back_and_what_waits_is_encoded() -> None:
    pool = EncodePool(bounds=Bounds(8, 16, bytes_of_one=3 * len(LONG), bytes_of_all=4 * len(LONG)))
    waiting = [asyncio.create_task(encoded(pool, LONG, tenant="hog")) for _ in range(4)]
    await asyncio.sleep(0)
    waiting += [asyncio.create_task(encoded(pool, LONG, tenant=tenant)) for tenant in ("b", "c")]
    refused = [task for task in await asyncio.gather(*waiting, return_exceptions=True) if not isinstance(task, array)]
    assert [(type(one), getattr(one, "reason", "")) for one in refused] == [(RequestRefused, "OVERLOADED")] * 2
    assert all(waiting[index].exception() is None for index in (0, 1, 4, 5)), "the tenant with the most loses its last"
    assert await encoded(pool, LONG, tenant="hog")
    await pool.close()


async def test_a_tokenizer_that_cannot_be_loaded_is_refused_and_the_process_goes_on(pool: EncodePool) -> None:
    for _ in range(2):
        with pytest.raises(RequestRefused, match="cannot be loaded"):
            await encoded(pool, LONG, EncoderSource(b"{}"))
    (encoder,) = pool._idle
    assert len(await encoded(pool, LONG)) == len(LONG)
    assert pool._idle == [encoder]


async def test_a_text_that_takes_too_long_is_refused_and_others_go_on() -> None:
    pool = EncodePool(time_limit_s=0.5)
    with pytest.raises(RequestRefused, match=r"takes longer than 0\.5 s for this input") as refused:
        await encoded(pool, SECONDS * 2, DEMO)
    assert (refused.value.reason, refused.value.field) == ("INVALID_REQUEST", "text")
    assert len(await encoded(pool, LONG)) == len(LONG)
    await pool.close()


async def test_a_process_that_was_killed_is_replaced(pool: EncodePool) -> None:
    await encoded(pool, LONG)
    (encoder,) = pool._idle
    os.kill(encoder._process.pid, signal.SIGKILL)
    assert len(await encoded(pool, LONG)) == len(LONG)


async def test_a_cancelled_text_is_not_the_next_ones_answer(pool: EncodePool) -> None:
    await encoded(pool, LONG)
    for _ in range(3):
        task = asyncio.create_task(encoded(pool, SECONDS, DEMO))
        await until(lambda: not pool._idle)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await encoded(pool, LONG) == await encoded(pool, LONG)
        assert len(await encoded(pool, LONG)) == len(LONG)


async def test_models_take_turns_at_one_process(pool: EncodePool) -> None:
    first = [await encoded(pool, SECONDS[:40_000], source) for source in (DEMO, BYTES)]
    for _ in range(3):
        assert [await encoded(pool, SECONDS[:40_000], source) for source in (DEMO, BYTES)] == first
    assert len(pool._idle) == 1


@pytest.mark.skipif(not HERE.exists(), reason="memory is looked up in /proc")
async def test_a_process_gives_back_what_a_long_text_took(pool: EncodePool) -> None:
    await encoded(pool, LONG, DEMO)
    (encoder,) = pool._idle
    before = rss_mib(encoder._process.pid)
    await encoded(pool, "! " * (1 << 19), DEMO)
    await until(lambda: rss_mib(encoder._process.pid) - before < 64)
