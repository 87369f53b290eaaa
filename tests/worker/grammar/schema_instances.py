"""Instances of schemas: valid ones, and changes of them that may be invalid. What they are, a validator says."""

import copy
from collections.abc import Iterator
from random import Random
from typing import Any
from urllib.parse import unquote

import jsonschema_rs

Schema = dict[str, Any]
FORMATS = {
    "date": "2024-02-29",
    "time": "23:59:59.5Z",
    "date-time": "2024-02-29T12:00:00+01:00",
    "duration": "P1DT2H",
    "email": "a.b@example.com",
    "hostname": "host-1.example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "2001:db8::1",
    "uri": "https://example.com/a?b=c#d",
    "uuid": "2eb8aa08-aa98-11ea-b4aa-73b441d16380",
    "byte": "aGk=",
}
WORDS = ["", "a", "Alpha beta", 'quote " and \\', "tab\t", "été", "\U0001f600", "0", "x" * 40]


class Instances:
    """Draws what should satisfy a schema, as far as its commonest keywords say."""

    def __init__(self, root: Schema, random: Random) -> None:
        self._root = root
        self._random = random

    def draw(self, schema: Any, depth: int = 0) -> Any:
        if not isinstance(schema, dict):
            return self._random.choice([None, 1, "a"])
        schema = self._resolved(schema)
        for keyword in ("anyOf", "oneOf"):
            if schema.get(keyword):
                branches = schema[keyword] if depth < 6 else schema[keyword][-1:]
                rest = {key: value for key, value in schema.items() if key != keyword}
                return self.draw(merged(rest, self._resolved(self._random.choice(branches))), depth)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._random.choice(schema["enum"])
        kind = schema.get(
            "type", "object" if "properties" in schema else self._random.choice(["string", "integer", "null"])
        )
        if isinstance(kind, list):
            kind = self._random.choice([each for each in kind if each != "object" or depth < 6])
        return getattr(self, f"_{kind}")(schema, depth)

    def _resolved(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return {}
        while "$ref" in schema or "allOf" in schema:
            parts = schema.get("allOf", [])
            if "$ref" in schema:
                target: Any = self._root
                for part in schema["$ref"].split("/")[1:]:
                    target = target[part]
                parts = [target, *parts]
            schema = {key: value for key, value in schema.items() if key not in ("$ref", "allOf")}
            for part in parts:
                schema = merged(schema, part if isinstance(part, dict) else {})
        return schema

    def _object(self, schema: Schema, depth: int) -> Any:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        share = 0.5 / (1 + depth // 2) if depth < 5 else 0.0
        names = [name for name in properties if name in required or self._random.random() < share]
        names += [name for name in required if name not in properties]
        value = {name: self.draw(properties.get(name, {}), depth + 1) for name in names}
        more = schema.get("additionalProperties", True)
        if more is not False and "propertyNames" not in schema and self._random.random() < 0.3 and depth < 5:
            value[f"more{self._random.randrange(9)}"] = self.draw(more, depth + 1)
        return value

    def _array(self, schema: Schema, depth: int) -> Any:
        prefix = schema.get("prefixItems", [])
        least, most = schema.get("minItems", 0), schema.get("maxItems", schema.get("minItems", 0) + 3)
        length = self._random.randint(least, max(least, min(most, least + (3 if depth < 5 else 0))))
        items = schema.get("items", {})
        return [self.draw(prefix[i] if i < len(prefix) else items, depth + 1) for i in range(length)]

    def _string(self, schema: Schema, depth: int) -> Any:
        if schema.get("format") in FORMATS:
            return FORMATS[schema["format"]]
        word = self._random.choice(WORDS)
        least = schema.get("minLength", 0)
        return (word + "y" * least)[: schema.get("maxLength", least + 100)]

    def _integer(self, schema: Schema, depth: int) -> Any:
        least = schema.get("minimum", schema.get("exclusiveMinimum", -1_000) + 1)
        most = schema.get("maximum", schema.get("exclusiveMaximum", max(least, 0) + 2_000) - 1)
        step = schema.get("multipleOf", 1)
        return self._random.randint(int(-(-least // step)), int(most // step)) * step

    def _number(self, schema: Any, depth: int) -> Any:
        least = schema.get("minimum", schema.get("exclusiveMinimum", -100.0))
        most = schema.get("maximum", schema.get("exclusiveMaximum", max(least, 0.0) + 200.0))
        return round(self._random.uniform(least, most), self._random.randrange(6))

    def _boolean(self, schema: Schema, depth: int) -> Any:
        return self._random.random() < 0.5

    def _null(self, schema: Schema, depth: int) -> Any:
        return None


def merged(one: Schema, other: Schema) -> Schema:
    """Both schemas in one, as far as drawing needs it."""
    both = {**other, **one}
    for keyword in ("properties", "$defs"):
        if keyword in one and keyword in other:
            both[keyword] = {**one[keyword], **other[keyword]}
    if "required" in one and "required" in other:
        both["required"] = [*one["required"], *other["required"]]
    if "allOf" in one and "allOf" in other:
        both["allOf"] = [*one["allOf"], *other["allOf"]]
    return both


def changed(value: Any, random: Random) -> Any:
    """A copy with one part changed."""
    root = [copy.deepcopy(value)]
    container, key = random.choice([*_places(root)])
    old = container[key]
    new = [None, True, 0, -1, 1.5, 10**12, "", "zzz", [], {}, [old], {"zzz": old}]
    if isinstance(old, str):
        new += [old + "x", old[:-1], old * 3]
    if isinstance(old, dict):
        new += [{**old, "zzz": 1}, *({k: v for k, v in old.items() if k != name} for name in old)]
    if isinstance(old, list):
        new += [old + old, old[:-1], [*old, None]]
    if isinstance(old, int | float) and not isinstance(old, bool):
        new += [old + 1, -old, old + 0.5, old * 1_000]
    container[key] = random.choice(new)
    return root[0]


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
        yield value, key
        if isinstance(child, dict | list):
            yield from _places(child)


class Ordered:
    """Puts properties in the order in which a schema lists them, which is the order that a grammar of JSON has."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._validators: dict[int, Any] = {}

    def ordered(self, value: Any) -> Any:
        return self._ordered(value, [self._root])

    def _ordered(self, value: Any, schemas: list[Any]) -> Any:
        if isinstance(value, list):
            schemas = [*self._applied(value, schemas)]
            return [self._ordered(each, self._of_item(schemas, index)) for index, each in enumerate(value)]
        if not isinstance(value, dict):
            return value
        schemas = [*self._applied(value, schemas)]
        listed = [name for schema in schemas for name in schema.get("properties", {})]
        required = [name for schema in schemas for name in schema.get("required", [])]
        names = [name for name in dict.fromkeys([*listed, *required, *value]) if name in value]
        return {name: self._ordered(value[name], self._of_property(schemas, name)) for name in names}

    def _applied(self, value: Any, schemas: list[Any]) -> Iterator[Schema]:
        for schema in schemas:
            if isinstance(schema, dict):
                yield schema
                if isinstance(schema.get("$ref"), str) and schema["$ref"].startswith("#"):
                    yield from self._applied(value, [self._target(schema["$ref"])])
                yield from self._applied(value, schema.get("allOf", []))
                for branch in schema.get("anyOf", []) + schema.get("oneOf", []):
                    if self._is_valid(value, branch):
                        yield from self._applied(value, [branch])
                        break

    def _target(self, reference: str) -> Any:
        target: Any = self._root
        for part in unquote(reference).split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            target = target[int(part) if isinstance(target, list) else part]
        return target

    def _is_valid(self, value: Any, branch: Any) -> bool:
        if not isinstance(branch, dict):
            return bool(branch)
        if id(branch) not in self._validators:
            definitions: Schema = {key: self._root[key] for key in ("$defs", "definitions") if key in self._root}
            try:
                self._validators[id(branch)] = jsonschema_rs.validator_for({**definitions, **branch})
            except ValueError:  # a reference that points elsewhere
                self._validators[id(branch)] = None
        validator = self._validators[id(branch)]
        return validator is None or bool(validator.is_valid(value))

    def _of_item(self, schemas: list[Schema], index: int) -> list[Any]:
        found = []
        for schema in schemas:
            prefix = schema.get("prefixItems", [])
            found.append(prefix[index] if index < len(prefix) else schema.get("items"))
        return found

    def _of_property(self, schemas: list[Schema], name: str) -> list[Any]:
        return [schema.get("properties", {}).get(name, schema.get("additionalProperties")) for schema in schemas]
