"""The traits that a router keeps about a worker's tokenizer, and the test for tokenizers that it runs itself.

The library holds the GIL while it reads a tokenizer.json: half a second for a vocabulary of 128,000 tokens. A pattern,
or a rule that makes text longer, can take any time for a short text. Unless a tokenizer is known to be cheap, it is
read and run in processes that have limits (encode_pool.py), and the router knows only its traits.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Self

from tokenizers import Tokenizer

from trunkline_router.prompts.tokenizer_config import TokenizerConfig, read_tokenizer_config
from trunkline_router.prompts.vocabulary.text_width import characters_per_token

FILE = "tokenizer.json"
# Largest cheap tokenizer.json: reading it takes some 40 ms.
CHEAP_BYTES = 1 << 20
# Longest token or rule of a cheap tokenizer: published ones have at most a few hundred characters.
CHEAP_CHARACTERS = 1024
# The library and the router walk over all ids up to the largest. Published vocabularies have up to a million tokens.
MAX_TOKENS = 1 << 21
CHEAP_GROWTH = 64  # the largest factor by which a cheap tokenizer's replacements make a text longer


@dataclass(frozen=True, slots=True)
class TokenizerTraits:
    """What a router needs to know about a tokenizer."""

    encoding: str  # identifies how text becomes tokens, in hex
    prefix: tuple[int, ...]  # special ids that the library leaves out
    suffix: tuple[int, ...]
    characters_per_token: int | None  # see vocabulary/text_width.py
    largest_id: int  # of its tokens; -1 if there are none
    padding_token: str | None  # that of tokenizer.json

    def to_json(self) -> bytes:
        """The traits as JSON, for from_json()."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """The inverse of to_json()."""
        fields = json.loads(data)
        return cls(**{**fields, "prefix": tuple(fields["prefix"]), "suffix": tuple(fields["suffix"])})


def described(files: Mapping[str, bytes]) -> tuple[Tokenizer, TokenizerTraits]:
    """A worker's tokenizer and its traits. Raises ConfigError, ValueError if an id exceeds MAX_TOKENS, and whatever the
    library raises: a bare Exception or a panic."""
    tokenizer = Tokenizer.from_buffer(files[FILE])
    largest_id = max(tokenizer.get_vocab().values(), default=-1)
    if largest_id >= MAX_TOKENS:
        raise ValueError(f"a token has the id {largest_id}; ids below {MAX_TOKENS} are supported")
    padding_token = (tokenizer.padding or {}).get("pad_token")
    config = read_tokenizer_config(files, padding_token=padding_token)
    # A prompt is never silently truncated or padded, whatever the file asks for.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    prefix, suffix = _missing_special_ids(tokenizer, config)
    return tokenizer, TokenizerTraits(
        # Equal for files that are written differently but convert between text and tokens in the same way.
        sha256(f"{prefix}{suffix}{tokenizer.to_str()}".encode()).hexdigest(),
        tuple(prefix),
        tuple(suffix),
        characters_per_token(tokenizer),
        largest_id,
        padding_token,
    )


def _missing_special_ids(tokenizer: Tokenizer, config: TokenizerConfig) -> tuple[list[int], list[int]]:
    """BOS and EOS if tokenizer_config.json asks for them and tokenizer.json's own processor leaves them out.

    Special tokens that the processor adds without being asked stay. tokenizer.json is used exactly as written, as
    transformers 5 does in PreTrainedTokenizerFast. If tokenizer_config.json names another class, AutoTokenizer may
    rebuild parts of it: a LlamaTokenizer with `legacy: false` then splits text after special tokens differently.
    """
    ids = tokenizer.encode("a").ids
    tokens = config.special_tokens
    bos, eos = (tokenizer.token_to_id(tokens.get(name, "")) for name in ("bos_token", "eos_token"))
    prefix = [bos] if config.add_bos and bos is not None and ids[:1] != [bos] else []
    suffix = [eos] if config.add_eos and eos is not None and ids[-1:] != [eos] else []
    return prefix, suffix


def is_cheap(file: bytes) -> bool:
    """Whether a tokenizer is quick to read, and needs little time and memory for a short text. It must be small, have
    no regular expression, and have no rule or token that turns a short text into a long one."""
    if len(file) > CHEAP_BYTES:
        return False
    try:
        growth = 1
        for part in _parts(json.loads(file)):
            if isinstance(part, str):
                if len(part) > CHEAP_CHARACTERS:
                    return False
            elif "Regex" in part:
                return False
            elif part.get("type") == "Replace" and isinstance(content := part.get("content"), str):
                growth *= max(1, len(content))
    except (ValueError, RecursionError):
        return False  # damaged; the helper process reports how
    return growth <= CHEAP_GROWTH


def _parts(value: Any) -> Iterator[str | dict[str, Any]]:
    """All JSON objects, keys and strings in the value."""
    if isinstance(value, dict):
        yield value
        for key, inside in value.items():
            yield key
            yield from _parts(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _parts(inside)
    elif isinstance(value, str):
        yield value
