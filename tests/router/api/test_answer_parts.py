"""Conversations with a model whose answers have parts, through the router and directly."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.router.cluster import cluster
from tests.router.direct_rig import KEY, arrival, choices, direct, fakes
from tests.router.fake_worker import WORKER_DRAINS, FakeWorker
from tests.router.tokenizer_files import tokenizer_files
from tests.tagged_answers import TAGGED, TaggedParser, joined
from trunkline import Client, SyncClient
from trunkline.answer.answer_parser import PARSERS
from trunkline.client.client import Piece
from trunkline.v1.generation_pb2 import ToolCall
from trunkline.v1.inference_pb2 import AnswerPart, ChatMessage, ChatMessages, ChatPart, Tool, ToolCallEnd

CHAT = [("user", "What is the weather?")]
ANSWER = '<think>Rain?</think>I ask.<tool_call>{"name": "weather", "arguments": {"place": "Graz"}}</tool_call>'
PARTS = [
    AnswerPart(reasoning="Rain?"),
    AnswerPart(text="I ask."),
    AnswerPart(tool_call=ToolCall(id="call-1", name="weather")),
    AnswerPart(arguments='{"place": "Graz"}'),
    AnswerPart(tool_call_end=ToolCallEnd()),
]

GRAZ = ToolCall(name="weather", arguments='{"place": "Graz"}')
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HERMES_TEMPLATE = (
    "{% for tool in tools %}{{ tool.function.name }}. {% endfor %}{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}{{ message.reasoning_content }} {% endif %}{{ message.content }} "
    "{% for call in message.tool_calls %}{{ call.function.name }} {{ call.function.arguments }} {{ call.id }} "
    "{% endfor %}{% if message.tool_call_id %}{{ message.tool_call_id }} {% endif %}{% endfor %}"
)


@pytest.fixture(autouse=True)
def tagged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARSERS, TAGGED, TaggedParser)


@pytest.fixture(params=["routed", "direct"])
def client_of(request: pytest.FixtureRequest) -> Any:
    return direct if request.param == "direct" else lambda router: Client(f"127.0.0.1:{router.port}")


async def pieces_of(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


def parts_of(pieces: list[Piece]) -> list[AnswerPart]:
    return joined([part for piece in pieces for part in piece.parts])


async def test_an_answer_comes_in_parts_also_across_a_failover(client_of: Any) -> None:
    workers = fakes("a", "b", answer_format=TAGGED)
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        reading = asyncio.create_task(pieces_of(client.generate(CHAT, max_tokens=99)))
        place = ANSWER.index("ool_call>")
        choice = await arrival(workers)
        choice.tokens(3, text=ANSWER[:place])
        choice.fail(WORKER_DRAINS)
        resumed = await arrival(workers)
        assert resumed.submit.resume.text_bytes_sent == place
        for character in ANSWER[place:-1]:
            resumed.tokens(1, text=character)
        resumed.tokens(1, text=ANSWER[-1], finish=True)
        pieces = await reading
    assert parts_of(pieces) == PARTS
    assert pieces[0].response.prompt.answer_format == TAGGED
    assert choice.submit.sampling.keep_marks
    assert resumed.submit.sampling.keep_marks
    assert "".join(piece.text for piece in pieces) == "I ask."
    assert "".join(chunk.text for piece in pieces for chunk in piece.response.chunks) == ANSWER
    assert pieces[-1].response.usage.completion_tokens == 3 + len(ANSWER) - place


async def test_a_parser_knows_the_end_of_the_prompt_and_the_tools(client_of: Any) -> None:
    """The prompt begins the reasoning, and the schema of a tool says what a raw value is."""
    template = "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0]['content'] }}<think>\n"
    workers = fakes("a", answer_format="qwen_xml", files=tokenizer_files(chat_template=template))
    schema = '{"properties": {"zip": {"type": "string"}, "days": {"type": "integer"}}}'
    tool = Tool(name="weather", parameters=schema)
    chat = ChatMessages(messages=[ChatMessage(role="user", content="Rain?")], tools=[tool])
    call = "<function=weather><parameter=zip>01</parameter><parameter=days>2</parameter></function>"
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        reading = asyncio.create_task(pieces_of(client.generate(chat)))
        (await arrival(workers)).tokens(1, text=f"Hm.</think><tool_call>{call}</tool_call>", finish=True)
        reasoning, begin, *parts = parts_of(await reading)
    assert (reasoning.reasoning, begin.tool_call.name) == ("Hm.", "weather")
    assert parts == [AnswerPart(arguments='{"zip": "01", "days": 2}'), AnswerPart(tool_call_end=ToolCallEnd())]


async def test_calls_after_the_first_one_are_left_out_on_request(client_of: Any) -> None:
    template = "{{ messages[0]['content'] }}{{ tools }}"
    workers = fakes("a", answer_format="hermes", files=tokenizer_files(chat_template=template))
    calls = [f'<tool_call>{{"name": "weather", "arguments": {{"day": {day}}}}}</tool_call>' for day in range(3)]
    messages = [ChatMessage(role="user", content="Rain?")]
    chat = ChatMessages(messages=messages, tools=[Tool(name="weather")], single_tool_call=True)
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        reading = asyncio.create_task(pieces_of(client.generate(chat)))
        (await arrival(workers)).tokens(1, text="".join(calls), finish=True)
        begin, *parts = parts_of(await reading)
    assert begin.tool_call.name == "weather"
    assert parts == [AnswerPart(arguments='{"day": 0}'), AnswerPart(tool_call_end=ToolCallEnd())]


@pytest.mark.parametrize(
    ("final", "reasons"),
    [
        ("<think>", True),
        ("<think>\nIt may " + "well " * 40, True),
        ("<think>a</think>\n<think>c", True),
        ("<think>a</think>b<think>c", False),
        ("The tag <think>", False),
        ("The tag <think> begins it, and", False),
        ("<think>a</think>It may", False),
        ("It may", False),
        ("", False),
    ],
)
async def test_an_answer_continues_the_reasoning_of_the_final_message(
    client_of: Any, final: str, reasons: bool
) -> None:
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    workers = fakes("a", answer_format="hermes", files=tokenizer_files(chat_template=template))
    question = ChatMessage(role="user", content="What is <think>?")
    for message in (
        ChatMessage(role="assistant", content=final),
        ChatMessage(role="assistant", parts=[ChatPart(text=text) for text in (final, " ")]),
        ChatMessage(role="assistant", parts=[ChatPart(reasoning="Hm."), ChatPart(text=final)]),
    ):
        chat = ChatMessages(messages=[question, message], continue_final_message=True)
        async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
            reading = asyncio.create_task(pieces_of(client.generate(chat)))
            (await arrival(workers)).tokens(1, text="rain.</think>Yes.", finish=True)
            parts = parts_of(await reading)
        answer = [AnswerPart(reasoning="rain."), AnswerPart(text="Yes.")]
        assert parts == (answer if reasons else [AnswerPart(text="rain.</think>Yes.")])


@pytest.mark.parametrize(("template", "reasons"), [("{}<think>\n{}", True), ("{}<think></think>{}", False)])
async def test_a_template_may_begin_the_reasoning_that_is_continued(
    client_of: Any, template: str, reasons: bool
) -> None:
    source = template.format("{{ messages[0].content }}", "{{ messages[1].content }}")
    workers = fakes("a", answer_format="hermes", files=tokenizer_files(chat_template=source))
    messages = [ChatMessage(role="user", content="Rain?"), ChatMessage(role="assistant", content="It may well be " * 9)]
    chat = ChatMessages(messages=messages, continue_final_message=True)
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        reading = asyncio.create_task(pieces_of(client.generate(chat)))
        (await arrival(workers)).tokens(1, text="rain.", finish=True)
        [part] = parts_of(await reading)
    assert part == (AnswerPart(reasoning="rain.") if reasons else AnswerPart(text="rain."))


async def test_a_message_that_is_not_continued_begins_no_reasoning(client_of: Any) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    workers = fakes("a", answer_format="hermes", files=tokenizer_files(chat_template=template))
    messages = [ChatMessage(role="user", content="What is <think>")]
    chat = ChatMessages(messages=messages, add_generation_prompt=False)
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        reading = asyncio.create_task(pieces_of(client.generate(chat)))
        (await arrival(workers)).tokens(1, text="A tag.", finish=True)
        assert parts_of(await reading) == [AnswerPart(text="A tag.")]


async def test_each_choice_has_parts_of_its_own(client_of: Any) -> None:
    workers = fakes("a", answer_format=TAGGED)
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        reading = asyncio.create_task(pieces_of(client.generate(CHAT, n=2)))
        for choice in [await arrival(workers) for _ in range(2)]:
            choice.tokens(1, text=f"<think>{choice.submit.choice}</think>", finish=True)
        pieces = await reading
    for index in range(2):
        (part,) = parts_of([piece for piece in pieces if piece.index == index])
        assert (part.index, part.reasoning) == (index, str(index))


def hermes(*names: str) -> list[FakeWorker]:
    return fakes(*names, answer_format="hermes", files=tokenizer_files(chat_template=HERMES_TEMPLATE))


def written(call: ToolCall) -> str:
    return f'<tool_call>{{"name": "{call.name}", "arguments": {call.arguments}}}</tool_call>'


async def test_text_goes_on_in_a_new_line_after_a_call(client_of: Any) -> None:
    workers = hermes("a")
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        asking = asyncio.create_task(client.complete(CHAT, tools=[WEATHER]))
        choice = await arrival(workers)
        for text in ("I ask.", f" {written(GRAZ)}", "\nThen I", " tell."):
            choice.tokens(1, text=text)
        choice.tokens(1, text=written(GRAZ), finish=True)
        answer = await asking
    assert (answer.text, len(answer.tool_calls)) == ("I ask.\nThen I tell.", 2)


async def test_a_program_calls_the_tools_and_answers_with_their_results(client_of: Any) -> None:
    """The answer's message, and the result, continue the conversation."""
    workers, chat = hermes("a"), list[Any](CHAT)
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        asking = asyncio.create_task(client.complete(chat, tools=[WEATHER]))
        (await arrival(workers)).tokens(1, text=f"<think>Rain?</think>I ask.{written(GRAZ)}", finish=True)
        asked = await asking
        (call,) = asked.tool_calls
        assert (asked.text, asked.reasoning, call.name, call.arguments) == (
            "I ask.",
            "Rain?",
            "weather",
            GRAZ.arguments,
        )
        chat += [asked.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
        telling = asyncio.create_task(client.complete(chat, tools=[WEATHER]))
        telling_choice = await arrival(workers)
        telling_choice.tokens(1, text="Rain.", finish=True)
        prompt = await client.detokenize(telling_choice.submit.prompt_token_ids)
        assert (await telling).choices[0].message == ChatMessage(role="assistant", parts=[ChatPart(text="Rain.")])
    assert prompt == (
        "weather. user: What is the weather? assistant: Rain? I ask. weather {'place': 'Graz'}"
        f" {call.id} tool: It rains. {call.id} "
    )


async def test_the_blocking_client_reads_parts_too() -> None:
    workers = hermes("a")
    async with cluster(*workers, grant_key=KEY) as router:
        with SyncClient(f"127.0.0.1:{router.port}") as client:
            asking = asyncio.create_task(asyncio.to_thread(client.complete, CHAT, tools=[WEATHER]))
            (await arrival(workers)).tokens(1, text=f"<think>Rain?</think>{written(GRAZ)}", finish=True)
            done = await asking
    assert (done.text, done.reasoning, [call.arguments for call in done.tool_calls]) == ("", "Rain?", [GRAZ.arguments])


async def test_choices_of_a_real_format_go_on_at_another_worker_in_the_middle_of_a_call(client_of: Any) -> None:
    workers, text = hermes("a", "b"), f"<think>Rain?</think>I ask.{written(GRAZ)}"
    place = text.index("Graz")
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        reading = asyncio.create_task(pieces_of(client.generate(CHAT, n=2, tools=[WEATHER])))
        begun = await choices(workers, 2)
        for choice in begun:
            choice.tokens(place, text=text[:place])
        for choice in begun:
            choice.fail(WORKER_DRAINS)
        for choice in await choices(workers, 2):
            for character in text[choice.submit.resume.text_bytes_sent :]:
                choice.tokens(1, text=character)
            choice.tokens(0, text="", finish=True)
        pieces = await reading
    assert pieces[-1].response.usage.resumptions == 1
    for index in range(2):
        own = [piece for piece in pieces if piece.index == index]
        (call,) = [call for piece in own for call in piece.tool_calls]
        assert (call.name, call.arguments) == (GRAZ.name, GRAZ.arguments)
        assert ("".join(piece.text for piece in own), "".join(piece.reasoning for piece in own)) == ("I ask.", "Rain?")
        ids = [part.tool_call.id for piece in own for part in piece.parts if part.HasField("tool_call")]
        assert ids == [call.id]


async def test_a_call_that_is_cut_off_is_no_call(client_of: Any) -> None:
    workers, cut = hermes("a"), written(GRAZ)[:-20]
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        asking = asyncio.create_task(client.complete(CHAT, tools=[WEATHER]))
        (await arrival(workers)).tokens(1, text=f"{written(GRAZ)}{cut}", finish=True)
        done = await asking
    assert [call.arguments for call in done.tool_calls] == [GRAZ.arguments]
    assert (done.text, done.choices[0].finish_reason) == ("", "length")


@pytest.mark.parametrize(
    ("prompt", "formats"), [("text", [TAGGED]), ([5, 6], [TAGGED]), (CHAT, ["unknown"]), (CHAT, [TAGGED, "", ""])]
)
async def test_other_answers_are_text(client_of: Any, prompt: Any, formats: list[str]) -> None:
    """Those to other prompts, in a format that the router does not know, or that few of the workers have."""
    workers = [worker for name, one in zip("abc", formats, strict=False) for worker in fakes(name, answer_format=one)]
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        reading = asyncio.create_task(pieces_of(client.generate(prompt)))
        choice = await arrival(workers)
        choice.tokens(1, text=ANSWER, finish=True)
        pieces = await reading
    assert "".join(piece.text for piece in pieces) == ANSWER
    assert not choice.submit.sampling.keep_marks
    assert not parts_of(pieces)
    assert not pieces[0].response.prompt.answer_format


async def test_workers_that_do_not_name_the_format_get_no_conversations(client_of: Any) -> None:
    """They would leave out its marks. Other prompts go to all workers."""
    workers = [*fakes("a", "b", answer_format=TAGGED), *fakes("c")]
    chats, texts = [[("user", f"{number}?")] for number in range(9)], [f"{number}?" for number in range(9)]
    async with cluster(*workers, grant_key=KEY) as router, client_of(router) as client:
        for prompts, worked in ((chats, {"a", "b"}), (texts, {"a", "b", "c"})):
            reading = asyncio.gather(*(pieces_of(client.generate(prompt)) for prompt in prompts))
            arrived = [await arrival(workers) for _ in prompts]
            assert {choice.worker.worker_id for choice in arrived} == worked
            for choice in arrived:
                choice.tokens(1, text=ANSWER, finish=True)
            await reading


async def test_a_direct_client_without_the_parser_leaves_the_answer_to_the_router(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trunkline.client.direct.PARSERS", {})
    workers = fakes("a", answer_format=TAGGED)
    async with cluster(*workers, grant_key=KEY) as router, direct(router) as client:
        reading = asyncio.create_task(pieces_of(client.generate(CHAT)))
        (await arrival(workers)).tokens(1, text=ANSWER, finish=True)
        assert parts_of(await reading) == PARTS
    assert f"cannot parse {TAGGED}" in caplog.text
