"""What a router knows of a worker's tokenizer, and which tokenizers it runs in the process that serves.

The library holds the GIL while it reads a tokenizer.json: half a second for a vocabulary of 128,000 tokens. A pattern,
or a rule that makes text longer, can take any time for a short text. A tokenizer for which that cannot be ruled out is
read and run in processes that have limits (encode_pool.py); the router then knows no more of it than its facts.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Self

from tokenizers import Tokenizer

from trunkline_router.prompts.text_width import characters_per_token
from trunkline_router.prompts.tokenizer_config import TokenizerConfig, read_tokenizer_config

FILE = "tokenizer.json"
# A tame tokenizer.json has at most so many bytes: it is read in some 40 ms.
TAME_BYTES = 1 << 20
# Its tokens and rules have at most so many characters: those of published ones have at most a few hundred.
TAME_CHARACTERS = 1024
TAME_GROWTH = 64  # times, at most, that its replacements make a text longer


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """encoding: identifies how text becomes tokens, in hex; prefix, suffix: special ids that the library leaves out;
    characters_per_token: see text_width.py; largest_id: of its tokens, -1 where there are none; padding_token: that of
    tokenizer.json"""

    encoding: str
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    characters_per_token: int | None
    largest_id: int
    padding_token: str | None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        told = json.loads(data)
        return cls(**{**told, "prefix": tuple(told["prefix"]), "suffix": tuple(told["suffix"])})


def described(files: Mapping[str, bytes]) -> tuple[Tokenizer, TokenizerFacts]:
    """A worker's tokenizer, and its facts. Raises what the library and read_tokenizer_config raise: bare Exception, or
    a panic."""
    tokenizer = Tokenizer.from_buffer(files[FILE])
    padding_token = (tokenizer.padding or {}).get("pad_token")
    config = read_tokenizer_config(files, padding_token=padding_token)
    # A prompt is never cut or filled up in silence, whatever the file was trained with.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    prefix, suffix = _missing_special_ids(tokenizer, config)
    return tokenizer, TokenizerFacts(
        # Equal where text becomes equal tokens, and tokens equal text, however the files are written.
        sha256(f"{prefix}{suffix}{tokenizer.to_str()}".encode()).hexdigest(),
        tuple(prefix),
        tuple(suffix),
        characters_per_token(tokenizer),
        max(tokenizer.get_vocab().values(), default=-1),
        padding_token,
    )


def _missing_special_ids(tokenizer: Tokenizer, config: TokenizerConfig) -> tuple[list[int], list[int]]:
    """BOS and EOS where tokenizer_config.json asks for them and tokenizer.json's own processor leaves them out.

    What the processor adds unasked stays. tokenizer.json is taken as it is written throughout, as transformers 5 does
    in PreTrainedTokenizerFast. Where tokenizer_config.json names another class, AutoTokenizer may rebuild parts of it:
    a LlamaTokenizer with `legacy: false` then cuts text after special tokens differently.
    """
    ids = tokenizer.encode("a").ids
    tokens = config.special_tokens
    bos, eos = (tokenizer.token_to_id(tokens.get(name, "")) for name in ("bos_token", "eos_token"))
    prefix = [bos] if config.add_bos and bos is not None and ids[:1] != [bos] else []
    suffix = [eos] if config.add_eos and eos is not None and ids[-1:] != [eos] else []
    return prefix, suffix


def is_tame(file: bytes) -> bool:
    """Whether a tokenizer.json is read in little time, and takes little time and memory for a short text: it is small,
    has no pattern of its own, and none of its rules or tokens makes much of little."""
    if len(file) > TAME_BYTES:
        return False
    try:
        growth = 1
        for part in _parts(json.loads(file)):
            if isinstance(part, str):
                if len(part) > TAME_CHARACTERS:
                    return False
            elif "Regex" in part:
                return False
            elif part.get("type") == "Replace" and isinstance(content := part.get("content"), str):
                growth *= max(1, len(content))
    except (ValueError, RecursionError):
        return False  # damaged: the process says how
    return growth <= TAME_GROWTH


def _parts(value: Any) -> Iterator[str | dict[str, Any]]:
    """All objects in it, keys and texts."""
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
