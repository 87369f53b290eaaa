"""Hundreds of thousands of token ids, or many thousands of parts, in a body do not hold the event loop."""

import asyncio
import json
from collections.abc import Callable

import pytest

from tests.parameters import one_in
from tests.router.cluster import PATIENCE_S
from tests.router.fake_worker import FakeWorker
from tests.router.loop_work import watched_loop
from tests.router.openai.openai_rig import client, result_of
from trunkline.status import RequestRefused
from trunkline_router.access.gate.http_passage import HttpPassage
from trunkline_router.edge import http_call
from trunkline_router.edge.anthropic.anthropic_requests import MessageRequest
from trunkline_router.edge.openai.chat import ChatRequest
from trunkline_router.edge.openai.completion_request import CompletionRequest
from trunkline_router.edge.pooling.pooling_fields import EmbeddingRequest
from trunkline_router.edge.request_fields import STEP_ITEMS, Fields, Steps, checked
from trunkline_router.edge.responses.response_request import ResponseRequest

NUM_IDS = 290_000  # nearly as many values as a body may have
CONTEXT = 100_000
WITHIN = 55_000  # ids that fit the context
SHORT = 4000
# The longest step parses the body: 0.02 s on a slow core. Template variables written by json take 0.3 to 0.5 s.
MOST_WORK_S = 0.25

COMPLETIONS, DETOKENIZE = "/v1/completions", "/detokenize"
PART = {"type": "text", "text": "x"}


def ids(count: int, *last: str) -> bytes:
    """A list of ids as JSON, each an object of its own in Python, in place of the last ones `last`."""
    texts = "300,301,302,303,304,305,306,307,308," * (count // 9 + 1)  # four characters for each
    return f"[{','.join([texts[: 4 * (count - len(last)) - 1], *last])}]".encode()


def parts(of_message: int, count: int) -> bytes:
    """A conversation whose messages have so many parts each."""
    return json.dumps([{"role": "user", "content": [PART] * of_message}] * count).encode()


# Path, body, status, code and param of the refusal.
LISTS: dict[str, tuple[str, Callable[[], bytes], str, str]] = {
    "longer than the context": (
        COMPLETIONS,
        lambda: b'{"model":"tiny","prompt":%b}' % ids(NUM_IDS),
        "context_length_exceeded",
        "prompt",
    ),
    "one of two longer than the context": (
        COMPLETIONS,
        lambda: b'{"model":"tiny","prompt":[%b,%b]}' % (ids(NUM_IDS // 2), ids(NUM_IDS // 2)),
        "context_length_exceeded",
        "prompt",
    ),
    "within the context, one id beyond the vocabulary": (
        COMPLETIONS,
        lambda: b'{"model":"tiny","prompt":%b}' % ids(WITHIN, "99999999"),
        "invalid_request",
        "prompt",
    ),
    "within the context, five times, one of them no id": (
        COMPLETIONS,
        lambda: b'{"model":"tiny","prompt":[%b]}' % b",".join([*[ids(WITHIN)] * 4, ids(WITHIN, "true")]),
        "invalid_request",
        "prompt",
    ),
    "many prompts, one of them no ids": (
        COMPLETIONS,
        lambda: b'{"model":"tiny","prompt":[%b]}' % b",".join([*[ids(SHORT)] * 60, ids(SHORT, "true")]),
        "invalid_request",
        "prompt",
    ),
    "many prompts, one id beyond the vocabulary": (
        COMPLETIONS,
        lambda: b'{"model":"tiny","prompt":[%b]}' % b",".join([ids(SHORT, "99999999")] * 61),
        "invalid_request",
        "prompt",
    ),
    "for a model that is not served": (
        COMPLETIONS,
        lambda: b'{"model":"other","prompt":[%b]}' % b",".join([ids(SHORT)] * 61),
        "model_not_found",
        "model",
    ),
    "detokenized by a model that is not served": (
        DETOKENIZE,
        lambda: b'{"model":"other","tokens":%b}' % ids(NUM_IDS, "0.5"),
        "model_not_found",
        "model",
    ),
    "more than are detokenized": (
        DETOKENIZE,
        lambda: b'{"model":"tiny","tokens":%b}' % ids(NUM_IDS),
        "invalid_request",
        "tokens",
    ),
    "detokenized, one of them no id": (
        DETOKENIZE,
        lambda: b'{"model":"tiny","tokens":%b}' % ids(NUM_IDS, "0.5"),
        "invalid_request",
        "tokens",
    ),
    "where a list is short": (
        COMPLETIONS,
        lambda: b'{"model":"tiny","prompt":"a","stop_token_ids":%b}' % ids(NUM_IDS),
        "invalid_request",
        "stop_token_ids",
    ),
    "in a field that is not known": (
        COMPLETIONS,
        lambda: b'{"model":"tiny","prompt":"a","x":{"y":%b}}' % ids(NUM_IDS),
        "invalid_request",
        "x",
    ),
    "in the template's variables": (
        "/v1/chat/completions",
        lambda: (
            b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":%b}}'
            % ids(1, b",".join([b"0.5"] * NUM_IDS).decode())
        ),
        "invalid_request",
        "chat_template_kwargs",
    ),
    "of long integers in the template's variables": (
        "/v1/chat/completions",
        lambda: (
            b'{"model":"tiny","messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"a":%b}}'
            % ids(1, ",".join(["9" * 4300] * 690))
        ),
        "invalid_request",
        "chat_template_kwargs",
    ),
    "in place of a text": (
        "/v1/chat/completions",
        lambda: b'{"model":"tiny","messages":[{"role":"user","content":[%b]}]}' % ids(NUM_IDS),
        "invalid_request",
        "messages[0].content[0]",
    ),
    "parts of a conversation": (
        "/v1/chat/completions",
        lambda: b'{"model":"tiny","messages":%b}' % parts(3, 2900),
        "invalid_request",
        "messages",
    ),
    "parts of an input": (
        "/v1/responses",
        lambda: b'{"model":"tiny","input":%b}' % parts(500, 17),
        "invalid_request",
        "input",
    ),
}


async def post(port: int, path: str, body: bytes) -> tuple[int, dict[str, str]]:
    """The status and the error, if any. A plain connection: a client's own work in this process would count."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    )
    writer.write(f"{head}connection: close\r\n\r\n".encode())
    for start in range(0, len(body), 1 << 16):
        writer.write(body[start : start + (1 << 16)])
        await writer.drain()
    async with asyncio.timeout(PATIENCE_S):
        answer = await reader.read()
    writer.close()
    told, _, content = answer.partition(b"\r\n\r\n")
    return int(told.split()[1]), json.loads(content).get("error", {})


@pytest.mark.parametrize("name", one_in(3, LISTS))
async def test_a_long_list_is_refused_without_holding_the_loop(name: str) -> None:
    path, made, code, param = LISTS[name]
    body = made()
    async with client(FakeWorker("w", context_length=CONTEXT, kv_token_capacity=CONTEXT)) as asks:
        await asks.complete()
        async with watched_loop() as work:
            status, error = await post(asks.router.http_port, path, body)
        assert (status, error["code"], error["param"]) == (404 if code == "model_not_found" else 400, code, param)
        assert work.longest_s < MOST_WORK_S


async def test_a_client_that_hangs_up_ends_the_check_of_its_body(monkeypatch: pytest.MonkeyPatch) -> None:
    body, begun, may_end = parts(1, 4000), list[int](), list[bool]()
    body = b'{"model":"tiny","max_tokens":1,"messages":%b}' % body.replace(b'"x"', b'"%b"' % (b"x" * 64))

    def waiting(kind: type[Fields], parsed: dict[str, object]) -> Steps[tuple[Fields, list[str]]]:
        begun.append(len(begun))
        while not may_end:
            yield
        return (yield from checked(kind, parsed))

    async with client(FakeWorker("w", context_length=CONTEXT, kv_token_capacity=CONTEXT)) as asks:
        await asks.complete()
        monkeypatch.setattr(http_call, "checked", waiting)
        first = asyncio.create_task(asks.post("/v1/chat/completions", body))
        while not begun:  # noqa: ASYNC110  # a step has no event
            await asyncio.sleep(0.001)
        second = asyncio.create_task(asks.post("/v1/chat/completions", body))
        for _ in range(20):  # others are served between its steps
            assert (await asks.http.get("/v1/models")).status_code == 200
        assert len(begun) == 1, "no other large body is checked meanwhile"
        first.cancel()
        while len(begun) == 1:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        may_end.append(True)
        assert (await second).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("kind", "name"), [(ChatRequest, "messages"), (MessageRequest, "messages"), (ResponseRequest, "input")]
)
def test_a_conversation_is_checked_in_steps_as_it_would_be_at_once(kind: type[Fields], name: str) -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": f"{i}"} for i in range(3 * STEP_ITEMS + 1)]
    messages[STEP_ITEMS + 3]["mood"] = 1
    body = {"model": "tiny", "max_tokens": 1, name: messages}
    if kind is ResponseRequest:
        del body["max_tokens"]
    steps = checked(kind, body)
    num_steps = 1
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            made, unknown = ended.value
            break
        num_steps += 1
    assert num_steps >= 6  # to validate, and to look for unknown fields
    assert made == kind.model_validate(body)
    assert unknown == made.unknown() == [f"{name}[{STEP_ITEMS + 3}].mood"]
    messages[2 * STEP_ITEMS + 5]["content"] = 7
    with pytest.raises(RequestRefused) as refused:
        result_of(checked(kind, body))
    assert refused.value.field == f"{name}[{2 * STEP_ITEMS + 5}].content"


@pytest.mark.parametrize("kind", [CompletionRequest, EmbeddingRequest, ChatRequest, MessageRequest, ResponseRequest])
def test_a_list_without_a_name_is_an_unknown_field(kind: type[Fields]) -> None:
    asked = {
        "model": "tiny",
        "prompt": "x",
        "messages": [{"role": "user", "content": "x"}],
        "input": "x",
        "max_tokens": 1,
    }
    body: dict[str, object] = {name: asked[name] for name in asked.keys() & kind.model_fields.keys()}
    body[""] = [0] * (STEP_ITEMS + 1)
    assert result_of(checked(kind, body))[1] == [""]


MESSAGES = [{"role": "user", "content": "x"}] * 4000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/responses", {"input": MESSAGES}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1}),
        ("/v1/messages/count_tokens", {"messages": MESSAGES}),
        ("/tokenize", {"messages": MESSAGES}),
    ],
)
async def test_the_time_in_which_a_conversation_becomes_a_request_counts_against_its_tenant(
    path: str, body: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = list[float]()
    monkeypatch.setattr(HttpPassage, "parsed", lambda _, cpu_s: counted.append(cpu_s))
    async with client(FakeWorker("w", context_length=CONTEXT, kv_token_capacity=CONTEXT)) as asks:
        await asks.complete()
        counted.clear()
        await post(asks.router.http_port, path, json.dumps({"model": "tiny", **body}).encode())
    assert len(counted) > 1 + 2 * len(MESSAGES) // STEP_ITEMS, "parsing, and each step of checking and converting"
    assert min(counted) > 0
