"""Schemas that programs use: of tools, of APIs' objects, of configuration files and of pydantic's models."""

import datetime
import decimal
import enum
import json
import uuid
from collections.abc import Iterator
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import anthropic.types
import openai.types
import openai.types.responses
from pydantic import AnyUrl, BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from tests.contract.bfcl import questions

REPOSITORY = Path(__file__).parents[3]
KUBERNETES = files("kubernetes_validate") / "kubernetes-json-schema" / "v1.37.0-local-strict"


class RealSchema(NamedTuple):
    source: str
    name: str
    schema: dict[str, Any]


def real_schemas() -> list[RealSchema]:
    """Between 300 and 500, always the same."""
    return [*_tools(150), *_models(150), *_kubernetes(80), *_own(), *_configurations()]


def _tools(count: int) -> Iterator[RealSchema]:
    """Parameters of the functions in bfcl-eval."""
    distinct = {tool.parameters: tool.name for question in questions() for tool in question.tools}
    for parameters, name in islice(distinct.items(), 0, None, len(distinct) // count):
        yield RealSchema("tools of bfcl-eval", name, json.loads(parameters))


def _models(count: int) -> Iterator[RealSchema]:
    """Objects in the interfaces of OpenAI and Anthropic."""
    for package in (openai.types, openai.types.responses, anthropic.types):
        models = [
            (name, model)
            for name, model in sorted(vars(package).items())
            if isinstance(model, type) and issubclass(model, BaseModel)
        ]
        for name, model in models[:: max(1, 3 * len(models) // count)]:
            try:
                yield RealSchema(f"models of {package.__name__.split('.')[0]}", name, model.model_json_schema())
            except (PydanticUserError, PydanticSchemaGenerationError):
                continue


def _kubernetes(count: int) -> Iterator[RealSchema]:
    definitions = json.loads((KUBERNETES / "_definitions.json").read_text())["$defs"]
    names = sorted(definitions)
    for name in names[:: len(names) // count]:
        schema = json.loads(json.dumps(definitions[name]).replace("_definitions.json#", "#"))
        needed: dict[str, Any] = {}
        todo = [schema]
        for each in todo:
            for target in _references(each):
                if target not in needed:
                    needed[target] = json.loads(json.dumps(definitions[target]).replace("_definitions.json#", "#"))
                    todo.append(needed[target])
        yield RealSchema("objects of Kubernetes", name, {**schema, "$defs": needed})


def _references(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("$ref"), str):
            yield schema["$ref"].removeprefix("#/$defs/")
        for each in schema.values():
            yield from _references(each)
    elif isinstance(schema, list):
        for each in schema:
            yield from _references(each)


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    weight: float = Field(gt=0, lt=120.5)


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=1, max_length=20)
    tags: list[str] = Field(min_length=1, max_length=3)
    pair: tuple[int, str]


class Times(BaseModel):
    day: datetime.date
    at: datetime.datetime
    clock: datetime.time
    wait: datetime.timedelta
    id: uuid.UUID


class Codes(BaseModel):
    zip: Annotated[str, Field(pattern=r"^\d{5}(-\d{4})?$")]
    plate: Annotated[str, Field(pattern=r"^[A-Z]{1,3}-[A-Z]{1,2} [1-9]\d{0,3}$")]
    even: Annotated[int, Field(multiple_of=2)]
    by_color: dict[Color, int]
    by_code: dict[Annotated[str, Field(pattern="^x[0-9]$")], bool]


class Person(BaseModel):
    """A person."""

    name: str
    age: int | None = None
    email: str | None = Field(default=None, description="may be absent")
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    favorite: Color = Color.RED
    scores: dict[str, float]
    anything: Any = None


class Exact(BaseModel):
    price: decimal.Decimal
    website: AnyUrl
    colors: set[Color]


OWN: tuple[Any, ...] = (
    Cat,
    Dog,
    Tree,
    Strict,
    Times,
    Codes,
    Person,
    Exact,
    list[Person],
    dict[str, Cat | Dog],
    int | str | None,
)


def _own() -> Iterator[RealSchema]:
    for model in OWN:
        yield RealSchema("models of pydantic", str(model), TypeAdapter(model).json_schema())


def _configurations() -> Iterator[RealSchema]:
    yield RealSchema("configuration files", "helm", _read(REPOSITORY / "helm/trunkline/values.schema.json"))
    for path in sorted(files("setuptools.config").iterdir(), key=str):
        if path.name.endswith(".schema.json"):
            yield RealSchema("configuration files", path.name, _read(path))


def _read(path: Any) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(path.read_text())
    return schema
