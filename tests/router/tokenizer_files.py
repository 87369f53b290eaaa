"""A tokenizer small enough to read, made on the spot, and the files of it that a worker would send."""

import json
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

DEMO_MODEL = Path(__file__).parents[2] / "deploy/demo/tiny-tales"  # a real one

SPECIAL = ("<unk>", "<s>", "</s>")
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
LARGE_VOCABULARY = 40_000
VOCAB_SIZE = len(SPECIAL) + len(BYTES)
BOS, EOS = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role') }}{% endif %}"
    "{{ bos_token }}{{ message['role'] }}:{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant:{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token per byte; BOS in front."""
    vocab = {token: index for index, token in enumerate([*SPECIAL, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def tokenizer_files(
    tokenizer: Tokenizer | None = None, *, chat_template: str | None = CHAT_TEMPLATE, **config: Any
) -> dict[str, bytes]:
    """What GetTokenizer streams."""
    files = {
        "tokenizer.json": (tokenizer or byte_tokenizer()).to_str().encode(),
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "eos_token": "</s>", **config}).encode(),
    }
    if chat_template is not None:
        files["chat_template.jinja"] = chat_template.encode()
    return files


def large_file(size: int = LARGE_VOCABULARY) -> bytes:
    """The byte tokenizer with so many more tokens."""
    described = json.loads(byte_tokenizer().to_str())
    vocab, draw = described["model"]["vocab"], Random(0)
    letters = [token for token in vocab if len(token) == 1]
    merges = described["model"]["merges"]
    while len(vocab) < size:
        pair = [draw.choice(letters), draw.choice(letters)] if len(merges) < 500 else draw.choice(merges)
        left, right = "".join(pair), draw.choice(letters)
        for one, other in ((pair[0], pair[1]), (left, right)):
            if one + other not in vocab and one in vocab:
                vocab[one + other] = len(vocab)
                merges.append([one, other])
    return json.dumps(described).encode()
