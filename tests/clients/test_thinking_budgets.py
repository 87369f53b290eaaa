"""Limits of reasoning: random weights, which would reason forever, stop after so many tokens and answer."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.edge import ANY_KEY, Edge, running_edge
from tests.clients.weather_tools import ASKED, SCHEMAS, TOOLS, check
from tests.playing.families import FAMILIES
from trunkline import SyncClient

MAX_TOKENS = 400
SEED = 1  # other outputs may end, or begin a call, at random
THINKS = "<|im_start|>assistant\n<think>\n"
LIMITS = (0, 1, 7, 60)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """A router before a worker with random weights. Its template begins the reasoning."""
    model = FAMILIES["hermes"].write(tmp_path_factory.mktemp("random") / "thinker", {})
    template = model / "chat_template.jinja"
    head, end = template.read_text().rsplit("<|im_start|>assistant\\n", 1)
    template.write_text(head + THINKS.replace("\n", "\\n") + end)
    with running_edge(model) as running:
        yield running


@pytest.fixture(scope="module")
def end_of_thought(thinker: Edge) -> int:
    with SyncClient(thinker.cluster.address) as client:
        [token_id] = client.tokenize("</think>", special_tokens=False)
    return token_id


def thoughts(tokens: list[int], end: int) -> int:
    """Tokens before the mark, which must be there once."""
    assert tokens.count(end) == 1
    return tokens.index(end)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_holds_to_the_token(thinker: Edge, end_of_thought: int, limit: int) -> None:
    asked: dict[str, Any] = {"max_tokens": 100, "logit_bias": {end_of_thought: -100.0}}  # it must be forced
    with SyncClient(thinker.cluster.address) as client:
        for seed in range(4):
            done = client.complete(ASKED, max_reasoning_tokens=limit, seed=seed, **asked).choices[0]
            assert thoughts(done.token_ids, end_of_thought) == limit
            streamed = client.generate(ASKED, max_reasoning_tokens=limit, seed=seed, **asked)
            assert [token for piece in streamed for token in piece.token_ids] == done.token_ids
        unlimited = client.complete(ASKED, seed=SEED, **asked).choices[0]
        assert (unlimited.text, end_of_thought in unlimited.token_ids) == ("", False)


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_required_follows_the_reasoning(thinker: Edge, end_of_thought: int, limit: int) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    with SyncClient(thinker.cluster.address) as client:
        bias = {end_of_thought: -100.0}  # so that it must be forced
        asked: dict[str, Any] = {"max_reasoning_tokens": limit, "max_tokens": MAX_TOKENS, "logit_bias": bias}
        asked["seed"] = SEED
        called = client.complete(ASKED, tools=TOOLS, tool_choice=choice, **asked).choices[0]
        assert thoughts(called.token_ids, end_of_thought) == limit
        check([(call.name, call.arguments) for call in called.tool_calls], named=True)
        written = client.complete(ASKED, grammar={"json_schema": SCHEMAS["now"]}, **asked).choices[0]
        assert thoughts(written.token_ids, end_of_thought) == limit
        assert json.loads(written.text) == {}
        beside = client.complete(ASKED, tools=TOOLS, **asked).choices[0]  # which may be called
        assert thoughts(beside.token_ids, end_of_thought) == limit


def test_each_protocol_has_a_field_for_it(thinker: Edge) -> None:
    from anthropic import Anthropic
    from openai import OpenAI

    seeded = {"seed": SEED}
    with OpenAI(base_url=thinker.url, api_key=ANY_KEY, max_retries=0, timeout=60) as client:
        asked: dict[str, Any] = {"model": thinker.model, "max_tokens": 60, "messages": ASKED}
        [chat] = client.chat.completions.create(**asked, extra_body={"thinking_token_budget": 7, **seeded}).choices
        assert chat.message.content
        limit: Any = {"max_tokens": 7}
        response = client.responses.create(
            model=thinker.model, input="Hello", max_output_tokens=60, reasoning=limit, extra_body=seeded
        )
        assert response.output_text
    with Anthropic(base_url=thinker.root, api_key=ANY_KEY, max_retries=0, timeout=60) as anthropic:
        message = anthropic.messages.create(
            **asked, thinking={"type": "enabled", "budget_tokens": 7}, extra_body=seeded
        )
    assert [block.type for block in message.content] == ["thinking", "text"]
