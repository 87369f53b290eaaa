"""A number in a body costs nothing: what it asks for is made only once the request is checked and admitted."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.loop_work import watched_loop
from tests.router.openai.openai_rig import CHAT, client

MOST = 2**32 - 1
GROWN_BYTES = 512 << 20  # that the process may map more: an allocation beyond it fails, instead of the machine
MOST_WORK_S = 0.04

PROMPTS: dict[str, Any] = {
    "a text": "hi",
    "texts": ["hi"] * 256,
    "token ids": [100, 101],
    "lists of token ids": [[100, 101]] * 256,
}


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Makes allocations fail beyond GROWN_BYTES more than there are now."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + GROWN_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_completions_refuse_any_number_of_choices_at_once(prompt: str, *, stream: bool) -> None:
    async with client(FakeWorker("w")) as asks:
        await asks.complete(PROMPTS[prompt])
        for n in (MOST, 4_000_000, 5):
            with bounded_memory():
                async with watched_loop() as work:
                    error = await asks.refusal("/v1/completions", prompt=PROMPTS[prompt], n=n, stream=stream)
            assert (error["code"], error["param"]) == ("invalid_request", "n")
            assert work.longest_s < MOST_WORK_S, n
        await asks.complete(PROMPTS[prompt], n=4, max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_refuses_any_number_of_choices_at_once(*, stream: bool) -> None:
    async with client(FakeWorker("w")) as asks:
        await asks.chat()
        for n in (MOST, 4_000_000, 5):
            with bounded_memory():
                async with watched_loop() as work:
                    error = await asks.refusal("/v1/chat/completions", messages=CHAT, n=n, stream=stream)
            assert (error["code"], error["param"]) == ("invalid_request", "n")
            assert work.longest_s < MOST_WORK_S, n
        assert len((await asks.chat(n=4))["choices"]) == 4


NUMBERS = ["max_tokens", "min_tokens", "top_k", "seed", "prompt_logprobs", "logprobs", "best_of", "priority"]


@pytest.mark.parametrize("stream", [False, True])
async def test_other_numbers_cost_no_more(*, stream: bool) -> None:
    async with client(FakeWorker("w")) as asks:
        await asks.complete(["hi"] * 256)
        for name, number in product(NUMBERS, (MOST, 2**31 - 1, 4_000_000)):
            body = {"model": "tiny", "prompt": "hi", "stream": stream, name: number}
            with bounded_memory():
                async with watched_loop() as work:
                    answer = await asks.post("/v1/completions", body)
            assert answer.status_code in (200, 400), answer.text
            assert work.longest_s < MOST_WORK_S, (name, number)


async def test_large_sampling_parameters_are_read_once_for_all_prompts() -> None:
    bias = {str(token): 1.0 for token in range(4000)}
    async with client(FakeWorker("w")) as asks:
        await asks.complete()
        async with watched_loop() as work:
            error = await asks.refusal("/v1/completions", prompt=["hi"] * 256, logit_bias=bias)
        assert error["param"] == "logit_bias"
        assert work.longest_s < MOST_WORK_S
