"""Enforced calls: those of random weights conform to their schemas, whole and streamed, over all protocols."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.edge import ANY_KEY, Edge, running_edge
from tests.clients.forced_calls import MARK, chat_model, forced_calls, random_weights
from tests.clients.weather_tools import ASKED, CHECKS, FUNCTIONS, QUESTION, SCHEMAS, TOOLS, Calls, check
from tests.playing.families import FAMILIES
from tests.playing.worker import COMMAND
from tests.worker.grammar.call_measure import tool_lists
from trunkline import SyncClient

if TYPE_CHECKING:
    from pathlib import Path

    from trunkline.v1.inference_pb2 import Tool

MAX_TOKENS = 300  # more than one of these calls can have


@pytest.fixture(scope="module", params=["hermes", "mistral"])
def weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with random_weights(request.param, tmp_path_factory.mktemp("random")) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_calls_of_random_weights_over_chat(weights: Edge, named: bool) -> None:
    from openai import OpenAI

    asked: dict[str, Any] = {
        "model": weights.model,
        "messages": ASKED,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": "weather"}} if named else "required",
        "parallel_tool_calls": False,
        "max_tokens": MAX_TOKENS,
    }
    with OpenAI(base_url=weights.url, api_key=ANY_KEY, max_retries=0, timeout=60) as client:
        for seed in range(4):
            whole = client.chat.completions.create(**asked, seed=seed)
            with client.chat.completions.stream(**asked, seed=seed) as stream:
                streamed = stream.get_final_completion()
            told: list[Calls] = []
            for answer in (whole, streamed):
                [choice] = answer.choices
                assert (choice.finish_reason, choice.message.content or None) == ("tool_calls", None)
                told.append([(one.function.name, one.function.arguments) for one in choice.message.tool_calls or ()])
            check(told[0], named=named)
            assert told[0] == told[1]


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_calls_of_random_weights_over_responses(weights: Edge, named: bool) -> None:
    from openai import OpenAI

    choice: Any = {"type": "function", "name": "weather"} if named else "required"
    asked: dict[str, Any] = {
        "model": weights.model,
        "input": QUESTION,
        "tools": [{"type": "function", **function} for function in FUNCTIONS],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_output_tokens": MAX_TOKENS,
    }
    with OpenAI(base_url=weights.url, api_key=ANY_KEY, max_retries=0, timeout=60) as client:
        whole = client.responses.create(**asked)
        with client.responses.stream(**asked) as stream:
            streamed = stream.get_final_response()
        responses: list[Any] = [whole, streamed]
        for response in responses:
            check([(item.name, item.arguments) for item in response.output], named=named)
        assert whole.to_dict()["tool_choice"] == choice


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_calls_of_random_weights_over_messages(weights: Edge, named: bool) -> None:
    from anthropic import Anthropic

    choice = {"type": "tool", "name": "weather"} if named else {"type": "any"}
    asked: dict[str, Any] = {
        "model": weights.model,
        "messages": ASKED,
        "tools": [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()],
        "tool_choice": {**choice, "disable_parallel_tool_use": True},
        "max_tokens": MAX_TOKENS,
    }
    with Anthropic(base_url=weights.root, api_key=ANY_KEY, max_retries=0, timeout=60) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            streamed = stream.get_final_message()
    messages: list[Any] = [whole, streamed]
    for message in messages:
        assert message.stop_reason == "tool_use"
        check([(block.name, json.dumps(block.input)) for block in message.content], named=named)


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_calls_of_random_weights_over_grpc(weights: Edge, named: bool) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}} if named else "required"
    with SyncClient(weights.cluster.address) as client:
        done = client.complete(ASKED, tools=TOOLS, tool_choice=choice, max_tokens=MAX_TOKENS)
    calls = [(call.name, call.arguments) for call in done.choices[0].tool_calls]
    check(calls[:1], named=named)
    assert not done.choices[0].text


@pytest.mark.slow
def test_forced_calls_of_real_tools_are_valid(weights: Edge) -> None:
    longest = max(tool_lists(), key=lambda tools: sum(len(tool.parameters) for tool in tools))
    check_real_tools(weights, [*some_lists(12), longest])


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with chat_model(tmp_path_factory.mktemp("chat")) as running:
        yield running


@pytest.mark.slow
def test_forced_calls_of_a_real_chat_model_are_valid(chatting: Edge) -> None:
    check_real_tools(chatting, some_lists(3))


@pytest.mark.slow
def test_a_mark_that_the_limit_cuts_off_is_text(chatting: Edge) -> None:
    with SyncClient(chatting.cluster.address) as client:
        length = len(client.tokenize(MARK, special_tokens=False))
        assert length > 1
        for limit in range(1, length + 1):
            asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_tokens": limit}
            [cut] = client.complete(ASKED, **asked).choices
            assert (cut.finish_reason, cut.tool_calls) == ("length", [])
            assert MARK.startswith(cut.text)
            assert (cut.text == "") == (limit == length)


def some_lists(number: int) -> list[list[Tool]]:
    """So many lists of bfcl-eval's tools, evenly chosen."""
    lists = tool_lists()
    return lists[:: len(lists) // number]


def check_real_tools(edge: Edge, lists: list[list[Tool]]) -> None:
    """Asserts that forced calls of lists of tools are valid."""
    counts, wrong = asyncio.run(forced_calls(edge.cluster.address, lists))
    assert wrong == []
    assert counts["calls"] > len(lists) / 2


@pytest.mark.slow
def test_a_model_that_must_not_call_begins_no_call(weights: Edge) -> None:
    """However much the client's bias favours the token that begins one."""
    with SyncClient(weights.cluster.address) as client:
        marks = [client.tokenize(mark, special_tokens=False) for mark in ("<tool_call>", "[TOOL_CALLS]")]
        [token] = min(marks, key=len)
        asked: dict[str, Any] = {"max_tokens": 40, "logit_bias": {token: 100.0}}
        assert token in client.complete(ASKED, **asked).choices[0].token_ids
        for tools in ([], TOOLS):
            done = client.complete(ASKED, tools=tools, tool_choice="none", **asked).choices[0]
            assert token not in done.token_ids
            assert not done.tool_calls


@pytest.mark.slow
@pytest.mark.parametrize("answer_format", ["hermes", "mistral"])  # gpt-oss would think again, at random
def test_a_constraint_begins_after_the_model_has_thought(answer_format: str, tmp_path: Path) -> None:
    """The model wants to answer with a text of its own after its thought."""
    from openai import OpenAI

    family = FAMILIES[answer_format]
    answer = family.thought("I know.").rstrip() + family.text("It is fine.")
    model = family.write(tmp_path / "player", {QUESTION: answer})
    with (
        running_edge(model, command=COMMAND) as edge,
        OpenAI(base_url=edge.url, api_key=ANY_KEY, max_retries=0, timeout=60) as client,
    ):
        choice: Any = {"type": "function", "function": {"name": "weather"}}
        asked: dict[str, Any] = {"model": edge.model, "messages": ASKED, "max_tokens": MAX_TOKENS}
        [called] = client.chat.completions.create(**asked, tools=TOOLS, tool_choice=choice).choices
        assert called.message.to_dict()["reasoning"].strip() == "I know."
        assert not called.message.content
        check([(one.function.name, one.function.arguments) for one in called.message.tool_calls or ()], named=True)
        form: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMAS["weather"]}}
        [written] = client.chat.completions.create(**asked, response_format=form).choices
        assert written.message.to_dict()["reasoning"].strip() == "I know."
        CHECKS["weather"].validate(json.loads(written.message.content or ""))
