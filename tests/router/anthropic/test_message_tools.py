"""What /v1/messages reads of tools, their calls and results, and of thinking."""

import asyncio
import json
from functools import partial
from typing import Any

import pytest

from tests.router.anthropic.messages_client import HI, Json, MessagesClient, arrived, client, prompt_of
from tests.router.fake_worker import FakeWorker
from tests.router.prompts.tool_templates import ALL, TAGGED
from tests.router.tokenizer_files import tokenizer_files
from trunkline.v1.generation_pb2 import FinishReason
from trunkline.v1.worker_pb2 import Capability
from trunkline_router.edge.http_call import Edge

STOP = FinishReason.FINISH_REASON_STOP
GRAMMARS = [Capability.CAPABILITY_GRAMMARS]
FILES = tokenizer_files(chat_template=ALL)
SCHEMA: Json = {"type": "object", "properties": {"place": {"type": "string"}, "days": {"type": ["integer", "null"]}}}
TOOL: Json = {"name": "weather", "description": "Tells the weather.", "input_schema": SCHEMA}
FUNCTION = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": SCHEMA},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Graz"}}</tool_call>'


def use(number: int, **given: Any) -> Json:
    return {"type": "tool_use", "id": f"toolu_{number}", "name": "weather", "input": given}


def result(number: int, **more: Any) -> Json:
    return {"type": "tool_result", "tool_use_id": f"toolu_{number}", **more}


def text(text: str) -> Json:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def called(number: int, **given: Any) -> Json:
    return {"id": f"toolu_{number}", "type": "function", "function": {"name": "weather", "arguments": given}}


def said(blocks: list[Json], role: str = "user") -> Json:
    return {"role": role, "content": blocks}


CONVERSATION: Json = {
    "system": [text("Be kind.")],
    "tools": [
        {
            **TOOL,
            "type": "custom",
            "strict": True,
            "cache_control": {"type": "ephemeral"},
            "allowed_callers": ["direct"],
        },
        {"name": "now", "input_schema": {"type": "object"}, "eager_input_streaming": True, "defer_loading": False},
    ],
    "messages": [
        HI,
        said(
            [
                {"type": "thinking", "thinking": "Rain?", "signature": "unsigned"},
                {"type": "redacted_thinking", "data": "AA=="},
                text("I ask."),
                {**use(1, place='Graz "ä"', days=None, at=1 << 70), "caller": {"type": "direct"}},
                use(2),
            ],
            "assistant",
        ),
        said([result(1, content=[text("wet"), text("cold")]), result(2, is_error=True), text("And?")]),
        said([text("Tell me.")]),
    ],
}


async def rendered(asking: MessagesClient, worker: FakeWorker, **body: Any) -> tuple[list[Json], list[Json] | None]:
    """The messages and tools that the template got."""
    await asking.message(**body)
    prompt, decoder = prompt_of(worker.submits[-1]), json.JSONDecoder()
    turns, end = decoder.raw_decode(prompt)
    return turns, decoder.raw_decode(prompt[end:])[0]


async def test_a_template_gets_calls_results_and_thinking() -> None:
    worker = FakeWorker("w", files=FILES, capabilities=GRAMMARS)
    async with client(worker) as messages:
        turns, tools = await rendered(messages, worker, **CONVERSATION)
        counted = await messages.count(**CONVERSATION)
    assert tools == [FUNCTION, {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    assert turns == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I ask.",
            "thinking": "Rain?",
            "reasoning_content": "Rain?",
            "tool_calls": [called(1, place='Graz "ä"', days=None, at=1 << 70), called(2)],
        },
        {"role": "tool", "content": "wet\ncold", "tool_call_id": "toolu_1"},
        {"role": "tool", "content": "", "tool_call_id": "toolu_2"},
        {"role": "user", "content": "And?\nTell me."},
    ]
    assert counted == len(worker.submits[0].prompt_token_ids)


SEARCH: Json = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


async def test_tools_that_run_at_no_client_are_left_out_and_named_or_refused() -> None:
    worker = FakeWorker("w", files=FILES)
    async with client(worker) as messages:
        assert (await rendered(messages, worker, tools=[SEARCH, TOOL]))[1] == [FUNCTION]
        response = await messages.post(tools=[TOOL, SEARCH, {"type": "mcp_toolset", "mcp_server_name": "x"}])
        assert response.headers["x-trunkline-warning"] == "ignored fields: tools[1], tools[2]"
    async with client(FakeWorker("w", files=FILES), edge=partial(Edge, refuses_server_tools=True)) as messages:
        assert (await messages.refusal(tools=[TOOL, SEARCH]))["message"].startswith("tools[1]: is not supported")


async def test_a_deferred_tool_is_told_once_a_result_refers_to_it() -> None:
    worker = FakeWorker("w", files=FILES)
    deferred, other = {**TOOL, "defer_loading": True}, {**TOOL, "name": "other", "defer_loading": True}
    tools = [{"name": "find", "input_schema": {}}, deferred, other]
    found = result(1, content=[{"type": "tool_reference", "tool_name": "weather"}])
    async with client(worker) as messages:
        _, before = await rendered(messages, worker, tools=tools)
        turns, after = await rendered(
            messages, worker, tools=tools, messages=[HI, said([use(1)], "assistant"), said([found])]
        )
        assert [tool["function"]["name"] for tool in before or ()] == ["find"]
        assert [tool["function"]["name"] for tool in after or ()] == ["find", "weather"]
        assert turns[-1]["content"] == "weather"


async def test_the_line_for_anthropics_accounts_is_kept_from_the_prompt_and_from_the_prefix_cache() -> None:
    worker = FakeWorker("w", files=FILES)
    turns = [HI, said([text("Hello.")], "assistant"), said([text("And now?")])]
    async with client(worker) as messages:

        async def usage(line: str, messages_so_far: list[Json]) -> tuple[int, int]:
            system = [text(f"x-anthropic-billing-header: cc_version=2.1; cch={line};"), text("Be kind. " * 200)]
            used = (await messages.message(system=system, messages=messages_so_far))["usage"]
            return used["input_tokens"], used["cache_read_input_tokens"]

        await usage("1a", turns[:1])
        computed, cached = await usage("2b", turns)
    assert "x-anthropic" not in prompt_of(worker.submits[0])
    assert "Be kind." in prompt_of(worker.submits[0])
    assert cached >= 0.9 * (computed + cached)


async def test_a_tool_choice_of_none_leaves_out_the_tools() -> None:
    worker = FakeWorker("w", files=FILES)
    async with client(worker) as messages:
        for choice, told in ({"type": "auto"}, [FUNCTION]), ({"type": "none"}, None), (None, [FUNCTION]):
            assert (await rendered(messages, worker, tools=[TOOL], tool_choice=choice))[1] == told


@pytest.mark.parametrize(
    ("choice", "kinds", "stop_reason"),
    [
        ({"type": "auto"}, ["tool_use", "tool_use"], "tool_use"),
        ({"type": "auto", "disable_parallel_tool_use": True}, ["tool_use"], "tool_use"),
        ({"type": "none"}, ["text"], "end_turn"),
        ({"type": "any", "disable_parallel_tool_use": True}, ["tool_use"], "tool_use"),
        ({"type": "tool", "name": "weather"}, ["tool_use", "tool_use"], "tool_use"),  # of a worker that does not mind
    ],
)
async def test_a_tool_choice_says_which_calls_an_answer_has(choice: Json, kinds: list[str], stop_reason: str) -> None:
    worker = FakeWorker("w", answer=None, answer_format="hermes", files=FILES, capabilities=GRAMMARS)
    async with client(worker) as messages:
        asked = asyncio.create_task(messages.message(tools=[TOOL], tool_choice=choice))
        (await arrived(worker)).tokens(2, text=f"{CALL}\n{CALL}", finish=True, ending=STOP)
        message = await asked
    assert ([block["type"] for block in message["content"]], message["stop_reason"]) == (kinds, stop_reason)
    assert worker.submits[0].work.HasField("grammar") == (choice["type"] in ("any", "tool"))


async def test_calls_that_cannot_be_enforced_are_refused_by_the_clients_names() -> None:
    strict, any_tool = {**TOOL, "strict": True}, {"type": "any"}
    body: Json
    async with client(FakeWorker("w", answer_format="hermes", files=FILES)) as messages:
        for body in ({"tools": [strict]}, {"tools": [TOOL], "tool_choice": any_tool}):
            assert (await messages.refusal(**body))["message"] == (
                "tools: needs the capability grammars, which no worker of model tiny has"
            )
    async with client(FakeWorker("w", answer_format="gemma4", files=FILES, capabilities=GRAMMARS)) as messages:
        for body, named in (
            ({"tools": [strict]}, "tools: calls cannot"),
            ({"tools": [TOOL], "tool_choice": any_tool}, "tool_choice: calls cannot"),
            ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "now"}}, "tool_choice: is none of the tools"),
            ({"tool_choice": any_tool}, "tool_choice: a call is required"),
            ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice: a function has a name"),
        ):
            assert (await messages.refusal(**body))["message"].startswith(named)


@pytest.mark.parametrize(
    ("body", "variable"),
    [
        ({}, "|"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024, "display": "summarized"}}, "True|True"),
        ({"thinking": {"type": "adaptive"}}, "True|True"),
        ({"thinking": {"type": "disabled"}}, "False|False"),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"enable_thinking": 7}}, "7|True"),
        ({"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": 7}}, "True|7"),
    ],
    ids=str,
)
async def test_thinking_is_a_variable_of_the_template(body: Json, variable: str) -> None:
    """Qwen 3 and GLM name it enable_thinking, DeepSeek V3.1 and Granite 3 name it thinking."""
    template = "{{ messages[0].content }}|{{ enable_thinking }}|{{ thinking }}"
    worker = FakeWorker("w", files=tokenizer_files(chat_template=template))
    async with client(worker) as messages:
        await messages.message(**body)
    assert prompt_of(worker.submits[0]) == f"hi|{variable}"


async def test_a_final_text_after_thinking_is_continued() -> None:
    worker = FakeWorker("w", answer_format="hermes", files=tokenizer_files(chat_template=TAGGED))
    thinking = {"type": "thinking", "thinking": "Rain?", "signature": "unsigned"}
    async with client(worker) as messages:
        await messages.message(messages=[HI, said([thinking, text("It is")], "assistant")])
        for refused in ([thinking], [text("It is"), use(1)]):
            error = await messages.refusal(messages=[HI, said(refused, "assistant")])
            assert error["message"].startswith("messages: only a final message that ends with text and calls no tools")
    assert prompt_of(worker.submits[0]).endswith("<|im_start|>assistant\n<think>\nRain?\n</think>\nIt is")


async def test_a_long_history_is_read() -> None:
    """A thousand calls with their results."""
    turns = [HI]
    for number in range(1000):
        turns += [said([text("I ask."), use(number, place="Graz")], "assistant"), said([result(number, content="wet")])]
    worker = FakeWorker("w", files=FILES, context_length=1 << 20, kv_token_capacity=1 << 20)
    async with client(worker) as messages:
        rendered_turns, _ = await rendered(messages, worker, messages=turns, max_tokens=1)
    assert len(rendered_turns) == len(turns)
