"""/v1/messages of a model that thinks and calls tools: blocks of content, as a whole and streamed."""

import asyncio
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest

from tests.router.anthropic.messages_client import HI, Json, MessagesClient, arrived, client
from tests.router.direct_rig import arrival
from tests.router.fake_worker import WORKER_DRAINS, FakeChoice, FakeWorker
from tests.router.prompts.tool_templates import ALL
from tests.router.tokenizer_files import tokenizer_files
from trunkline.v1.generation_pb2 import FinishReason

STOP, LENGTH = FinishReason.FINISH_REASON_STOP, FinishReason.FINISH_REASON_LENGTH
MAX_TOKENS = 250
ASKED: Json = {"max_tokens": MAX_TOKENS, "tools": [{"name": "weather", "input_schema": {"type": "object"}}]}
WORKER: Any = {"answer": None, "answer_format": "hermes", "files": tokenizer_files(chat_template=ALL)}

CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Graz \\u00e4"}}</tool_call>'
THINKING = {"type": "thinking", "thinking": "Rain?", "signature": "unsigned"}
INPUT = {"place": "Graz ä"}
# What a model writes, why it ends, and what it is to a client.
ANSWERS: dict[str, tuple[str, "FinishReason.ValueType", list[Json], str]] = {
    "text": ("It rains.", STOP, [{"type": "text", "text": "It rains."}], "end_turn"),
    "nothing": ("", STOP, [{"type": "text", "text": ""}], "end_turn"),
    "reasoning": ("<think>Rain?</think>", STOP, [THINKING], "end_turn"),
    "reasoning that was cut off": ("<think>Rain?", LENGTH, [THINKING], "max_tokens"),
    "reasoning, text and two calls": (
        f"<think>\nRain?\n</think>\n\nI ask.\n{CALL}\n{CALL}",
        STOP,
        [
            THINKING,
            {"type": "text", "text": "I ask."},
            {"type": "tool_use", "name": "weather", "input": INPUT},
            {"type": "tool_use", "name": "weather", "input": INPUT},
        ],
        "tool_use",
    ),
    "a call and then text": (
        f"{CALL}I wait.",
        STOP,
        [{"type": "tool_use", "name": "weather", "input": INPUT}, {"type": "text", "text": "I wait."}],
        "tool_use",
    ),
    "a call at the limit": (
        CALL,
        LENGTH,
        [{"type": "tool_use", "name": "weather", "input": INPUT}],
        "max_tokens",
    ),
}


def pieces(text: str, rng: Random) -> list[str]:
    cuts = sorted(rng.choices(range(len(text) + 1), k=rng.choice([0, 1, 5, len(text)])))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def play(choice: FakeChoice, texts: Iterable[str], ending: "FinishReason.ValueType", **last: Any) -> None:
    for text in texts:
        choice.tokens(1, text=text)
    count = MAX_TOKENS - choice.sent if ending == LENGTH else 1
    choice.tokens(count, text="", finish=True, ending=ending, **last)


async def played(worker: FakeWorker, texts: Iterable[str], ending: "FinishReason.ValueType", **last: Any) -> None:
    play(await arrived(worker), texts, ending, **last)


def told(blocks: Iterable[Json]) -> list[Json]:
    """Blocks without what differs from answer to answer, and without what is null or empty."""
    left_out = ("id", "citations")
    return [{k: v for k, v in block.items() if k not in left_out and v is not None} for block in blocks]


def check_thinking_tokens(message: Json) -> None:
    """The tokenizer has a token for each character. The worker may have sent fewer tokens."""
    thought, usage = sum(len(block.get("thinking", "")) for block in message["content"]), message["usage"]
    assert usage["output_tokens_details"] == {"thinking_tokens": min(thought, usage["output_tokens"])}


async def whole(messages: MessagesClient, worker: FakeWorker, answer: str, **end: Any) -> Json:
    asked = asyncio.create_task(messages.message(**ASKED))
    await played(worker, [answer], **end)
    return await asked


async def streamed(messages: MessagesClient, worker: FakeWorker, texts: Iterable[str], **end: Any) -> list[Json]:
    asked = asyncio.create_task(messages.streamed(**ASKED))
    await played(worker, texts, **end)
    return await asked


@pytest.mark.parametrize("name", ANSWERS)
async def test_anthropics_client_gets_the_same_message_whole_and_streamed(name: str) -> None:
    from anthropic import AsyncAnthropic

    answer, ending, content, stop_reason = ANSWERS[name]
    rng, worker = Random(name), FakeWorker("w", **WORKER)
    async with client(worker) as messages:
        once = await whole(messages, worker, answer, ending=ending)
        assert told(once["content"]) == content
        assert once["stop_reason"] == stop_reason
        check_thinking_tokens(once)
        async with AsyncAnthropic(base_url=str(messages.http.base_url), api_key="any", max_retries=0) as anthropic:
            for _ in range(4):
                asked = anthropic.messages.stream(model="tiny", messages=[HI], **ASKED)  # type: ignore[list-item]
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(played(worker, pieces(answer, rng), ending))
                    async with asked as stream:
                        final = await stream.get_final_message()
                assert told(final.to_dict()["content"]) == content  # type: ignore[arg-type]
                assert final.stop_reason == stop_reason
                check_thinking_tokens(final.to_dict())
                type(final).model_validate(final.to_dict())


async def test_the_events_of_blocks_come_in_order_as_the_tokens_do() -> None:
    worker = FakeWorker("w", **WORKER)
    async with client(worker) as messages, messages.stream(worker, **ASKED) as (choice, events):

        async def shown(text: str, count: int, **options: Any) -> list[Json]:
            choice.tokens(1, text=text, **options)
            return [await anext(events) for _ in range(count)]

        def delta(index: int, kind: str, name: str, text: str) -> Json:
            return {"type": "content_block_delta", "index": index, "delta": {"type": f"{kind}_delta", name: text}}

        def start(index: int, kind: str, **fields: Any) -> Json:
            return {"type": "content_block_start", "index": index, "content_block": {"type": kind, **fields}}

        [message] = await shown("", 1)
        assert (message["type"], message["message"]["content"]) == ("message_start", [])
        assert await shown("<think>Ra", 2) == [
            start(0, "thinking", thinking="", signature=""),
            delta(0, "thinking", "thinking", "Ra"),
        ]
        assert await shown("in?", 1) == [delta(0, "thinking", "thinking", "in?")]
        assert await shown("</think>I", 4) == [
            delta(0, "signature", "signature", "unsigned"),
            {"type": "content_block_stop", "index": 0},
            start(1, "text", text="", citations=[]),
            delta(1, "text", "text", "I"),
        ]
        choice.tokens(1, text='<tool_call>{"name": "f", "argum')
        ended, begun, empty, first = await shown('ents": {"a": ', 4)
        assert ended == {"type": "content_block_stop", "index": 1}
        assert begun["content_block"].pop("id")
        assert begun == start(2, "tool_use", name="f", input={})
        assert empty == delta(2, "input_json", "partial_json", "")
        assert first == delta(2, "input_json", "partial_json", '{"a": ')
        assert await shown('"b"}}', 2) == [
            delta(2, "input_json", "partial_json", '"b"}'),
            {"type": "content_block_stop", "index": 2},
        ]
        ending, stop = await shown("</tool_call>", 2, finish=True, ending=STOP)
        assert (ending["type"], ending["delta"]["stop_reason"]) == ("message_delta", "tool_use")
        assert ending["usage"]["output_tokens"] == 8
        assert stop == {"type": "message_stop"}


async def test_thinking_that_is_not_shown_is_an_empty_block() -> None:
    """Its tokens are counted, and clients send the block back."""
    from anthropic import AsyncAnthropic

    worker, omitted = FakeWorker("w", **WORKER), {"type": "adaptive", "display": "omitted"}
    async with client(worker) as messages:
        url = str(messages.http.base_url)
        async with (
            AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as anthropic,
            asyncio.TaskGroup() as tasks,
        ):
            tasks.create_task(played(worker, "<think>Rain?</think>Yes.", STOP))
            asked = anthropic.messages.stream(model="tiny", messages=[HI], thinking=omitted, **ASKED)  # type: ignore[arg-type, list-item]
            async with asked as stream:
                kinds = [event.delta.type async for event in stream if event.type == "content_block_delta"]
                final: Json = (await stream.get_final_message()).to_dict()
        asked_whole = asyncio.create_task(messages.message(**ASKED, thinking=omitted))
        await played(worker, "<think>Rain?</think>Yes.", STOP)
        once = await asked_whole
        content = [{**THINKING, "thinking": ""}, {"type": "text", "text": "Yes."}]
        for message in (final, once):
            assert told(message["content"]) == content
            assert message["usage"]["output_tokens_details"] == {"thinking_tokens": 5}
        assert (kinds[0], set(kinds[1:])) == ("signature_delta", {"text_delta"})
        again = asyncio.create_task(messages.message(messages=[HI, {"role": "assistant", "content": content}, HI]))
        await played(worker, ["!"], STOP)
        await again


async def test_a_call_that_was_cut_off_is_no_call() -> None:
    """A stream has begun it, so it ends its block. What was complete before it stays."""
    worker = FakeWorker("w", **WORKER)
    async with client(worker) as messages:
        for ending, reason in ((LENGTH, "max_tokens"), (STOP, "end_turn")):
            cut = CALL[: CALL.index("az")]
            message = await whole(messages, worker, cut, ending=ending)
            assert (told(message["content"]), message["stop_reason"]) == ([{"type": "text", "text": ""}], reason)
            events = await streamed(messages, worker, [cut], ending=ending)
            assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
            assert events[1]["content_block"]["name"] == "weather"
            assert events[-2]["delta"]["stop_reason"] == reason
        message = await whole(messages, worker, CALL + CALL[:-20], ending=STOP, stop_string="END")
        assert [block["type"] for block in message["content"]] == ["tool_use"]
        assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")
        events = await streamed(messages, worker, [CALL + CALL[:-20]], ending=STOP)
        assert events[-2]["delta"]["stop_reason"] == "end_turn"


async def test_a_stop_sequence_after_a_call_ends_the_message() -> None:
    worker = FakeWorker("w", **WORKER)
    async with client(worker) as messages:
        message = await whole(messages, worker, f"{CALL}\n", ending=STOP, stop_string="END")
        assert [block["type"] for block in message["content"]] == ["tool_use"]
        events = await streamed(messages, worker, [CALL], ending=STOP, stop_string="END")
        for ended in message, events[-2]["delta"]:
            assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "END")


MALFORMED = '<tool_call>\n{"name": "weather", "arguments": {"place": "a "b" c"}}\n</tool_call>'


@pytest.mark.parametrize("second", [MALFORMED, f"{MALFORMED}\nDone.", CALL[: CALL.index("az")]])
async def test_anthropics_client_runs_no_tool_of_a_stream_with_a_call_that_has_not_ended(second: str) -> None:
    from anthropic import AsyncAnthropic, beta_async_tool

    places = list[str]()

    @beta_async_tool
    async def weather(place: str) -> str:
        places.append(place)
        return "Rain."

    worker, rng = FakeWorker("w", **WORKER), Random(second)
    asked: Any = {"model": "tiny", "max_tokens": MAX_TOKENS, "messages": [HI]}
    async with client(worker) as messages:
        url = str(messages.http.base_url)
        async with AsyncAnthropic(base_url=url, api_key="any", max_retries=0) as anthropic:
            for answers in ([CALL + second], [CALL, "Rain."]):
                runner: Any = anthropic.beta.messages.tool_runner(**asked, tools=[weather], stream=True)
                async with asyncio.TaskGroup() as tasks:
                    last = tasks.create_task(runner.until_done())
                    for answer in answers:
                        await played(worker, pieces(answer, rng), STOP)
                assert last.result().stop_reason == "end_turn"
                assert places == ["Graz ä"] * (len(answers) - 1)


async def test_a_message_streams_on_after_a_failover() -> None:
    workers = [FakeWorker(name, **WORKER) for name in "ab"]
    answer = f"<think>Rain?</think>{CALL}"
    async with client(*workers) as messages:
        asked = asyncio.create_task(messages.streamed(**ASKED))
        lost = await arrival(workers)
        place = answer.index("Gra")
        lost.tokens(1, text=answer[:place])
        lost.fail(WORKER_DRAINS)
        play(await arrival(workers), [answer[place:]], STOP)
        events = await asked
    arguments = [event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", ())]
    assert "".join(arguments) == '{"place": "Graz \\u00e4"}'
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
