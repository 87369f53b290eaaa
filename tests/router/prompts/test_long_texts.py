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
from trunkline_router.prompts.helper_pool import JOB_BYTES, LONG, LONG_PROCESSES, HelperPool, Helpers, TokenizerSource
from trunkline_router.prompts.tokenizer import MAX_TEXT_BYTES, PromptTokenizer

DEMO = TokenizerSource((DEMO_MODEL / "tokenizer.json").read_bytes())
BYTES = TokenizerSource(tokenizer_files()["tokenizer.json"])
LONG_TEXT = "x" * (LONG + 1)
SECONDS = "The little dog ran to the park, and saw 12 birds there. " * 18_000  # a MiB
MOST_WORK_S = 0.2  # of the router and of its client, which share the loop
HERE = Path("/proc/self/statm")


@pytest.fixture
async def helpers(helpers: Helpers) -> AsyncIterator[Helpers]:
    yield helpers
    assert not helpers.long._accounts


def rss_mib(pid: int | str = "self") -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) / 256


async def encoded(helpers: Helpers, text: str, source: TokenizerSource = BYTES, tenant: str = "") -> "array[int]":
    return array("i", await helpers.convert(source, tenant, "encode", text, False))


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
    model: Path | str, special_tokens: bool, shared: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shared / model  # of an absolute path nothing but it is left
    files = {path.name: path.read_bytes() for path in folder.glob("tokenizer*")}
    tokenizer = PromptTokenizer(files, helpers)
    for text in TEXTS.values():
        long = (text * LONG * 2)[: LONG + 100]
        ids = await tokenizer.encode(long, special_tokens=special_tokens)
        with monkeypatch.context() as patched:
            patched.setattr("trunkline_router.prompts.tokenizer.INLINE", len(long))
            assert ids == await tokenizer.encode(long, special_tokens=special_tokens)


@pytest.mark.parametrize("keep_special", [True, False])
@pytest.mark.parametrize("model", [DEMO_MODEL, "tokenizers/tinyllama", "tokenizers/phi-3-mini"], ids=str)
async def test_many_tokens_become_the_same_text_as_few(
    model: Path | str, keep_special: bool, shared: Path, helpers: Helpers, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in (shared / model).glob("tokenizer*")}
    tokenizer, draw = PromptTokenizer(files, helpers), Random(0)
    for vocabulary in (3, 300, 500):  # special tokens and bytes that make no characters, often or at times
        ids = array("i", (draw.randrange(vocabulary) for _ in range(LONG + 1)))
        text = await tokenizer.decode(ids, keep_special=keep_special)
        with monkeypatch.context() as patched:
            patched.setattr("trunkline_router.prompts.tokenizer.INLINE", len(ids))
            assert text == await tokenizer.decode(ids, keep_special=keep_special)


@pytest.mark.slow
@pytest.mark.skipif(not HERE.exists(), reason="memory is looked up in /proc")
async def test_the_longest_text_holds_nobody_up_and_leaves_no_memory_behind() -> None:
    text = "! " * (MAX_TEXT_BYTES // 2)
    request = TokenizeRequest(text=text)
    async with cluster(FakeWorker("a")) as router:
        await router.answer("x")
        before = rss_mib()
        assert (await router.stub.Tokenize(TokenizeRequest(text=LONG_TEXT))).token_ids[0] == BOS
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


@pytest.mark.parametrize("num_hostile", [1, 2])
async def test_hostile_tenants_with_long_texts_leave_a_process_to_another_one(
    num_hostile: int, helpers: Helpers
) -> None:
    await asyncio.gather(
        *(encoded(helpers, LONG_TEXT, DEMO, str(tenant)) for tenant in range(LONG_PROCESSES))
    )  # all are there
    hostile = [f"hostile {number}" for number in range(num_hostile)]
    hogging = [asyncio.create_task(encoded(helpers, SECONDS * 3, DEMO, tenant)) for tenant in hostile for _ in range(3)]
    await asyncio.sleep(0)
    for source in (BYTES, DEMO, BYTES):
        assert await encoded(helpers, LONG_TEXT, source, "innocent")
        assert not all(task.done() for task in hogging), "the innocent waited for all of them"
    for task in hogging:
        task.cancel()
    await asyncio.gather(*hogging, return_exceptions=True)


async def test_a_tenants_texts_take_one_process_at_a_time(helpers: Helpers) -> None:
    texts = [asyncio.create_task(encoded(helpers, LONG_TEXT, tenant="one")) for _ in range(4)]
    await asyncio.gather(*texts)
    assert len(helpers.long._idle) == 1


async def test_text_without_measure_is_told_to_come_back_and_what_waits_is_encoded(helpers: Helpers) -> None:
    helpers.long = HelperPool(LONG_PROCESSES, max_bytes=6 * (len(LONG_TEXT) + 2 * JOB_BYTES))
    waiting = [asyncio.create_task(encoded(helpers, LONG_TEXT, tenant="hog")) for _ in range(4)]
    await asyncio.sleep(0)
    waiting += [asyncio.create_task(encoded(helpers, LONG_TEXT, tenant="b"))]
    *encoded_ones, refused, other = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(refused, RequestRefused)
    assert refused.reason == "OVERLOADED"
    assert [len(ids) for ids in [*encoded_ones, other] if isinstance(ids, array)] == [len(LONG_TEXT)] * 4
    assert await encoded(helpers, LONG_TEXT, tenant="hog")


async def test_a_tokenizer_that_cannot_be_loaded_is_refused_and_the_process_goes_on(helpers: Helpers) -> None:
    for _ in range(2):
        with pytest.raises(RequestRefused, match="cannot be loaded"):
            await encoded(helpers, LONG_TEXT, TokenizerSource(b"{}"))
    (encoder,) = helpers.long._idle
    assert len(await encoded(helpers, LONG_TEXT)) == len(LONG_TEXT)
    assert helpers.long._idle == [encoder]


async def test_a_text_that_takes_too_long_is_refused_and_others_go_on() -> None:
    helpers = Helpers(long_limit_s=0.5)
    with pytest.raises(RequestRefused, match=r"takes longer than 0\.5 s for this input") as refused:
        await encoded(helpers, SECONDS * 2, DEMO)
    assert (refused.value.reason, refused.value.field) == ("INVALID_REQUEST", "text")
    assert len(await encoded(helpers, LONG_TEXT)) == len(LONG_TEXT)
    await helpers.close()


async def test_a_process_that_was_killed_is_replaced(helpers: Helpers) -> None:
    await encoded(helpers, LONG_TEXT)
    (encoder,) = helpers.long._idle
    os.kill(encoder._process.pid, signal.SIGKILL)
    assert len(await encoded(helpers, LONG_TEXT)) == len(LONG_TEXT)


async def test_a_cancelled_text_is_not_the_next_ones_answer(helpers: Helpers) -> None:
    await encoded(helpers, LONG_TEXT)
    for _ in range(3):
        task = asyncio.create_task(encoded(helpers, SECONDS))
        await until(lambda: not helpers.long._idle)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await encoded(helpers, LONG_TEXT) == await encoded(helpers, LONG_TEXT)
        assert len(await encoded(helpers, LONG_TEXT)) == len(LONG_TEXT)


async def test_more_models_than_processes_take_turns_at_them(helpers: Helpers) -> None:
    sources = [DEMO, *(TokenizerSource(BYTES.file + b" " * number) for number in range(LONG_PROCESSES))]
    first = [await encoded(helpers, SECONDS[:40_000], source) for source in sources]
    for _ in range(2):
        assert [await encoded(helpers, SECONDS[:40_000], source) for source in sources] == first
    assert len(helpers.long._idle) == LONG_PROCESSES


@pytest.mark.skipif(not HERE.exists(), reason="memory is looked up in /proc")
async def test_a_process_gives_back_what_a_long_text_took(helpers: Helpers) -> None:
    await encoded(helpers, LONG_TEXT, DEMO)
    (encoder,) = helpers.long._idle
    before = rss_mib(encoder._process.pid)
    await encoded(helpers, "! " * (1 << 19), DEMO)
    await until(lambda: rss_mib(encoder._process.pid) - before < 64)
