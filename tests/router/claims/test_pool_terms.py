"""Workers of one model that differ in what decides tokens and text are not one pool: most of them are."""

import json
from random import Random

from tests.router.cluster import cluster, until
from tests.router.fake_worker import FakeWorker
from tests.router.liar import PROMPT
from tests.router.tokenizer_files import VOCAB_SIZE, tokenizer_files
from trunkline.tokenizer_digest import tokenizer_digest
from trunkline.v1.fleet_pb2 import ListWorkersRequest
from trunkline.v1.generation_pb2 import SamplingParams
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.workers.pool_terms import Terms, most_common


def test_most_workers_decide_what_must_agree_and_of_equally_many_those_from_before() -> None:
    a, b = Terms(100, b"x"), Terms(100, b"y")
    for seed in range(200):
        rng = Random(seed)
        terms = [rng.choice((a, b)) for _ in range(rng.randrange(1, 7))]
        before = rng.choice((None, a, b))
        common = most_common(terms, before)
        assert 2 * terms.count(common) >= len(terms)
        if 2 * terms.count(common) == len(terms):
            assert common == (before or terms[0])


def other_text(contents: dict[str, bytes]) -> dict[str, bytes]:
    """Files of a tokenizer that is as large, and spells two of its tokens the other way round."""
    files = json.loads(contents["tokenizer.json"])
    vocab = files["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    return {**contents, "tokenizer.json": json.dumps(files).encode()}


def another_version(contents: dict[str, bytes]) -> dict[str, bytes]:
    """Files of the same tokenizer, written otherwise, with one more, as an older or newer worker sends them."""
    return {
        **contents,
        "tokenizer.json": json.dumps(json.loads(contents["tokenizer.json"]), indent=1).encode(),
        "special_tokens_map.json": b'{"bos_token": "<s>"}',
    }


async def test_a_worker_with_another_tokenizer_is_set_aside_by_name_and_its_text_never_mixes() -> None:
    good = [FakeWorker("good-0"), FakeWorker("good-1", files=another_version(tokenizer_files()))]
    odd = FakeWorker("odd", files=other_text(tokenizer_files()))
    async with cluster(*good, odd) as router:
        for number in range(12):
            await router.answer(f"{number} abba")
        listed = (await router.fleet.ListWorkers(ListWorkersRequest())).workers
        problems = {one.worker_id: one.problem for one in listed}
        assert "other tokens than at 2 of the model's 3" in problems.pop("odd")
        assert set(problems.values()) == {""}
        assert not odd.submits
        assert all(worker.submits for worker in good), "files that are written otherwise are no other tokenizer"
        before = tokens_of_text(good[0])
        for worker in good:
            worker.send_load(draining=True)
        await until(lambda: not (router.connected(0).accepts or router.connected(1).accepts))
        await router.answer("abba")
        assert tokens_of_text(odd)[-4:] != before[-4:], "when the others leave, its terms hold"


async def test_a_copied_digest_brings_nobody_the_copiers_files() -> None:
    for number in range(6):  # whichever comes first
        good, copier = FakeWorker("good"), FakeWorker("copier", files=other_text(tokenizer_files()))
        copier.tokenizer_digest = tokenizer_digest(good.files)
        workers = (copier, good) if number % 2 else (good, copier)
        async with cluster(*workers, seed=number) as router:
            await router.answer("abba")
            assert router.connected(workers.index(good)).tokenizer.encoding == encoding_of(good.files)


def tokens_of_text(worker: FakeWorker) -> list[int]:
    return list(worker.submits[-1].prompt_token_ids)


def encoding_of(files: dict[str, bytes]) -> bytes:
    return PromptTokenizer(files, Helpers()).encoding


async def test_defaults_that_few_workers_have_are_nobodys() -> None:
    defaults = [SamplingParams(temperature=value) for value in (0.5, 0.5, 0.25)]
    workers = [FakeWorker(f"w{n}", default_sampling=each, context_length=4096 + n) for n, each in enumerate(defaults)]
    async with cluster(*workers) as router:
        for number in range(24):
            await router.answer([20 + number, *PROMPT])
        assert {submit.sampling.temperature for worker in workers for submit in worker.submits} == {0.5}
        assert workers[2].submits, "it is a worker like the others"


async def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_though_it_comes_alone() -> None:
    small = FakeWorker("small", vocab_size=VOCAB_SIZE - 1, model="other")
    async with cluster(FakeWorker("good"), small, expected=(True, False)) as router:
        await until(lambda: "tokenizer belongs to another model" in router.links[1].problem)
