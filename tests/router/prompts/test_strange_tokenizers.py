"""Tokenizers that are large, or in which anything may be hidden, are read and run in processes that have limits."""

import asyncio
import json
import time
from array import array
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from tests.router.cluster import cluster, refusal, until
from tests.router.fake_worker import FakeWorker
from tests.router.liar import TokenizerLiar, innocents
from tests.router.loop_work import watched_loop
from tests.router.tokenizer_files import (
    BOS,
    DEMO_MODEL,
    LARGE_VOCABULARY,
    byte_tokenizer,
    large_file,
    tokenizer_files,
)
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import DetokenizeRequest, GenerateRequest, TokenizeRequest
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import PromptTokenizer, TokenizerError
from trunkline_router.prompts.tokenizer_files import (
    CHEAP_BYTES,
    CHEAP_CHARACTERS,
    CHEAP_GROWTH,
    CHEAP_STEPS,
    MAX_TOKENS,
    TokenizerTraits,
    described,
    is_cheap,
)

HANGS = r"(a+)+$"  # takes two to the power of the letters before one that does not match
PIECE_BYTES = 256 << 10
MOST_WORK_S = 0.1  # of the router and of the worker, which share the loop


def strange(**parts: Any) -> Tokenizer:
    tokenizer = byte_tokenizer()
    for name, part in parts.items():
        setattr(tokenizer, name, part)
    return tokenizer


def grows(times: int) -> normalizers.Normalizer:
    return normalizers.Replace("a", "b" * times)


CHEAP = {
    "bytes": byte_tokenizer(),
    "an ordinary replacement": strange(normalizer=normalizers.Sequence([normalizers.Replace(" ", "▁"), grows(8)])),
}
NOT_CHEAP = {
    "a pattern": strange(pre_tokenizer=pre_tokenizers.Split(Regex(HANGS), "isolated")),
    "a pattern to replace": strange(normalizer=normalizers.Replace(Regex("a"), "b")),
    "text that becomes longer": strange(normalizer=grows(CHEAP_GROWTH + 1)),
    "text that becomes longer and longer": strange(normalizer=normalizers.Sequence([grows(8)] * 3)),
    "steps without measure": strange(normalizer=normalizers.Sequence([normalizers.NFC()] * CHEAP_STEPS)),
    "a long rule": strange(normalizer=normalizers.Prepend("x" * (CHEAP_CHARACTERS + 1))),
}


@pytest.mark.parametrize("name", [*CHEAP, *NOT_CHEAP])
def test_what_may_take_much_for_a_short_text_is_not_cheap(name: str) -> None:
    assert is_cheap({**CHEAP, **NOT_CHEAP}[name].to_str().encode()) == (name in CHEAP)


def test_the_demo_model_is_cheap_and_large_and_damaged_files_are_not() -> None:
    demo = (DEMO_MODEL / "tokenizer.json").read_bytes()
    assert is_cheap(demo)
    assert not is_cheap(demo + b" " * CHEAP_BYTES)
    for data in (b"", b"{", b"\xff", b"[" * 100_000):
        assert not is_cheap(data)


@pytest.mark.parametrize("model", [DEMO_MODEL, "tokenizers/tinyllama"], ids=str)
async def test_a_tokenizer_in_processes_makes_the_same_of_everything_as_here(
    model: Path | str, shared: Path, helpers: Helpers
) -> None:
    files = {path.name: path.read_bytes() for path in (shared / model).glob("tokenizer*")}
    traits = await helpers.inspect(files, worker="w")
    assert traits == described(files)[1] == TokenizerTraits.from_json(traits.to_json())
    here, there = PromptTokenizer(files, helpers), PromptTokenizer(files, helpers, traits)
    assert there.encoding == here.encoding
    assert there.largest_id == here.largest_id
    for text in ("a", "Once upon a time, Lily's 3 friends\n\nwent home.  ", "aé漢🦊\u0301 <s></s>", "x " * 5000):
        for special_tokens in (True, False):
            ids = await there.encode(text, special_tokens=special_tokens)
            assert list(ids) == list(await here.encode(text, special_tokens=special_tokens))
            for keep in (True, False):
                read = array("i", ids)
                assert await there.decode(read, keep_special=keep) == await here.decode(read, keep_special=keep)


async def test_a_large_tokenizer_is_never_read_in_the_process_that_serves() -> None:
    files = {**tokenizer_files(), "tokenizer.json": large_file()}
    assert not is_cheap(files["tokenizer.json"])
    pieces = [
        (name, data[at : at + PIECE_BYTES]) for name, data in files.items() for at in range(0, len(data), PIECE_BYTES)
    ]
    good = FakeWorker("good")
    large = TokenizerLiar("large", model="large", files=files, pieces=pieces, vocab_size=LARGE_VOCABULARY + 1)
    async with cluster(good, large, expected=(True, False)) as router:
        await router.answer("x", model="tiny")
        async with watched_loop() as work:
            large.may_speak.set()
            await until(lambda: router.links[1].worker is not None)
        assert work.longest_s < MOST_WORK_S
        ids = (await router.stub.Tokenize(TokenizeRequest(text="Once", model="large"))).token_ids
        assert ids[0] == BOS
        text = (await router.stub.Detokenize(DetokenizeRequest(token_ids=ids, model="large"))).text
        assert text == "Once"
        assert await router.answer("Once", model="large")


async def test_a_text_on_which_a_pattern_hangs_costs_itself_alone() -> None:
    files = tokenizer_files(NOT_CHEAP["a pattern"])
    good, hangs = FakeWorker("good"), FakeWorker("hangs", model="hangs", files=files)
    async with cluster(good, hangs) as router:
        asked = asyncio.create_task(refusal(router.stub.Generate(GenerateRequest(text="a" * 60 + "b", model="hangs"))))
        async with watched_loop() as work:
            await innocents(router, "tiny")
            refused = await asked
        assert (refused.reason, refused.field) == ("INVALID_REQUEST", "text")
        assert work.longest_s < MOST_WORK_S
        assert await router.answer("b", model="hangs")


@pytest.mark.parametrize("largest_id", [MAX_TOKENS, 2**32 - 1])
async def test_ids_without_measure_are_refused_before_anything_walks_over_them(
    largest_id: int, helpers: Helpers
) -> None:
    file = json.loads(byte_tokenizer().to_str())
    file["model"]["vocab"]["far"] = largest_id
    files = {**tokenizer_files(), "tokenizer.json": json.dumps(file).encode()}
    before_s = time.process_time()
    with pytest.raises(TokenizerError, match=f"the id {largest_id}; ids below {MAX_TOKENS}"):
        PromptTokenizer(files, helpers)
    with pytest.raises(RequestRefused, match=f"the id {largest_id}; ids below {MAX_TOKENS}"):
        await helpers.inspect(files, worker="w")
    assert time.process_time() - before_s < MOST_WORK_S


async def test_files_that_take_too_long_to_read_set_their_worker_aside() -> None:
    helpers = Helpers(long_limit_s=0.05)
    try:
        with pytest.raises(RequestRefused, match=r"takes longer than 0\.05 s"):
            await helpers.inspect({"tokenizer.json": large_file()}, worker="w")
        assert (await helpers.inspect(tokenizer_files(), worker="w")).largest_id > 0
    finally:
        await helpers.close()
