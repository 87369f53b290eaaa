"""POST /v1/chat/completions of a model whose answers have parts: reasoning and calls, whole and streamed."""

import asyncio
import json
import re
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest
from jsonschema_rs import Draft202012Validator

from tests.router.cluster import until
from tests.router.fake_worker import FakeChoice, FakeWorker
from tests.router.openai.openai_rig import CHAT, OpenAiClient, client
from tests.router.tokenizer_files import tokenizer_files
from trunkline.v1.generation_pb2 import FinishReason
from trunkline_router.edge.http_call import Edge
from trunkline_router.edge.openapi.page import openapi_page

PATH = "/v1/chat/completions"
SCHEMAS = orjson.loads(openapi_page())["components"]
ANSWER_SCHEMA = Draft202012Validator({**SCHEMAS["schemas"]["ChatCompletion"], "components": SCHEMAS})
STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
TEMPLATE = "{{ tools }}{{ messages[0].content }}{# tool_calls #}"
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
GRAZ = '<tool_call>\n{"name": "weather", "arguments": {"place": "Graz", "note": "<tool_call> é 🦊"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


BOTH = f"<think>\nHm.\n</think>\n\nI ask.\n{GRAZ}\n{NOW}"
GRAZ_CALL = call("weather", '{"place": "Graz", "note": "<tool_call> é 🦊"}')
# An output and how it ends; the message's content, reasoning and calls, and why it is finished.
Case = tuple[str, "FinishReason.ValueType", str, str, list[Any], str]
CASES: list[Case] = [
    (BOTH, STOP, "I ask.", "Hm.", [GRAZ_CALL, call("now", "{}")], "tool_calls"),
    ("No call, but a <tool", STOP, "No call, but a <tool", "", [], "stop"),
    (GRAZ[:50], LENGTH, "", "", [call("weather", GRAZ[45:50])], "length"),
    (GRAZ[:50], STOP, "", "", [call("weather", GRAZ[45:50])], "stop"),
    (f"{NOW}\n{GRAZ[:50]}", STOP, "", "", [call("now", "{}"), call("weather", GRAZ[45:50])], "stop"),
    (f"I ask.\n{GRAZ}\nAnd\n{NOW}\nS", LENGTH, "I ask.\nAnd\nS", "", [GRAZ_CALL, call("now", "{}")], "length"),
    (f"{GRAZ}\nSo", LENGTH, "So", "", [GRAZ_CALL], "length"),
    ("<think>\nHm", LENGTH, "", "Hm", [], "length"),
]  # fmt: skip


def worker(name: str = "w", template: str = TEMPLATE) -> FakeWorker:
    return FakeWorker(name, answer=None, answer_format="hermes", files=tokenizer_files(chat_template=template))


async def play(choice: FakeChoice, text: str, ending: "FinishReason.ValueType", rng: Random | None) -> None:
    """The worker sends the text, in random pieces if there is an `rng`."""
    while rng is not None and text:
        cut = rng.choice((0, 1, 1, 2, 3, 7, 30))
        choice.tokens(1, text=text[:cut])
        text = text[cut:]
        if rng.random() < 0.3:
            await asyncio.sleep(0.001)
    choice.tokens(1, text=text, finish=True, ending=ending)


async def played(fake: FakeWorker, cases: list[Case], rng: Random | None = None) -> None:
    """The worker answers with a case for each choice."""
    choices = [await fake.arrived.get() for _ in cases]
    await asyncio.gather(*(play(choice, *cases[choice.submit.choice][:2], rng) for choice in choices))


async def whole_answer(asks: OpenAiClient, fake: FakeWorker, cases: list[Case], **body: Any) -> dict[str, Any]:
    answering = asyncio.create_task(played(fake, cases))
    answer = await asks.answer(PATH, **{"messages": CHAT, "tools": TOOLS, "n": len(cases), **body})
    await answering
    ANSWER_SCHEMA.validate(answer)
    return answer


def added(events: list[Any]) -> list[dict[str, Any]]:
    """What the deltas of each choice add up to, as clients add them, and why it ended."""
    made: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in event["choices"]:
            so_far = made.setdefault(choice["index"], {"content": "", "tool_calls": [], "reasoning": "", "ids": []})
            delta = choice["delta"]
            assert not so_far.get("finish_reason"), "nothing follows the end"
            so_far["finish_reason"] = choice["finish_reason"]
            so_far["ids"] += choice.get("token_ids", [])
            so_far["content"] += delta.get("content", "")
            so_far["reasoning"] += delta.get("reasoning", "")
            for one in delta.get("tool_calls", ()):
                if "id" in one:
                    assert one["index"] == len(so_far["tool_calls"])
                    so_far["tool_calls"].append(call(one["function"]["name"], ""))
                so_far["tool_calls"][one["index"]]["function"]["arguments"] += one["function"]["arguments"]
    return [made[index] for index in sorted(made)]


def expected(case: Case) -> dict[str, Any]:
    _, _, content, reasoning, calls, finish_reason = case
    return {"content": content, "tool_calls": calls, "reasoning": reasoning, "finish_reason": finish_reason}


async def test_a_message_has_reasoning_and_calls_beside_its_text() -> None:
    fake = worker()
    async with client(fake) as asks:
        answer = await whole_answer(asks, fake, CASES[:2])
        called, plain = answer["choices"]
        ids = [one.pop("id") for one in called["message"]["tool_calls"]]
        assert len(set(ids)) == 2
        assert all(ids)
        assert called["message"] == {
            "role": "assistant", "content": "I ask.", "refusal": None, "annotations": [], "reasoning": "Hm.",
            "tool_calls": [GRAZ_CALL, call("now", "{}")],
        }  # fmt: skip
        assert (called["finish_reason"], plain["finish_reason"]) == ("tool_calls", "stop")
        assert plain["message"] == {
            "role": "assistant", "content": "No call, but a <tool", "refusal": None, "annotations": [],
        }  # fmt: skip


async def test_a_call_that_was_cut_off_has_its_arguments_so_far_and_is_not_to_be_run() -> None:
    fake = worker()
    async with client(fake) as asks:
        for case in CASES[2:4]:
            [choice] = (await whole_answer(asks, fake, [case]))["choices"]
            message = choice["message"]
            assert (message["content"], choice["finish_reason"]) == (None, case[-1])
            assert message["tool_calls"][0]["function"] == case[4][0]["function"]


@pytest.mark.parametrize("seed", range(10))
async def test_a_stream_adds_up_to_the_whole_answer_however_it_is_cut(seed: int) -> None:
    fake, rng = worker(), Random(seed)
    async with client(fake, max_choices=len(CASES)) as asks:
        whole = await whole_answer(asks, fake, CASES)
        answering = asyncio.create_task(played(fake, CASES, rng))
        asked = {"messages": CHAT, "tools": TOOLS, "n": len(CASES), "return_token_ids": seed % 2 == 0}
        *events, done = await asks.all_events(PATH, **asked, stream_options={"include_usage": True})
        await answering
    assert done == "[DONE]"
    streamed, usage = added(events), events[-1]["usage"]
    num_ids = sum(len(choice.pop("ids")) for choice in streamed)
    assert num_ids == (usage["completion_tokens"] if asked["return_token_ids"] else 0)
    assert usage["completion_tokens_details"] == whole["usage"]["completion_tokens_details"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("Hm.") + len("Hm")
    assert streamed == [expected(case) for case in CASES]
    for choice in whole["choices"]:
        message = {"reasoning": "", "tool_calls": [], **choice["message"]}
        made = {name: message[name] or "" for name in ("content", "reasoning")}
        calls = [call(**one["function"]) for one in message["tool_calls"]]
        assert {**made, "tool_calls": calls, "finish_reason": choice["finish_reason"]} == streamed[choice["index"]]


async def test_a_call_streams_before_its_end() -> None:
    fake = worker()
    async with client(fake) as asks:
        events = asks.events(PATH, messages=CHAT, tools=TOOLS)
        opening = asyncio.create_task(anext(events))
        choice = await fake.arrived.get()
        choice.tokens(1, text=GRAZ[:46])
        assert (await opening)["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
        [begun] = (await anext(events))["choices"][0]["delta"]["tool_calls"]
        assert begun.pop("id")
        assert begun == {"index": 0, **call("weather", "")}
        for piece, arguments in (
            (None, "{"),
            ('"place"', '"place"'),
            (': "Gr', ': "Gr'),
            ('az"}}\n</tool_call>', 'az"}'),
        ):
            if piece is not None:
                choice.tokens(1, text=piece)
            delta = (await anext(events))["choices"][0]["delta"]
            assert delta == {"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}
        choice.tokens(1, text="", finish=True, ending=STOP)
        last, done = [event async for event in events]
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"], done) == ({}, "tool_calls", "[DONE]")


async def test_a_call_streams_on_after_its_worker_is_lost() -> None:
    first, second = worker("a"), worker("b")
    async with client(first, second) as asks:
        reading = asyncio.create_task(asks.all_events(PATH, messages=CHAT, tools=TOOLS))
        await until(lambda: not (first.arrived.empty() and second.arrived.empty()))
        lost, other = (first, second) if not first.arrived.empty() else (second, first)
        lost.arrived.get_nowait().tokens(3, text=GRAZ[:-7])
        await asyncio.sleep(0.05)
        await lost.die()
        resumed = await other.arrived.get()
        assert resumed.submit.resume.text_bytes_sent == len(GRAZ[:-7].encode())
        resumed.tokens(1, text=GRAZ[-7:], finish=True, ending=STOP)
        events = await reading
    [made] = added(events[:-1])
    assert (made["tool_calls"], made["finish_reason"]) == ([GRAZ_CALL], "tool_calls")


async def test_log_probabilities_and_ids_of_all_tokens_are_told_also_of_marks() -> None:
    fake = worker()
    async with client(fake) as asks:
        answering = asyncio.create_task(played(fake, [CASES[0]], Random(1)))
        asked = {"logprobs": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
        events = await asks.all_events(PATH, messages=CHAT, tools=TOOLS, **asked)
        await answering
    choices = [event["choices"][0] for event in events[:-2]]
    num_tokens = events[-2]["usage"]["completion_tokens"]
    assert len([one for choice in choices for one in choice.get("token_ids", ())]) == num_tokens
    assert sum(len(choice["logprobs"]["content"]) for choice in choices if choice["logprobs"]) == num_tokens


async def test_reasoning_has_the_configured_name_and_may_be_left_out() -> None:
    fake = worker()
    async with client(fake, edge=partial(Edge, reasoning_field="reasoning_content")) as asks:
        for more, reasoning in (
            ({}, "Hm."),
            ({"include_reasoning": True}, "Hm."),
            ({"include_reasoning": False}, None),
        ):
            answer = await whole_answer(asks, fake, CASES[:1], **more)
            message = answer["choices"][0]["message"]
            assert (message.get("reasoning_content"), message.get("reasoning")) == (reasoning, None)
            answering = asyncio.create_task(played(fake, CASES[:1]))
            events = await asks.all_events(PATH, messages=CHAT, tools=TOOLS, **more)
            await answering
            deltas = [event["choices"][0]["delta"] for event in events[:-1]]
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
            assert not any("reasoning" in delta for delta in deltas)


@pytest.mark.parametrize("forbidden", [{"tool_choice": "none"}, {"tools": []}])
async def test_what_looks_like_a_call_is_text_if_the_model_may_not_call(forbidden: dict[str, Any]) -> None:
    fake = worker()
    async with client(fake) as asks:
        [choice] = (await whole_answer(asks, fake, [(GRAZ, STOP, *CASES[0][2:])], **forbidden))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (GRAZ, "stop")
    assert "tool_calls" not in choice["message"]


async def test_further_calls_are_left_out_if_parallel_calls_are_forbidden() -> None:
    fake = worker()
    async with client(fake) as asks:
        [choice] = (await whole_answer(asks, fake, CASES[:1], parallel_tool_calls=False))["choices"]
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"


async def test_the_conversation_of_the_page_of_tool_calls_is_true() -> None:
    page = (Path(__file__).parents[3] / "docs/tool-calls.md").read_text()
    asked, message, result = map(json.loads, re.findall(r"```json\n(.*?)```", page, re.DOTALL))
    fake = worker(template="{{ [messages, tools]|tojson }}{# tool #}")
    thought = f"<think>\n{message['reasoning']}\n</think>\n\n"
    called = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': {'place': 'Graz'}})}\n</tool_call>"
    async with client(fake) as asks:
        body = {**asked, "model": "tiny"}
        [choice] = (await whole_answer(asks, fake, [(thought + called, STOP, *CASES[0][2:])], **body))["choices"]
        result["tool_call_id"] = message["tool_calls"][0]["id"] = choice["message"]["tool_calls"][0]["id"]
        assert (choice["message"], choice["finish_reason"]) == (message, "tool_calls")
        body["messages"] += [choice["message"], result]
        [choice] = (await whole_answer(asks, fake, [("Yes.", STOP, *CASES[0][2:])], **body))["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Yes.", "stop")
