"""Structural tags with `format`: what is produced is what the elements say, with tokens where they name tokens."""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from jsonschema_rs import validator_for
from llguidance import LLMatcher, LLTokenizer

from tests.worker.grammar.byte_matcher import TAGS
from tests.worker.grammar.grammar_rig import DEMO, DEMO_EOS, DEMO_VOCAB, GrammarRig, bits_of
from trunkline.answer.answer_parser import PARSERS
from trunkline.answer.output_reader import AnswerContext
from trunkline.engine.v1.grammar_pb2 import CompileRequest
from trunkline.status import RequestRefused
from trunkline.v1.generation_pb2 import FinishReason
from trunkline.v1.inference_pb2 import Tool
from trunkline_worker.grammar import compiling
from trunkline_worker.grammar.grammar_link import Compiled, Refused
from trunkline_worker.grammar.grammar_text import llguidance_grammar
from trunkline_worker.grammar.matching import Matching, compiled
from trunkline_worker.grammar.structural_elements import FIELDS, MAX_ELEMENTS, MAX_MARKS
from trunkline_worker.grammar.structural_format import MAX_DEPTH, STYLES
from trunkline_worker.grammar.structural_literals import AddedTokens

Format = dict[str, Any]

# Added tokens, and whether the tokenizer calls them special. llguidance takes those in angle brackets for special, and
# reads the others as bytes, of which they are the only long token.
DSML = "\uff5cDSML\uff5c"
ADDED = {"<think>": False, "</think>": False, "<call>": True, "</call>": True, "[ARGS]": True, DSML: False}
ADDED |= {"<|stop|>": True}
IDS = {text: DEMO_VOCAB + index for index, text in enumerate(ADDED)}
VOCAB = DEMO_VOCAB + 32
EOS = [DEMO_EOS, IDS["<|stop|>"]]
MOST_TOKENS = 60
ONE_TOKEN = re.compile("|".join(map(re.escape, IDS)))

INTEGER = {"type": "json_schema", "json_schema": {"type": "integer", "minimum": 0, "maximum": 99}}
OBJECT = {
    "type": "json_schema",
    "json_schema": {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def tokenizer_json(tmp_path_factory: pytest.TempPathFactory) -> Path:
    content = json.loads(DEMO.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] += [
        {"id": IDS[text], "content": text, "special": special, **flags} for text, special in ADDED.items()
    ]
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def model(tokenizer_json: Path) -> "Model":
    return Model(tokenizer_json)


class Model:
    """A tokenizer, and grammars compiled for it."""

    def __init__(self, path: Path) -> None:
        self.library = LLTokenizer(str(path), n_vocab=VOCAB, eos_token=EOS)
        self.tokens = AddedTokens.of(json.loads(path.read_text()), EOS)

    def matcher(self, element: Format) -> LLMatcher:
        return compiled(self.library, llguidance_grammar(TAGS, json.dumps({"format": element}), self.tokens))

    def encoded(self, text: str) -> list[int]:
        """With the added tokens that are written in it."""
        parts = re.split(f"({ONE_TOKEN.pattern})", text)
        return [token for part in parts for token in ([IDS[part]] if part in IDS else self.spelled(part))]

    def spelled(self, text: str) -> list[int]:
        """In tokens of single characters."""
        return [token for character in text for token in self.library.tokenize_str(character)]

    def accepts(self, matcher: LLMatcher, output: Sequence[int]) -> bool:
        fresh = matcher.deep_copy()
        return fresh.try_consume_tokens(list(output)) == len(output) and fresh.is_accepting()


def tag(begin: str, content: Format, end: str | Sequence[str]) -> Format:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def elements(kind: str, *values: Format) -> Format:
    return {"type": kind, "elements": list(values)}


FREE: Format = {"type": "any_text"}
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<call>"],
    "tags": [tag("<call>one ", INTEGER, "</call>"), tag("<call>two ", OBJECT, "\n</call>")],
}
ONE, TWO = "<call>one 7</call>", '<call>two {"a": true}\n</call>'


@pytest.mark.parametrize(
    ("element", "accepted", "refused"),
    [
        (text("a<think>\n"), ["a<think>\n"], ["", "a", "a<think>", "a<think>\n\n"]),
        (elements("sequence", text("a"), INTEGER, text("")), ["a1", "a99"], ["a", "1", "a100"]),
        (elements("or", text("a"), INTEGER, {"type": "regex", "pattern": "b+"}), ["a", "0", "bb"], ["", "a0", "ab"]),
        (
            tag("<think>", FREE, "</think>"),
            ["<think></think>", "<think>a < b\n</think>"],
            ["<think>", "<think></think>a"],
        ),
        (
            tag("", FREE, ["STOP", "ST", "\n</think>"]),
            ["ST", "a\nST", "\n</think>"],
            ["</think>", "a</think>", "S", "STOP"],
        ),
        (tag("(", tag("", FREE, ""), ")"), ["()", "(a)"], ["(", "())"]),
        (tag("(", elements("or", FREE, INTEGER), ")"), ["()", "(a)", "(1)"], ["(1", "1)"]),
        (
            tag(f"<{DSML}x>", FREE, f"</{DSML}x>"),
            [f"<{DSML}x>a</{DSML}x>"],
            [f"<{DSML}x>a<{DSML}x>", f"<{DSML}x>a</{DSML}"],
        ),
        (FREE | {"excludes": ["no", "<call>"]}, ["", "n o", "<call"], ["no", "anob", "<call>"]),
        (
            elements("sequence", tag("", FREE, "</think>"), OBJECT),
            ['x</think>{"a": true}'],
            ["x</think>", '{"a": true}'],
        ),
        (elements("sequence", text("a"), {"type": "any_tokens"}), ["a", "a<call>b</think>"], ["", "b"]),
        ({"type": "any_tokens", "exclude_tokens": ["<think>"]}, ["", "a<call>"], ["<think>", "a<think>"]),
        # What needs an added token that there is not is left out, unless it is strict.
        (tag("(", FREE | {"max_tokens": 1, "strict": False}, ")"), ["()", "(many more)"], ["(", ")"]),
        ({"type": "any_tokens", "exclude_tokens": ["x", "<think>"], "strict": False}, ["x"], ["<think>"]),
        ({"type": "optional", "content": text("a")}, ["", "a"], ["aa"]),
        ({"type": "star", "content": text("a")}, ["", "a", "aa"], ["b"]),
        ({"type": "plus", "content": text("ab")}, ["ab", "abab"], ["", "aba"]),
        ({"type": "repeat", "content": text("a"), "min": 1, "max": 2}, ["a", "aa"], ["", "aaa"]),
        ({"type": "repeat", "content": text("a"), "min": 2, "max": -1}, ["aa", "aaa"], ["", "a"]),
        ({"type": "plus", "content": {"type": "optional", "content": text("a")}}, ["", "a", "aa"], ["b"]),
        ({"type": "grammar", "grammar": 'root ::= "x" root | "y"'}, ["y", "xxy"], ["x"]),
        (
            elements("sequence", {"type": "grammar", "grammar": 'start: "x" W\n%ignore " "\nW: /[a-z]+/'}, text("9")),
            ["xab9", "x ab9"],
            ["x", "xab", "xab 9 "],
        ),
        (CALLS, ["", "a\n", ONE, f"a{ONE}{TWO}b"], ["<call>", "<call>two 7</call>", "</call>", "<think>"]),
        (CALLS | {"at_least_one": True}, [ONE, f"{ONE}a", f"{TWO} {ONE}"], ["", f"a{ONE}"]),
        (CALLS | {"stop_after_first": True}, ["", "a", ONE, f"a{TWO}"], [f"{ONE}a", f"{ONE}{ONE}"]),
        (CALLS | {"stop_after_first": True, "at_least_one": True}, [ONE, TWO], ["", f"a{ONE}", f"{ONE}a"]),
        (CALLS | {"triggers": ["<c"]}, ["<c", ONE], ["<call>"]),
        (CALLS | {"excludes": ["no"]}, [f"n{ONE}o"], ["no"]),
        (tag("(", CALLS, ")"), ["()", f"({ONE})", f"(a{ONE}b)"], ["(", f"({ONE}", "()a"]),
        (
            tag("(", CALLS | {"stop_after_first": True}, [")", "</think>"]),
            ["()", f"(a{ONE})", "(</think>"],
            [f"({ONE}b)"],
        ),
        (
            {"type": "tags_with_separator", "tags": CALLS["tags"], "separator": ", "},
            ["", ONE, f"{ONE}, {TWO}"],
            [ONE + TWO, f"{ONE}, ", f"a{ONE}"],
        ),
        (
            {"type": "tags_with_separator", "tags": CALLS["tags"], "separator": "", "at_least_one": True},
            [ONE, ONE + TWO],
            ["", f"{ONE}a"],
        ),
        (
            {"type": "tags_with_separator", "tags": CALLS["tags"], "separator": "", "stop_after_first": True},
            ["", TWO],
            [ONE + TWO],
        ),
    ],
)
def test_elements_accept_what_they_say(
    model: Model, element: Format, accepted: Sequence[str], refused: Sequence[str]
) -> None:
    matcher = model.matcher(element)
    assert [each for each in accepted if not model.accepts(matcher, model.encoded(each))] == []
    assert [each for each in refused if model.accepts(matcher, model.encoded(each))] == []


@pytest.mark.parametrize("mark", [text for text in IDS if text != "<|stop|>"])
def test_a_mark_that_is_a_token_is_not_spelled(model: Model, mark: str) -> None:
    """Not where it must stand, and not in the free text that it ends."""
    spelled = model.spelled(mark)
    assert len(spelled) > 1
    assert Matching(model.matcher(text(mark)), model.library).forced == [IDS[mark]]
    assert not model.accepts(model.matcher(text(f"{mark}a")), [*spelled, *model.spelled("a")])
    matcher = model.matcher(elements("sequence", tag("", FREE, mark), text("a")))
    assert model.accepts(matcher, [*model.spelled(mark[:-1]), IDS[mark], *model.spelled("a")])
    assert not model.accepts(matcher, [*spelled, *model.spelled("a")])
    assert not model.accepts(matcher, [*spelled, IDS[mark], *model.spelled("a")])


def test_tokens_are_forced_together_with_the_text_around_them(model: Model) -> None:
    matching = Matching(model.matcher(text(f"one <think>two<{DSML}")), model.library)
    assert matching.forced == [
        *model.library.tokenize_str("one "),
        IDS["<think>"],
        *model.library.tokenize_str("two<"),
        IDS[DSML],
    ]


@pytest.mark.parametrize("limit", [1, 2, 6])
def test_free_text_may_have_a_limit(model: Model, limit: int) -> None:
    end = IDS["</think>"]
    matcher = model.matcher(elements("sequence", tag("", FREE | {"max_tokens": limit}, "</think>\n"), OBJECT))
    lengths = set()
    for seed in range(20):
        output = random_output(Matching(matcher.deep_copy(), model.library), Random(seed))
        lengths.add(output.index(end))
        assert output.count(end) == 1
        assert model.library.decode_str(output[output.index(end) + 1 :]).startswith('\n{"a": ')
    assert max(lengths) == limit


def test_any_tokens_are_those_of_the_tokenizer(model: Model) -> None:
    mask = np.zeros((VOCAB + 31) // 32, np.int32)
    assert Matching(model.matcher({"type": "any_tokens"}), model.library).mask_into(mask.ctypes.data, mask.nbytes)
    assert bits_of(mask) == [*range(DEMO_VOCAB + len(IDS))]  # the ends, too, because the text may end here


def as_characters(mark: str, or_spelled: bool = False) -> str:
    parts = re.split(f"({ONE_TOKEN.pattern})", mark)
    one = "".join(chr(0xE000 + IDS[part] - DEMO_VOCAB) if part in IDS else re.escape(part) for part in parts)
    return f"(?:{one}|{re.escape(mark)})" if or_spelled else one


PLAIN = f"(?:{as_characters(DSML)}|[^\ue000-\ue0ff])"


def expression(element: Format, ends: Sequence[str] = ()) -> str:
    """What an element accepts, as Python reads regular expressions; each added token is one character."""
    free = "".join(f"(?!{as_characters(mark, True)})" for mark in [*ends, *element.get("excludes", [])])
    rest = f"(?:{'|'.join(as_characters(end) for end in ends)})" if ends else ""
    match element["type"]:
        case "const_string":
            return as_characters(element["value"])
        case "json_schema":
            return r'\{"a": (?:true|false)\}' if element == OBJECT else "[1-9]?[0-9]"
        case "any_text":
            return f"(?:{free}{PLAIN})*?{rest}"
        case "sequence":
            *first, last = element["elements"]
            return "".join(map(expression, first)) + expression(last, ends)
        case "or":
            return f"(?:{'|'.join(expression(each, ends) for each in element['elements'])})"
        case "star":
            return f"(?:{expression(element['content'])})*"
        case "tag":
            own = [element["end"]] if isinstance(element["end"], str) else element["end"]
            content = expression(element["content"], own)
            if element["content"]["type"] not in ("any_text", "triggered_tags"):
                content += f"(?:{'|'.join(map(as_characters, own))})"
            return as_characters(element["begin"]) + content
        case "triggered_tags":
            tags = "|".join(map(expression, element["tags"]))
            marks = "".join(f"(?!{as_characters(mark, True)})" for mark in [*ends, *element["triggers"]])
            return f"(?:{tags}|{marks}{PLAIN})*?{rest}"
    raise AssertionError(element)


MARKS = ["</think>", "STOP", "\n</call>", "a", DSML, f"</{DSML}x>", "[ARGS]", "\n\n"]


def random_format(chance: Random, depth: int = 0) -> Format:
    def inner() -> Format:
        return random_format(chance, depth + 1)

    def free() -> Format:
        return chance.choice([FREE, {"type": "any_text", "excludes": chance.sample(["e", "th", "\n", "<"], 2)}, CALLS])

    simple: list[Callable[[], Format]] = [
        lambda: text(chance.choice(["<think>", "b", "b [ARGS]", DSML, "once upon a time"])),
        lambda: INTEGER,
        lambda: OBJECT,
        lambda: tag(chance.choice(["", "<think>", "("]), free(), chance.sample(MARKS, chance.choice([1, 2]))),
    ]
    composed: list[Callable[[], Format]] = [
        lambda: elements("sequence", *(inner() for _ in range(chance.randint(1, 3)))),
        lambda: elements("or", tag("x", inner(), ""), tag("y", inner(), ",")),
        lambda: {"type": "star", "content": tag(";", inner(), ",")},
        lambda: tag("(", inner(), chance.choice([")", ["</think>", "]"]])),
    ]
    return chance.choice(simple if depth == 3 or chance.random() < 0.4 else composed)()


def random_output(matching: Matching, chance: Random, marks_are: float = 0.3, most: int = MOST_TOKENS) -> list[int]:
    """Up to `most` tokens, unless it ends with EOS. Marks, and newlines, are as likely as `marks_are`."""
    output: list[int] = []
    mask = np.full((VOCAB + 31) // 32, -1, np.int32)
    while len(output) < MOST_TOKENS and not (output and output[-1] in EOS):
        has_mask = matching.mask_into(mask.ctypes.data, mask.nbytes)
        new = list(matching.forced)
        if not new:
            assert has_mask
            allowed = bits_of(mask)
            marks = [token for token in allowed if token >= DEMO_VOCAB or token in EOS]
            new = [chance.choice(marks if marks and chance.random() < 0.3 else allowed)]
        output += new
        if output[-1] not in EOS:
            matching.advance(new)
    return output


def test_random_outputs_are_what_random_elements_say(model: Model) -> None:
    finished = 0
    for seed in range(150):
        chance = Random(seed)
        element = random_format(chance)
        matcher = model.matcher(element)
        for _ in range(4):
            output = random_output(Matching(matcher.deep_copy(), model.library), chance)
            if output[-1] not in EOS:
                continue
            found = b"".join(
                chr(0xE000 + token - DEMO_VOCAB).encode()
                if token >= DEMO_VOCAB
                else model.library.decode_bytes([token])
                for token in output[:-1]
            ).decode()
            assert re.fullmatch(expression(element), found, re.DOTALL), (element, found)
            finished += 1
    assert finished > 300


@pytest.mark.parametrize(
    ("element", "named"),
    [
        ({}, "/format: must be an object whose `type`"),
        ({"type": ["star"]}, "/format: must be an object whose `type`"),
        ({"type": "token", "token": 1}, "/format: must be an object whose `type`"),
        (elements("sequence", text("a"), elements("or")), "/format/elements/1/elements: must be an array of 1 to"),
        (elements("or", text("a"), {"type": "const_string"}), "/format/elements/1/value: must be a string"),
        (elements("or", *[text("a")] * MAX_ELEMENTS), "more than 1000 elements"),
        (elements("sequence", FREE, text("a")), "/format/elements/0: free text must come last"),
        ({"type": "star", "content": FREE}, "/format/content: free text must come last"),
        (tag("a", FREE, []), "/format/end: must have 1 to"),
        (tag("a", FREE, ["", "b"]), "/format/end: must be an array of strings that are not empty"),
        (tag("a", FREE, "<|stop|>"), "/format/end: <|stop|> ends every answer"),
        ({"type": "tag", "begin": "a", "content": FREE, "end": 1}, "/format/end: must be an array"),
        (FREE | {"excludes": [""]}, "/format/excludes: must be an array of strings that are not empty"),
        (FREE | {"max_tokens": 5}, "/format/max_tokens: needs one end"),
        (tag("a", FREE | {"max_tokens": 5}, "b"), "/format/content/max_tokens: needs one end"),
        (tag("a", {"type": "any_tokens"}, "b"), "/format/content: must be the last of the answer"),
        ({"type": "any_tokens", "exclude_tokens": ["x"]}, "/format/exclude_tokens: 'x' is no added token"),
        ({"type": "any_tokens", "exclude_tokens": ["<|stop|>"]}, "/format/exclude_tokens: '<|stop|>' is no added"),
        (tag("a", FREE | {"max_tokens": 0}, "</think>"), "/format/content/max_tokens: must be an integer from 1"),
        (INTEGER | {"json_schema": {"not": {}}}, "/format/json_schema: /not: this keyword is not supported"),
        (INTEGER | {"style": "yaml"}, "/format/style: "),
        ({"type": "regex", "pattern": "(?=a)"}, "/format/pattern: regular expression: look-around"),
        ({"type": "grammar", "grammar": "start: <think>"}, "/format/grammar: line 1, column 8: "),
        ({"type": "repeat", "content": text("a"), "min": 2, "max": 1}, "/format/max: must not be below `min`"),
        ({"type": "repeat", "content": text("a"), "min": 0, "max": 1001}, "/format/max: must be an integer from"),
        ({"type": "repeat", "content": text("a"), "min": True, "max": 1}, "/format/min: must be an integer from"),
        (CALLS | {"triggers": []}, "/format/triggers: must have 1 to"),
        (CALLS | {"triggers": ["x"]}, "/format/tags/0/begin: begins with no trigger"),
        (CALLS | {"triggers": ["<call>", "x"]}, "/format/triggers: no tag begins with one of these"),
        (CALLS | {"tags": [text("<call>")]}, "/format/tags/0: must be an element of type `tag`"),
        (CALLS | {"tags": [tag("<call>", FREE, "")]}, "/format/tags/0: free text must come last"),
        (CALLS | {"at_least_one": 1}, "/format/at_least_one: must be true or false"),
    ],
)
def test_elements_that_are_not_as_documented_are_refused_by_their_place(
    model: Model, element: Format, named: str
) -> None:
    with pytest.raises(RequestRefused) as refused:
        model.matcher(element)
    assert refused.value.message.startswith(f"grammar: {named}")


def test_a_schema_that_is_not_strict_is_enforced_as_far_as_possible(model: Model) -> None:
    def accepts(schema: Any, document: Any) -> bool:
        element = {"type": "json_schema", "json_schema": schema, "strict": False}
        return model.accepts(model.matcher(element), model.encoded(json.dumps(document)))

    odd: Format = {"type": "string", "not": {}, "pattern": "(?=a)", "maxLength": 2}
    closed: Format = {"type": "object", "properties": {"a": odd, "b": {"uniqueItems": True, "foo": 1}}}
    closed |= {"required": ["a"], "additionalProperties": False}
    assert accepts(closed, {"a": "xy", "b": [1, 1]})
    others: list[Any] = [{}, {"a": "xyz"}, {"a": 1}, {"a": "xy", "c": 1}, []]
    for document in others:
        assert not accepts(closed, document)
    # Without what delimits them, others are left out as well.
    assert accepts({"properties": {"a": {"properties": 1, "additionalProperties": False}}}, {"a": {"b": 1}})
    schemas: list[Format] = [{"properties": 1, "additionalProperties": False}, {"$ref": "#/none"}]
    for schema in schemas:
        assert accepts(schema, {"b": 1})
        assert not accepts(schema, [])
    assert accepts({"oneOf": [{"type": "integer"}, {"type": "number"}]}, 1)


CITY: Format = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "at": {"$ref": "#/$defs/at"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "unit"],
    "$defs": {"at": {"type": "array", "items": {"type": "boolean"}}},
}


def arguments(style: str, written: Mapping[str, str]) -> str:
    """As models write them."""
    match style:
        case "qwen_xml":
            return "\n".join(f"<parameter={key}>\n{value}\n</parameter>" for key, value in written.items())
        case "glm_xml":
            pairs = written.items()
            return "\n".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>" for key, value in pairs)
    tags = {key: str(key == "city" or key == "unit").lower() for key in written}
    return "\n".join(
        f'<{DSML}parameter name="{key}" string="{tags[key]}">{value}</{DSML}parameter>'
        for key, value in written.items()
    )


@pytest.mark.parametrize("style", STYLES)
def test_arguments_are_written_in_the_style_of_the_model(model: Model, style: str) -> None:
    matcher = model.matcher({"type": "json_schema", "json_schema": CITY, "style": style})

    def accepts(written: Mapping[str, str]) -> bool:
        return model.accepts(matcher, model.encoded(arguments(style, written)))

    assert accepts({"city": 'a\n<b> "c"\n', "unit": "C"})
    assert accepts({"city": "", "days": "7", "unit": "F", "at": "[true, false]", "note": "null"})
    for written in (
        {},
        {"city": "a"},
        {"unit": "C", "city": "a"},
        {"city": "a", "days": "10", "unit": "C"},
        {"city": "a", "unit": "K"},
        {"city": "a", "unit": "C", "at": "true"},
        {"city": "a", "unit": "C", "more": "a"},
    ):
        assert not accepts(written), written
    long = {"type": "object", "properties": {"a": {"type": "string", "minLength": 2}}}
    with pytest.raises(RequestRefused, match="/properties/a: a string in this style"):
        model.matcher({"type": "json_schema", "json_schema": long, "style": style})
    assert model.matcher({"type": "json_schema", "json_schema": long, "style": style, "strict": False})


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"required": ["a"]}, "all that is required"),
        ({"properties": {"a": {"type": "string", "const": 5}}}, "/properties/a: in this style a parser reads"),
        ({"properties": {"a": {"enum": ["5", 7]}}}, "/properties/a: in this style a parser reads"),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#"}}}}, "/properties/a: in this style references"),
    ],
)
def test_what_arguments_of_a_style_cannot_be_is_refused(
    model: Model, style: str, schema: Mapping[str, Any], named: str
) -> None:
    with pytest.raises(RequestRefused, match=named):
        model.matcher({"type": "json_schema", "json_schema": {"type": "object", **schema}, "style": style})


CALLS_IN_STYLE = {
    "qwen_xml": ("qwen_xml", "<tool_call>\n<function=f>\n", "\n</function>\n</tool_call>"),
    "glm_xml": ("glm", "<tool_call>f\n", "\n</tool_call>"),
    "deepseek_xml": (
        "deepseek_dsml",
        f'<{DSML}function_calls>\n<{DSML}invoke name="f">\n',
        f"\n</{DSML}invoke>\n</{DSML}function_calls>",
    ),
}


@pytest.mark.parametrize("style", STYLES)
def test_the_parser_of_the_format_reads_what_is_written_in_a_style(model: Model, style: str) -> None:
    parser, begin, end = CALLS_IN_STYLE[style]
    matcher = model.matcher(tag(begin, {"type": "json_schema", "json_schema": CITY, "style": style}, end))
    validator = validator_for(CITY)
    context = AnswerContext(tools=[Tool(name="f", parameters=json.dumps(CITY))])
    closing = model.encoded(STYLES[style].end)
    finished = 0
    for seed in range(40):
        chance, fresh, output = Random(seed), matcher.deep_copy(), list[int]()
        while not fresh.is_accepting() and len(output) < 200:
            mask = np.frombuffer(fresh.compute_bitmask(), np.int32)
            is_closing = chance.random() < 0.3 and fresh.validate_tokens(closing) == len(closing)
            new = closing if is_closing else [chance.choice(bits_of(mask))]
            assert fresh.consume_tokens(new)
            output += new
        if not fresh.is_accepting():
            continue
        found = PARSERS[parser](context)
        parts = found.feed(model.library.decode_str(output)) + found.finish(FinishReason.FINISH_REASON_STOP)
        assert not any(part.text for part in parts)
        assert validator.is_valid(json.loads("".join(part.arguments for part in parts)))
        finished += 1
    assert finished > 10


def wide(count: int, trigger: str = "<") -> Format:
    tags = [tag(f"{trigger}{number}>", OBJECT, "</f>") for number in range(count)]
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags}


def nested(depth: int, element: Format) -> Format:
    return {"type": "optional", "content": nested(depth - 1, element)} if depth > 1 else element


@pytest.mark.parametrize(
    ("element", "compiles"),
    [
        (nested(60, FREE), False),
        (wide(400), True),
        (wide(10_000), False),
        (tag("", FREE, ["a" * length for length in range(1, 128)]), True),
        (tag("", FREE, "a" * 200_000), True),
        (elements("sequence", *[tag("", FREE, "a")] * 400), True),
        (elements("or", *[tag("", FREE, f"a{number}") for number in range(100)]), True),
        (
            {
                "type": "repeat",
                "min": 1000,
                "max": 1000,
                "content": {"type": "repeat", "min": 1000, "max": 1000} | {"content": text("a")},
            },
            False,
        ),
        (
            {
                "type": "json_schema",
                "style": "qwen_xml",
                "json_schema": {"properties": dict.fromkeys((f"a{number}" for number in range(5_000)), True)},
            },
            False,
        ),
        (elements("sequence", text("")), True),
        (tag("", text(""), ""), True),
    ],
)
def test_hostile_elements_compile_or_are_refused(model: Model, element: Format, compiles: bool) -> None:
    request = CompileRequest(kind=TAGS, text=json.dumps({"format": element}))
    since_s = time.process_time()
    answer = compiling.answer_to(request, model.library, model.tokens)
    assert answer.HasField("error") != compiles
    assert answer.error.reason in ("", "INVALID_REQUEST")
    assert time.process_time() - since_s < compiling.COMPILE_TIMEOUT_S


def test_elements_are_not_nested_without_bound(model: Model) -> None:
    assert model.accepts(model.matcher(nested(MAX_DEPTH, text("a"))), model.encoded("a"))
    with pytest.raises(RequestRefused, match="nested more than"):
        model.matcher(nested(MAX_DEPTH + 1, text("a")))


def test_a_grammar_process_knows_the_tokens_of_its_tokenizer(tokenizer_json: Path) -> None:
    element = elements("sequence", tag("<think>", FREE, "</think>"), OBJECT)
    with GrammarRig(tokenizer_json, VOCAB, EOS) as rig:
        digest, answer = rig.compile(TAGS, json.dumps({"format": element}))
        assert isinstance(answer, Compiled)
        assert rig.begin(1, digest).forced == [IDS["<think>"]]
        rig.advance(1, [IDS["<think>"]])
        allowed = rig.advance(1, [IDS["</think>"]])
        assert rig.tokenizer.decode(allowed.forced) == '{"a":'
        _, answer = rig.compile(TAGS, json.dumps({"format": tag("", FREE, "<|stop|>")}))
        assert isinstance(answer, Refused)


def test_a_schema_that_does_not_compile_becomes_any_object_unless_it_is_strict(tokenizer_json: Path) -> None:
    schema = {"type": "object", "patternProperties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    element: Format = {"type": "json_schema", "json_schema": schema}
    with GrammarRig(tokenizer_json, VOCAB, EOS) as rig:
        _, answer = rig.compile(TAGS, json.dumps({"format": element}))
        assert isinstance(answer, Refused)
        digest, answer = rig.compile(TAGS, json.dumps({"format": element | {"strict": False}}))
        assert isinstance(answer, Compiled)
        assert rig.tokenizer.decode(rig.generate(1, digest, 0))[0] == "{"


def test_the_page_has_all_elements_with_their_fields_and_limits() -> None:
    page = (Path(__file__).parents[3] / "docs" / "structured-output.md").read_text()
    for kind, fields in FIELDS.items():
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{kind}`" in line.split("|")[1])
        assert [field for field in fields if f"`{field}`" not in row] == []
    assert [style for style in STYLES if f"`{style}`" not in page] == []
    for limit in (f"{MAX_ELEMENTS:,}, nested {MAX_DEPTH} deep", f"excludes | {MAX_MARKS} |"):
        assert limit in page
