"""Grammars of Lark as regular expressions."""

import re
import time
from contextlib import suppress

import pytest

from tests.contract.call_grammars import PATCH, PATCH_GRAMMAR
from trunkline.answer.lark_regex import MAX_CHARACTERS, lark_regex
from trunkline.status import RequestRefused


def test_the_grammar_of_codex_takes_its_patches_and_nothing_else() -> None:
    matches = re.compile(lark_regex(PATCH_GRAMMAR, "f")).fullmatch
    added = "*** Begin Patch\n*** Add File: a\n+b\n+\n*** Delete File: c/d e\n*** End Patch"
    moved = "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@\n c\n*** End of File\n*** End Patch\n"
    for text in (PATCH, added, moved):
        assert matches(text), text
        assert not matches(text[1:])
        assert not matches(text.replace("End Patch", "End"))
        assert not matches(f"{text}\n\n")


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: "a.b"', "a.b", "a+b"),
        ('start: "/\\n\\"\\\\" // a comment: yes', '/\n"\\', "/"),
        ('start: x ("," x)*\nx.2: "a" | "bc"\n  | D -> d\nD: "0".."9"', "a,bc,7", "a,,a"),
        ('?start: ["a"] "b"? "c"~2 "d"~1..2 "e"{3}\n', "accdeee", "acdeee"),
        ("start: /a.[.]\\.\\/[^]]/", "a\r../x", "a\n../x"),
        ("start: INT WS N\n%import common (INT)\n".replace(" (INT)", ".INT") + "%import common.WS\n"
         "%import common.NUMBER -> N\n", "12 \n1.5e3", "12 x"),
        ('start: "ä\U0001f600" /ß/', "ä\U0001f600ß", "äß"),
    ],
)  # fmt: skip
def test_what_lark_writes(grammar: str, right: str, wrong: str) -> None:
    matches = re.compile(lark_regex(grammar, "f")).fullmatch
    assert matches(right)
    assert not matches(wrong)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start: "a" start?', "rules refer to themselves"),
        ('a\na: a\nstart: "x"', "rules refer to themselves"),
        ('a: "b"', "no rule `start`"),
        ("start: b", "no rule `b`"),
        ('start: "a" "b"i', "rule `start`: "),
        ("start: /a/i", "rule `start`: "),
        ('start: "a" ~"b"', "rule `start`: "),
        ('start: "a"\n%ignore " "', "rule `start`: "),
        ('%declare A\nstart: "a"', "rule ``: "),
        ('start: "\\x41"', "an escape that JSON does not know"),
        ("start: A\n%import common.SQL_COMMENT -> A", "common.SQL_COMMENT is not supported"),
        ("start: a0\n" + "".join(f"a{n}: a{n + 1} a{n + 1}\n" for n in range(30)) + 'a30: "x"', "more than 16384"),
        (f"start: {'a ' * (MAX_CHARACTERS // 3)}\na: /b/", "its regular expression has more than 16384"),
        ('start: "a" //' + "b" * MAX_CHARACTERS, "f: has more than 16384"),
    ],
)
def test_other_grammars_are_refused(grammar: str, words: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        lark_regex(grammar, "f")
    assert refused.value.field == "f"
    assert words in refused.value.message


# Expressions that go back from each character would take five seconds and more.
@pytest.mark.parametrize(
    ("begin", "repeated"),
    [
        ('"a"{1,', " "),
        ("/", "["),
        ("", "("),
        ("", '"a" '),
        ("->", " "),
        ('"a"', " "),
        ("", "a"),
        ("/", "\\"),
        ("a~", " "),
    ],
)
def test_the_time_is_linear_in_the_length(begin: str, repeated: str) -> None:
    grammar = f"start: {begin}{repeated * MAX_CHARACTERS}"[: MAX_CHARACTERS - 1] + "/"
    begun_s = time.thread_time()
    with suppress(RequestRefused):
        lark_regex(grammar, "f")
    assert time.thread_time() - begun_s < 1.0
