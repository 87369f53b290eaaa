"""A worker's tokenizer files: special tokens and chat template, and the traits that a router keeps of a tokenizer.

The files have the same precedence as in transformers 5 (`PreTrainedTokenizerBase._from_pretrained`).

The library holds the GIL while it reads a tokenizer.json: half a second for a vocabulary of 128,000 tokens. A pattern,
or a rule that makes text longer, can take any time for a short text. Unless a tokenizer is known to be cheap, it is
read and run in helper processes (helper_pool.py), and the router knows only its traits.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any, Self

from tokenizers import Tokenizer

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates/"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# Names of templates: of several, the one for conversations without tools, and the one for those with tools.
DEFAULT, FOR_TOOLS = "default", "tool_use"
# Largest cheap tokenizer.json: reading it takes some 40 ms.
CHEAP_BYTES = 1 << 20
# Longest token or rule of a cheap tokenizer: published ones have at most a few hundred characters.
CHEAP_CHARACTERS = 1024
# The library and the router walk over all ids up to the largest. Published vocabularies have up to a million tokens.
MAX_TOKENS = 1 << 21
CHEAP_GROWTH = 64  # the largest factor by which a cheap tokenizer's replacements make a text longer
CHEAP_STEPS = 64  # of all its parts; published ones have at most twenty
# A text with more characters than this for each token of a context does not fit, nor one with more than the longest
# token has. Composing normal forms merge four characters into one, and some tokenizers collapse blanks; prose has four
# characters a token.
CHARACTERS_PER_TOKEN = 64


class ConfigError(Exception):
    """A file cannot be read. The message is one line for people and names the file."""


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """`special_tokens`: text by name, as templates expect them. `template`: None if there is none or if it cannot be
    used; in the latter case `template_problem` has the reason. `template_for_tools`: None if it is the same."""

    special_tokens: dict[str, str]
    add_bos: bool
    add_eos: bool
    template: str | None
    template_problem: str = ""
    template_for_tools: str | None = None


def read_tokenizer_config(files: Mapping[str, bytes], *, padding_token: str | None = None) -> TokenizerConfig:
    """Reads the files. `padding_token` is that of tokenizer.json and applies unless a file names another one.

    Raises ConfigError if tokenizer_config.json or special_tokens_map.json is damaged.
    """
    config = _json_object(files, CONFIG)
    tokens = _special_tokens(config, _json_object(files, SPECIAL_TOKENS), padding_token)
    problem = ""
    try:
        template, for_tools = _templates(files, config)
    except ConfigError as error:
        template, for_tools, problem = None, None, str(error)
    return TokenizerConfig(
        tokens, bool(config.get("add_bos_token")), bool(config.get("add_eos_token")), template, problem, for_tools
    )


def _json_object(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    try:
        found = json.loads(files.get(name, b"{}").decode())
    except ValueError as error:  # not JSON, not UTF-8, or an integer with thousands of digits
        raise ConfigError(f"{name} is damaged: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name} is nested too deeply") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{name} does not hold a JSON object")
    return found


def _special_tokens(
    config: dict[str, Any], special_tokens_map: dict[str, Any], padding_token: str | None
) -> dict[str, str]:
    """Special tokens by name. If tokenizer_config.json is older than `added_tokens_decoder`, special_tokens_map.json
    takes precedence over it; otherwise it is ignored. A null token has no text, whatever the other file says."""
    values = dict(config)
    # A model's own tokens, such as image_token: a string in tokenizer_config.json takes precedence.
    own = {name: value for name, value in config.items() if isinstance(value, str) and _is_own(name)}
    named = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    own.update(named if isinstance(named, dict) else {})
    if "added_tokens_decoder" not in config:
        values.update(special_tokens_map)
        named = special_tokens_map.get("extra_special_tokens")
        own.update(named if isinstance(named, dict) else {})
    if padding_token is not None:
        values.setdefault("pad_token", padding_token)
    found = {name: value for name, value in values.items() if name in NAMED_TOKENS or _is_own(name)} | own
    return {name: text for name, value in found.items() if (text := _content(value)) is not None}


def _is_own(name: str) -> bool:
    return name.endswith("_token") and name not in (*NAMED_TOKENS, "add_bos_token", "add_eos_token")


def _content(token: Any) -> str | None:
    """The text of a special token, which is a string or an object that holds it. None for anything else."""
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    try:
        token.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return None
    return token


def _templates(files: Mapping[str, bytes], config: dict[str, Any]) -> tuple[str | None, str | None]:
    """The default template and the one for tools: from template files if there are any, else from the configuration;
    None if there is none. Raises ConfigError if the templates cannot be used.
    """
    named = _template_files(files) or _configured_templates(config.get("chat_template"))
    if not named:
        return None, None
    if DEFAULT not in named:
        raise ConfigError(f"the model has several chat templates, and none of them is called {DEFAULT!r}")
    return _source(named[DEFAULT]), _source(named[FOR_TOOLS]) if FOR_TOOLS in named else None


def _source(source: Any) -> str:
    """A template's text. Raises ConfigError if it is none."""
    if not isinstance(source, str | bytes):
        raise ConfigError("the model's chat template is not a text")
    try:
        return source.decode() if isinstance(source, bytes) else source.encode().decode()
    except UnicodeError as error:
        raise ConfigError(f"the model's chat template is not UTF-8: {error}") from None


def _template_files(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Templates that are files of their own, by name."""
    named: dict[str, Any] = {DEFAULT: files[TEMPLATE]} if TEMPLATE in files else {}
    for name, data in files.items():
        if name.startswith(NAMED_TEMPLATES):
            named[name.removeprefix(NAMED_TEMPLATES).removesuffix(".jinja")] = data
    return named


def _configured_templates(templates: Any) -> dict[str, Any]:
    """Templates of tokenizer_config.json, by name; none if it has no `chat_template`. Raises ConfigError."""
    if templates is None:
        return {}
    if isinstance(templates, str):
        return {DEFAULT: templates}
    if isinstance(templates, dict):
        return templates
    if not isinstance(templates, list):
        raise ConfigError("the model's chat template is not a text")
    if not all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in templates):
        raise ConfigError("the model's chat templates are no list of named ones")
    return {one["name"]: one.get("template") for one in templates}


@dataclass(frozen=True, slots=True)
class TokenizerTraits:
    """What a router needs to know about a tokenizer."""

    encoding: str  # identifies how text becomes tokens, in hex
    prefix: tuple[int, ...]  # special ids that the library leaves out
    suffix: tuple[int, ...]
    characters_per_token: int  # that one token can stand for, at most
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
    tokenizer = Tokenizer.from_buffer(files[TOKENIZER])
    vocabulary = tokenizer.get_vocab()
    largest_id = max(vocabulary.values(), default=-1)
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
        max([CHARACTERS_PER_TOKEN, *map(len, vocabulary)]),
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
    few steps and no regular expression, and have no rule or token that turns a short text into a long one."""
    if len(file) > CHEAP_BYTES:
        return False
    growth, num_steps = 1, 0
    try:
        for part in _parts(json.loads(file)):
            if isinstance(part, str):
                if len(part) > CHEAP_CHARACTERS:
                    return False
            elif "Regex" in part:
                return False
            else:
                num_steps += "type" in part
                if part.get("type") == "Replace" and isinstance(content := part.get("content"), str):
                    growth *= max(1, len(content))
    except (ValueError, RecursionError):
        return False  # damaged; the helper process reports how
    return growth <= CHEAP_GROWTH and num_steps <= CHEAP_STEPS


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
