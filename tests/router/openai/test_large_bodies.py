"""Every value of a body is used to the end, however long the body is, and long lists are not kept."""

import asyncio
import gc
import json
import time
from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import CHAT, OpenAiClient, client
from tests.router.tokenizer_files import BOS, byte_tokenizer, tokenizer_files
from trunkline_router.edge.http.json_body import STEP_BYTES
from trunkline_router.edge.openai.completion_request import CompletionRequest
from trunkline_router.edge.request_fields import MAX_TEMPLATE_KWARGS_BYTES, json_text

TOKENIZER = byte_tokenizer()
ROOM = 2 * STEP_BYTES  # tokens of a byte each
NAMES = "{{ messages | map(attribute='content') | join }}|{% for word in names.of.words %}{{ word }},{% endfor %}"
WORDS = ["one", "two", "three"]
ASKED = "hi|one,two,three,"
LONG_TEXT = "x" * STEP_BYTES + "y"
LONG_IDS = [100 + index % 100 for index in range(STEP_BYTES // 2)]
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


def variables(length: int) -> dict[str, Any]:
    """Variables of which the template writes the words."""
    return {"names": {"of": {"words": WORDS}}, "padding": ["x" * length]}


def conversation(path: str, length: int) -> dict[str, Any]:
    given = {"input": "hi"} if path == PATHS["responses"] else {"messages": CHAT}
    most = "max_output_tokens" if path == PATHS["responses"] else "max_tokens"
    return {"model": "tiny", most: 2, "chat_template_kwargs": variables(length), **given}


def worker() -> FakeWorker:
    files = tokenizer_files(chat_template=NAMES)
    return FakeWorker("w", context_length=ROOM, kv_token_capacity=ROOM, files=files)


async def answered(asks: OpenAiClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    answer = await asks.post(path, body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def test_the_long_bodies_of_these_tests_are_longer_than_a_step() -> None:
    for body in (conversation(PATHS["chat"], STEP_BYTES), {"prompt": LONG_TEXT}, {"prompt": LONG_IDS}):
        assert len(json.dumps(body)) > STEP_BYTES


@pytest.mark.parametrize("length", [1, STEP_BYTES])
@pytest.mark.parametrize("path", PATHS.values())
async def test_variables_reach_the_template(path: str, length: int) -> None:
    asked = worker()
    async with client(asked) as asks:
        await answered(asks, path, conversation(path, length))
    assert TOKENIZER.decode(list(asked.submits[0].prompt_token_ids)) == ASKED


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"1e999", "a number is out of range"),
        (b'"%b"' % (b"x" * MAX_TEMPLATE_KWARGS_BYTES), "has more than 1048576 bytes"),
    ],
)
@pytest.mark.parametrize("path", PATHS.values())
async def test_variables_that_are_not_written_as_they_came_are_refused(path: str, value: bytes, problem: str) -> None:
    raw = json.dumps(conversation(path, 1)).replace("[", "[VALUE,", 1)
    async with client(worker()) as asks:
        answer = await asks.post(path, raw.encode().replace(b"VALUE", value))
    assert answer.status_code == 400, answer.text
    assert f"chat_template_kwargs: {problem}" in answer.json()["error"]["message"]


@pytest.mark.parametrize("length", [1, STEP_BYTES])
@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
async def test_variables_count(path: str, length: int) -> None:
    async with client(worker()) as asks:
        body = {"model": "tiny", "messages": CHAT, "chat_template_kwargs": variables(length)}
        counted = await answered(asks, path, body)
    assert (counted["count"] if path == "/tokenize" else counted["input_tokens"]) == len(ASKED)


@pytest.mark.parametrize("prompt", ["hi", LONG_TEXT, ["hi", LONG_TEXT], [100, 101], LONG_IDS, [[100, 101], LONG_IDS]])
async def test_prompts_are_whole(prompt: Any) -> None:
    asked = worker()
    several = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    async with client(asked) as asks:
        await asks.complete(prompt, max_tokens=1)
    got = sorted((list(submit.prompt_token_ids) for submit in asked.submits), key=len)
    assert got == [item if isinstance(item, list) else [BOS, *TOKENIZER.encode(item).ids[1:]] for item in several]


async def test_texts_become_tokens_and_back() -> None:
    async with client(worker()) as asks:
        for text in ("hi", LONG_TEXT):
            told = await answered(asks, "/tokenize", {"prompt": text, "add_special_tokens": False})
            assert told["count"] == len(text)
            back = await answered(asks, "/detokenize", {"tokens": told["tokens"]})
            assert back == {"prompt": text}


@pytest.mark.parametrize("ids", [[100, 101], LONG_IDS])
async def test_a_running_request_does_not_keep_the_list_of_its_token_ids(ids: list[int]) -> None:
    """However short it is: else code that uses it later would pass tests with short bodies and fail with long ones."""
    asked = worker()
    asked.answer = None
    gc.collect()
    async with client(asked) as asks:
        answering = asyncio.create_task(asks.complete(list(ids)))
        choice = await asked.arrived.get()
        assert [kept.prompt for kept in gc.get_objects() if issubclass(type(kept), CompletionRequest)] == [[]]
        choice.tokens(1, finish=True)
        assert (await answering)["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("values", [[1.5] * 299_000, [[1.5] * 70] * 4_000])
def test_numbers_beside_null_are_written_in_little_time(values: list[Any]) -> None:
    """CPU time counts, and the least of some times: the machine may be busy."""
    times_s = []
    for _ in range(3):
        begun_s = time.thread_time()
        assert json_text({"a": None, "d": values}, "tools").startswith('{"a":null,"d":[')
        times_s.append(time.thread_time() - begun_s)
    assert min(times_s) < 0.1
