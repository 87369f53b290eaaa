"""Grammars that are made to harm whatever compiles them, in ten classes, by seed."""

import json
from collections.abc import Callable
from contextlib import suppress
from random import Random
from typing import Any

from trunkline.v1.worker_pb2 import GrammarKind

Hostile = tuple[int, str]  # kind, text

SCHEMA, REGEX = GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, GrammarKind.GRAMMAR_KIND_REGEX
LARK, CHOICE = GrammarKind.GRAMMAR_KIND_LARK, GrammarKind.GRAMMAR_KIND_CHOICE
FIELDS: dict[int, str] = {SCHEMA: "json", REGEX: "regex", LARK: "grammar", CHOICE: "choice"}


def deep(chance: Random) -> Hostile:
    depth = chance.choice([10, 50, 63, 500, 5_000, 40_000])
    match chance.randrange(4):
        case 0:
            part = '{"type": "array", "items": '
            return SCHEMA, part * depth + '{"type": "null"}' + "}" * depth
        case 1:
            return SCHEMA, '{"anyOf": [' * depth + '{"type": "null"}' + "]}" * depth
        case 2:
            return REGEX, "(" * depth + "a" + ")" * depth
        case _:
            return LARK, "start: " + "(" * depth + '"a"' + ")" * depth


def wide(chance: Random) -> Hostile:
    count = chance.choice([100, 999, 2_000, 5_000])
    names = [f"{chance.choice('abc')}{number}" for number in range(count)]
    match chance.randrange(4):
        case 0:
            return SCHEMA, json.dumps({"type": "object", "properties": {name: {"type": "integer"} for name in names}})
        case 1:
            return SCHEMA, json.dumps({"anyOf": [{"const": name} for name in names]})
        case 2:
            return REGEX, "|".join(names)
        case _:
            return LARK, "start: " + " | ".join(f"r{name}" for name in names) + "\n" + "\n".join(
                f'r{name}: "{name}" start?' for name in names
            )


def references(chance: Random) -> Hostile:
    count = chance.choice([10, 250, 3_000])
    following: Callable[[int], int] = chance.choice([lambda i: i + 1, lambda i: (i + 1) % count, lambda i: 0])
    wrap: Callable[[Any], Any] = chance.choice(
        [
            lambda one: one,
            lambda one: {"allOf": [one, one]},
            lambda one: {"anyOf": [one, one, {"type": "array", "items": one}]},
            lambda one: {"type": "object", "properties": {"a": one, "b": one}},
        ]
    )
    definitions = {f"a{i}": wrap({"$ref": f"#/$defs/a{following(i)}"}) for i in range(count)}
    return SCHEMA, json.dumps({"$defs": {f"a{count}": {"type": "null"}} | definitions, "$ref": "#/$defs/a0"})


def exponential(chance: Random) -> Hostile:
    n = chance.choice([5, 20, 60, 300])
    return REGEX, chance.choice(
        [f"(.*a.{{{n}}})*", f"((a|aa){{0,{n}}}b){{0,{n}}}", f"[ab]*a[ab]{{{n}}}", ".*".join("abcdefgh"[: n % 9] * n)]
    )


def enums(chance: Random) -> Hostile:
    count, length = chance.choice([(10_000, 8), (1_000, 200), (30_000, 5), (3, 60_000)])
    values = ["".join(chance.choices('abcdefé\\"\n', k=length)) for _ in range(count)]
    return (CHOICE, json.dumps(values)) if chance.random() < 0.5 else (SCHEMA, json.dumps({"enum": values}))


def contradictory(chance: Random) -> Hostile:
    number = chance.randrange(100)
    return chance.choice(
        [
            (SCHEMA, json.dumps({"type": "integer", "minimum": number, "maximum": number - 1})),
            (SCHEMA, json.dumps({"allOf": [{"type": "string"}, {"type": "null"}]})),
            (SCHEMA, json.dumps({"type": "string", "minLength": 3 + number, "maxLength": 2})),
            (SCHEMA, json.dumps({"required": ["a"], "properties": {"a": False}, "additionalProperties": False})),
            (LARK, 'start: "a" start'),
            (LARK, 'start: a\na: b "x"\nb: a'),
            (SCHEMA, json.dumps({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})),
        ]
    )


def empty(chance: Random) -> Hostile:
    return chance.choice(
        [
            (kind, text)
            for kind in (SCHEMA, REGEX, LARK, CHOICE)
            for text in ("", " ", "\0", "{}", "[]", "null", "start:")
        ]
    )


def huge(chance: Random) -> Hostile:
    kind, part = chance.choice(
        [(SCHEMA, '{"a": '), (REGEX, "a?"), (LARK, 'start: "a"\n'), (CHOICE, '["'), (REGEX, "é")]
    )
    return kind, part * (chance.choice([200_000, 300_000, 10_000_000]) // len(part.encode()))


def repeats(chance: Random) -> Hostile:
    n = chance.choice([10, 100, 1_000, 100_000])
    m = chance.choice([1, 2, 5])
    pattern = "a"
    for _ in range(m):
        pattern = f"({pattern}){{{chance.choice([0, 1, n])},{n}}}"
    match chance.randrange(3):
        case 0:
            return REGEX, pattern
        case 1:
            return SCHEMA, json.dumps({"type": "string", "pattern": f"^{pattern}$"})
        case _:
            schema: dict[str, Any] = {"type": "boolean"}
            for _ in range(m):
                schema = {"type": "array", "items": schema, "minItems": n // 2, "maxItems": n}
            return SCHEMA, json.dumps(schema)


def unicode_classes(chance: Random) -> Hostile:
    classes = [
        "\\p{L}",
        "\\p{Han}",
        "[\\p{L}--\\p{Lu}]",
        "[^\\p{M}]",
        "\\w",
        "\\W",
        "(?i)ß",
        ".",
        "[\\x{0}-\\x{10ffff}]",
    ]
    n = chance.choice([1, 30, 300])
    pattern = "".join(f"{chance.choice(classes)}{{0,{n}}}" for _ in range(chance.choice([1, 8, 40])))
    return (REGEX, pattern) if chance.random() < 0.5 else (SCHEMA, json.dumps({"type": "string", "pattern": pattern}))


CLASSES: list[Callable[[Random], Hostile]] = [
    *(deep, wide, references, exponential, enums, contradictory, empty, huge, repeats, unicode_classes)
]


def structured_outputs(kind: int, text: str) -> dict[str, Any]:
    """The grammar as the field of that name has it."""
    value: Any = text
    if kind == CHOICE:
        with suppress(ValueError):
            value = json.loads(text)
    return {FIELDS[kind]: value}
