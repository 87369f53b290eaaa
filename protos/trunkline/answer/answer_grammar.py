"""Grammars of answers: reasoning, then calls of tools as the parser of the model's format reads them, or a text that
the request constrains. Pure.

They are structural tags (docs/structured-output.md), which workers enforce as they do other grammars.
"""

import json
import re
from contextlib import suppress
from functools import partial
from typing import Any

from trunkline.answer.answer_parser import PARSERS, call_marks, reasoning_marks
from trunkline.answer.call_styles import CallStyle, call_style
from trunkline.answer.lark_regex import MAX_CHARACTERS, lark_regex
from trunkline.status import RequestRefused, invalid
from trunkline.v1.inference_pb2 import ChatMessages, GenerateRequest, Tool
from trunkline.v1.worker_pb2 import Grammar, GrammarKind
from trunkline.validation import MAX_GRAMMAR_BYTES

Element = dict[str, Any]

STRUCTURAL_TAG = GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG
CALLED, REQUIRES, TOOLS = "chat.called_tool", "chat.requires_call", "chat.tools"  # fields
FORBIDS = "chat.forbids_calls"
LIMIT = "chat.max_reasoning_tokens"
ANY_TEXT: Element = {"type": "any_text"}
LENIENT: Element = {"strict": False}  # what cannot be enforced is left out
HARMONY_TEXT: Element = {**ANY_TEXT, "excludes": ["<|start|>", "<|channel|>"]}  # which begin another message
HARMONY = "harmony"
_TOKEN = re.compile(r"<[^<>]+>|\[[A-Z]+\]")  # a mark that is one token
_NAME = re.compile(r"[\w.:/\-]+")  # of a tool, so that every format can write it


def needs_grammar(request: GenerateRequest, *, enforces_calls: bool = False) -> bool:
    """Whether a request needs a worker that constrains output, whatever the model is.

    enforces_calls: every call conforms to its tool, as if one were strict
    """
    return request.HasField("grammar") or _constrains_calls(request.chat, enforces_calls)


def _constrains_calls(chat: ChatMessages, enforces_calls: bool) -> bool:
    return must_call(chat) or (enforces_calls and bool(chat.tools)) or any(tool.strict for tool in chat.tools)


def must_call(chat: ChatMessages) -> bool:
    """Whether an answer must call tools."""
    return chat.requires_call or bool(chat.called_tool)


def check_choice(chat: ChatMessages) -> None:
    """Raises RequestRefused (INVALID_REQUEST) if there is no tool that the answer must call, or one where it must not
    call any."""
    if chat.forbids_calls and (chat.tools or must_call(chat)):
        raise invalid(FORBIDS, "is not allowed with tools")
    if chat.called_tool and all(tool.name != chat.called_tool for tool in chat.tools):
        raise invalid(CALLED, "is none of the tools")
    if chat.requires_call and not chat.tools:
        raise invalid(REQUIRES, "a call is required, and there are no tools")


def answer_grammar(
    request: GenerateRequest,
    answer_format: str,
    prompt_end: str,
    template: str,
    *,
    enforces_calls: bool = False,
    most_reasoning: int | None = None,
) -> Grammar | None:
    """Returns the grammar of a whole answer to a conversation, with its reasoning; None if that is the request's own
    grammar, or none. Raises RequestRefused (INVALID_REQUEST) if calls cannot be enforced.

    answer_format: of the model; "": its answers are text
    prompt_end: as in AnswerContext
    template: the model's chat template
    enforces_calls: as in needs_grammar()
    most_reasoning: tokens of reasoning, if the request itself has no limit: where it cannot be enforced, there is none
    """
    guards = _constrains_calls(request.chat, enforces_calls)
    whole_of = partial(_whole, request, answer_format, prompt_end, template, most_reasoning=most_reasoning)
    if not guards and any(tool.HasField("input_grammar") for tool in request.chat.tools):
        with suppress(RequestRefused):  # what cannot be enforced here is told to the model
            return whole_of(guards_calls=True)
    return whole_of(guards_calls=guards)


def _whole(
    request: GenerateRequest,
    answer_format: str,
    prompt_end: str,
    template: str,
    *,
    guards_calls: bool,
    most_reasoning: int | None,
) -> Grammar | None:
    """As answer_grammar().  guards_calls: calls that begin are calls of the tools, and conform to their schemas"""
    chat, must = request.chat, must_call(request.chat)
    has_limit = chat.HasField("max_reasoning_tokens")
    most, strictness = (chat.max_reasoning_tokens, {}) if has_limit else (most_reasoning, LENIENT)
    thought = ANY_TEXT if most is None else {**ANY_TEXT, "max_tokens": most, **strictness}
    given = request.grammar if request.HasField("grammar") and not must else None
    is_wanted = guards_calls or request.HasField("grammar") or most is not None
    if not (must or (answer_format and is_wanted)):
        return None
    text = None if given is None else _given(given)
    if given is not None and text is None:
        return None  # a worker says why it is no grammar
    may_be_tagged = given is not None and given.kind == STRUCTURAL_TAG
    if answer_format == HARMONY and may_be_tagged:
        if most is not None:
            raise invalid(LIMIT, f"cannot be enforced with structural tags in the model's answer format, {HARMONY}")
        return None
    calls = None
    if chat.tools and (text or guards_calls or answer_format == HARMONY):
        calls = _calls(chat, answer_format, template, is_free=text is None and not must)
    if answer_format == HARMONY:
        return _grammar(_harmony(calls, text, thought, is_free=not must), chat)
    prompt_end = prompt_end.rstrip()
    reasoning = _reasoning(answer_format, prompt_end, template, thought)
    if calls is None and not reasoning:
        return None
    rest = [each for each in (calls, text) if each is not None]
    if not rest:
        return _grammar(_limited(reasoning, _marks(answer_format, prompt_end, template)[0], strictness), chat)
    return _grammar([*reasoning, _either(rest)], chat)


def may_reason(answer_format: str, prompt_end: str, template: str) -> bool:
    """Whether an answer may have reasoning. Takes what answer_grammar() takes."""
    return answer_format == HARMONY or bool(answer_format and _marks(answer_format, prompt_end.rstrip(), template)[1])


def _calls(chat: ChatMessages, answer_format: str, template: str, *, is_free: bool) -> Element:
    """The calls of an answer.  is_free: there may be text, and no calls, if a mark tells calls from text"""
    style = call_style(answer_format, template)
    if style is None:
        field = CALLED if chat.called_tool else REQUIRES if chat.requires_call else TOOLS
        raise invalid(field, f"calls cannot be enforced in the model's answer format, {answer_format or 'none'}")
    tools = [(at, tool) for at, tool in enumerate(chat.tools) if tool.name == chat.called_tool or not chat.called_tool]
    if (
        size := sum(len(tool.parameters) + len(tool.input_grammar.text) for _, tool in tools)
    ) > MAX_GRAMMAR_BYTES:  # before they are read
        raise invalid(TOOLS, f"the schemas have {size} characters, more than the {MAX_GRAMMAR_BYTES} of a grammar")
    if sum(len(tool.input_grammar.text) for _, tool in tools) > MAX_CHARACTERS:
        raise invalid(TOOLS, f"the grammars have more than {MAX_CHARACTERS} characters")
    tags = [_call(style, tool, at, must=must_call(chat)) for at, tool in tools]
    begin, end = style.section
    ending = {"stop_after_first": chat.single_tool_call or bool(chat.called_tool) or not style.mark}
    calls = {"type": "tags_with_separator", "tags": tags, "separator": style.joint, "at_least_one": True, **ending}
    section = _tag(begin, calls, end) if begin else calls
    if not (is_free and style.mark):
        return section
    # What else the parser reads as a call, such as one without its section.
    others = [mark for mark in call_marks(answer_format) if not style.mark.startswith(mark)]
    free = {"type": "triggered_tags", "triggers": [style.mark], "excludes": others}
    return {**free, "tags": [section] if begin else tags, **ending}


def _call(style: CallStyle, tool: Tool, index: int, *, must: bool) -> Element:
    """must: a call is required, so that a grammar of its text that cannot be enforced is refused"""
    if not _NAME.fullmatch(tool.name):
        raise invalid(f"{TOOLS}[{index}].name", "calls can be enforced if it has only letters, digits and _ . : / -")
    arguments: Element = {"type": "json_schema", "json_schema": _schema(tool, index), "style": style.arguments}
    if not tool.strict:
        arguments |= LENIENT
    if tool.HasField("input_grammar"):
        try:
            text = _text_schema(tool, f"{TOOLS}[{index}].input_grammar")
            arguments = {**arguments, "json_schema": text, "strict": tool.strict or must}
        except RequestRefused:
            if tool.strict or must:
                raise
    head = style.head + tool.name
    if style.count:
        count = {"type": "regex", "pattern": style.count}
        return _tag(head, _sequence([count, _text(style.neck), arguments]), style.tail)
    return _tag(head + style.neck, arguments, style.tail)


def _schema(tool: Tool, index: int) -> Any:
    try:
        return json.loads(tool.parameters or "{}") | {"type": "object"}  # an object: the conversation was rendered
    except RecursionError:  # where the stack was lower
        raise invalid(f"{TOOLS}[{index}].parameters", "has too many levels") from None


def _text_schema(tool: Tool, field: str) -> Any:
    """The schema of arguments that have a text of the tool's grammar."""
    kind, text = tool.input_grammar.kind, tool.input_grammar.text
    if kind not in (GrammarKind.GRAMMAR_KIND_LARK, GrammarKind.GRAMMAR_KIND_REGEX):
        raise invalid(field, "must be of kind LARK or REGEX")
    pattern = lark_regex(text, field) if kind == GrammarKind.GRAMMAR_KIND_LARK else text
    inner = {"type": "string", "pattern": f"^(?:{pattern})$"}
    return {"type": "object", "properties": {"input": inner}, "required": ["input"], "additionalProperties": False}


def _marks(answer_format: str, prompt_end: str, template: str) -> tuple[str, str]:
    """What begins and ends the reasoning of an answer: that of the prompt, otherwise what the model may begin. Empty if
    there is none: a model whose template lacks the mark at its end does not reason."""
    marks = reasoning_marks(answer_format)
    for begin, end in marks.items():
        if prompt_end.endswith(begin):
            return begin, end
    begin, end = next(iter(marks.items()), ("", ""))
    reasons = prompt_end and end and not prompt_end.endswith(end) and end in template
    return (begin, end) if reasons else ("", "")


def _reasoning(answer_format: str, prompt_end: str, template: str, thought: Element) -> list[Element]:
    """The reasoning before the rest of an answer. Its marks may be tokens, which free text does not have.

    thought: what stands between its marks
    """
    begin, end = _marks(answer_format, prompt_end, template)
    if not end:
        return []
    space = {"type": "optional", "content": {"type": "regex", "pattern": "\\n{1,2}"}}
    after = [space] if getattr(PARSERS[answer_format], "strips", (False, False))[0] else []
    if prompt_end.endswith(begin):
        return [_thought("", end, thought), *after]
    return [{"type": "optional", "content": _sequence([_thought(begin, end, thought), *after])}]


def _limited(reasoning: list[Element], begin: str, strictness: Element) -> list[Element]:
    """An answer of which only the reasoning has a limit. No more of it may begin."""
    is_token = _TOKEN.fullmatch(begin) is not None
    if reasoning[0]["type"] == "optional" and not is_token:
        raise invalid(LIMIT, f"cannot be enforced where the model begins its reasoning with {begin!r}")
    return [*reasoning, {"type": "any_tokens", "exclude_tokens": [begin] if is_token else [], **strictness}]


def _thought(begin: str, end: str, thought: Element) -> Element:
    """Reasoning between its marks."""
    return _text(begin + end) if thought.get("max_tokens") == 0 else _tag(begin, thought, end)


def _harmony(calls: Element | None, text: Element | None, thought: Element, *, is_free: bool) -> list[Element]:
    """The messages of gpt-oss: reasoning, which is one message if it has a limit, then a call or the final text."""
    begun = {name: f"<|channel|>{name}<|message|>" for name in ("analysis", "commentary", "final")}
    before = [_thought(begun["analysis"], "<|end|>", thought)]
    if is_free and text is None:
        before.append(_tag(begun["commentary"], HARMONY_TEXT, "<|end|>"))  # what it says before a call
        text = HARMONY_TEXT
    head = _text("<|start|>assistant")
    if "max_tokens" not in thought:
        messages = [{"type": "star", "content": _sequence([_either(before), head])}]
    else:
        messages = [{"type": "optional", "content": _sequence([each, head])} for each in before]
    final = [] if text is None else [_sequence([_text(begun["final"]), text])]
    return [*messages, _either([*final, *([calls] if calls else [])])]


def _given(grammar: Grammar) -> Element | None:
    """A request's own grammar; None if it is none."""
    kind, text = grammar.kind, grammar.text
    if kind == GrammarKind.GRAMMAR_KIND_REGEX:
        return {"type": "regex", "pattern": text}
    if kind in (GrammarKind.GRAMMAR_KIND_LARK, GrammarKind.GRAMMAR_KIND_EBNF):
        return {"type": "grammar", "grammar": text}
    try:
        value = json.loads(text)
        if kind == GrammarKind.GRAMMAR_KIND_JSON_SCHEMA:
            return {"type": "json_schema", "json_schema": value}
        if kind == GrammarKind.GRAMMAR_KIND_CHOICE:
            return _choice(value)
        return value["format"] if "format" in value else _triggered(value)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _choice(value: Any) -> Element | None:
    if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
        return None
    # Strings of Lark are written as those of JSON. It has room for more of them than there may be elements.
    texts = (json.dumps(each, ensure_ascii=False).replace("\x7f", "\\u007f") for each in value)
    return {"type": "grammar", "grammar": f"start: CHOICE\nCHOICE: {' | '.join(texts)}"}


def _triggered(value: Any) -> Element:
    """Structural tags in their older form."""
    tags = [
        _tag(one["begin"], {"type": "json_schema", "json_schema": one["schema"]}, one["end"])
        for one in value["structures"]
    ]
    return {"type": "triggered_tags", "triggers": value["triggers"], "tags": tags}


def _text(value: str) -> Element:
    return {"type": "const_string", "value": value}


def _tag(begin: str, content: Element, end: str) -> Element:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _sequence(elements: list[Element]) -> Element:
    return {"type": "sequence", "elements": elements}


def _either(elements: list[Element]) -> Element:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}


def _grammar(elements: list[Element], chat: ChatMessages) -> Grammar:
    field = TOOLS if chat.tools else "grammar"
    try:
        text = json.dumps({"format": _sequence(elements)}, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):  # such as 1e999
        raise invalid(field, "a schema has a number that is out of range, or too many levels") from None
    if (num_bytes := len(text.encode())) > MAX_GRAMMAR_BYTES:
        raise invalid(field, f"the grammar of the answer has {num_bytes} bytes, more than {MAX_GRAMMAR_BYTES}")
    return Grammar(kind=STRUCTURAL_TAG, text=text)
