"""Structural tags: elements in xgrammar's notation become Lark. Needs no llguidance.

Free text ends with the first of the marks that may follow it. So an element that ends with free text, which is open,
is written together with its ends: those of the tag around it. If there are none, it ends with the answer.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from trunkline.answer.argument_types import types_in
from trunkline.answer.xml_calls import STRING, typed
from trunkline.status import RequestRefused, invalid
from trunkline_worker.grammar.lark_text import checked_lark, gbnf_as_lark, lark_grammar, lark_string
from trunkline_worker.grammar.portable_regex import portable_regex
from trunkline_worker.grammar.schema_check import ANY_OBJECT, checked_schema, in_form, lenient_schema, schema_text
from trunkline_worker.grammar.schema_document import ANNOTATIONS, AT_ROOT
from trunkline_worker.grammar.structural_elements import MAX_ELEMENTS, MAX_MARKS, Element, refusals_at, refused_at
from trunkline_worker.grammar.structural_literals import AddedTokens, Literal, Token, choice_lark, cut, literal_lark

MAX_DEPTH = 32  # of elements
MAX_TOKENS = (1 << 32) - 1  # of a free text with a limit

ANY = "/(?s:.*)/"
GBNF = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)  # Lark has no "::="


class ArgumentStyle(NamedTuple):
    """How arguments are written outside of JSON. Strings are raw, other values are JSON.

    begin, end: around the value; `begin` has places for the key, and for whether the value is a string
    joint: between arguments
    excludes: what strings cannot contain
    """

    begin: str
    end: str
    joint: str
    excludes: Sequence[str]


STYLES = {
    "qwen_xml": ArgumentStyle(
        "<parameter={key}>\n", "\n</parameter>", "\n", ("<parameter=", "</parameter>", "</function>")
    ),
    "glm_xml": ArgumentStyle("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>", "\n", ("</tool_call>",)),
    "deepseek_xml": ArgumentStyle(
        '<\uff5cDSML\uff5cparameter name="{key}" string="{is_string}">', "</\uff5cDSML\uff5cparameter>", "\n", ()
    ),
}
ARGUMENT_KEY = re.compile(r"[^\s<>\"'&]+")
OTHER_REFERENCE = re.compile(r'"\$ref": "#(?!/\$defs/|/definitions/)')
ANCHORS = re.compile(r"(\^?)((?:\\.|[^\\])*?)(\$?)", re.DOTALL)  # of a pattern: none at an end, anything may be there
OF_STRINGS = {"type", "pattern"}
OF_ARGUMENTS = {"type", "properties", "required", "additionalProperties"}


class _Written(NamedTuple):
    """An element in Lark. If it is open, its ends are written with it."""

    lark: str
    is_open: bool = False

    def closed(self, at: str) -> str:
        if self.is_open:
            raise refused_at(at, "free text must come last, or in a tag whose `end` is not empty")
        return self.lark


def structural_grammar(document: Any, tokens: AddedTokens, compiles: Callable[[str], bool]) -> str:
    """The grammar of a document with `format`, or with `triggers` and `structures`.

    compiles: whether the library takes a grammar
    """
    fields = document if isinstance(document, dict) else {}
    known = {"type", "format"} if "format" in fields else {"type", "triggers", "structures"}
    if unknown := fields.keys() - known:
        raise invalid("grammar", f"`{min(unknown)[:64]}` is not supported")
    if "format" in fields:
        return _Writer(tokens, compiles).grammar(Element.of(fields["format"], "/format"))
    structures = fields.get("structures")
    if not isinstance(structures, list):
        raise refused_at("/structures", "must be an array")
    tags = [_tag_of_structure(each) for each in structures]
    triggered = {"type": "triggered_tags", "triggers": fields.get("triggers"), "tags": tags}
    return _Writer(tokens, compiles).grammar(Element(triggered, ""))


def _tag_of_structure(structure: Any) -> dict[str, Any]:
    if not isinstance(structure, dict) or structure.keys() != {"begin", "schema", "end"}:
        raise invalid("grammar", "a structure has `begin` and `end`, which are strings, and `schema`")
    content = {"type": "json_schema", "json_schema": structure["schema"]}
    return {"type": "tag", "begin": structure["begin"], "content": content, "end": structure["end"]}


class _Writer:
    def __init__(self, tokens: AddedTokens, compiles: Callable[[str], bool]) -> None:
        self._tokens = tokens
        self._compiles = compiles
        self._num_elements = 0
        self._texts: dict[tuple[str, ...], str] = {}  # terminals of free texts, by what they exclude
        self._lines = ["%llguidance {}"]
        self._grammars: list[dict[str, str]] = []  # that are embedded

    def grammar(self, element: Element) -> str:
        self._lines.append("start: " + self._write(element, (), MAX_DEPTH).lark)
        return lark_grammar("\n".join(self._lines), self._grammars)

    def _write(self, element: Element, ends: Sequence[Literal], depth: int) -> _Written:
        """ends: what may follow, if the element is open; none: it is the last of the answer"""
        self._count()
        if depth == 0:
            raise invalid("grammar", f"elements are nested more than {MAX_DEPTH} deep")
        written = self._expansion(element, ends, depth)
        return _Written(self._rule("element", written.lark), written.is_open)

    def _count(self) -> None:
        self._num_elements += 1
        if self._num_elements > MAX_ELEMENTS:
            raise invalid("grammar", f"more than {MAX_ELEMENTS} elements and arguments")

    def _rule(self, name: str, lark: str, attributes: str = "") -> str:
        """A new rule: the library does not nest brackets deeply."""
        name = f"{name}{len(self._lines)}"
        self._lines.append(f"{name}{attributes}: {lark}")
        return name

    def _expansion(self, element: Element, ends: Sequence[Literal], depth: int) -> _Written:
        match element.fields["type"]:
            case "any_text":
                if element.fields.get("max_tokens") is not None:
                    return _Written(self._limited_text(element, ends), is_open=True)
                return _Written(self._free_text(ends, element.texts("excludes")), is_open=True)
            case "any_tokens":
                if ends:
                    raise refused_at(element.at, "must be the last of the answer")
                texts, strict = element.texts("exclude_tokens"), element.flag("strict", default=True)
                tokens = self._tokens.but(texts, f"{element.at}/exclude_tokens", strict=strict)
                return _Written(f"{tokens}*", is_open=True)
            case "sequence":
                *first, last = element.each("elements")
                parts = [self._write(each, (), depth - 1).closed(each.at) for each in first]
                written = self._write(last, ends, depth - 1)
                return _Written(" ".join([*parts, written.lark]), written.is_open)
            case "or":
                return _either([self._write(each, ends, depth - 1) for each in element.each("elements")], ends)
            case "optional":
                return _either([self._write(element.inner(), ends, depth - 1), _Written('""')], ends)
            case "tag":
                begin, rest = self._tag(element, ends, depth)
                return _Written(f"{literal_lark(begin)} {rest.lark}", rest.is_open)
            case "triggered_tags":
                return self._triggered_tags(element, ends, depth)
            case "tags_with_separator":
                return _Written(self._tags_with_separator(element, depth))
            case "star" | "plus" | "repeat":
                content = element.inner()
                return _Written(f"({self._write(content, (), depth - 1).closed(content.at)}){_times(element)}")
        return _Written(self._leaf(element))

    def _leaf(self, element: Element) -> str:
        match element.fields["type"]:
            case "const_string":
                return literal_lark(self._tokens.literal(element.text("value"), f"{element.at}/value"))
            case "regex":
                with refusals_at(f"{element.at}/pattern"):
                    return f"/(?:{portable_regex(element.text('pattern'))})/"
            case "grammar":
                return self._embedded(element)
        return self._json(element)

    def _json(self, element: Element) -> str:
        schema, strict = element.fields.get("json_schema"), element.flag("strict", default=True)
        style = element.fields.get("style", "json")
        if style not in ("json", *STYLES):
            raise refused_at(f"{element.at}/style", f"must be json, {', '.join(STYLES)}")
        with refusals_at(f"{element.at}/json_schema"):
            if style != "json":
                return self._arguments(STYLES[style], schema, strict)
            return self._document(schema, strict)

    def _document(self, schema: Any, strict: bool) -> str:
        if strict:
            return f"%json {schema_text(schema)}"
        text = in_form(lenient_schema(schema))
        if not self._compiles(lark_grammar(f"start: %json {text}")):
            text = in_form(ANY_OBJECT)
        return f"%json {text}"

    def _arguments(self, style: ArgumentStyle, schema: Any, strict: bool) -> str:
        """The properties of an object, in order; others are left out."""
        if strict:
            checked_schema(schema)
        fields = schema if isinstance(schema, dict) else {}
        properties, required = fields.get("properties", {}), fields.get("required", [])
        if strict and (schema is True or fields.keys() - ANNOTATIONS - AT_ROOT - OF_ARGUMENTS):
            raise invalid("grammar", f"in this style only {', '.join(sorted(OF_ARGUMENTS))} are enforced")
        if strict and not set(required) <= properties.keys():
            raise invalid("grammar", "in this style all that is required must be listed in properties")
        definitions = {key: fields[key] for key in ("$defs", "definitions") if key in fields}
        first, others = '""', '""'  # what may follow no argument, and what may follow one
        for key, value in reversed(properties.items() if isinstance(properties, dict) else ()):
            self._count()
            if not ARGUMENT_KEY.fullmatch(key):
                raise invalid("grammar", "this style has no names with spaces, quotes and angle brackets")
            is_optional = not isinstance(required, list) or key not in required
            if is_optional and not self._has_values(value, definitions):
                continue
            with refusals_at(f"/properties/{key}"):
                argument = self._rule("argument", self._argument(style, key, value, definitions, strict))
            first = self._rule("first", f"{argument} {others}" + (f" | {first}" if is_optional else ""))
            joint = f"{lark_string(style.joint)} {argument} {others}"
            others = self._rule("others", joint + (f" | {others}" if is_optional else ""))
        return first

    def _has_values(self, schema: Any, definitions: Mapping[str, Any]) -> bool:
        """Whether a value conforms to a schema that lists values: one may ask for a boolean that is "yes"."""
        if not isinstance(schema, dict) or not schema.keys() & {"enum", "const"}:
            return True
        text = in_form(lenient_schema({**schema, **definitions}))
        return self._compiles(lark_grammar(f"start: %json {text}"))

    def _argument(
        self, style: ArgumentStyle, key: str, schema: Any, definitions: Mapping[str, Any], strict: bool
    ) -> str:
        fields = schema if isinstance(schema, dict) else {}
        types = types_in(schema)
        is_raw = "string" in types or not fields.keys() - ANNOTATIONS
        is_string = "true" if types == {"string"} else "false"
        begin = self._tokens.literal(style.begin.format(key=key, is_string=is_string), "")
        end = self._tokens.literal(style.end, "")
        constants = [fields["const"]] if "const" in fields else fields.get("enum")
        if not is_raw:
            if strict and OTHER_REFERENCE.search(json.dumps(schema)):
                raise invalid("grammar", "in this style references lead to $defs and definitions alone")
            value = f"{self._document({**fields, **definitions}, strict)} {literal_lark(end)}"
        elif isinstance(constants, list) and constants:
            texts = [each if isinstance(each, str) else json.dumps(each) for each in constants]
            if strict and any(json.loads(typed(text, types)) not in constants for text in texts):
                raise invalid("grammar", "in this style a parser reads one of these values as none of them")
            value = f"{choice_lark([self._tokens.literal(text, '') for text in texts])} {literal_lark(end)}"
        elif (matching := self._pattern(fields, (*style.excludes, style.end), strict)) is not None:
            value = self._up_to(end, matching)
        elif strict and not _is_plain(schema):
            raise invalid("grammar", "a string in this style can have an enum, a const or a pattern, and nothing else")
        else:
            value = self._free_text([end], style.excludes)
        return f"{literal_lark(begin)} {value}"

    def _pattern(self, fields: Mapping[str, Any], excludes: Sequence[str], strict: bool) -> str | None:
        """A terminal of the texts that a schema's pattern describes, if that is all that it says of strings."""
        pattern = fields.get("pattern")
        if types_in(fields) != STRING or not isinstance(pattern, str) or fields.keys() - ANNOTATIONS - OF_STRINGS:
            return None
        try:
            return self._matching(pattern, excludes)
        except RequestRefused:
            if strict:
                raise
            return None

    def _embedded(self, element: Element) -> str:
        text, name = element.text("grammar"), f"g{len(self._grammars)}"
        with refusals_at(f"{element.at}/grammar"):
            lark = gbnf_as_lark(text) if GBNF.search(text) else checked_lark(text)
        self._grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _tag(self, element: Element, ends: Sequence[Literal], depth: int) -> tuple[Literal, _Written]:
        """What begins a tag, and the rest of it."""
        begin = self._tokens.literal(element.text("begin"), f"{element.at}/begin")
        is_text = isinstance(element.fields.get("end"), str)
        texts = [element.text("end")] if is_text else element.texts("end", least=1)
        if texts == [""]:
            return begin, self._write(element.inner(), ends, depth - 1)
        own_ends = [self._tokens.literal(text, f"{element.at}/end") for text in texts]
        content = self._write(element.inner(), own_ends, depth - 1)
        return begin, _Written(content.lark if content.is_open else f"{content.lark} {choice_lark(own_ends)}")

    def _tags(self, element: Element, depth: int) -> list[tuple[Element, Literal, str]]:
        tags = []
        for tag in element.each("tags"):
            if tag.fields["type"] != "tag":
                raise refused_at(tag.at, "must be an element of type `tag`")
            begin, rest = self._tag(tag, (), depth)
            tags.append((tag, begin, self._rule("rest", rest.closed(tag.at))))
        return tags

    def _tags_with_separator(self, element: Element, depth: int) -> str:
        separator = literal_lark(self._tokens.literal(element.text("separator"), f"{element.at}/separator"))
        tag = "(" + " | ".join(f"{literal_lark(begin)} {rest}" for _, begin, rest in self._tags(element, depth)) + ")"
        tags = tag if element.flag("stop_after_first") else f"({tag} ({separator} {tag})*)"
        return tags if element.flag("at_least_one") else f"{tags}?"

    def _triggered_tags(self, element: Element, ends: Sequence[Literal], depth: int) -> _Written:
        triggers = element.texts("triggers", least=1)
        tags = self._tags(element, depth)
        stop, at_least_one = element.flag("stop_after_first"), element.flag("at_least_one")
        first = "(" + " | ".join(f"{literal_lark(begin)} {rest}" for _, begin, rest in tags) + ")"
        if stop and at_least_one:
            return _Written(first)
        used = set[str]()
        rests: dict[tuple[str | Token, ...], list[str]] = {}
        for tag, begin, rest in tags:
            text = tag.text("begin")
            # The shortest, because a trigger counts as soon as it is there.
            trigger = min((trigger for trigger in triggers if text.startswith(trigger)), key=len, default=None)
            if trigger is None:
                raise refused_at(f"{tag.at}/begin", "begins with no trigger")
            used.add(trigger)
            head, tail = cut(begin, len(trigger))
            rests.setdefault(tuple(head), []).append(f"{literal_lark(tail)} {rest}")
        if used != set(triggers):
            raise refused_at(f"{element.at}/triggers", "no tag begins with one of these, or a shorter one begins it")
        excludes = element.texts("excludes")
        if stop:
            ended = {trigger: [f"({' | '.join(each)}) {choice_lark(ends)}"] for trigger, each in rests.items()}
            return _Written(self._free_text(ends, excludes, ended, times="?"), is_open=True)
        text = self._free_text(ends, excludes, rests, times="*")
        return _Written(f"{first} {text}" if at_least_one else text, is_open=True)

    def _free_text(
        self,
        ends: Sequence[Literal],
        excludes: Sequence[str],
        rests: Mapping[tuple[str | Token, ...], Sequence[str]] = {},
        times: str = "",
    ) -> str:
        """Free text with its end.

        rests: what follows the triggers in it
        times: `*`, or `?` if what follows a trigger is the last and has the end with it
        """
        marks = [*rests, *ends]
        if len(marks) > MAX_MARKS:
            raise invalid("grammar", f"more than {MAX_MARKS} triggers and ends of one free text")
        # A parser of the answer cannot tell a token from its characters.
        first_tokens = (next((part.text for part in mark if isinstance(part, Token)), "") for mark in marks)
        text = self._text((*excludes, *filter(None, first_tokens)))
        tags = " | ".join(f"{self._up_to(mark, text)} ({' | '.join(each)})" for mark, each in rests.items())
        last = "(" + " | ".join(self._up_to(end, text) for end in ends) + ")" if ends else text
        if times == "?":
            return f"({tags} | {last})"
        return f"({tags})* {last}" if rests else last

    def _limited_text(self, element: Element, ends: Sequence[Literal]) -> str:
        """Free text of at most so many tokens, with its end, which is forced after them."""
        match [(end, end[0]) for end in ends]:
            case [(end, Token(mark, _))]:
                text = self._text((*element.texts("excludes"), mark))
                limit = f"[max_tokens={element.integer('max_tokens', 1, MAX_TOKENS)}]"
                return f"{self._rule('limited', text, limit)} {literal_lark(end)}"
        if not element.flag("strict", default=True):
            return self._free_text(ends, element.texts("excludes"))
        raise refused_at(f"{element.at}/max_tokens", "needs one end, which begins with an added token of the tokenizer")

    def _text(self, excludes: tuple[str, ...]) -> str:
        """A terminal."""
        if excludes not in self._texts:
            self._texts[excludes] = self._rule("TEXT", ANY + _without(excludes))
        return self._texts[excludes]

    def _matching(self, pattern: str, excludes: Sequence[str]) -> str:
        """A terminal: a text in which the pattern of a schema matches."""
        found = ANCHORS.fullmatch(pattern)
        assert found is not None
        before, after = ("" if anchor else "(?s:.*)" for anchor in (found[1], found[3]))
        return self._rule("TEXT", f"/{before}(?:{portable_regex(found[2])}){after}/" + _without(excludes))

    def _up_to(self, mark: Literal, text: str) -> str:
        """Free text and a mark."""
        head, *tail = mark
        if isinstance(head, Token):
            return f"{text} {literal_lark(mark)}"
        up_to = f"{text} {lark_string(head)}"
        if tail:  # the token, which free text cannot have, ends it
            return f"{self._rule('HEAD', up_to)} {literal_lark(tail)}"
        return self._rule("mark", up_to, "[lazy]")


def _without(excludes: Sequence[str]) -> str:
    strings = " | ".join(map(lark_string, dict.fromkeys(excludes)))
    return f" & ~({ANY} ({strings}) {ANY})" if excludes else ""


def _is_plain(schema: Any) -> bool:
    """Whether a schema says no more than types."""
    fields = schema if isinstance(schema, dict) else {}
    return not fields.keys() - ANNOTATIONS - {"type", "anyOf"} and all(map(_is_plain, fields.get("anyOf", [])))


def _either(written: Sequence[_Written], ends: Sequence[Literal]) -> _Written:
    is_open = any(each.is_open for each in written)
    larks = [f"{each.lark} {choice_lark(ends)}" if is_open and not each.is_open else each.lark for each in written]
    return _Written(f"({' | '.join(larks)})", is_open)


def _times(element: Element) -> str:
    if element.fields["type"] != "repeat":
        return {"star": "*", "plus": "+"}[element.fields["type"]]
    least, most = element.integer("min", 0), element.integer("max", -1)
    if 0 <= most < least:
        raise refused_at(f"{element.at}/max", "must not be below `min`")
    return f"{{{least},{most if most >= 0 else ''}}}"
