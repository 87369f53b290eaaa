"""Text to tokens and back, with the files that a worker sent."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer, processors

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessages
from trunkline_router.chat_template import ChatTemplate, check_messages

# Encoding this much text takes about a millisecond; more goes to a thread (the library lets go of the GIL).
INLINE_CHARACTERS = 4096
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerError(Exception):
    """The files that a worker sent make no tokenizer. One line for a person."""


class PromptTokenizer:
    """A model's tokenizer and chat template. Raises TokenizerError."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(files["tokenizer.json"])
            config: dict[str, Any] = json.loads(files.get("tokenizer_config.json", b"{}"))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"the worker's tokenizer files are damaged: {error}") from None
        # A prompt is never cut or filled up in silence, whatever the file was trained with.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._heed_special_tokens(config)
        self._template, self.template_problem = _read_template(files, config)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids; with the model's special tokens (BOS, say) unless told otherwise."""
        if len(text) <= INLINE_CHARACTERS:
            return self._encode(text, special_tokens)
        return await asyncio.to_thread(self._encode, text, special_tokens)

    async def encode_chat(self, chat: ChatMessages) -> list[int]:
        """The rendered conversation's ids: the template writes special tokens itself. Raises RequestRefused."""
        check_messages([{"role": message.role} for message in chat.messages])
        if self._template is None:
            raise invalid("chat", self.template_problem or "this model has no chat template: send text or token_ids")
        if sum(len(message.content) for message in chat.messages) <= INLINE_CHARACTERS:
            return self._encode(self._template.render(chat), False)
        text = await asyncio.to_thread(self._template.render, chat)
        return await asyncio.to_thread(self._encode, text, False)

    async def decode(self, token_ids: list[int], *, keep_special: bool) -> str:
        if len(token_ids) <= INLINE_CHARACTERS:
            return self._tokenizer.decode(token_ids, skip_special_tokens=not keep_special)
        return await asyncio.to_thread(self._tokenizer.decode, token_ids, skip_special_tokens=not keep_special)

    def _encode(self, text: str, special_tokens: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def _heed_special_tokens(self, config: dict[str, Any]) -> None:
        """Where tokenizer_config.json says whether BOS and EOS are added, it overrules tokenizer.json's processor.

        As transformers does it, so that a prompt's tokens are those that the model was tried with.
        """
        if config.get("add_bos_token") is None and config.get("add_eos_token") is None:
            return
        bos, eos = (self._special_token(config, name) for name in ("bos", "eos"))
        self._tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join([*(token for token, _ in bos), "$A", *(token for token, _ in eos)]),
            special_tokens=[*bos, *(token for token in eos if token not in bos)],
        )

    def _special_token(self, config: dict[str, Any], name: str) -> list[tuple[str, int]]:
        """The token and its id, where the configuration asks for it and the vocabulary has it."""
        token = _content(config.get(f"{name}_token"))
        token_id = self._tokenizer.token_to_id(token) if token and config.get(f"add_{name}_token") else None
        return [(token, token_id)] if token is not None and token_id is not None else []


def _content(token: Any) -> str | None:
    """A special token's text: a string, or an object that holds it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _read_template(files: Mapping[str, bytes], config: dict[str, Any]) -> tuple[ChatTemplate | None, str]:
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
        return ChatTemplate(source, special), ""
    except ValueError as error:
        return None, str(error)
