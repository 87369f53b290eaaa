"""JSON schemas: what llguidance enforces is passed on, what it would ignore or get wrong is refused by name.

The schema is written anew from the keywords in KEYWORDS, so that nothing else reaches the library.
"""

import json
import math
from collections.abc import Callable, Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any

from trunkline.status import RequestRefused, invalid
from trunkline_worker.grammar.portable_regex import portable_regex
from trunkline_worker.grammar.schema_document import (
    ANNOTATIONS,
    MAX_PROPERTIES,
    TYPES,
    KeywordUse,
    Schema,
    SchemaDocument,
    refused,
)

MAX_DEPTH = 64  # of arrays and objects in the text of a schema
MAX_PATTERNS = 32  # of the properties of one object, which are compared with one another
MAX_COUNT = 10**9
ANY_OBJECT: Schema = {"type": "object"}
MAX_BRANCHES = 64  # of one oneOf, whose branches are compared with one another

# Of the documents. Whitespace is not a choice: so longer parts of a document are forced, and none ends in endless
# whitespace. Without the escape \\u, which would write a property's name in another way than the schema does.
JSON_FORM = {
    **{"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    **{"coerce_one_of": False, "lenient": False, "json_allowed_escapes": '"\\bfnrt'},
}

YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
DATE = (
    f"(?:{YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{LEAP_YEAR}-02-29)"
)
TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
POINTER = "(?:/(?:[^~/]|~[01])*)*"
# Formats of strings, as schemas. Where the library's own accepts more than the format, a pattern says what is right.
FORMATS: dict[str, Schema] = {
    **{name: {"format": name} for name in ("duration", "ipv4", "ipv6", "uri", "uuid")},
    "date": {"pattern": f"^{DATE}$"},
    "time": {"pattern": f"^{TIME}$"},
    "date-time": {"pattern": f"^{DATE}T{TIME}$"},
    "email": {"format": "email", "pattern": "^[^@]{1,64}@", "maxLength": 254},
    "hostname": {"format": "hostname", "pattern": r"^[^.\-]+(?:[.\-][^.\-]+)*$", "maxLength": 253},
    "json-pointer": {"pattern": f"^{POINTER}$"},
    "relative-json-pointer": {"pattern": f"^(?:0|[1-9][0-9]*)(?:#|{POINTER})$"},
    "byte": {"pattern": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"},
}
# Formats that constrain no string, and those of integers with their bounds.
FREE_FORMATS = {"password", "binary", "path", "file-path", "directory-path", "float", "double"}
INTEGERS = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}
MAX_DIGITS = 15  # of a bound that is no integer
MAX_BOUND = 2**63 - 1024  # the largest float below 2**63, beyond which the library does not compute


def parsed_json(text: str) -> Any:
    """A document of a client. Raises RequestRefused if it is none, or not one that every reader reads alike."""
    try:
        document = json.loads(text, parse_constant=_no_constant)
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        raise invalid("grammar", "not a JSON document, or one with lone surrogates or endless numbers") from None
    values = [document]
    for _ in range(MAX_DEPTH):
        if any(isinstance(value, float) and math.isinf(value) for value in values):
            raise invalid("grammar", "a number is too large")
        values = [child for value in values for child in _children(value)]
        if not values:
            return document
    raise invalid("grammar", f"nested more than {MAX_DEPTH} deep")


def checked_schema(document: Any) -> Schema:
    """The schema of a parsed document, written anew for llguidance. Raises RequestRefused if it cannot be enforced."""
    if document is True:
        return {}
    if not isinstance(document, dict):
        raise invalid("grammar", "a schema that accepts anything is a JSON object")
    return SchemaDocument(document, KEYWORDS).checked()


def lenient_schema(document: Any) -> Schema:
    """As checked_schema(), without what cannot be enforced; any object if it is too much."""
    try:
        if isinstance(document, dict):
            return SchemaDocument(document, KEYWORDS, lenient=True).checked()
    except RequestRefused:
        return ANY_OBJECT
    return checked_schema(document)


def schema_text(document: Any) -> str:
    """The schema of a parsed document, for llguidance, with the form that documents have."""
    return in_form(checked_schema(document))


def in_form(schema: Schema) -> str:
    """A checked schema for llguidance, with the form that documents have."""
    return json.dumps({**schema, "x-guidance": JSON_FORM})


def _type(use: KeywordUse) -> None:
    types = [use.value] if isinstance(use.value, str) else use.value
    use.must(isinstance(types, list) and all(isinstance(each, str) and each in TYPES for each in types), "types")
    use.write(use.value)


def _constants(use: KeywordUse) -> None:
    use.must(use.keyword == "const" or isinstance(use.value, list), "an array")
    values = [use.value]
    for value in values:
        values += _children(value)
        use.check_strings([value, *value] if isinstance(value, dict) else [value])
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise refused(use.at, "an integer has more than 64 bits")
    use.write(use.value)


def _count(use: KeywordUse) -> None:
    is_count = _is_number(use.value) and 0 <= use.value <= MAX_COUNT and use.value == int(use.value)
    use.must(is_count, f"an integer from 0 to {MAX_COUNT}")
    use.write(int(use.value))


def _min_properties(use: KeywordUse) -> None:
    _count(use)
    required = use.schema.get("required")
    if use.value > 1 and not (isinstance(required, list) and use.value <= len(set(map(str, required)))):
        raise refused(use.at, "more than 1 is not supported, unless as many are required")
    if use.value > 1 or use.schema.get("required"):
        del use.written[use.keyword]


def _bound(use: KeywordUse) -> None:
    """Writes a bound, rounded inwards: the library computes with floats, and rounds more than 15 digits in either
    direction. An exclusive bound from which the range leads away from zero becomes inclusive, one step inwards, because
    the library may produce it. Others stay exclusive: with a maximum of 0.999, the library does not produce 0.9."""
    if isinstance(use.value, bool) and use.keyword.startswith("exclusive"):
        return  # of draft 4: it belongs to the bound beside it
    use.must(_is_number(use.value) and abs(use.value) <= 2**64, "a number of at most 64 bits")
    is_lower = use.keyword.lower().endswith("minimum")
    name = "minimum" if is_lower else "maximum"
    exclusive_name = f"exclusive{name.capitalize()}"
    value = Decimal(str(use.value))
    has_fraction = _admits(use.schema, "number")
    places = max(0, MAX_DIGITS - 1 - max(value.adjusted() if value else -1, -1)) if has_fraction else 0
    step = Decimal(1 if is_lower else -1).scaleb(-places)
    exact = value.quantize(step, ROUND_CEILING if is_lower else ROUND_FLOOR)
    if exact == value and (use.keyword == exclusive_name or use.schema.get(exclusive_name) is True):
        if has_fraction and value * step < 0:
            name = exclusive_name
        else:
            exact += step
    exact = max(exact, Decimal(-MAX_BOUND)) if is_lower else min(exact, Decimal(MAX_BOUND))
    use.must(abs(exact) <= MAX_BOUND, "a bound that integers of 64 bits can meet")
    bound = float(exact)
    if places == 0 and (bound < exact if is_lower else bound > exact):
        bound = math.nextafter(bound, math.inf if is_lower else -math.inf)
    bound = (max if is_lower else min)(bound, use.written.get(name, bound))
    use.written[name] = int(bound) if bound == int(bound) else bound


def _multiple_of(use: KeywordUse) -> None:
    use.must(_is_number(use.value) and use.value > 0, "a positive number")
    use.write(use.value)


def _pattern(use: KeywordUse) -> None:
    use.must(isinstance(use.value, str), "a string")
    use.also({"pattern": portable_regex(use.value, f"{use.at[-128:]}: ")})


def _format(use: KeywordUse) -> None:
    use.must(isinstance(use.value, str), "a string")
    if use.value in FORMATS:
        use.also(FORMATS[use.value])
    elif use.value in INTEGERS:
        minimum, maximum = INTEGERS[use.value]
        use.also({"minimum": max(minimum, -MAX_BOUND), "maximum": min(maximum, MAX_BOUND)})
    elif use.value not in FREE_FORMATS:
        raise refused(use.at, "this format is not supported")


def _required(use: KeywordUse) -> None:
    use.must(isinstance(use.value, list) and all(isinstance(name, str) for name in use.value), "an array of strings")
    use.must(len(use.value) <= MAX_PROPERTIES, f"of at most {MAX_PROPERTIES} members")
    use.check_strings(use.value)
    use.write(list(dict.fromkeys(use.value)))


def _properties(use: KeywordUse) -> None:
    use.write(use.named_subschemas())
    use.check_strings(use.value)


def _pattern_properties(use: KeywordUse) -> None:
    schemas = {portable_regex(name, f"{use.at[-128:]}: "): schema for name, schema in use.named_subschemas().items()}
    use.must(len(schemas) == len(use.value) <= MAX_PATTERNS, f"of at most {MAX_PATTERNS} patterns, which differ")
    use.write(schemas)


def _subschema(use: KeywordUse) -> None:
    use.write(use.document.schema(use.value, use.at))


def _items(use: KeywordUse) -> None:
    if isinstance(use.value, list):  # of draft 2019-09 and older
        use.must("prefixItems" not in use.schema, "a schema")
        use.written["prefixItems"] = use.subschemas()
        if "additionalItems" in use.schema:
            use.written["items"] = use.document.schema(use.schema["additionalItems"], use.at)
    else:
        _subschema(use)


def _additional_items(use: KeywordUse) -> None:
    if not isinstance(use.schema.get("items"), list):
        raise refused(use.at, "is supported only beside an array of items")


def _list(use: KeywordUse) -> None:
    use.write(use.subschemas())


def _all_of(use: KeywordUse) -> None:
    for schema in use.subschemas():
        use.written.setdefault("allOf", []).append(schema)


def _one_of(use: KeywordUse) -> None:
    branches = use.subschemas()
    use.must(len(branches) <= MAX_BRANCHES, f"of at most {MAX_BRANCHES} branches")
    use.document.one_of(use, branches)
    use.also({"anyOf": branches})


def _ref(use: KeywordUse) -> None:
    use.must(isinstance(use.value, str), "a string")
    use.write(use.document.reference(use.value, use.at))


def _property_names(use: KeywordUse) -> None:
    """Names that are allowed become `properties` or `patternProperties` beside which no others are."""
    names = use.document.followed(use.value, use.at)
    keywords = names.keys() - ANNOTATIONS if isinstance(names, dict) else None
    if keywords and _admits(names, "string"):
        keywords -= {"type"}
    if keywords == {"enum"}:
        use.must(isinstance(names["enum"], list), "a schema whose enum is an array")
        use.check_strings(names["enum"])
        allowed = {"properties": dict.fromkeys((name for name in names["enum"] if isinstance(name, str)), True)}
    elif keywords == {"pattern"}:
        use.must(isinstance(names["pattern"], str), "a schema whose pattern is a string")
        allowed = {"patternProperties": {portable_regex(names["pattern"], f"{use.at[-128:]}: "): True}}
    elif names is True or keywords == set():
        return
    else:
        raise refused(use.at, "only an enum or a pattern of names is supported")
    use.also({**allowed, "additionalProperties": False})


def _unevaluated(use: KeywordUse) -> None:
    """`true` says nothing. `false` is like additionalProperties and items, if no other schema evaluates any."""
    if use.value is False and not use.schema.keys() & APPLICATORS:
        use.written.setdefault({"unevaluatedProperties": "additionalProperties"}.get(use.keyword, "items"), False)
    elif use.value is not True:
        raise refused(use.at, "only true is supported, and false in schemas without $ref, allOf, anyOf and oneOf")


def _unique_items(use: KeywordUse) -> None:
    if use.value is not False:
        raise refused(use.at, "this keyword is not supported")


APPLICATORS = {"$ref", "allOf", "anyOf", "oneOf"}
KEYWORDS: dict[str, Callable[[KeywordUse], None]] = {
    "type": _type,
    **dict.fromkeys(("enum", "const"), _constants),
    "properties": _properties,
    "required": _required,
    "patternProperties": _pattern_properties,
    "additionalProperties": _subschema,
    "propertyNames": _property_names,
    "minProperties": _min_properties,
    **dict.fromkeys(("maxProperties", "minItems", "maxItems", "minLength", "maxLength"), _count),
    "items": _items,
    "additionalItems": _additional_items,
    "prefixItems": _list,
    "pattern": _pattern,
    "format": _format,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bound),
    "multipleOf": _multiple_of,
    "anyOf": _list,
    "allOf": _all_of,
    "oneOf": _one_of,
    "$ref": _ref,
    "uniqueItems": _unique_items,
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), _unevaluated),
}


def _no_constant(name: str) -> None:
    raise ValueError(name)


def _children(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _admits(schema: Schema, name: str) -> bool:
    """Whether the type of a schema, if it has one, includes this type."""
    types = schema.get("type", name)
    return types == name or (isinstance(types, list) and name in types)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
