"""Templates that were written against other callers get tools and calls as they take them; what they would leave out is
refused. The templates here are the distinctive lines of published ones, which are named beside them."""

import pytest

from tests.router.cluster import cluster
from tests.router.fake_worker import FakeWorker
from tests.router.prompts.tool_templates import BY_ID, EACH, END, SINGLE, TAGGED
from tests.router.tokenizer_files import byte_tokenizer, tokenizer_files
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import ToolCall
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages, ChatPart, GenerateRequest, Tool, ToolResult
from trunkline_router.prompts.chat_template import ChatTemplate
from trunkline_router.prompts.conversation import ToolStyle
from trunkline_router.prompts.tokenizer_files import read_tokenizer_config

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
ARGUMENTS = '{"city":"Köln",  "days": [1,2]}'
CALL = "{% for call in m.tool_calls %}{{ call.function.name + '\n' + call.function.arguments + '\n' }}{% endfor %}"
REST = "{% if m.role != 'assistant' %}{{ m.role + ': ' + m.content + '\n' }}{% endif %}"
# DeepSeek V3 adds arguments to a text.
TEXT_ARGUMENTS = EACH + "{% if 'tool_calls' in m %}{{ m.content }}" + CALL + "{% endif %}" + REST + END
# DeepSeek R1 Distill has calls only in messages whose content is None.
NULL_CONTENT = EACH + "{% if m.role == 'assistant' and m.content is none %}" + CALL + "{% endif %}" + REST + END
# gpt-oss takes either text or reasoning beside calls, and needs the description of each tool.
ONE_TEXT = (
    "{% for tool in tools or [] %}{{ '// ' + tool.function.description + '\n' }}{{ tool.function.name + '\n' }}"
    "{% endfor %}" + EACH + "{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('Cannot pass both content and thinking in an assistant message with tool calls!') }}{% endif %}"
    "{{ '[' ~ (m.thinking or '') ~ '|' + m.content + ']' + m.tool_calls[0].function.arguments | tojson + '\n' }}"
    "{% endif %}" + REST + END
)
# Phi 3 leaves out every message of another role.
TWO_ROLES = (
    EACH + "{% if m.role == 'user' %}{{ m.content }}{% elif m.role == 'assistant' %}{{ m.content }}{% endif %}" + END
)
# Command R and Gemma 2 do not know tools, and refuse roles that do not alternate.
ALTERNATING = EACH + (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role in ('user', 'assistant') %}{{ m.content }}{% endif %}"
) + END  # fmt: skip
# Granite 3.3 and LFM2 write any role, but no calls.
ANY_ROLE = EACH + "{{ m.role + ': ' + m.content + '\n' }}" + END

SAID = ChatMessage(role="user", content="Weather?")
RESULT = ChatMessage(role="tool", parts=[ChatPart(tool_result=ToolResult(call_id="call_0123456789", content="rain"))])


def called(*beside: ChatPart, call_id: str = "call_0123456789") -> ChatMessage:
    call = ToolCall(id=call_id, name="weather", arguments=ARGUMENTS)
    return ChatMessage(role="assistant", parts=[*beside, ChatPart(tool_call=call)])


def rendered(template: str, *messages: ChatMessage, tools: tuple[Tool, ...] = ()) -> str:
    return ChatTemplate(template, SPECIAL).render(ChatMessages(messages=messages, tools=tools))


@pytest.mark.parametrize("template", [TEXT_ARGUMENTS, NULL_CONTENT])
def test_a_template_that_takes_arguments_as_text_gets_them_as_they_were_written(template: str) -> None:
    expected = f"user: Weather?\nweather\n{ARGUMENTS}\ntool: rain\n"
    assert rendered(template, SAID, called(), RESULT) == expected


def test_text_beside_calls_joins_the_reasoning_if_the_template_takes_one_of_them() -> None:
    thought, text = ChatPart(reasoning="I ask."), ChatPart(text="One moment.")
    arguments = '{"city": "Köln", "days": [1, 2]}'
    for beside, expected in (
        ([thought, text], "[I ask.\nOne moment.|]"),
        ([thought], "[I ask.|]"),
        ([text], "[|One moment.]"),
        ([], "[|]"),
    ):
        assert rendered(ONE_TEXT, SAID, called(*beside)) == f"user: Weather?\n{expected}{arguments}\n"


def test_a_tool_has_a_description_if_the_template_needs_one() -> None:
    tools = (Tool(name="weather"), Tool(name="time", description="Tells it."))
    assert rendered(ONE_TEXT, SAID, tools=tools) == "// \nweather\n// Tells it.\ntime\nuser: Weather?\n"
    assert "description" not in rendered(TAGGED, SAID, tools=tools[:1])
    needy = "{% for tool in tools %}{{ '' + tool.function.description }}{{ tool.function | tojson }}{% endfor %}"
    assert rendered(needy, SAID, tools=tools[1:]) == (
        'Tells it.{"name": "time", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}}'
    )


def test_ids_have_nine_characters_if_the_template_needs_that_and_results_name_their_calls() -> None:
    short = ToolStyle(short_ids=True)
    assert short.call_id("abcDEF789") == "abcDEF789"
    first, second = (short.call_id(name) for name in ("call_0123456789", "call_0123456780"))
    assert first != second
    text = rendered(BY_ID, SAID, called(), called(call_id="abcDEF789"), RESULT)
    assert text.count(first) == 2
    assert text.count("abcDEF789") == 1
    assert "call_0123456789" in rendered(BY_ID.replace("!= 9", "> 99"), SAID, called())


@pytest.mark.parametrize(
    ("template", "messages", "problem"),
    [
        (TWO_ROLES, [called()], "no place for calls of tools"),
        (TWO_ROLES, [RESULT], "no place for results of tools"),
        (TWO_ROLES, [ChatMessage(role="tool", content="rain")], "no place for results of tools"),
        (ALTERNATING, [called()], "no place for calls of tools"),
        (ALTERNATING, [called(), RESULT], "no place for calls of tools"),
        (ALTERNATING, [ChatMessage(role="assistant"), RESULT], "no place for results of tools"),
        (ANY_ROLE, [called()], "no place for calls of tools"),
        (BY_ID, [called(call_id="")], "ids have 9 characters"),
        (SINGLE, [ChatMessage(role="assistant", parts=[*called().parts] * 2)], "only supports single tool-calls"),
    ],
)
def test_what_a_template_would_leave_out_is_refused(template: str, messages: list[ChatMessage], problem: str) -> None:
    with pytest.raises(RequestRefused, match=problem) as caught:
        rendered(template, SAID, *messages)
    assert caught.value.reason == "INVALID_REQUEST"
    assert "\n" not in caught.value.message


def test_a_message_of_a_role_that_the_template_leaves_out_is_refused() -> None:
    note = ChatMessage(role="critic", content=' "Rain" ')
    for template, written in (
        (ANY_ROLE, 'critic:  "Rain" \n'),
        ("{{ messages | map(attribute='content') | list | tojson }}", "Rain"),
    ):
        assert written in rendered(template, SAID, note)
    for message in (note, ChatMessage(role="critic", parts=[ChatPart(text="Rain")])):
        with pytest.raises(RequestRefused, match="leaves out this role") as caught:
            rendered(TWO_ROLES, SAID, message)
        assert caught.value.field == "chat.messages[1].role"


def test_a_template_without_calls_may_still_have_results() -> None:
    assert rendered(ANY_ROLE, SAID, RESULT) == "user: Weather?\ntool: rain\n"


async def test_a_conversation_with_tools_has_a_template_of_its_own_if_there_is_one() -> None:
    files = tokenizer_files(chat_template="plain: {{ messages[0].content }}")
    files["additional_chat_templates/tool_use.jinja"] = b"{{ tools[0].function.name }}: {{ messages[0].content }}"
    assert read_tokenizer_config(files).template_for_tools is not None
    worker = FakeWorker("a", files=files)
    async with cluster(worker) as router:
        for tools, expected in (([], "plain: Weather?"), ([Tool(name="f")], "f: Weather?")):
            request = GenerateRequest(chat=ChatMessages(messages=[SAID], tools=tools))
            [_ async for _ in router.stub.Generate(request)]
            ids = byte_tokenizer().encode(expected, add_special_tokens=False).ids
            assert list(worker.submits[-1].prompt_token_ids) == ids
