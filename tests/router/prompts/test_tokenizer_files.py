"""What tokenizer_config.json and templates of the wild ask for, against transformers reading the same files."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from tests.router.tokenizer_files import BOS, EOS, byte_tokenizer, tokenizer_files
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages
from trunkline_router.prompts.helper_pool import Helpers
from trunkline_router.prompts.tokenizer import PromptTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TURNS = [("system", "Be brief."), ("user", "Hi {{ there }}"), ("assistant", "Yo"), ("user", "Grüße\n🦊 <s>")]


def both(
    directory: Path, files: dict[str, bytes], helpers: Helpers
) -> tuple[PromptTokenizer, "PreTrainedTokenizerFast"]:
    from transformers import PreTrainedTokenizerFast

    for name, data in files.items():
        (directory / name).write_bytes(data)
    return PromptTokenizer(files, helpers), PreTrainedTokenizerFast.from_pretrained(directory)


@pytest.mark.parametrize(
    ("config", "added"),
    [
        ({}, ([], [])),
        ({"add_bos_token": False}, ([], [])),
        ({"add_bos_token": True}, ([BOS], [])),
        ({"add_eos_token": True}, ([], [EOS])),
        ({"add_bos_token": True, "add_eos_token": True}, ([BOS], [EOS])),
        ({"add_bos_token": True, "bos_token": {"__type": "AddedToken", "content": "</s>"}}, ([EOS], [])),
        ({"add_bos_token": True, "bos_token": None}, ([], [])),
    ],
    ids=str,
)
async def test_special_tokens_that_only_the_config_asks_for_are_added(
    config: dict[str, Any], added: tuple[list[int], list[int]], tmp_path: Path, helpers: Helpers
) -> None:
    silent = json.loads(byte_tokenizer().to_str())
    silent["post_processor"] = None
    ours, theirs = both(tmp_path, tokenizer_files(Tokenizer.from_str(json.dumps(silent)), **config), helpers)
    for text in ("", "hello", "a <s> b"):
        plain = theirs(text, add_special_tokens=False)["input_ids"]
        assert list(await ours.encode(text)) == [*added[0], *plain, *added[1]]
        assert list(await ours.encode(text, special_tokens=False)) == plain


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_bos_token": False}], ids=str)
async def test_what_the_tokenizers_own_processor_adds_is_neither_doubled_nor_dropped(
    config: dict[str, Any], tmp_path: Path, helpers: Helpers
) -> None:
    ours, theirs = both(tmp_path, tokenizer_files(**config), helpers)
    for text in ("", "hello", "a <s> b"):
        assert list(await ours.encode(text)) == theirs(text)["input_ids"]
        assert (
            list(await ours.encode(text, special_tokens=False)) == theirs(text, add_special_tokens=False)["input_ids"]
        )


async def test_a_file_made_for_training_neither_cuts_nor_pads_a_prompt(helpers: Helpers) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    prompts = PromptTokenizer(tokenizer_files(tokenizer), helpers)
    assert len(await prompts.encode("x" * 20)) == 21
    assert len(await prompts.encode("x")) == 2


TEMPLATES = {
    "whitespace": """{% for m in messages %}
        {% if m.role != 'system' %}
[{{ m.content | trim }}]
        {% endif %}
    {% endfor %}""",
    "loop controls": "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "tojson": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}",
    "namespace": "{% set s = namespace(n=0) %}{% for m in messages %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}",
    "tools": "{% if tools is not none and tools %}tools{% endif %}{% if documents %}documents{% endif %}none",
    "prompt": "{% if add_generation_prompt %}assistant:{% endif %}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
async def test_templates_render_as_transformers_renders_them(name: str, tmp_path: Path, helpers: Helpers) -> None:
    ours, theirs = both(tmp_path, tokenizer_files(chat_template=TEMPLATES[name]), helpers)
    chat = ChatMessages(messages=[ChatMessage(role=role, content=content) for role, content in TURNS])
    messages = [{"role": role, "content": content} for role, content in TURNS]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert list(await ours.encode_chat(chat)) == expected


async def test_a_template_that_does_not_compile_leaves_text_prompts_usable(helpers: Helpers) -> None:
    prompts = PromptTokenizer(tokenizer_files(chat_template="{% for %}"), helpers)
    assert not prompts.has_chat_template
    assert "cannot be used" in prompts.template_problem
    assert await prompts.encode("x")
