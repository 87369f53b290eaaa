"""The contents of a worker's tokenizer files apart from tokenizer.json: special tokens by name, and the chat template.

The files have the same precedence as in transformers 5 (`PreTrainedTokenizerBase._from_pretrained`).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
TEMPLATE = "chat_template.jinja"
NAMED_TEMPLATES = "additional_chat_templates/"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT = "default"  # of several templates, the one for conversations without tools


class ConfigError(Exception):
    """A file cannot be read. The message is one line for people and names the file."""


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """`special_tokens`: text by name, as templates expect them. `template`: None if there is none or if it cannot be
    used; in the latter case `template_problem` has the reason."""

    special_tokens: dict[str, str]
    add_bos: bool
    add_eos: bool
    template: str | None
    template_problem: str = ""


def read_tokenizer_config(files: Mapping[str, bytes], *, padding_token: str | None = None) -> TokenizerConfig:
    """Reads the files. `padding_token` is that of tokenizer.json and applies unless a file names another one.

    Raises ConfigError if tokenizer_config.json or special_tokens_map.json is damaged.
    """
    config = _json_object(files, CONFIG)
    tokens = _special_tokens(config, _json_object(files, SPECIAL_TOKENS), padding_token)
    problem = ""
    try:
        template = _template(files, config)
    except ConfigError as error:
        template, problem = None, str(error)
    return TokenizerConfig(
        tokens, bool(config.get("add_bos_token")), bool(config.get("add_eos_token")), template, problem
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


def _template(files: Mapping[str, bytes], config: dict[str, Any]) -> str | None:
    """The default template: from template files if there are any, else from the configuration; None if there is none.

    Raises ConfigError if the templates cannot be used.
    """
    named = _template_files(files) or _configured_templates(config.get("chat_template"))
    if not named:
        return None
    if DEFAULT not in named:
        raise ConfigError(f"the model has several chat templates, and none of them is called {DEFAULT!r}")
    source = named[DEFAULT]
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
