"""Long texts are tokenized by processes of their own: exactly as here, without holding anybody up."""

import asyncio
import os
import signal
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from tests.router.cluster import cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.tokenizer_files import BOS, DEMO_MODEL, tokenizer_files
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import TokenizeRequest
from trunkline_router import encode_pool
from trunkline_router.encode_pool import EncodePool, EncoderSource
from trunkline_router.render_pool import RenderPool
from trunkline_router.tokenizer import MAX_TEXT_BYTES, THREAD_CHARACTERS, THREAD_TOKENS, PromptTokenizer
from trunkline_runtime.loop_lag import LoopLag

DEMO = EncoderSource((DEMO_MODEL / "tokenizer.json").read_bytes())
BYTES = EncoderSource(tokenizer_files()["tokenizer.json"])
LONG = "x" * (THREAD_CHARACTERS + 1)
SECONDS = "The little dog ran to the park, and saw 12 birds there. " * 18_000  # a MiB
MOST_LAG_S = 0.1
HERE = Path("/proc/self/statm")


@pytest.fixture
async def pool() -> AsyncIterator[EncodePool]:
    made = EncodePool()
    yield made
    await made.close()
    assert not made._accounts
    assert not made._num_bytes


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


@pytest.mark.parametrize("special_tokens", [True, False])
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
            patched.setattr("trunkline_router.tokenizer.THREAD_CHARACTERS", len(long))
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
            patched.setattr("trunkline_router.tokenizer.THREAD_TOKENS", len(ids))
            assert text == await tokenizer.decode(ids, keep_special=keep_special)


@pytest.mark.skipif(not HERE.exists(), reason="memory is looked up in /proc")
async def test_the_longest_text_holds_nobody_up_and_leaves_no_memory_behind() -> None:
    text = "! " * (MAX_TEXT_BYTES // 2)
    request = TokenizeRequest(text=text)
    async with cluster(FakeWorker("a")) as router, LoopLag().watching() as lag:
        await router.answer("x")
        before, lag_s = rss_mib(), lag.take()
        assert (await router.stub.Tokenize(TokenizeRequest(text=LONG))).token_ids[0] == BOS
        call = asyncio.ensure_future(router.stub.Tokenize(request, timeout=60))
        answers = 0
        while not call.done():
            await router.answer("x")
            answers += 1
            lag_s = max(lag_s, lag.take())
        assert len((await call).token_ids) == MAX_TEXT_BYTES + 1
        assert answers > 5
        assert lag_s < 2 * MOST_LAG_S
        assert rss_mib() - before < 150


async def test_while_one_tenants_texts_wait_for_each_other_another_ones_is_encoded(pool: EncodePool) -> None:
    await asyncio.gather(encoded(pool, LONG, DEMO, "a"), encoded(pool, LONG, DEMO, "b"))  # both processes are there
    hogging = [asyncio.create_task(encoded(pool, SECONDS, DEMO, "hog")) for _ in range(4)]
    await asyncio.sleep(0)
    for _ in range(5):
        assert len(await encoded(pool, LONG, BYTES, "innocent")) == len(LONG)
        assert sum(task.done() for task in hogging) <= 1
    for task in hogging:
        task.cancel()
    await asyncio.gather(*hogging, return_exceptions=True)


async def test_text_without_measure_is_told_to_come_back_and_what_waits_is_encoded(
    pool: EncodePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode_pool, "MAX_TENANT_BYTES", 3 * len(LONG))
    monkeypatch.setattr(encode_pool, "MAX_BYTES", 4 * len(LONG))
    waiting = [asyncio.create_task(encoded(pool, LONG, tenant="hog")) for _ in range(3)]
    await asyncio.sleep(0)
    for tenant, fits in (("hog", False), ("b", True), ("c", False)):
        task = asyncio.create_task(encoded(pool, LONG, tenant=tenant))
        await asyncio.sleep(0)
        if fits:
            waiting.append(task)
            continue
        with pytest.raises(RequestRefused) as refused:
            await task
        assert (refused.value.reason, refused.value.retry_delay_ms > 0) == ("OVERLOADED", True)
    assert [len(ids) for ids in await asyncio.gather(*waiting)] == [len(LONG)] * 4
    await encoded(pool, LONG, tenant="hog")


async def test_a_text_that_takes_too_long_is_refused_and_others_go_on() -> None:
    pool = EncodePool(time_limit_s=0.5)
    with pytest.raises(RequestRefused, match=r"takes longer than 0\.5 s for so much") as refused:
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
