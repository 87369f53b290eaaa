"""POST /v1/responses of models whose answers have parts: reasoning, messages and calls."""

import asyncio
import itertools
from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.router.fake_worker import WORKER_DRAINS, FakeWorker
from tests.router.responses.responses_client import STOP, Json, client
from tests.router.tokenizer_files import tokenizer_files
from trunkline.status import CODE_INTERNAL, INTERNAL, RequestRefused
from trunkline.v1.generation_pb2 import FinishReason

LENGTH = FinishReason.FINISH_REASON_LENGTH
THOUGHT = "<think>\nA fox, hm.\n</think>\n\n"

DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


TEMPLATE = "{{ tools }}{% for message in messages %}{{ message.content }}{{ message.tool_calls }}{% endfor %}"
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
ARGUMENTS = '{"place": "Graz \\u00e4", "days": [1, 2]}'


def worker_of_parts(name: str = "w") -> FakeWorker:
    return FakeWorker(name, answer=None, answer_format="hermes", files=tokenizer_files(chat_template=TEMPLATE))


def marked(arguments: str, end: str = "}\n</tool_call>") -> str:
    """A call as the model writes it."""
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}{end}'


async def answer(
    worker: FakeWorker, asked: "asyncio.Task[Any]", pieces: list[str], ending: "FinishReason.ValueType" = STOP
) -> Any:
    """What was asked, once the worker has answered it in these pieces."""
    choice = await worker.arrived.get()
    for piece in pieces:
        choice.tokens(1, text=piece)
    choice.tokens(0, text="", finish=True, ending=ending)
    return await asked


async def both(
    text: str, *, size: int = 1, ending: "FinishReason.ValueType" = STOP, **body: Any
) -> tuple[Json, list[Json]]:
    """The whole response, and the events of a stream, of an answer that comes in pieces of this size."""
    worker = worker_of_parts()
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    async with client(worker) as responses:
        body = {"tools": [TOOL], **body}
        whole = await answer(worker, asyncio.create_task(responses.response(**body)), pieces, ending)
        events = await answer(worker, asyncio.create_task(responses.streamed(**body)), pieces, ending)
    assert_as_openai_declares(whole, events)
    return whole, events


def assert_as_openai_declares(whole: Json, events: list[Json]) -> None:
    from openai.types.responses import Response, ResponseStreamEvent  # takes a second, and collecting must not

    Response.model_validate(whole)
    for event in events:
        read: Any = TypeAdapter(ResponseStreamEvent).validate_python(event)
        assert read.type == event["type"]


def told(events: list[Json]) -> list[Json]:
    """The items that a stream tells, each from its own events, which must be in order and in one piece."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[Json] = []
    for index, group in itertools.groupby(events[2:-1], key=lambda event: event["output_index"]):
        assert index == len(items)
        first, *between, last = group
        added, item = first["item"], last["item"]
        kind, delta = item["type"], DELTAS[item["type"]]
        assert (first["type"], last["type"]) == ("response.output_item.added", "response.output_item.done")
        assert (added["id"], added["type"], added["status"]) == (item["id"], kind, "in_progress")
        if kind == "function_call":
            *between, done = between
            text, part = done["arguments"], None
            assert (added["call_id"], added["name"], added["arguments"]) == (item["call_id"], item["name"], "")
            assert (done["type"], done["name"], text) == (f"{delta}.done", item["name"], item["arguments"])
        else:
            begun, *between, done, part_done = between
            text, [part] = done["text"], item["content"]
            assert added["content"] == []
            assert (begun["type"], part_done["type"]) == ("response.content_part.added", "response.content_part.done")
            assert (begun["part"], part_done["part"]) == ({**part, "text": "", **NO_LOGPROBS[kind]}, part)
            assert (done["type"], text) == (f"{delta}.done", part["text"])
        assert {event["type"] for event in between} <= {f"{delta}.delta"}
        assert "".join(event["delta"] for event in between) == text
        assert {event["item_id"] for event in (*between, done)} == {item["id"]}
        items.append(item)
    return items


NO_LOGPROBS: Json = {"message": {"logprobs": []}, "reasoning": {}}


def nameless(items: list[Json]) -> list[Json]:
    """Items without the names that differ from response to response."""
    return [{name: value for name, value in item.items() if name not in ("id", "call_id")} for item in items]


def reasoning(text: str, status: str = "completed") -> Json:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "status": status, "summary": [], "content": content}


def message(text: str, status: str = "completed") -> Json:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    return {"type": "message", "status": status, "role": "assistant", "content": content}


def call(arguments: str, status: str = "completed") -> Json:
    return {"type": "function_call", "status": status, "name": "weather", "arguments": arguments}


OUTPUTS: dict[str, tuple[str, Any, list[Json]]] = {
    "reasoning and text": (THOUGHT + "Once.", STOP, [reasoning("A fox, hm."), message("Once.")]),
    "text alone": ("Once.", STOP, [message("Once.")]),
    "nothing": ("", STOP, [message("")]),
    "cut text": (THOUGHT + "On", LENGTH, [reasoning("A fox, hm."), message("On", "incomplete")]),
    "a call": (marked(ARGUMENTS), STOP, [call(ARGUMENTS)]),
    "a call without arguments": (marked("{}"), STOP, [call("{}")]),
    "reasoning, text and two calls": (
        f"{THOUGHT}I ask.\n{marked(ARGUMENTS)}\n{marked('{}')}",
        STOP,
        [reasoning("A fox, hm."), message("I ask."), call(ARGUMENTS), call("{}")],
    ),
    "a call before the end of the tokens": (marked("{}"), LENGTH, [call("{}")]),
    "a call that was cut off": (
        marked("{}") + marked('{"place": "Gr', ""),
        LENGTH,
        [call("{}"), call('{"place": "Gr', "incomplete")],
    ),
    "a call that a stop string cut off": (
        "I ask." + marked('{"place": "Gr', ""),
        STOP,
        [message("I ask."), call('{"place": "Gr', "incomplete")],
    ),
    "cut reasoning": ("<think>\nA fox", LENGTH, [reasoning("A fox", "incomplete")]),
}


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", OUTPUTS)
async def test_an_answer_becomes_items_alike_in_a_stream_and_as_a_whole(name: str, size: int) -> None:
    text, ending, expected = OUTPUTS[name]
    whole, events = await both(text, size=size, ending=ending)
    last = events[-1]["response"]
    assert nameless(whole["output"]) == nameless(last["output"]) == expected
    assert told(events) == last["output"]
    status = "completed" if ending == STOP else "incomplete"
    assert (whole["status"], last["status"], events[-1]["type"]) == (status, status, f"response.{status}")


@pytest.mark.parametrize(("text", "number"), [("Once", 4), ("<think>A</think>Once", 0)])
async def test_only_a_message_that_is_the_whole_output_has_log_probabilities(text: str, number: int) -> None:
    whole, events = await both(text, include=["message.output_text.logprobs"])
    logprobs = whole["output"][-1]["content"][0]["logprobs"]
    assert len(logprobs) == number
    deltas = [entry for event in events if "delta" in event for entry in event.get("logprobs", ())]
    assert events[-1]["response"]["output"][-1]["content"][0]["logprobs"] == deltas == logprobs


async def test_a_failure_between_items_tells_those_that_were_begun() -> None:
    worker = worker_of_parts()
    async with client(worker) as responses, responses.stream(worker) as (choice, events):
        choice.tokens(1, text=THOUGHT + "Once upon a time")
        begun = [await anext(events) for _ in range(11)]
        choice.fail(RequestRefused(CODE_INTERNAL, INTERNAL, "a bug"))
        [failed] = [event async for event in events if event["type"] == "response.failed"]
    assert begun[-1]["type"] == "response.output_text.delta"
    assert [item["status"] for item in failed["response"]["output"]] == ["completed", "incomplete"]


async def test_a_call_goes_on_at_another_worker_where_the_first_one_left_it() -> None:
    workers = [worker_of_parts(name) for name in "ab"]
    for worker in workers:
        worker.arrived = workers[0].arrived
    text = f"{THOUGHT}I ask.\n{marked(ARGUMENTS)}"
    place = text.index("days")
    async with client(*workers) as responses, responses.stream(workers[0], tools=[TOOL]) as (choice, events):
        for character in text[:place]:
            choice.tokens(1, text=character)
        choice.fail(WORKER_DRAINS)
        resumed = await workers[0].arrived.get()
        assert resumed.worker is not choice.worker
        for character in text[place:]:
            resumed.tokens(1, text=character)
        resumed.tokens(0, text="", finish=True, ending=STOP)
        told_events = [event async for event in events]
    assert nameless(told(told_events)) == [reasoning("A fox, hm."), message("I ask."), call(ARGUMENTS)]
