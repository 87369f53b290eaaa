"""Tokenizers of GGUF files split text as those that they were made of."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer

from tests.worker.checkpoint.gguf_files import config_for, finish
from tests.worker.engine_rig import DEMO_MODEL
from tests.worker.model.oracle import checked, silence
from trunkline_worker.front.text.tokenizer_files import read_tokenizer_files
from trunkline_worker.model.checkpoint.gguf_tokenizer import PRE_TOKENIZERS
from trunkline_worker.model.checkpoint.refusals import ModelError

TEXTS = [
    "Once upon a time, there was a fox.",
    "It's 1234567 o'clock, we'LL see; they've  gone.\n\n  Then\r\n\tthe end   ",
    "\u00fcber na\u00efve caf\u00e9 \u4f60\u597d \U0001f98a ... ??!--__ a1b2",
    " a",
    "",
    "x\n",
    "<s>one</s> two<|end|>",
]


def write_tokenizer(path: Path, original: dict[str, Any], add: Callable[[Any], object]) -> Path:
    """A file without tensors that has the tokens of a tokenizer.json; `add` writes the rest of its tokenizer."""
    config = config_for("llama")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = sorted(original["model"]["vocab"], key=original["model"]["vocab"].__getitem__)
    added = {token["content"] for token in original["added_tokens"]}
    types = [3 if token in added else 6 if token.startswith("<0x") else 1 for token in tokens]
    writer.add_token_list(tokens)
    unknown = original["model"]["unk_token"]
    writer.add_token_types([2 if token == unknown else kind for token, kind in zip(tokens, types, strict=True)])
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    add(writer)
    finish(writer)
    return path


def byte_level(pre: str) -> Callable[[Any], None]:
    def add(writer: Any) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in demo()["model"]["merges"]])

    return add


def demo() -> dict[str, Any]:
    return json.loads((DEMO_MODEL / "tokenizer.json").read_text())  # type: ignore[no-any-return]


def check_texts(ours: Tokenizer, theirs: Any) -> None:
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=False)
        ids = getattr(ids, "ids", ids)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def test_a_byte_level_tokenizer_is_the_one_that_it_was_made_of(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "model.gguf", demo(), byte_level("gpt-2"))
    check_texts(read_tokenizer_files(path).tokenizer, Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))


@pytest.mark.parametrize("pre", [pre for pre in PRE_TOKENIZERS if pre != "smollm"])
def test_texts_are_split_as_in_transformers(pre: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    path = write_tokenizer(tmp_path / "model.gguf", demo(), byte_level(pre))
    with silence():
        theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    check_texts(read_tokenizer_files(path).tokenizer, theirs)


def test_smollm_splits_digits_one_by_one(tmp_path: Path) -> None:
    """transformers does not; SmolLM2's own tokenizer.json does."""
    path = write_tokenizer(tmp_path / "model.gguf", demo(), byte_level("smollm"))
    tokenizer = read_tokenizer_files(path).tokenizer
    assert tokenizer.pre_tokenizer is not None
    parts = tokenizer.pre_tokenizer.pre_tokenize_str("It's a 12 x")
    assert [part for part, _ in parts] == ["It", "'s", "\u0120a", "\u0120", "1", "2", "\u0120x"]


def test_a_sentencepiece_tokenizer_is_the_one_that_it_was_made_of(shared: Path, tmp_path: Path) -> None:
    source = shared / "tokenizers" / "tinyllama" / "tokenizer.json"
    original = json.loads(source.read_text())

    def add(writer: Any) -> None:
        writer.add_tokenizer_model("llama")
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(original["model"]["merges"]):
            ranks.setdefault(merge.replace(" ", ""), rank)
        writer.add_token_scores([-float(ranks.get(token, 0)) for token in original["model"]["vocab"]])

    path = write_tokenizer(tmp_path / "model.gguf", original, add)
    files = read_tokenizer_files(path)
    check_texts(files.tokenizer, Tokenizer.from_file(str(source)))
    assert json.loads(files.contents["tokenizer_config.json"])["add_bos_token"]


WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "pre": (byte_level("bloom"), 'tokenizer.ggml.pre "bloom" is not supported; supported: gpt-2, smollm, llama-bpe'),
    "model": (
        lambda writer: writer.add_tokenizer_model("rwkv"),
        'tokenizer.ggml.model "rwkv" is not supported; supported',
    ),
    "none": (lambda writer: None, "tokenizer.ggml.model null is not supported"),
    "merges": (
        lambda writer: (writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("gpt-2")),
        "tokenizer.ggml.merges is missing",
    ),
    "scores": (lambda writer: writer.add_tokenizer_model("llama"), "tokenizer.ggml.scores is missing"),
    "id": (
        lambda writer: (byte_level("gpt-2")(writer), writer.add_unk_token_id(5000)),
        "tokenizer.ggml.unknown_token_id 5000 is not the id of a token",
    ),
}


@pytest.mark.parametrize("part", WRONG)
def test_a_tokenizer_that_cannot_be_read_is_refused_by_name(part: str, tmp_path: Path) -> None:
    add, told = WRONG[part]
    path = write_tokenizer(tmp_path / "model.gguf", demo(), add)
    with pytest.raises(ModelError) as caught:
        read_tokenizer_files(path)
    assert told in checked(caught.value)
