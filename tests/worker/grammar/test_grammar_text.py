"""Grammars of all kinds: what is accepted is what the grammar says, and what cannot be enforced is refused by name."""

import json
import re
from random import Random

import pytest

from tests.worker.grammar.byte_matcher import (
    CHOICE,
    EBNF,
    LARK,
    REGEX,
    SCHEMA,
    TAGS,
    DoesNotCompile,
    accepts,
    matcher_of,
    sample,
)
from trunkline.status import RequestRefused
from trunkline_worker.grammar.grammar_text import llguidance_grammar

# Strings that would end a literal, a comment or a line of a grammar.
HOSTILE = ['"', "\\", '\\"', "\n", "\r\n", "/", "//", "#", " | ", '" | "', "é", "\U0001f600", "\0", "\x7f", "\u2028"]
HOSTILE += ["\\n", "%json {}", "<[1]>", "'", "{", "$", "\\u0041", "\\x41", "start: x", "a" * 5_000]


def refusal(kind: int, text: str) -> str:
    with pytest.raises(RequestRefused) as refused:
        matcher_of(kind, text)
    assert (refused.value.reason, refused.value.field) == ("INVALID_REQUEST", "grammar")
    return refused.value.message


def test_a_choice_is_one_of_its_strings_whatever_they_contain() -> None:
    matcher = matcher_of(CHOICE, json.dumps(HOSTILE))
    for text in HOSTILE:
        assert accepts(matcher, text)
        assert not accepts(matcher, text + "a")
    assert not accepts(matcher, "")
    for text in HOSTILE:
        alone = matcher_of(CHOICE, json.dumps([text]))
        assert [other for other in HOSTILE if accepts(alone, other)] == [text]


@pytest.mark.parametrize("text", ["[]", '[""]', "[1]", '"a"', "{}", "[", '["\\ud800"]', json.dumps(["a"] * 10_001)])
def test_a_choice_of_anything_else_is_refused(text: str) -> None:
    refusal(CHOICE, text)


REGEXES = [
    *(
        "abc",
        "^abc$",
        "a|b",
        "^(?:a|bc)$",
        "[a-c]+x?",
        r"\d{3}-\d{4}",
        r"\w+@\w+\.com",
        "",
        "a{2}",
        "a{2,}b",
        "a{1,3}?",
    ),
    *(
        "x+?y*?",
        r"[^\s]+",
        r"[^\w]{1,3}",
        r"[^\d\S]?",
        r"\S\D\W",
        r"[\s\d]",
        r"[\]\-a]",
        "[a-]",
        "[-a]",
        "[&&a]",
    ),
    *("[a[b]", r"\{a\}", "{a}", r"\u0041\x42", "é+", "(?P<year>[0-9]{4})-(?P<month>0[1-9])", r"\/\-\.", r"[\b]?", "."),
    *(
        "a.c",
        "(a|b(c|d)*)+",
        "(yes|no|maybe)",
        r"(\+\d{1,2} )?\d+",
        "[^a]",
        "[^a-z\n]",
        r"a\tb\nc",
        "~`!@#%&_=;:'\"<>,",
    ),
]


@pytest.mark.parametrize("regex", REGEXES)
def test_a_regex_produces_what_the_whole_of_it_matches_in_python(regex: str) -> None:
    matcher = matcher_of(REGEX, regex)
    random = Random(regex)
    samples = [sample(matcher, random, 60) for _ in range(60)]
    assert any(text is not None for text in samples)
    for text in samples:
        assert text is None or re.fullmatch(regex, text), text


def test_a_surrogate_pair_in_a_regex_is_one_character_as_in_ecmascript() -> None:
    assert accepts(matcher_of(REGEX, r"[\ud83d\ude00-\ud83d\ude02]{2}"), "\U0001f600\U0001f601")


REFUSED_REGEXES = [
    *(
        "(?=a)a",
        "(?!a)",
        "(?<=a)",
        "(?<!a)",
        "(?i)a",
        "(?>a)",
        "(?P=n)",
        "(?#c)",
        r"(a)\1",
        r"\k<a>",
        r"\bword\b",
        r"\B",
    ),
    *(
        r"\Aa",
        r"a\Z",
        r"a\z",
        r"\cA",
        r"\q",
        r"\é",
        "a**",
        "a*+",
        "*a",
        "^*",
        "(|*)",
        "a{,3}",
        "a{2,1}",
        "a{2}{3}",
        "[",
        "[]",
    ),
    *("[^]", "[b-a]", r"[\d-z]", r"[a-\w]", "(", ")", "(a", r"\ud800", "a\\", "[a\\", "\x01", r"\x01", r"[\x00-\x07]"),
    *(
        "(" * 40 + ")" * 40,
        "(a{1000}){1000}",
        "a{99999}",
        "a{1234567}",
        r"\u{41}",
        "a^b",
        "a$b",
        "(?:^a)+",
        r"\p{Nonsense}",
    ),
]


@pytest.mark.parametrize("regex", REFUSED_REGEXES)
def test_what_dialects_of_regexes_read_differently_or_not_at_all_is_refused(regex: str) -> None:
    with pytest.raises((RequestRefused, DoesNotCompile)) as refused:
        matcher_of(REGEX, regex)
    assert (
        "lookarounds" in str(refused.value)
        or "Unicode property" in str(refused.value)
        or refused.type is RequestRefused
    )
    with pytest.raises((RequestRefused, DoesNotCompile)):
        matcher_of(SCHEMA, json.dumps({"pattern": regex}))


GBNF = r"""
root ::= item ("," " "? item)* tail?   # a list
item ::= "\"" [^"\\\x00-\x1F]{2,5} "\"" | number | "(" root ")" | letter-Case
number ::= "-"? ( "0" | [1-9] [0-9]* ) ("." [0-9]+)?
letter-Case ::= [a-zA-Z_\-\]] |
  "\t" | "\u00e9"
tail ::= (
  ";" | "!"
)
"""


def test_gbnf_derives_what_its_root_does() -> None:
    matcher = matcher_of(EBNF, GBNF)
    for text in ("1", "-0.5,12", '"abc", x', "((1,2),a)!", "_", "-", "]", "\t", "é;", "(1;)"):
        assert accepts(matcher, text), text
    for text in ("", "01", "1,,2", '"a"', '"abcdef"', "(1", "(1))", "1;;", "\\", "ab", "1\n"):
        assert not accepts(matcher, text), text


def test_gbnf_reads_empty_alternatives_dots_and_its_escapes() -> None:
    assert [text for text in ("", "a", "b") if accepts(matcher_of(EBNF, 'root ::= "a" |'), text)] == ["", "a"]
    assert [text for text in ("", "\n", "é", "ab") if accepts(matcher_of(EBNF, "root ::= . "), text)] == ["\n", "é"]
    assert accepts(
        matcher_of(EBNF, r'root ::= "\x41\u00e9\U0001F600\n\r\t\\\"" [\U0001F600-\U0001F602]'), 'Aé😀\n\r\t\\"😁'
    )


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            'start: "a"',
            'root: "a"',
            'a ::= "a"',
            "root ::= x",
            'root ::= "a',
            "root ::= [a",
            "root ::= (",
            "root ::= )",
        ),
        *(
            'root ::= "a"\nroot ::= "b"',
            "root ::= *",
            "root ::= ( * )",
            r'root ::= "\q"',
            r'root ::= "\ud800"',
            "root ::= [b-a]",
        ),
        *('root ::= "a"{1001}', "root ::= <token>", r'root ::= "\U00110000"', '"a" root ::= "a"', "root ::= %json {}"),
    ],
)
def test_gbnf_that_is_invalid_or_unknown_is_refused(text: str) -> None:
    with pytest.raises((RequestRefused, DoesNotCompile)):
        matcher_of(EBNF, text)


def test_a_large_gbnf_is_written_in_linear_time() -> None:
    chain = "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(900)) + '\nr900 ::= "a"'
    assert "R900" in llguidance_grammar(EBNF, chain)
    assert llguidance_grammar(EBNF, "root ::= [" + "a-b" * 50_000 + "]" + "*" * 50_000)
    refusal(EBNF, "root ::= r0\n" + "\n".join(f'r{i} ::= "a"' for i in range(1_000)))
    refusal(LARK, "start: r0\n" + "\n".join(f'r{i}: "a"' for i in range(1_000)))


LARK_TEXT = r"""
// a comment with %json {} in it
# another
%import common.INT
%ignore /[ ]+/
start: "sum" expression ["!"]
?expression: expression "+" term | term   // left recursion
term: INT | NAME | "(" expression ")" | value | "x"i~2
NAME: /[a-z]{3}/
value: "#" %json {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
"""


def test_lark_derives_what_its_start_does() -> None:
    matcher = matcher_of(LARK, LARK_TEXT)
    for text in ("sum 1", "sum 1 + (abc+2)!", 'sum #{"a": true}', "sum Xx"):
        assert accepts(matcher, text), text
    for text in ("sum", "sum ab", "sum #{}", 'sum #{"a": 1}', "sum 1 +"):
        assert not accepts(matcher, text), text


@pytest.mark.parametrize(
    "text",
    [
        *('%llguidance {"no_forcing": true}\nstart: "a"', 'start[temperature=0.5]: "a"', 'start[max_tokens=3]: "a"'),
        *(
            'start[stop="x"]: /.*/',
            'start[suffix="x"]: /.*/',
            "start: <|eos|>",
            "start: <[1]>",
            "start: @other",
            "start: $x",
        ),
        *(
            'start: %regex {"substring_chars": "abc"}',
            'start: %lark { start: "a" }',
            "start: a::x",
            "%declare A\nstart: A",
        ),
        *(
            '%override a: "b"\nstart: a',
            "start: %json",
            "start: %json []",
            "start: %json {",
            "start: %json " + '{"a":' * 2_000,
        ),
        *(
            'start: %json {"x-guidance": {"lenient": true}, "not": {}}',
            'start: %json {"uniqueItems": true}',
            'start: "a"{1001}',
        ),
        *("start: 'a'", 'start: "a\nb"', "start: /a\nb/", "start: \x00"),
    ],
)
def test_what_lark_would_do_beyond_constraining_the_text_is_refused(text: str) -> None:
    refusal(LARK, text)


def test_terminals_of_lark_are_as_long_as_possible() -> None:
    matcher = matcher_of(LARK, 'start: WORD "a"\nWORD: /[a-z]+/')
    assert not accepts(matcher, "ba")
    assert accepts(matcher_of(LARK, 'start: WORD "1"\nWORD: /[a-z]+/'), "ba1")


def test_a_comment_of_lark_cannot_hide_what_the_library_would_read() -> None:
    assert not accepts(matcher_of(LARK, 'start: "a" // %json {"x-guidance": {"lenient": true}}\n'), "a{}")


TAGS_TEXT = {
    "triggers": ["<f", "["],
    "structures": [
        {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"},
        {"begin": "[", "schema": {"const": "x"}, "end": ""},
    ],
}


def test_structural_tags_constrain_what_follows_their_triggers() -> None:
    matcher = matcher_of(TAGS, json.dumps(TAGS_TEXT))
    for text in ("", "free\ntext", "é <f=a>12</f> and <f=b>true</f>", '["x"', "<", "< f", '<f=a>1</f>["x"["x"'):
        assert accepts(matcher, text), text
    for text in ("<f", "<f>", "x<f=a>true</f>", "<f=b>true", "<f=a>1</g>", "[1", "[ "):
        assert not accepts(matcher, text), text


@pytest.mark.parametrize(
    "change",
    [
        *(
            {"triggers": []},
            {"triggers": [""]},
            {"triggers": "<f"},
            {"triggers": ["<f"]},
            {"triggers": ["<f", "[", "?"]},
        ),
        *({"structures": []}, {"structures": [1]}, {"structures": [{"begin": "["}]}, {"triggers": ["<f", "[", "<f="]}),
        {"structures": [{"begin": "[", "schema": {"not": {}}, "end": ""}]},
        {"structures": [{"begin": "[", "schema": {}, "end": "", "lazy": True}]},
        {"stop_after_first": True},
    ],
)
def test_structural_tags_that_are_not_as_documented_are_refused(change: dict[str, object]) -> None:
    refusal(TAGS, json.dumps({**TAGS_TEXT, **change}))


@pytest.mark.parametrize("kind", [0, 7, 99])
def test_a_kind_that_is_not_known_is_refused(kind: int) -> None:
    refusal(kind, "a")


@pytest.mark.parametrize("kind", [SCHEMA, REGEX, EBNF, LARK, CHOICE, TAGS])
@pytest.mark.parametrize(
    "text", ["", "\ud800", "[" * 200_000, '{"a":' * 50_000, "(" * 200_000, "a" * 250_000, "9" * 30_000, "\0"]
)
def test_no_text_does_more_than_be_refused(kind: int, text: str) -> None:
    if (kind, text) != (REGEX, ""):
        with pytest.raises((RequestRefused, DoesNotCompile)):
            matcher_of(kind, text)
