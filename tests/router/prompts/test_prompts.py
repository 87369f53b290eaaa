"""Prompts: tokenizers as Hugging Face reads them, chat templates in a sandbox."""

import json
import re
from array import array
from pathlib import Path

import pytest
from jinja2.exceptions import SecurityError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.router.tokenizer_files import DEMO_MODEL
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages
from trunkline_router.prompts import chat_template
from trunkline_router.prompts.chat_template import ChatTemplate
from trunkline_router.prompts.conversation import check_conversation
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import PromptTokenizer, TokenizerError
from trunkline_worker.front.text.tokenizer_files import read_tokenizer_files


def chat(*turns: tuple[str, str], go_on: bool = False) -> ChatMessages:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    return ChatMessages(messages=messages, continue_final_message=go_on)


def tokenizer_of(directory: Path, helpers: Helpers) -> PromptTokenizer:
    return PromptTokenizer(read_tokenizer_files(directory).contents, helpers)


TEXTS = ["Hello", " leading space", "Once upon a time\n\nthere was 🦊", "", "a" * 9000]


async def check_like_transformers(directory: Path, helpers: Helpers) -> None:
    from transformers import PreTrainedTokenizerFast

    # The class that takes tokenizer.json as it is written; AutoTokenizer may rebuild parts of it by its own rules.
    ours, theirs = tokenizer_of(directory, helpers), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        assert list(await ours.encode(text)) == theirs(text)["input_ids"], text[:20]
        plain = await ours.encode(text, special_tokens=False)
        assert list(plain) == theirs(text, add_special_tokens=False)["input_ids"]
    if theirs.chat_template:
        turns = [("user", "Tell me a story about a fox."), ("assistant", "No."), ("user", "Please!")]
        messages = [{"role": role, "content": content} for role, content in turns]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(await ours.encode_chat(chat(*turns))) == expected


async def test_the_demo_tokenizer_and_chat_template_equal_transformers(helpers: Helpers) -> None:
    await check_like_transformers(DEMO_MODEL, helpers)


@pytest.mark.parametrize("name", ["models/stories260k", "tokenizers/tinyllama", "tokenizers/phi-3-mini"])
async def test_real_tokenizers_and_chat_templates_equal_transformers(shared: Path, name: str, helpers: Helpers) -> None:
    await check_like_transformers(shared / name, helpers)


async def test_long_text_leaves_the_event_loop_and_says_the_same(helpers: Helpers) -> None:
    tokenizer = tokenizer_of(DEMO_MODEL, helpers)
    text = "Once upon a time there was a fox. " * 400
    assert len(text) > 4096
    ids = array("i", await tokenizer.encode(text))
    assert await tokenizer.decode(ids, keep_special=False) == text.encode()


async def test_a_model_without_a_chat_template_says_so(helpers: Helpers) -> None:
    contents = dict(read_tokenizer_files(DEMO_MODEL).contents)
    contents.pop("chat_template.jinja")
    tokenizer = PromptTokenizer(contents, helpers)
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestRefused, match="no chat template") as caught:
        await tokenizer.encode_chat(chat(("user", "hi")))
    assert caught.value.field == "chat"


@pytest.mark.parametrize(
    "source", ["{{ raise_exception('roles must alternate') }}", "{{ messages[5].content }}", "{{ 1 / 0 }}"]
)
def test_a_template_that_refuses_is_the_requests_fault(source: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        ChatTemplate(source, {}).render(chat(("user", "x")))
    assert caught.value.reason == "INVALID_REQUEST"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(999999999) %}x{% endfor %}",
    ],
)
def test_a_template_cannot_reach_out_of_its_sandbox(source: str) -> None:
    with pytest.raises(RequestRefused):
        ChatTemplate(source, {}).render(chat(("user", "x")))


@pytest.mark.parametrize("name", ["x", "items()", "_x", "__class__", "missing", "missing.x", "clear()"])
def test_a_name_of_a_dictionary_means_what_it_means_in_the_sandbox_of_jinja(name: str) -> None:
    source = "{% set d = {'x': 1, 'items': 2, '_x': 3, '__class__': 4, 'clear': 5} %}{{ d." + name + " }}"
    try:
        theirs = ImmutableSandboxedEnvironment().from_string(source).render()
    except (UndefinedError, SecurityError) as error:
        with pytest.raises(RequestRefused, match=re.escape(str(error))):
            ChatTemplate(source, {}).render(chat(("user", "x")))
    else:
        assert ChatTemplate(source, {}).render(chat(("user", "x"))) == theirs


def test_what_a_template_writes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_BYTES", 100)
    with pytest.raises(RequestRefused, match="longer than 100"):
        ChatTemplate("{% for i in range(1000) %}xxxxxxxxxx{% endfor %}", {}).render(chat(("user", "x")))


def test_an_empty_conversation_and_an_empty_role_are_refused() -> None:
    for bad in (chat(), chat(("", "x"))):
        with pytest.raises(RequestRefused):
            check_conversation(bad)


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
TRIMMED = PLAIN.replace("m.content", "m.content | trim")
REMINDING = PLAIN + "(last: {{ messages[-1].role }})</s>"


@pytest.mark.parametrize(
    ("source", "final", "expected"),
    [
        (PLAIN, "Well, ", "Well, "),
        (PLAIN, "Well,", "Well,"),
        (TRIMMED, "Well, \n", "Well,"),
        # A blank that the template writes itself looks like one that it keeps, to transformers too.
        (TRIMMED.replace("</s>", "{% if m.role != 'user' %} {% endif %}</s>"), "Well, ", "Well, "),
        # What the template writes afterwards may hold the message's own text, or all of it where there is none.
        (PLAIN, "s", "s"),
        (PLAIN, "", ""),
        (PLAIN, "  ", "  "),
        (TRIMMED, "  ", ""),
        (REMINDING, "The assistant", "The assistant"),
        (REMINDING, "assistant", "assistant"),
    ],
)
def test_the_final_message_is_continued_where_it_ends(source: str, final: str, expected: str) -> None:
    rendered = ChatTemplate(source, {}).render(chat(("user", "a"), ("assistant", final), go_on=True))
    assert rendered == "<user>a</s><assistant>" + expected


@pytest.mark.parametrize("source", [PLAIN, TRIMMED])
@pytest.mark.parametrize("final", ["Well, ", "Well,", " a b\n"])
def test_a_continued_message_is_rendered_as_transformers_renders_it(source: str, final: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    turns = [("user", "a"), ("assistant", final)]
    messages = [{"role": role, "content": content} for role, content in turns]
    theirs = render_jinja_template([messages], chat_template=source, continue_final_message=True)[0]
    assert ChatTemplate(source, {}).render(chat(*turns, go_on=True)) == theirs[0]


# What a block sets stays in the block; what is set outside, and the loop, is seen in it.
GENERATION = {
    "a name that is set in it": "{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}|{{ x is defined }}",
    "a name that is set again in it": (
        "{% set x = 1 %}{% generation %}{% set x = x + 1 %}{{ x }}{% endgeneration %}{{ x }}"
    ),
    "a namespace": "{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}{% endgeneration %}{{ n.x }}",
    "within a loop": (
        "{% for m in messages %}{% generation %}{% set x = loop.index %}{{ x }}{{ m.content }}{% endgeneration %}"
        "{{ x is defined }}{% endfor %}"
    ),
    "around a loop": (
        "{% generation %}{% for m in messages %}{% set x = m.content %}{{ x }}{% endfor %}{{ x is defined }}"
        "{% endgeneration %}"
    ),
    "one in another": (
        "{% generation %}{% set x = 1 %}{% generation %}{% set y = x %}{{ y }}{% endgeneration %}{{ y is defined }}"
        "{% endgeneration %}{{ x is defined }}"
    ),
    "a macro that is defined in it": (
        "{% generation %}{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(1) }}{% endgeneration %}{{ f is defined }}"
    ),
}


@pytest.mark.parametrize("name", GENERATION)
def test_a_generation_block_is_a_scope_as_in_transformers(name: str) -> None:
    from transformers import PreTrainedTokenizerFast

    turns = [("user", "a"), ("assistant", "b")]
    messages = [{"role": role, "content": content} for role, content in turns]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO_MODEL)
    theirs = tokenizer.apply_chat_template(messages, chat_template=GENERATION[name], tokenize=False)
    asked = chat(*turns)
    asked.add_generation_prompt = False
    assert ChatTemplate(GENERATION[name], {}).render(asked) == theirs


def test_a_template_of_more_than_128_kib_is_not_parsed(helpers: Helpers) -> None:
    parsed = "{{ messages[0].content }}"
    contents = dict(read_tokenizer_files(DEMO_MODEL).contents)
    for size, is_used in ((128 << 10, True), ((128 << 10) + 1, False)):
        contents["chat_template.jinja"] = parsed.ljust(size, "x").encode()
        tokenizer = PromptTokenizer(contents, helpers)
        assert tokenizer.has_chat_template == is_used
    problem = "the chat template cannot be used: it has 131073 characters; at most 131072 are supported"
    assert tokenizer.template_problem == problem


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(RequestRefused, match="does not keep the final message"):
        ChatTemplate("{{ messages[0].content }}", {}).render(chat(("user", "a"), ("assistant", "a"), go_on=True))


def test_damaged_files_are_one_clear_line(helpers: Helpers) -> None:
    for files in ({}, {"tokenizer.json": b"{}"}, {"tokenizer.json": b"\xff"}):
        with pytest.raises(TokenizerError, match="damaged"):
            PromptTokenizer(files, helpers)


async def test_bos_that_only_the_config_asks_for_is_added(helpers: Helpers) -> None:
    contents = dict(read_tokenizer_files(DEMO_MODEL).contents)
    data = json.loads(contents["tokenizer.json"])
    data["post_processor"] = None
    contents["tokenizer.json"] = json.dumps(data).encode()
    config = json.loads(contents["tokenizer_config.json"])
    plain = PromptTokenizer(
        {**contents, "tokenizer_config.json": json.dumps({**config, "add_bos_token": False}).encode()}, helpers
    )
    asking = PromptTokenizer(
        {**contents, "tokenizer_config.json": json.dumps({**config, "add_bos_token": True}).encode()}, helpers
    )
    assert (await asking.encode("Hi"))[1:] == await plain.encode("Hi")
