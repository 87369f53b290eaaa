"""Special tokens and chat templates come from the files that transformers takes them from, and in its order."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.router.tokenizer_files import byte_tokenizer
from trunkline_router.prompts.tokenizer_files import NAMED_TOKENS, read_tokenizer_config
from trunkline_worker.front.text.tokenizer_files import read_tokenizer_files
from trunkline_worker.model.checkpoint.refusals import ModelError

NAMES = st.sampled_from([*NAMED_TOKENS, "image_token", "add_bos_token"])
TEXTS = st.sampled_from(["<s>", "</s>", "<unk>", "<image>", "<pad>"])
IN_CONFIG = st.one_of(st.none(), TEXTS, TEXTS.map(lambda text: {"__type": "AddedToken", "content": text}))
IN_MAP = st.one_of(st.none(), TEXTS, TEXTS.map(lambda text: {"content": text, "lstrip": False, "special": True}))
TEMPLATE = st.sampled_from(["{{ 1 }}", "{{ 2 }}\r\n{{ bos_token }}", "Grüße"])
NAMED = st.dictionaries(st.sampled_from(["default", "tool_use", "rag"]), TEMPLATE, min_size=1)


@st.composite
def model_files(draw: st.DrawFn) -> dict[str, bytes]:
    """What a model directory may hold, none of it damaged."""
    tokenizer = byte_tokenizer()
    if draw(st.booleans()):
        tokenizer.enable_padding(pad_id=0, pad_token="<unk>")
    config: dict[str, Any] = draw(st.dictionaries(NAMES.filter(lambda name: name != "add_bos_token"), IN_CONFIG))
    config |= draw(st.sampled_from([{}, {"add_bos_token": True}]))
    more = st.dictionaries(st.sampled_from(["boi_token", "eoi"]), TEXTS)
    config |= draw(st.one_of(st.just({}), more.map(lambda named: {"extra_special_tokens": named})))
    if draw(st.booleans()):
        config["added_tokens_decoder"] = {"1": {"content": "<s>", "special": True}}
    if draw(st.booleans()):
        named = draw(NAMED)
        as_list = [{"name": name, "template": template} for name, template in named.items()]
        config["chat_template"] = draw(st.sampled_from([as_list, next(iter(named.values()))]))
    files = {"tokenizer.json": tokenizer.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    if draw(st.booleans()):
        special = draw(st.dictionaries(NAMES.filter(lambda name: name != "add_bos_token"), IN_MAP))
        files["special_tokens_map.json"] = json.dumps(special).encode()
    if draw(st.booleans()):
        files["chat_template.jinja"] = draw(TEMPLATE).encode()
    if draw(st.booleans()):
        for name, template in draw(NAMED).items():
            files[f"additional_chat_templates/{name}.jinja"] = template.encode()
    return files


@settings(max_examples=150, deadline=None, derandomize=True)
@given(model_files())
def test_special_tokens_and_the_template_are_those_of_transformers(files: dict[str, bytes]) -> None:
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "additional_chat_templates").mkdir()
        for name, data in files.items():
            (directory / name).write_bytes(data)
        theirs = PreTrainedTokenizerFast.from_pretrained(directory)
        sent = read_tokenizer_files(directory)
    assert sent.contents == files, "everything that counts is sent to routers"
    assert not sent.template_problem
    padding = theirs.backend_tokenizer.padding
    ours = read_tokenizer_config(sent.contents, padding_token=padding["pad_token"] if padding else None)
    assert ours.special_tokens == theirs.special_tokens_map
    try:
        expected = theirs.get_chat_template()
    except ValueError:
        expected = None
    assert with_plain_lines(ours.template) == with_plain_lines(expected)
    if expected is not None:
        for_tools = theirs.get_chat_template(tools=[{}])
        assert with_plain_lines(ours.template_for_tools or ours.template) == with_plain_lines(for_tools)
    has_any = theirs.chat_template is not None
    assert bool(ours.template_problem) == (has_any and expected is None)


def with_plain_lines(template: str | None) -> str | None:
    """Jinja reads every kind of line end alike."""
    return None if template is None else template.replace("\r\n", "\n")


def test_a_digest_covers_every_file_that_is_sent(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    digests = {read_tokenizer_files(tmp_path).digest}
    (tmp_path / "additional_chat_templates").mkdir()
    added = [
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "additional_chat_templates/x.jinja",
    ]
    for name in added:
        for text in ("{}", "{ }"):
            (tmp_path / name).write_text(text)
            digests.add(read_tokenizer_files(tmp_path).digest)
    assert len(digests) == 1 + 2 * len(added)


def test_a_given_chat_template_replaces_all_templates_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "own", "bos_token": "<s>"}))
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "default.jinja").write_text("named")
    given = tmp_path / "given.jinja"
    given.write_text("{% generation %}{{ messages[0].content }}{% endgeneration %}")
    own, files = read_tokenizer_files(tmp_path), read_tokenizer_files(tmp_path, given)
    assert read_tokenizer_config(files.contents).template == given.read_text()
    assert read_tokenizer_config(files.contents).special_tokens == {"bos_token": "<s>"}
    assert files.digest != own.digest


def test_damaged_templates_of_the_model_do_not_matter_beside_a_given_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": 3}))
    (tmp_path / "chat_template.jinja").mkdir()
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_bytes(b"\xff")
    given = tmp_path / "given.jinja"
    given.write_text("given")
    files = read_tokenizer_files(tmp_path, given)
    assert not files.template_problem
    assert read_tokenizer_config(files.contents).template == "given"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{{ bos_token }}\n{% for message in messages %}", "line 2: Unexpected end of template"),
        (b"\n\n{{ messages[ }}", "line 3: unexpected '}'"),
        (b"{% macro %}", "line 1: "),
        (b"{{ " + b"(" * 5000 + b" }}", ""),
        (b"\xff", "not UTF-8: "),
        (None, "is missing"),
    ],
)
def test_a_given_chat_template_that_cannot_be_parsed_is_one_line_with_file_and_line(
    text: bytes | None, problem: str, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_text(byte_tokenizer().to_str())
    given = tmp_path / "given.jinja"
    if text is not None:
        given.write_bytes(text)
    with pytest.raises(ModelError) as caught:
        read_tokenizer_files(tmp_path, given)
    assert "given.jinja" in str(caught.value)
    assert problem in str(caught.value)
    assert str(caught.value).isprintable()
