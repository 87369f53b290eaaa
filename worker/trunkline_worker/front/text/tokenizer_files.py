"""The tokenizer's files, which routers fetch. They are checked here, so that routers can read them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trunkline.tokenizer_digest import tokenizer_digest
from trunkline_runtime.template_syntax import syntax_problem
from trunkline_worker.front.text.token_texts import PANIC, TokenTexts
from trunkline_worker.model.checkpoint.model_file import exists, read_file, read_json
from trunkline_worker.model.checkpoint.refusals import ModelError, shown

REQUIRED = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates"  # a folder
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateError(Exception):
    """A chat template cannot be used. The message is one line for people and names the file."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The contents of the files that exist, by name, and the tokenizer itself.

    `templates`: the sources of all chat templates, one after another.
    `template_problem`: one line on why the chat template cannot be used; empty if there is no problem.
    """

    contents: dict[str, bytes]
    tokenizer: Tokenizer
    templates: str = ""
    template_problem: str = ""

    @property
    def digest(self) -> bytes:
        """A digest of all files' names and contents."""
        return tokenizer_digest(self.contents)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises ModelError if the tokenizer has a token id that a model of this vocabulary size does not have. Having
        fewer tokens than the model is usual: embeddings are padded to a round size."""
        token, largest = max(self.tokenizer.get_vocab().items(), key=lambda entry: entry[1], default=("", -1))
        if largest >= vocab_size:
            raise ModelError(
                f"{REQUIRED} is another model's: its token {shown(token)} has the id {largest}, and this model's "
                f"vocabulary ends at {vocab_size - 1}"
            )


def read_tokenizer_files(directory: Path, template: Path | None = None) -> TokenizerFiles:
    """Reads and checks the files. Raises ModelError (one line with the file's name) if tokenizer.json is missing or a
    file is damaged. If only a chat template is damaged, sets `template_problem` instead, and text is still served.

    template: a file with the chat template to use instead of all of the model's own; ModelError if it cannot be parsed
    """
    if not exists(directory / REQUIRED):
        raise ModelError(f"{directory / REQUIRED} is missing: Trunkline reads tokenizers in this format only")
    names = [REQUIRED, CONFIG, SPECIAL_TOKENS]
    if template is None:
        named = sorted((directory / NAMED_TEMPLATES).glob("*.jinja"))
        names += [TEMPLATE, *(f"{NAMED_TEMPLATES}/{path.name}" for path in named)]
    contents = {name: read_file(directory / name) for name in names if exists(directory / name)}
    if template is not None:
        contents[TEMPLATE] = _parsed(template)
    config = read_json(directory / CONFIG) if CONFIG in contents else {}
    for name, values in ((CONFIG, config), (SPECIAL_TOKENS, None)):
        if name in contents:
            _check_special_tokens(directory / name, read_json(directory / name) if values is None else values)
    tokenizer = _tokenizer(directory / REQUIRED, contents[REQUIRED])
    try:
        return TokenizerFiles(contents, tokenizer, "\n".join(_templates(contents, config)))
    except TemplateError as error:
        return TokenizerFiles(contents, tokenizer, template_problem=str(error))


def _parsed(template: Path) -> bytes:
    data = read_file(template)
    try:
        problem = syntax_problem(data.decode())
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: {error}"
    if problem is not None:
        raise ModelError(f"--chat-template {template}: {problem}")
    return data


def _tokenizer(path: Path, data: bytes) -> Tokenizer:
    """Returns the tokenizer after encoding and decoding a text: some files load, and then fail at the first text."""

    def attempt(what: str, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BaseException as error:  # the library raises Exception itself, or panics
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise ModelError(f"{path} {what}: {' '.join(str(error).split())}") from None

    tokenizer: Tokenizer = attempt("is damaged", lambda: Tokenizer.from_buffer(data))
    # The file's padding and truncation lengths may be arbitrary; neither is wanted here.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    ids = attempt("cannot encode a text", lambda: tokenizer.encode("a").ids)
    texts: TokenTexts = attempt("has a decoder that cannot be read", lambda: TokenTexts(tokenizer))
    attempt("cannot decode a text", lambda: [texts.units(keep_special=True)[token_id] for token_id in ids])
    return tokenizer


def _check_special_tokens(path: Path, values: dict[str, Any]) -> None:
    for name in NAMED_TOKENS:
        value = values.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if value is None or (isinstance(text, str) and _is_unicode(text)):
            continue
        raise ModelError(f'{path}: {name} is {shown(value)}, not a string or an object with a string "content"')


def _templates(contents: dict[str, bytes], config: dict[str, Any]) -> list[str]:
    """Returns the sources of the chat templates. Raises TemplateError if they cannot be used."""
    found = []
    for name, data in contents.items():
        if name.endswith(".jinja"):
            try:
                found.append(data.decode())
            except UnicodeDecodeError as error:
                raise TemplateError(f"{name} is not UTF-8: {error}") from None
    # A template file takes precedence, so the configuration's template does not matter beside one.
    source = None if TEMPLATE in contents else config.get("chat_template")
    templates: list[Any]
    if isinstance(source, list):
        are_named = all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in source)
        templates = [one.get("template") for one in source] if are_named else [None]
    elif isinstance(source, dict):
        templates = list(source.values())
    else:
        templates = [] if source is None else [source]
    if not all(isinstance(template, str) and _is_unicode(template) for template in templates):
        raise TemplateError(f"{CONFIG}: chat_template is {shown(source)}, not a string or named strings")
    return found + templates


def _is_unicode(text: str) -> bool:
    """Returns False for a string with half of a surrogate pair, which JSON can spell but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
