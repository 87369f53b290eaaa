"""What is counted of an answer that is parsed: in its usage, its span and its line in the log."""

import asyncio
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import structlog

from tests.router.api.observed import Traces, ended
from tests.router.cluster import cluster
from tests.router.direct_rig import KEY, arrival, choices, direct, fakes
from tests.router.fake_worker import WORKER_DRAINS, FakeWorker
from tests.router.tokenizer_files import tokenizer_files
from tests.runtime.otlp_receiver import GENERATE
from trunkline import Client
from trunkline.client.completion import Completion
from trunkline.v1.fleet_pb2 import ListRequestsRequest
from trunkline.v1.inference_pb2 import Usage
from trunkline_router.prompts import tokenizer
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import PromptTokenizer
from trunkline_router.prompts.tokenizer_files import described
from trunkline_router.record.request_record import RequestRecord
from trunkline_router.request import answer_counts

CHAT = [("user", "hi")]
TEMPLATE = "{% for tool in tools or [] %}tool {% endfor %}{{ messages[0].content }}"
TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
REASONING = "Why not? Ünd. " * 500 + "So."  # longer than what is converted on the event loop
ANSWER = f"<think>{REASONING}</think>Well.{CALL}{CALL[:40]}"


@pytest.fixture
def lines() -> Iterator[list[dict[str, object]]]:
    with structlog.testing.capture_logs() as captured:
        yield captured  # type: ignore[misc]


def hermes(**fields: Any) -> list[FakeWorker]:
    """They have room for a token for each byte of an answer."""
    room = dict.fromkeys(("vocab_size", "context_length", "kv_token_capacity"), 1 << 16)
    files = tokenizer_files(chat_template=TEMPLATE)
    return fakes("a", "b", **{"answer_format": "hermes", "files": files, **room, **fields})


async def completed(client: Client, workers: Any, text: str, **options: Any) -> Completion:
    """What the client makes of an answer, each choice of which moves to another worker in its middle."""
    asking, n, middle = asyncio.create_task(client.complete(CHAT, **options)), options.get("n", 1), len(text) // 2
    begun = await choices(workers, n)
    for choice in begun:
        choice.tokens(len(text[:middle].encode()), text=text[:middle])
    for choice in begun:
        choice.fail(WORKER_DRAINS)
    for choice in await choices(workers, n):
        rest = text.encode()[choice.submit.resume.text_bytes_sent :]
        choice.tokens(len(rest), text=rest.decode(), finish=True)
    return await asking


async def usage_of(text: str, **fields: Any) -> Usage:
    workers = hermes(**fields)
    async with cluster(*workers, grant_key=KEY) as router, Client(f"127.0.0.1:{router.port}") as client:
        return (await completed(client, workers, text)).usage


async def test_reasoning_and_calls_are_counted_whatever_becomes_of_the_worker(lines: Any) -> None:
    """The tokenizer has a token for each byte."""
    workers, traces = hermes(), Traces()
    async with (
        cluster(*workers, grant_key=KEY, observer=traces.observer) as router,
        Client(f"127.0.0.1:{router.port}") as client,
    ):
        done = await completed(client, workers, ANSWER, n=2, tools=TOOLS)
        assert [choice.reasoning for choice in done.choices] == [REASONING] * 2
        tokens = 2 * len(await client.tokenize(REASONING, special_tokens=False))
    assert (done.usage.reasoning_tokens, done.usage.resumptions) == (tokens, 1)
    line, attributes = ended(lines), traces.one(GENERATE).attributes
    assert (line["tool_calls"], line["reasoning_tokens"]) == (4, tokens)
    assert (attributes["trunkline.tool_calls"], attributes["trunkline.complete_tool_calls"]) == (4, 2)
    assert attributes["gen_ai.usage.reasoning.output_tokens"] == tokens


async def test_the_list_of_requests_has_the_numbers() -> None:
    workers = hermes()
    async with cluster(*workers, grant_key=KEY) as router, Client(f"127.0.0.1:{router.port}") as client:
        usage = (await completed(client, workers, ANSWER, tools=TOOLS)).usage
        (shown,) = (await router.fleet.ListRequests(ListRequestsRequest())).requests
    assert (shown.reasoning_tokens, shown.tool_calls) == (usage.reasoning_tokens, 2)


async def test_the_output_comes_before_the_count() -> None:
    workers = hermes()
    async with cluster(*workers, grant_key=KEY) as router, Client(f"127.0.0.1:{router.port}") as client:
        stream = client.generate(CHAT)
        begun = asyncio.create_task(anext(stream))
        (await arrival(workers)).tokens(9, text=f"<think>{REASONING}</think>Well.", finish=True)
        first, last = await begun, await anext(stream)
    assert (first.reasoning, first.text, first.finish_reason) == (REASONING, "Well.", None)
    assert (last.text, last.finish_reason, last.response.usage.reasoning_tokens) == ("", "length", 9)
    assert not first.response.HasField("usage")


async def test_an_answer_without_reasoning_has_no_tokens_of_it() -> None:
    usage = await usage_of("Well.")
    assert usage.HasField("reasoning_tokens")
    assert usage.reasoning_tokens == 0


async def test_reasoning_has_no_more_tokens_than_the_answer() -> None:
    workers = hermes()
    async with cluster(*workers, grant_key=KEY) as router, Client(f"127.0.0.1:{router.port}") as client:
        asking = asyncio.create_task(client.complete(CHAT))
        (await arrival(workers)).tokens(3, text="<think>Why not?</think>", finish=True)
        assert (await asking).usage.reasoning_tokens == 3


async def test_an_answer_that_is_not_parsed_counts_no_reasoning() -> None:
    assert not (await usage_of(ANSWER, answer_format="")).HasField("reasoning_tokens")


async def test_a_direct_client_counts_no_reasoning() -> None:
    workers = hermes()
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        done = await completed(client, workers, ANSWER)
    assert done.reasoning == REASONING
    assert not done.usage.HasField("reasoning_tokens")


@pytest.mark.parametrize(
    ("place", "limit", "value"), [(answer_counts, "MOST_WAIT_S", 0.0), (tokenizer, "MAX_TEXT_BYTES", len(REASONING))]
)
async def test_a_tokenizer_that_is_late_or_refuses_the_reasoning_fails_no_answer(
    monkeypatch: pytest.MonkeyPatch, place: ModuleType, limit: str, value: float
) -> None:
    monkeypatch.setattr(place, limit, value)
    usage = await usage_of(ANSWER)
    assert usage.completion_tokens == len(ANSWER.encode())
    assert not usage.HasField("reasoning_tokens")


async def test_a_late_count_goes_on_and_its_process_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    files, helpers = tokenizer_files(), Helpers()
    tokens = PromptTokenizer(files, helpers, described(files)[1])
    text = "late " * 100_000
    counted = len(await tokens.encode(text, special_tokens=False))
    [process] = helpers.long._idle
    monkeypatch.setattr(answer_counts, "MOST_WAIT_S", 0.005)
    parsers: Any = SimpleNamespace(reasoning=[[text]])
    prepared: Any = SimpleNamespace(tokenizer=tokens, scheduling=SimpleNamespace(tenant=""))
    usage = Usage(completion_tokens=1 << 20)
    await answer_counts.count_reasoning(parsers, prepared, RequestRecord("r"), usage)
    assert not usage.HasField("reasoning_tokens")
    assert await asyncio.gather(*answer_counts._counting) == [counted]
    assert helpers.long._idle == [process]
    await helpers.close()
