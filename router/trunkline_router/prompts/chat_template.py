"""Renders conversations with a model's chat template, which is untrusted code, in a sandbox.

Templates get the names that Hugging Face's apply_chat_template defines. Rendering runs in helper_process.py, because a
sandbox bounds what a template can reach but not how long it runs.
"""

import json
import secrets
from collections.abc import Mapping
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trunkline.status import RequestRefused, invalid
from trunkline.v1.inference_pb2 import ChatMessage, ChatMessages
from trunkline_router.prompts.conversation import (
    CONTENT,
    DOCUMENTS,
    FIELD,
    PLAIN,
    TOOL,
    TOOLS,
    USUAL_ROLES,
    ToolStyle,
    Values,
    json_object,
    template_documents,
    template_messages,
    template_tools,
)
from trunkline_router.prompts.reasoning_effort import effort_variables
from trunkline_router.prompts.tool_trial import ToolPlaces, tool_places
from trunkline_runtime.template_syntax import TAGS

VARIABLES = "template_variables"
RESERVED = {"messages", "add_generation_prompt", "continue_final_message", TOOLS, DOCUMENTS}
MAX_RENDERED_BYTES = 8 << 20  # a template that writes more than this for one conversation is broken


class ChatTemplate:
    """A compiled template, and the one for conversations with tools if that is another one. Raises ValueError if a
    source does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], for_tools: str | None = None) -> None:
        self._for_tools = ChatTemplate(for_tools, special_tokens) if for_tools else None
        try:
            self._template = _environment().from_string(source)
        except Exception as error:  # compiling evaluates the template's constants, which can raise anything
            raise ValueError(f"the chat template does not compile: {error}") from None
        self._names = frozenset(name for name in (CONTENT, TOOL, TOOLS, DOCUMENTS) if name in source)
        self._special_tokens = special_tokens

    def render(self, chat: ChatMessages) -> str:
        """The text of a prompt that check_conversation() lets pass. Raises RequestRefused (INVALID_REQUEST) if a part
        is not allowed, or the template has no place for it or refuses it."""
        if chat.tools and self._for_tools:
            return self._for_tools.render(chat)
        style = PLAIN
        if chat.tools or any(message.parts or message.role == TOOL for message in chat.messages):
            style = self._tool_places.style
            self._check_places(chat)
        text = self._rendered(chat, style)
        for index, message in enumerate(chat.messages):
            if message.role not in USUAL_ROLES and not _has(text, message):
                raise invalid(f"{FIELD}.messages[{index}].role", "the model's chat template leaves out this role")
        return text

    @cached_property
    def _tool_places(self) -> ToolPlaces:
        names_tools = TOOL in self._names
        return tool_places(self._rendered) or ToolPlaces(keeps_calls=names_tools, keeps_results=names_tools)

    def _rendered(self, chat: ChatMessages, style: ToolStyle) -> str:
        messages, tools = template_messages(chat.messages, style), template_tools(chat.tools, style)
        documents, variables = template_documents(chat.documents), _variables(chat)
        if documents and DOCUMENTS not in self._names:
            raise invalid(f"{FIELD}.{DOCUMENTS}", "the model's chat template has no place for documents")
        given = variables | {"messages": messages, TOOLS: tools, DOCUMENTS: documents}
        if not chat.continue_final_message:
            opens_turn = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else True
            return self._render(given, add_generation_prompt=opens_turn)
        kinds = [part.WhichOneof("part") for part in chat.messages[-1].parts]
        if kinds and (kinds[-1] != "text" or not {*kinds} <= {"text", "reasoning"}):
            raise invalid(FIELD, "only a final message that ends with text and calls no tools can be continued")
        # As in transformers: a mark shows where the final message ends, and the text after it, such as an end-of-turn
        # token, is cut off. If the template strips the blank after the mark, it trims messages, so the text before the
        # mark is trimmed too. The mark is random, so no message contains it.
        content = messages[-1][CONTENT]
        mark = secrets.token_hex(16).upper()
        messages[-1][CONTENT] = content + mark + " "
        text = self._render(given, add_generation_prompt=False)
        end = text.rfind(mark)
        if end < 0 or content.strip() not in text or CONTENT not in self._names:
            raise invalid(FIELD, "the model's chat template does not keep the final message, so it cannot be continued")
        kept = text[:end] if text.startswith(" ", end + len(mark)) else text[:end].rstrip()
        return kept.replace(mark + " ", "").replace(mark, "")  # the template may repeat the message

    def _check_places(self, chat: ChatMessages) -> None:
        """Raises RequestRefused (INVALID_REQUEST) if the template would leave out tools, calls of them or results."""
        if chat.tools and TOOLS not in self._names:
            raise invalid(f"{FIELD}.{TOOLS}", "the model's chat template has no place for tools")
        kinds = {part.WhichOneof("part") for message in chat.messages for part in message.parts}
        if "tool_call" in kinds and not self._tool_places.keeps_calls:
            raise invalid(f"{FIELD}.messages", "the model's chat template has no place for calls of tools")
        has_results = "tool_result" in kinds or any(message.role == TOOL for message in chat.messages)
        if has_results and not self._tool_places.keeps_results:
            raise invalid(f"{FIELD}.messages", "the model's chat template has no place for results of tools")

    def _render(self, given: Mapping[str, Any], *, add_generation_prompt: bool) -> str:
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                {**self._special_tokens, **given, "add_generation_prompt": add_generation_prompt}
            ):
                size += len(part)
                if size > MAX_RENDERED_BYTES:
                    raise invalid(FIELD, f"the rendered conversation is longer than {MAX_RENDERED_BYTES} characters")
                parts.append(part)
        except RequestRefused:
            raise
        except Exception as error:  # a template can raise anything for a conversation that it was not written for
            raise invalid(FIELD, f"the model's chat template refuses the conversation: {error}") from None
        return "".join(parts)


def _has(text: str, message: ChatMessage) -> bool:
    """Whether a rendered text has the message, as it is or in JSON."""
    content = (message.content or "".join(part.text for part in message.parts[:1])).strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


def _variables(chat: ChatMessages) -> Values:
    """Raises RequestRefused (INVALID_REQUEST) if the client's are no JSON object, or replace what the router sets."""
    variables = json_object(chat.template_variables, VARIABLES)
    if reserved := sorted(RESERVED & variables.keys()):
        raise invalid(VARIABLES, f"{', '.join(reserved)} cannot be replaced")
    return effort_variables(chat.reasoning_effort) | variables


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that finds the values of messages, tools and arguments at once, instead of looking for an attribute of
    the dictionary first. That took an eighth of the time of rendering."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)


_DICT_NAMES = frozenset(dir(dict))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=TAGS)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
