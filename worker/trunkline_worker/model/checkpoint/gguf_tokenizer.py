"""What tokenizer.json and tokenizer_config.json would say of a GGUF file, from its metadata."""

from collections.abc import Iterator, Sequence
from typing import Any

from trunkline_worker.model.checkpoint.entries import listed
from trunkline_worker.model.checkpoint.gguf_file import GgufFile
from trunkline_worker.model.checkpoint.refusals import ModelError, shown

MODEL, PRE = "tokenizer.ggml.model", "tokenizer.ggml.pre"
TOKENS, TYPES, SCORES, MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))
TEMPLATE, NAMED_TEMPLATES = "tokenizer.chat_template", "tokenizer.chat_templates"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # types of tokens
SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
MOST_CHARACTERS = 1024  # of a token that others are merged to
SPACE = "\u2581"  # in SentencePiece's tokens

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
BYTE_LEVEL: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _split(pattern: str) -> list[dict[str, Any]]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return [split, BYTE_LEVEL | {"use_regex": False}]


# How text is split before merges apply, by the file's name of it. Qwen's tokenizers bring text into NFC first.
LLAMA_3, QWEN_2 = _split(_ENGLISH + _WORDS % "{1,3}"), _split(_ENGLISH + _WORDS % "")
PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "gpt-2": [BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL],
    "llama-bpe": LLAMA_3,
    "qwen2": QWEN_2,
    "deepseek-r1-qwen": QWEN_2,
}


def tokenizer_of(file: GgufFile) -> dict[str, Any]:
    """Returns a tokenizer.json. Raises ModelError if the tokenizer is damaged, or of another kind."""
    kind = file.text(MODEL)
    if kind not in ("gpt2", "llama"):
        raise _refused(file, MODEL, kind, ["gpt2", "llama"])
    tokens = file.texts(TOKENS)
    types = _array(file, TYPES, len(tokens)) or [NORMAL] * len(tokens)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if vocabulary[token] != index)
        raise ModelError(f"{file.path} is damaged: {TOKENS} has {shown(twice)} twice")
    added = [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": types[index] != USER_DEFINED}
        for index, token in enumerate(tokens)
        if types[index] in (UNKNOWN, CONTROL, USER_DEFINED) and token
    ]  # fmt: skip
    parts = _byte_level(file) if kind == "gpt2" else _sentence_piece(file, tokens, types)
    model = {"type": "BPE", "vocab": vocabulary, **parts.pop("model")}
    return {"version": "1.0", "added_tokens": added, "post_processor": None, **parts, "model": model}


def _byte_level(file: GgufFile) -> dict[str, Any]:
    pre = file.text(PRE)
    if pre not in PRE_TOKENIZERS:
        raise _refused(file, PRE, pre, PRE_TOKENIZERS)
    return {
        "normalizer": {"type": "NFC"} if PRE_TOKENIZERS[pre] is QWEN_2 else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "decoder": BYTE_LEVEL,
        # Llama 3's takes words that are tokens as they are.
        "model": {"merges": file.texts(MERGES), "ignore_merges": pre == "llama-bpe"},
    }


def _sentence_piece(file: GgufFile, tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """SentencePiece's BPE: pieces are merged in the order of the scores of what comes out."""
    scores = _array(file, SCORES, len(tokens))
    if scores is None:
        raise ModelError(f"{file.path}: {SCORES} is missing")
    prefixed = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    prepend = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    ids = {token: index for index, token in enumerate(tokens) if types[index] == NORMAL}
    merges = sorted(
        _merges(ids), key=lambda pair: (-scores[ids[pair[0] + pair[1]]], -len(pair[0]), ids[pair[0]], ids[pair[1]])
    )
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, _replacing(" ", SPACE)]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [_replacing(SPACE, " "), {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {"merges": merges, "unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def _replacing(old: str, new: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": old}, "content": new}


def _merges(ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yields every way to put a token together from two others."""
    for token in ids:
        for at in range(1, len(token) if len(token) <= MOST_CHARACTERS else 0):
            if (left := token[:at]) in ids and (right := token[at:]) in ids:
                yield left, right


def tokenizer_config_of(file: GgufFile) -> dict[str, Any]:
    """Returns a tokenizer_config.json: the special tokens, whether prompts begin with one, and the chat templates."""
    metadata, tokens = file.metadata, file.texts(TOKENS)
    config: dict[str, Any] = {}
    for name, key in SPECIAL.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise ModelError(f"{file.path}: tokenizer.ggml.{key}_token_id {shown(index)} is not the id of a token")
        config[f"{name}_token"] = tokens[index]
    # As in llama.cpp, if the file does not say.
    begins = metadata.get(MODEL) == "llama" or metadata.get(PRE) == "llama-bpe"
    config["add_bos_token"] = metadata.get("tokenizer.ggml.add_bos_token", begins)
    config["add_eos_token"] = metadata.get("tokenizer.ggml.add_eos_token", False)
    templates = {"default": metadata[TEMPLATE]} if TEMPLATE in metadata else {}
    if NAMED_TEMPLATES in metadata:
        templates |= {name: metadata.get(f"{TEMPLATE}.{name}") for name in file.texts(NAMED_TEMPLATES)}
    if templates:
        config["chat_template"] = [{"name": name, "template": text} for name, text in templates.items()]
    return config


def _array(file: GgufFile, key: str, count: int) -> list[Any] | None:
    """Returns an array of numbers, one for each token; None if there is none."""
    array = file.metadata.get(key)
    if array is None:
        return None
    if not isinstance(array, list) or len(array) != count:
        raise ModelError(f"{file.path} is damaged: {key} does not have a number for each of the {count} tokens")
    return array


def _refused(file: GgufFile, key: str, value: Any, supported: Sequence[str] | dict[str, Any]) -> ModelError:
    return ModelError(
        f"{file.path}: {key} {shown(value)} is not supported; supported: {listed(supported)}: serve the directory of "
        "the checkpoint that the file was made of"
    )
