"""A JSON schema as a document: its subschemas are written anew, its references within become references to `$defs`, and
what it adds up to is bounded.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any, NamedTuple
from urllib.parse import unquote

from trunkline.status import RequestRefused, invalid
from trunkline_worker.grammar.portable_regex import CONTROL

Schema = dict[str, Any]
MAX_SCHEMAS = 20_000  # subschemas, those that references point to included
MAX_DEFINITIONS = 300  # that references point to: the library follows them by recursion
MAX_PROPERTIES = 1_000  # of one object: each optional one makes masks slower
# Of the schemas that apply to one value through $ref, allOf and anyOf:
MAX_NESTED = 32  # one within the other
MAX_APPLIED = 2_000  # in all
MAX_ALTERNATIVES = 1_000  # combinations of one branch of each anyOf
MAX_FIRST = 1_200  # properties that an object may begin with, of all branches

DRAFTS = (
    "json-schema.org/schema",
    "draft/2020-12/schema",
    "draft/2019-09/schema",
    "draft-07/schema",
    "draft-06/schema",
    "draft-04/schema",
)
# Keywords that say nothing about what is valid, as do all that begin with "x-".
ANNOTATIONS = {
    *("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment"),
    *("contentEncoding", "contentMediaType", "contentSchema", "$anchor", "$defs", "definitions"),
    *("discriminator", "externalDocs", "xml", "nullable"),  # of OpenAPI
}
AT_ROOT = {"$schema", "$id", "id"}
TYPES = {"null", "boolean", "integer", "number", "string", "array", "object"}
DEFINITIONS = "#/$defs/"
# Keywords without which others of the same schema, additionalProperties and items, accept less.
DELIMITING = {"properties", "patternProperties", "prefixItems"}


def refused(at: str, why: str) -> RequestRefused:
    """A refusal of the keyword at this JSON pointer."""
    return invalid("grammar", f"{at[-128:]}: {why}" if at else why)


class _Facts(NamedTuple):
    """What is certain of the values that a schema accepts."""

    types: set[str]
    values: set[tuple[bool, Any]] | None  # with whether it is a boolean, since True == 1; None: unknown
    tags: "dict[str, _Facts]"  # of required properties

    def excludes(self, other: "_Facts") -> bool:
        """Whether no value can satisfy both."""
        if not self.types & other.types:
            return True
        if self.values is not None and other.values is not None and not self.values & other.values:
            return True
        return self.types & other.types == {"object"} and any(
            tag.excludes(other.tags[name]) for name, tag in self.tags.items() if name in other.tags
        )


class SchemaDocument:
    """A schema that is written anew.

    keywords: what writes each one; others that say something are refused
    lenient: what is refused is left out, and the schema accepts more; unless nothing is left
    """

    def __init__(
        self, root: Schema, keywords: Mapping[str, Callable[["KeywordUse"], None]], *, lenient: bool = False
    ) -> None:
        self._root = root
        self._lenient = lenient
        self._keywords = keywords
        self._names: dict[tuple[str, ...], str] = {}  # of definitions, by their paths in the document
        self._definitions: dict[str, Schema | bool] = {}
        self._written: list[Schema] = []  # all subschemas
        self._one_ofs: list[tuple[KeywordUse, list[Schema | bool]]] = []
        self._weights: dict[int, tuple[int, int, int, int]] = {}  # by the id of a written schema: see _weigh

    def checked(self) -> Schema:
        uri = self._root.get("$schema", "json-schema.org/schema")
        if not self._lenient and not (isinstance(uri, str) and uri.rstrip("#").endswith(DRAFTS)):
            raise refused("/$schema", "this dialect is not known")
        schema = self.schema(self._root, "")
        assert isinstance(schema, dict)
        while len(self._definitions) < len(self._names):  # one may refer to more
            path = list(self._names)[len(self._definitions)]
            self._definitions[self._names[path]] = self.schema(self._target(path), _pointer(path))
        for written in self._written:
            self._weigh(written, 0)
        for use, branches in () if self._lenient else self._one_ofs:
            self._check_exclusive(use, branches)
        return {**schema, "$defs": self._definitions} if self._definitions else schema

    def schema(self, schema: Any, at: str) -> Schema | bool:
        """The subschema at this pointer, written anew."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise refused(at, "must be a schema")
        written: Schema = {}
        for keyword, value in schema.items():
            try:
                self._write(KeywordUse(self, keyword, value, _pointer([keyword], at), schema, written), at == "")
            except RequestRefused:
                if not self._lenient or (keyword in DELIMITING and at == ""):
                    raise
                if keyword in DELIMITING:
                    return True
                written.pop(keyword, None)
        self._written.append(written)
        if len(self._written) > MAX_SCHEMAS:
            raise invalid("grammar", f"more than {MAX_SCHEMAS} subschemas")
        return written

    def _write(self, use: "KeywordUse", is_root: bool) -> None:
        keyword = use.keyword
        if keyword in self._keywords:
            self._keywords[keyword](use)
        elif keyword == "x-guidance" or not (
            keyword in ANNOTATIONS or keyword.startswith("x-") or (keyword in AT_ROOT and is_root)
        ):
            raise refused(use.at, "this keyword is not supported")

    def reference(self, reference: str, at: str) -> str:
        """A reference to the definition that takes the place of what `reference` points to."""
        name = self._names.setdefault(self._path(reference, at), str(len(self._names)))
        if len(self._names) > MAX_DEFINITIONS:
            raise refused(at, f"references point to more than {MAX_DEFINITIONS} places")
        return DEFINITIONS + name

    def followed(self, schema: Any, at: str) -> Any:
        """The schema that a reference, if it is one, points to."""
        for _ in range(MAX_NESTED):
            if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str) or schema.keys() != {"$ref"}:
                return schema
            schema = self._target(self._path(schema["$ref"], at))
        raise refused(at, "the reference is circular")

    def one_of(self, use: "KeywordUse", branches: list[Schema | bool]) -> None:
        """Refuses the schema, once all of it is written, unless no value but null can satisfy two of the branches."""
        self._one_ofs.append((use, branches))

    def _path(self, reference: str, at: str) -> tuple[str, ...]:
        uri = self._root.get("$id", self._root.get("id"))
        if isinstance(uri, str):
            reference = reference.removeprefix(uri.rstrip("#"))
        if reference != "#" and not reference.startswith("#/"):
            raise refused(at, "only references within the document, # and #/..., are supported")
        return tuple(part.replace("~1", "/").replace("~0", "~") for part in unquote(reference).split("/")[1:])

    def _check_exclusive(self, use: "KeywordUse", branches: list[Schema | bool]) -> None:
        for one, other in combinations(map(self._facts, branches), 2):
            if one.types & other.types == {"null"}:
                use.also({"type": sorted(TYPES - {"null"})})
            elif not one.excludes(other):
                raise refused(use.at, "branches must differ in type, or in the const or enum of a required property")

    def _target(self, path: tuple[str, ...]) -> Any:
        target: Any = self._root
        for part in path:
            if isinstance(target, dict) and part in target:
                target = target[part]
            elif isinstance(target, list) and part in map(str, range(len(target))):
                target = target[int(part)]
            else:
                raise refused(_pointer(path), "a reference points to this place, which does not exist")
        return target

    def _weigh(self, schema: Schema | bool, depth: int) -> tuple[int, int, int, int]:
        """How the schemas that apply to one value add up: how deeply they are nested, how many they are, how many
        combinations of branches they have, and how many properties an object may at least begin with."""
        if isinstance(schema, bool):
            return 1, 1, 1, 0
        if id(schema) not in self._weights:
            if depth > MAX_NESTED:
                raise invalid("grammar", f"$ref, allOf and anyOf are circular, or nested more than {MAX_NESTED} deep")
            every = [self._weigh(each, depth + 1) for each in self._conjuncts(schema)]
            some = [self._weigh(each, depth + 1) for each in schema.get("anyOf", [])]
            nested = 1 + max((each[0] for each in every + some), default=0)
            applied = 1 + sum(each[1] for each in every + some)
            alternatives = math.prod(each[2] for each in every) * (sum(each[2] for each in some) or 1)
            if nested > MAX_NESTED or applied > MAX_APPLIED or alternatives > MAX_ALTERNATIVES:
                raise invalid("grammar", "$ref, allOf and anyOf combine too many schemas")
            branches = 0 if schema.get("required") else sum(each[3] for each in some)
            if branches > MAX_FIRST:
                raise invalid("grammar", f"anyOf: the branches begin with more than {MAX_FIRST} optional properties")
            first = max(_num_first(schema), branches, *(each[3] for each in every))
            self._weights[id(schema)] = nested, applied, alternatives, first
        return self._weights[id(schema)]

    def _conjuncts(self, schema: Schema) -> list[Schema | bool]:
        """What a value that the schema accepts must satisfy too."""
        conjuncts = list(schema.get("allOf", []))
        if "$ref" in schema:
            conjuncts.append(self._definitions[schema["$ref"].removeprefix(DEFINITIONS)])
        return conjuncts

    def _facts(self, *schemas: Schema | bool, of_tag: bool = False) -> _Facts:
        types = TYPES
        values: set[tuple[bool, Any]] | None = None
        required: set[str] = set()
        properties: dict[str, list[Schema | bool]] = {}
        todo = list(schemas)
        for schema in todo:
            if isinstance(schema, bool):
                types = types if schema else set()
                continue
            todo += self._conjuncts(schema)
            named = schema.get("type", [*TYPES])
            named = [named] if isinstance(named, str) else named
            types = types & {*named, *(["integer"] if "number" in named else [])}
            for constants in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
                if constants is None:
                    continue
                types = types & {name for value in constants for name in _types(value)}
                if not types & {"array", "object"}:
                    scalars = [value for value in constants if not isinstance(value, list | dict)]
                    found = {(isinstance(value, bool), value) for value in scalars}
                    values = found if values is None else values & found
            required.update(schema.get("required", []))
            for name, property in schema.get("properties", {}).items():
                properties.setdefault(name, []).append(property)
        tags = {} if of_tag else {name: self._facts(*properties.get(name, []), of_tag=True) for name in required}
        return _Facts(types, values, tags)


class KeywordUse(NamedTuple):
    """A keyword in a schema."""

    document: SchemaDocument
    keyword: str
    value: Any
    at: str
    schema: Schema
    written: Schema  # so far

    def write(self, value: Any) -> None:
        self.written[self.keyword] = value

    def also(self, schema: Schema) -> None:
        """Writes what must be satisfied too."""
        self.written.setdefault("allOf", []).append(schema)

    def must(self, condition: bool, be: str) -> None:
        if not condition:
            raise refused(self.at, f"must be {be}")

    def check_strings(self, values: Iterable[Any]) -> None:
        if any(isinstance(value, str) and CONTROL.search(value) for value in values):
            raise refused(self.at, "control characters are not supported")

    def subschemas(self) -> list[Schema | bool]:
        self.must(isinstance(self.value, list), "an array of schemas")
        return [self.document.schema(each, f"{self.at}/{index}") for index, each in enumerate(self.value)]

    def named_subschemas(self) -> dict[str, Schema | bool]:
        self.must(isinstance(self.value, dict), "an object of schemas")
        self.must(len(self.value) <= MAX_PROPERTIES, f"of at most {MAX_PROPERTIES} members")
        return {name: self.document.schema(each, _pointer([name], self.at)) for name, each in self.value.items()}


def _num_first(schema: Schema) -> int:
    """How many optional properties an object may begin with: they come in order, and none after a required one."""
    required = set(schema.get("required", ()))
    names = list(schema.get("properties", ()))
    return next((index for index, name in enumerate(names) if name in required), len(names))


def _types(value: Any) -> tuple[str, ...]:
    match value:
        case None:
            return ("null",)
        case bool():
            return ("boolean",)
        case int() | float():
            return ("integer", "number")
        case str():
            return ("string",)
        case list():
            return ("array",)
    return ("object",)


def _pointer(path: Iterable[str], base: str = "") -> str:
    return base + "".join("/" + part.replace("~", "~0").replace("/", "~1") for part in path)
