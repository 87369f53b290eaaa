"""JSON schemas: no invalid document can be produced, most valid ones can, and what is refused is refused by name."""

import json
from decimal import Decimal
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import jsonschema_rs
import pytest

from tests.worker.grammar.byte_matcher import SCHEMA, DoesNotCompile, accepts, matcher_of, sample
from tests.worker.grammar.real_schemas import real_schemas
from tests.worker.grammar.schema_measure import parsed, real, suite, total
from trunkline.status import RequestRefused
from trunkline_worker.grammar.grammar_text import MAX_CHOICES, llguidance_grammar
from trunkline_worker.grammar.lark_text import MAX_RULES
from trunkline_worker.grammar.portable_regex import MAX_GROUP_DEPTH, MAX_PLACES
from trunkline_worker.grammar.schema_check import (
    FORMATS,
    FREE_FORMATS,
    INTEGERS,
    KEYWORDS,
    MAX_BRANCHES,
    MAX_DEPTH,
    MAX_PATTERNS,
)
from trunkline_worker.grammar.schema_document import (
    ANNOTATIONS,
    MAX_ALTERNATIVES,
    MAX_APPLIED,
    MAX_DEFINITIONS,
    MAX_FIRST,
    MAX_NESTED,
    MAX_PROPERTIES,
    MAX_SCHEMAS,
)

LEAST_SHARE = 0.92


@pytest.fixture
def draft(shared: Path) -> Path:
    return shared / "json_schema_test_suite/tests/draft2020-12"


def test_no_invalid_instance_of_the_test_suite_is_accepted_and_most_valid_ones_are(draft: Path) -> None:
    measured = total(suite(draft))
    assert not measured.wrong
    assert measured.share() >= LEAST_SHARE
    assert measured.taken > 190, "fewer schemas are taken than used to be"


@pytest.mark.parametrize("folder", ["optional", "optional/format"])
def test_no_invalid_instance_of_the_optional_test_suite_is_accepted(draft: Path, folder: str) -> None:
    assert not total(suite(draft / folder)).wrong


def test_a_refusal_names_a_keyword_of_the_schema(draft: Path) -> None:
    for path in sorted(draft.rglob("*.json")):
        for group in json.loads(path.read_text()):
            schema = group["schema"]
            if isinstance(schema, dict) and (message := why_refused(schema)):
                where, _, why = message.partition(": ")
                assert where.startswith("/"), message
                assert f'"{where.rpartition("/")[2].replace("~1", "/")}"' in json.dumps(schema), message
                assert why


def test_random_samples_of_the_test_suite_are_valid(draft: Path) -> None:
    count = 0
    for path in sorted(draft.glob("*.json")):
        for group in json.loads(path.read_text()):
            try:
                matcher = matcher_of(SCHEMA, json.dumps(group["schema"]))
            except (RequestRefused, DoesNotCompile):
                continue
            validator = jsonschema_rs.validator_for(group["schema"], validate_formats=True)
            random = Random(group["description"])
            for _ in range(4):
                text = sample(matcher, random, 400)
                count += text is not None
                assert text is None or validator.is_valid(parsed(text)), (group["schema"], text)
    assert count > 500


def check_real(every: int) -> None:
    measures = real(real_schemas()[::every])
    measured = total(measures)
    assert not measured.wrong
    assert measured.share() >= LEAST_SHARE
    assert measured.samples > 2 * measured.taken
    assert measured.refused.total() < 0.1 * (measured.taken + measured.refused.total())


def test_schemas_of_programs_are_enforced() -> None:
    check_real(every=9)


@pytest.mark.slow
def test_each_of_400_schemas_of_programs_is_enforced() -> None:
    assert len(real_schemas()) > 400
    check_real(every=1)


def why_refused(schema: Any) -> str:
    """Empty if the schema is taken, or refused by llguidance."""
    try:
        llguidance_grammar(SCHEMA, json.dumps(schema))
    except RequestRefused as refused:
        return refused.message.removeprefix("grammar: ")
    return ""


def takes(schema: Any, *texts: str) -> list[bool]:
    matcher = matcher_of(SCHEMA, json.dumps(schema))
    return [accepts(matcher, text) for text in texts]


def refusal(schema: Any) -> str:
    with pytest.raises(RequestRefused) as refused:
        matcher_of(SCHEMA, schema if isinstance(schema, str) else json.dumps(schema))
    assert refused.value.field == "grammar"
    return refused.value.message.removeprefix("grammar: ")


INTEGER = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"x-guidance": {"lenient": True}}, "/x-guidance"),
        ({"properties": {"a/b~": {"propertes": {}}}}, "/properties/a~1b~0/propertes"),
        ({"items": {"x-guidance": {}}}, "/items/x-guidance"),
        ({"uniqueItems": True}, "/uniqueItems"),
        ({"not": {}}, "/not"),
        ({"if": {}}, "/if"),
        ({"$ref": "other.json"}, "/$ref"),
        ({"$ref": "https://example.com/a.json#/b"}, "/$ref"),
        ({"$ref": "#/$defs/a"}, "/$defs/a"),
        ({"$ref": "#/default", "default": {"not": {}}}, "/default/not"),
        ({"$ref": "#/examples/0", "examples": [{"x-guidance": {}}]}, "/examples/0/x-guidance"),
        ({"$ref": "#/enum/0", "enum": [3]}, "/enum/0"),
        ({"$schema": "https://example.com/mine"}, "/$schema"),
        ({"properties": {"a": {"$id": "b"}}}, "/properties/a/$id"),
        ({"format": "idn-email"}, "/format"),
        ({"format": 3}, "/format"),
        ({"pattern": "(?=a)"}, "/pattern"),
        ({"pattern": 3}, "/pattern"),
        ({"patternProperties": {"(?=a)": {}}}, "/patternProperties"),
        ({"patternProperties": {r"\d": {}, "[0-9]": {}}}, "/patternProperties"),
        ({"patternProperties": {f"^{name}": {} for name in range(40)}}, "/patternProperties"),
        ({"propertyNames": {"maxLength": 3}}, "/propertyNames"),
        ({"propertyNames": {"type": "integer"}}, "/propertyNames"),
        ({"propertyNames": {"enum": ["a"], "type": ["integer", "null"]}}, "/propertyNames"),
        ({"minProperties": 2}, "/minProperties"),
        ({"const": "a\0b"}, "/const"),
        ({"enum": [{"a": ["\x7f"]}]}, "/enum"),
        ({"enum": [{"a\x01": 1}]}, "/enum"),
        ({"enum": 3}, "/enum"),
        ({"properties": {"a\x01": {}}}, "/properties"),
        ({"required": ["a\x01"]}, "/required"),
        ({"required": "a"}, "/required"),
        ({"required": [3]}, "/required"),
        ({"const": 2**63}, "/const"),
        ({"enum": [[2**70]]}, "/enum"),
        ({"minimum": 2**63}, "/minimum"),
        ({"maximum": "3"}, "/maximum"),
        ({"maximum": True}, "/maximum"),
        ({"multipleOf": 0}, "/multipleOf"),
        ({"minItems": -1}, "/minItems"),
        ({"maxLength": 1.5}, "/maxLength"),
        ({"maxLength": 10**10}, "/maxLength"),
        ({"type": "text"}, "/type"),
        ({"type": [{}]}, "/type"),
        ({"properties": []}, "/properties"),
        ({"properties": {str(name): {} for name in range(1_001)}}, "/properties"),
        ({"properties": {"a": 3}}, "/properties/a"),
        ({"anyOf": {}}, "/anyOf"),
        ({"items": [{}], "prefixItems": [{}]}, "/items"),
        ({"items": {}, "additionalItems": False}, "/additionalItems"),
        ({"oneOf": [INTEGER, {"type": "number"}]}, "/oneOf"),
        ({"oneOf": [{"const": 1}, {"enum": [1.0]}]}, "/oneOf"),
        ({"oneOf": [{**INTEGER, "enum": [1, [], {}]}, {"const": 1}]}, "/oneOf"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "/oneOf"),
        ({"oneOf": [{"const": each} for each in range(65)]}, "/oneOf"),
        ({"unevaluatedProperties": False, "$ref": "#/$defs/a", "$defs": {"a": {}}}, "/unevaluatedProperties"),
        ({"unevaluatedItems": {}}, "/unevaluatedItems"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(schema: Any, named: str) -> None:
    assert refusal(schema).startswith(named + ": ")


def chain(keyword: str, length: int) -> Any:
    definitions = {str(i): {keyword: [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(length)}
    return {"$ref": "#/$defs/0", "$defs": {**definitions, str(length): INTEGER}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#"}, INTEGER]}}},
        {"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(3_000)}, "$ref": "#/$defs/0"},
        {
            "items": {"$ref": "#/$defs/0"},
            "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(3_000)},
        },
        chain("allOf", 30),
        chain("anyOf", 12),
        chain("anyOf", 30),
        {"allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(10)]},
        '{"items":' * 65 + "{}" + "}" * 65,
        '{"const":' + "[" * 65 + "]" * 65 + "}",
        "[" * 100_000,
        '{"const": 1e400}',
        '{"const": NaN}',
        '{"const": ' + "9" * 5_000 + "}",
        '{"const": "\\ud800"}',
        '{"\\udfff": 1}',
        "{} {}",
        "",
        "[]",
        "false",
        "3",
    ],
    ids=str,
)
def test_a_schema_that_is_hostile_or_none_is_refused(schema: Any) -> None:
    assert len(refusal(schema)) < 200


def test_a_refusal_quotes_at_most_128_characters_of_a_schema() -> None:
    assert len(refusal({"properties": {"a" * 10_000: {"not": {}}}})) < 200


def test_documents_have_one_form() -> None:
    schema = {"properties": {"a": INTEGER, "b": {"type": "array", "items": INTEGER}}, "required": ["b"]}
    texts = [
        '{"a": 1, "b": [1, 2]}',
        '{"b": [], "c": null}',
        '{"a":1,"b":[]}',
        '{"b": [ ]}',
        '{"b": [], "a": 1}',
        '{"b": []} ',
    ]
    assert takes(schema, *texts) == [True, True, False, False, False, False]


def test_a_property_cannot_be_written_in_another_way() -> None:
    schema = {"properties": {"a": INTEGER}, "patternProperties": {"^x": INTEGER}}
    assert takes(schema, '{"\\u0061": "s"}', '{"\\u0078": "s"}', '{"b": "s"}') == [False, False, True]


def test_bounds_beyond_53_bits_are_rounded_inwards() -> None:
    assert takes({**INTEGER, "maximum": 2**53 + 3}, str(2**53 + 2), str(2**53 + 3), str(2**53 + 4)) == [
        True,
        False,
        False,
    ]
    assert takes({**INTEGER, "minimum": 2**53 + 1}, str(2**53), str(2**53 + 1), str(2**53 + 2)) == [False, False, True]
    int64 = {**INTEGER, "minimum": -(2**63), "maximum": 2**63 - 1}
    for schema in (int64, {**INTEGER, "format": "int64"}):
        assert takes(schema, "0", str(2**62), str(2**63), str(-(2**63) - 1)) == [True, True, False, False]
    assert takes({**INTEGER, "format": "int32"}, str(2**31 - 1), str(2**31)) == [True, False]


BOUNDS = ["-148.05123961609453", "-1.5", "-1", "-0.1", "0", "1e-9", "0.1", "0.30000000000000004", "0.5", "1", "2.46"]
BOUNDS += ["3", "99.99999999999999", "100", "4503599627370497"]
STEPS = ["0", "1e-17", "1e-16", "1e-15", "1e-14", "1e-12", "0.1", "0.25", "1"]


def one_bound(keyword: str, exclusive: bool, value: float, form: str) -> Any:
    """A bound as a schema writes it, or a draft 4 schema, or another schema that applies."""
    if form == "draft 4":
        return {keyword: value, f"exclusive{keyword.capitalize()}": exclusive}
    schema = {f"exclusive{keyword.capitalize()}" if exclusive else keyword: value}
    return {"allOf": [schema]} if form == "allOf" else schema


@pytest.mark.parametrize("form", ["own", "draft 4", "allOf"])
def test_no_number_on_the_wrong_side_of_a_bound_is_produced(form: str) -> None:
    count = 0
    for lower, upper, above, below in product(BOUNDS, BOUNDS, [False, True], [False, True]):
        low, high = Decimal(lower), Decimal(upper)
        if high - low < Decimal("1e-9"):
            continue
        minimum = one_bound("minimum", above, float(lower), form)
        schema = {"type": "number", **minimum, **one_bound("maximum", below, float(upper), "own")}
        matcher = matcher_of(SCHEMA, json.dumps(schema))
        for bound, step, sign in product([low, high], STEPS, [-1, 1]):
            number = bound + sign * Decimal(step)
            text = f"{number.normalize():f}"
            valid = (low < number if above else low <= number) and (number < high if below else number <= high)
            accepted = accepts(matcher, text)
            assert valid or not accepted, (schema, text)
            # The library does not produce a part of a bound's digits.
            is_part = any(f"{each:f}".startswith(text) for each in (low, high))
            assert accepted or not valid or is_part or len(text) > 14, (schema, text)
            count += accepted
    assert count > 2_000


def test_what_is_just_within_an_exclusive_bound_is_produced() -> None:
    assert takes({"type": "number", "exclusiveMaximum": 1}, "0.9", "0.99", "0.9999", "1") == [True, True, True, False]
    assert takes({"type": "number", "exclusiveMinimum": -1}, "-0.9", "-0.99", "0", "-1") == [True, True, True, False]
    cents = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 0.5, "multipleOf": 0.01}
    assert takes(cents, "0", "0.01", "0.49", "0.50") == [False, True, True, False]


def test_bounds_of_integers_are_exact() -> None:
    numbers = [*range(-5, 5), *range(2**52, 2**52 + 5)]
    lows, highs = [-3, -1.5, 0, 2**52], [-1, 0, 0.5, 2, 2**52 + 3]
    for low, high, above, below in product(lows, highs, [False, True], [False, True]):
        schema = {**INTEGER, **one_bound("minimum", above, low, "own"), **one_bound("maximum", below, high, "own")}
        valid = [
            (low < number if above else low <= number) and (number < high if below else number <= high)
            for number in numbers
        ]
        if any(valid):
            assert takes(schema, *map(str, numbers)) == valid, schema


def test_branches_of_one_of_that_exclude_one_another_are_taken() -> None:
    cat = {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]}
    dog = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]}
    schema = {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"allOf": [{"$ref": "#/$defs/dog"}]}],
        "$defs": {"cat": cat, "dog": dog},
    }
    assert takes(schema, '{"kind": "cat"}', '{"kind": "wolf"}', '{"kind": "x"}', "{}") == [True, True, False, False]
    nullable = {"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]}
    assert takes(nullable, '"a"', "1", "null") == [True, True, False]
    partly = {"oneOf": [{**INTEGER, "enum": [1, [], {}]}, {"type": "string"}]}
    assert takes(partly, "1", '"a"', "[]", "{}") == [True, True, False, False]


def test_names_of_properties_may_be_an_enum_or_follow_a_pattern() -> None:
    named = {
        "propertyNames": {"$ref": "#/$defs/name"},
        "additionalProperties": INTEGER,
        "$defs": {"name": {"enum": ["a", 1]}},
    }
    assert takes(named, '{"a": 1}', '{"a": "s"}', '{"b": 1}', "{}") == [True, False, False, True]
    pattern = {
        "type": "object",
        "propertyNames": {"pattern": "^x", "type": ["string", "null"]},
        "additionalProperties": INTEGER,
    }
    assert takes(pattern, '{"xa": 1}', '{"xa": "s"}', '{"b": 1}') == [True, False, False]


def test_as_many_optional_properties_as_an_object_may_have_can_follow() -> None:
    names = [f"name{number}" for number in range(MAX_PROPERTIES)]
    schema = {"properties": {"a": {"properties": dict.fromkeys(names, INTEGER)}}}
    texts = [f'{{"a": {{"name{last}": {value}}}}}' for last in (0, 999) for value in ("1", '"1"')]
    assert takes(schema, *texts) == [True, False, True, False]


def test_branches_begin_with_as_many_optional_properties_as_can_follow() -> None:
    def branch(name: str, number: int) -> dict[str, Any]:
        kind = {"type": "object", "required": ["kind"], "additionalProperties": False}
        return kind | {"properties": {f"{name}{n}": INTEGER for n in range(number)} | {"kind": {"const": name}}}

    def nested(*branches: Any) -> Any:
        return {"properties": {"x": {"oneOf": branches}}}

    half = MAX_FIRST // 2
    texts = [f'{{"x": {{"{name}{n}": 3, "kind": "{name}"}}}}' for name, n in (("a", 0), ("b", half - 1), ("a", half))]
    assert takes(nested(branch("a", half), branch("b", half)), *texts) == [True, True, False]
    assert "more than 1200 optional properties" in refusal(nested(branch("a", half), branch("b", half + 1)))
    first = [
        {**each, "properties": dict(reversed(each["properties"].items()))} for each in map(branch, "ab", (900, 900))
    ]
    assert takes(nested(*first), '{"x": {"kind": "b", "b7": 1}}', '{"x": {"kind": "b", "a7": 1}}') == [True, False]


def test_what_says_nothing_is_not_refused() -> None:
    annotations = {"title": "t", "x-mine": {"not": 3}, "examples": [], "nullable": True, "$comment": "c", "default": 3}
    silent = {
        "uniqueItems": False,
        "unevaluatedItems": True,
        "propertyNames": True,
        "$schema": "http://json-schema.org/schema#",
    }
    assert takes({**annotations, **silent, "type": "null"}, "null", "1") == [True, False]
    assert takes(True, "null", "1", '{"a": []}') == [True, True, True]


def test_unevaluated_properties_beside_no_other_schema_are_additional_ones() -> None:
    assert takes({"properties": {"a": {}}, "unevaluatedProperties": False}, '{"a": 1}', '{"b": 1}') == [True, False]


def test_an_array_of_items_of_older_drafts_is_a_tuple() -> None:
    schema = {"type": "array", "items": [INTEGER, {"type": "null"}], "additionalItems": False}
    assert takes(schema, "[1, null]", "[1]", "[null]", "[1, null, 1]") == [True, True, False, False]
    assert takes({"minimum": 3, "exclusiveMinimum": True}, "3", "4") == [False, True]


def test_references_with_the_documents_own_id_and_escapes_are_followed() -> None:
    schema = {"$id": "https://a.b/c", "$ref": "https://a.b/c#/$defs/x~1y%25", "$defs": {"x/y%": INTEGER}}
    assert takes(schema, "1", '"a"') == [True, False]
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}, "additionalProperties": False}
    assert takes(tree, '{"next": {"next": {}}}', '{"next": 1}') == [True, False]


def test_the_documentation_names_all_keywords_and_formats() -> None:
    page = (Path(__file__).parents[3] / "docs/structured-output.md").read_text()
    names = [*KEYWORDS, *ANNOTATIONS, *FORMATS, *FREE_FORMATS, *INTEGERS]
    assert [name for name in names if f"`{name}`" not in page] == []
    limits = [
        MAX_DEPTH,
        MAX_PROPERTIES,
        MAX_FIRST,
        MAX_PATTERNS,
        MAX_BRANCHES,
        MAX_NESTED,
        MAX_APPLIED,
        MAX_ALTERNATIVES,
    ]
    limits += [MAX_DEFINITIONS, MAX_SCHEMAS, MAX_PLACES, MAX_GROUP_DEPTH, MAX_RULES, MAX_CHOICES]
    assert [limit for limit in limits if f"{limit:,}" not in page] == []
