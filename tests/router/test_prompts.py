"""Prompts: tokenizers as Hugging Face reads them, chat templates in a sandbox."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from tests.worker.engine_rig import DEMO_MODEL
from trunkline.status import RequestRefused
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages
from trunkline_router import chat_template
from trunkline_router.chat_template import ChatTemplate
from trunkline_router.tokenizer import PromptTokenizer, TokenizerError
from trunkline_worker.tokenizer_files import read_tokenizer_files


def chat(*turns: tuple[str, str], go_on: bool = False) -> ChatMessages:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    return ChatMessages(messages=messages, continue_final_message=go_on)


def tokenizer_of(directory: Path) -> PromptTokenizer:
    return PromptTokenizer(read_tokenizer_files(directory).contents)


TEXTS = ["Hello", " leading space", "Once upon a time\n\nthere was 🦊", "", "a" * 9000]


async def check_like_transformers(directory: Path) -> None:
    # The class that takes tokenizer.json as it is written; AutoTokenizer may rebuild parts of it by its own rules.
    ours, theirs = tokenizer_of(directory), PreTrainedTokenizerFast.from_pretrained(directory)
    for text in TEXTS:
        assert await ours.encode(text) == theirs(text)["input_ids"], text[:20]
        assert await ours.encode(text, special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]
    if theirs.chat_template:
        turns = [("user", "Tell me a story about a fox."), ("assistant", "No."), ("user", "Please!")]
        messages = [{"role": role, "content": content} for role, content in turns]
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert await ours.encode_chat(chat(*turns)) == expected


async def test_the_demo_tokenizer_and_chat_template_equal_transformers() -> None:
    await check_like_transformers(DEMO_MODEL)


@pytest.mark.parametrize("name", ["models/stories260k", "tokenizers/tinyllama", "tokenizers/phi-3-mini"])
async def test_real_tokenizers_and_chat_templates_equal_transformers(shared: Path, name: str) -> None:
    await check_like_transformers(shared / name)


async def test_long_text_leaves_the_event_loop_and_says_the_same() -> None:
    tokenizer = tokenizer_of(DEMO_MODEL)
    text = "Once upon a time there was a fox. " * 400
    assert len(text) > 4096
    ids = await tokenizer.encode(text)
    assert await tokenizer.decode(ids, keep_special=False) == text


async def test_a_model_without_a_chat_template_says_so() -> None:
    contents = dict(read_tokenizer_files(DEMO_MODEL).contents)
    contents.pop("chat_template.jinja")
    tokenizer = PromptTokenizer(contents)
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


def test_what_a_template_writes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_BYTES", 100)
    with pytest.raises(RequestRefused, match="longer than 100"):
        ChatTemplate("{% for i in range(1000) %}xxxxxxxxxx{% endfor %}", {}).render(chat(("user", "x")))


def test_an_empty_conversation_and_an_empty_role_are_refused() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    for bad in (chat(), chat(("", "x"))):
        with pytest.raises(RequestRefused):
            template.render(bad)


def test_the_final_message_can_be_continued() -> None:
    source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    assert (
        ChatTemplate(source, {}).render(chat(("user", "a"), ("assistant", "Well, "), go_on=True))
        == "<user>a</s><assistant>Well,"
    )


def test_damaged_files_are_one_clear_line() -> None:
    for files in ({}, {"tokenizer.json": b"{}"}, {"tokenizer.json": b"\xff"}):
        with pytest.raises(TokenizerError, match="damaged"):
            PromptTokenizer(files)


async def test_bos_that_only_the_config_asks_for_is_added() -> None:
    contents = dict(read_tokenizer_files(DEMO_MODEL).contents)
    data = json.loads(contents["tokenizer.json"])
    data["post_processor"] = None
    contents["tokenizer.json"] = json.dumps(data).encode()
    config = json.loads(contents["tokenizer_config.json"])
    plain = PromptTokenizer(
        {**contents, "tokenizer_config.json": json.dumps({**config, "add_bos_token": False}).encode()}
    )
    asking = PromptTokenizer(
        {**contents, "tokenizer_config.json": json.dumps({**config, "add_bos_token": True}).encode()}
    )
    assert (await asking.encode("Hi"))[1:] == await plain.encode("Hi")
