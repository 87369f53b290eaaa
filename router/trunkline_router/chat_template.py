"""Rendering conversations with a model's chat template, which is code from a stranger: in a sandbox.

The names that templates expect are those of Hugging Face's apply_chat_template.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trunkline.status import invalid
from trunkline.v1.inference_pb2 import ChatMessages

FIELD = "chat"
MAX_MESSAGES = 4096
MAX_RENDERED_BYTES = 16 << 20  # a template that writes more than this in answer to a conversation is broken
# What a template can raise about a conversation that it was not written for.
RENDER_ERRORS = (
    TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError, MemoryError,
)  # fmt: skip


class _GenerationTag(Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is only let through."""

    tags = {"generation"}  # noqa: RUF012  # the base class's attribute

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Raises ValueError where the source does not compile."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ValueError(f"the chat template does not compile: {error}") from None
        self._special_tokens = special_tokens

    def render(self, chat: ChatMessages) -> str:
        """The prompt's text. Raises RequestRefused (INVALID_REQUEST) where the template refuses the conversation."""
        messages = [{"role": message.role, "content": message.content} for message in chat.messages]
        check_messages(messages)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                messages=messages,
                add_generation_prompt=not chat.continue_final_message,
                tools=None,
                documents=None,
                **self._special_tokens,
            ):
                size += len(part)
                if size > MAX_RENDERED_BYTES:
                    raise invalid(FIELD, f"the rendered conversation is longer than {MAX_RENDERED_BYTES} characters")
                parts.append(part)
        except RENDER_ERRORS as error:
            raise invalid(FIELD, f"the model's chat template refuses the conversation: {error}") from None
        text = "".join(parts)
        return _cut_after_final(text, messages[-1]["content"]) if chat.continue_final_message else text


def check_messages(messages: Sequence[dict[str, str]]) -> None:
    """Raises RequestRefused (INVALID_REQUEST) for what no template can make sense of."""
    if not messages:
        raise invalid(FIELD, "the conversation is empty")
    if len(messages) > MAX_MESSAGES:
        raise invalid(FIELD, f"{len(messages)} messages are more than {MAX_MESSAGES}")
    for index, message in enumerate(messages):
        if not message["role"]:
            raise invalid(f"{FIELD}.messages", f"message {index} has no role")


def _cut_after_final(text: str, content: str) -> str:
    """Drops what the template writes after the last message, such as an end-of-turn token."""
    end = text.rfind(content.strip())
    if end < 0:
        raise invalid(FIELD, "the model's chat template does not keep the final message, so it cannot be continued")
    return text[: end + len(content.strip())]


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
