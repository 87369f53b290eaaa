"""Text to tokens and back, with the files that a worker sent."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from trunkline.status import context_exceeded, invalid
from trunkline.v1.inference_pb2 import ChatMessages
from trunkline_router.chat_template import check_messages, check_syntax
from trunkline_router.render_pool import RenderPool, TemplateSource
from trunkline_router.text_width import characters_per_token

# Encoding this much text takes about a millisecond; more goes to a thread (the library lets go of the GIL).
INLINE_CHARACTERS = 4096
MAX_TEXT_BYTES = 16 << 20  # takes seconds, and its tokens fill a message
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerError(Exception):
    """The files that a worker sent make no tokenizer. One line for a person."""


class PromptTokenizer:
    """A model's tokenizer and chat template. Raises TokenizerError."""

    def __init__(self, files: Mapping[str, bytes], renderers: RenderPool) -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
            config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"the worker's tokenizer files are damaged: {error}") from None
        # A prompt is never cut or filled up in silence, whatever the file was trained with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._prefix, self._suffix = self._missing_special_ids(config)
        self._characters_per_token = characters_per_token(self._tokenizer)
        self._renderers = renderers
        self._template, self.template_problem = _read_template(files, config)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids; with the model's special tokens (BOS, say) unless told otherwise."""
        if len(text) <= INLINE_CHARACTERS:
            ids = self._encode(text, special_tokens)
        else:
            ids = await asyncio.to_thread(self._encode, text, special_tokens)
        return [*self._prefix, *ids, *self._suffix] if special_tokens else ids

    def check_fits(self, text: str, most_tokens: int | None = None) -> None:
        """Raises RequestRefused where it is clear without tokenizing that the text is too long: for `most_tokens`, or
        for anybody.
        """
        width = self._characters_per_token
        if most_tokens is not None and width is not None and len(text) > most_tokens * width:
            raise context_exceeded(f"{len(text)} characters of text cannot fit into {most_tokens} tokens")
        if len(text) > MAX_TEXT_BYTES or len(text.encode()) > MAX_TEXT_BYTES:
            raise invalid("text", f"text of more than {MAX_TEXT_BYTES} bytes is not tokenized")

    async def encode_chat(self, chat: ChatMessages, most_tokens: int | None = None) -> list[int]:
        """The rendered conversation's ids: the template writes special tokens itself. Raises RequestRefused."""
        check_messages([{"role": message.role} for message in chat.messages])
        if self._template is None:
            raise invalid("chat", self.template_problem or "this model has no chat template: send text or token_ids")
        if chat.ByteSize() > MAX_TEXT_BYTES:
            raise invalid("chat", f"a conversation of more than {MAX_TEXT_BYTES} bytes is not rendered")
        text = await self._renderers.render(self._template, chat)
        self.check_fits(text, most_tokens)
        return await self.encode(text, special_tokens=False)

    async def decode(self, token_ids: list[int], *, keep_special: bool) -> str:
        if len(token_ids) <= INLINE_CHARACTERS:
            return self._tokenizer.decode(token_ids, skip_special_tokens=not keep_special)
        return await asyncio.to_thread(self._tokenizer.decode, token_ids, skip_special_tokens=not keep_special)

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def _missing_special_ids(self, config: dict[str, Any]) -> tuple[list[int], list[int]]:
        """BOS and EOS where tokenizer_config.json asks for them and tokenizer.json's own processor leaves them out.

        What the processor adds unasked stays: transformers 5 takes tokenizer.json at its word too.
        """
        ids = self._encode("a", True)
        bos, eos = (
            self._tokenizer.token_to_id(_content(config.get(name)) or "") for name in ("bos_token", "eos_token")
        )
        prefix = [bos] if config.get("add_bos_token") and bos is not None and ids[:1] != [bos] else []
        suffix = [eos] if config.get("add_eos_token") and eos is not None and ids[-1:] != [eos] else []
        return prefix, suffix


def _content(token: Any) -> str | None:
    """A special token's text: a string, or an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_template(files: Mapping[str, bytes], config: dict[str, Any]) -> tuple[TemplateSource | None, str]:
    """The template and, where there is one that cannot be used, why."""
    source: Any = (
        files["chat_template.jinja"].decode() if "chat_template.jinja" in files else config.get("chat_template")
    )
    if isinstance(source, list):  # several named ones
        source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
    if not isinstance(source, str):
        return None, ""
    special = {name: text for name in SPECIAL_TOKENS if (text := _content(config.get(name))) is not None}
    try:
        check_syntax(source)
    except ValueError as error:
        return None, str(error)
    return TemplateSource(source, special), ""
