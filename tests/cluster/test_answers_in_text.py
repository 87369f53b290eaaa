"""Answers in text are the same whether they are parsed or not: real workers with the same model, with a format and
without one."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster.processes import Process, Worker, script
from tests.worker.engine_rig import DEMO_MODEL
from trunkline_bench.servers.ports import free_port

QUESTIONS = ["Are dogs real?", "Write a loop in Python.", "Tell me a story about a fox, in five lines."]
TIMEOUT_S = 300.0


@contextmanager
def running(model: Path) -> Iterator[httpx.Client]:
    """A router before two workers, whose models are called hermes and none for the formats of their answers."""
    with ExitStack() as stack:
        names = ("hermes", "none")
        workers = [Worker(model, f"--answer-format={name}", f"--served-model-name={name}") for name in names]
        for worker in workers:
            stack.callback(worker.stop)
        for worker in workers:
            worker.wait_ready()
        http_port, addresses = free_port(), ",".join(worker.address for worker in workers)
        flags = (f"--workers={addresses}", "--port=0", f"--http-port={http_port}")
        router = Process(script("trunkline-router"), *flags)
        stack.callback(router.stop)
        router.wait_for("router listening")
        client = httpx.Client(base_url=f"http://127.0.0.1:{http_port}/v1", timeout=TIMEOUT_S)
        yield stack.enter_context(client)


def body(name: str, question: str, **options: Any) -> dict[str, Any]:
    return {"model": name, "messages": [{"role": "user", "content": question}], "max_tokens": 60, **options}


def whole(client: httpx.Client, request: dict[str, Any]) -> tuple[str, str, int]:
    """Returns the text, the reason of its end, and the number of its tokens."""
    answer = client.post("/chat/completions", json=request).raise_for_status().json()
    (choice,) = answer["choices"]
    assert not choice["message"].get("tool_calls")
    assert not choice["message"].get("reasoning")
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]


def streamed(client: httpx.Client, request: dict[str, Any]) -> tuple[str, str, int]:
    text, reason, tokens = "", "", 0
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/chat/completions", json=request | options) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            tokens = event["usage"]["completion_tokens"] if event.get("usage") else tokens
            for choice in event["choices"]:
                assert not choice["delta"].get("tool_calls")
                assert not choice["delta"].get("reasoning")
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
    return text, reason, tokens


def check_answers(model: Path) -> None:
    with running(model) as client:
        for question in QUESTIONS:
            for options in ({"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 0, "stop": ["."]}):
                expected = whole(client, body("none", question, **options))
                assert expected[0]
                assert whole(client, body("hermes", question, **options)) == expected
                for name in ("hermes", "none"):
                    assert streamed(client, body(name, question, **options)) == expected


@pytest.mark.slow
def test_answers_in_text_are_the_same_whether_they_are_parsed_or_not() -> None:
    check_answers(DEMO_MODEL)
