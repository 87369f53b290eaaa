"""Fields that requests of several endpoints have in common.

OpenAI's names, and vLLM's for what OpenAI does not have. A field that is not served is refused by name instead of being
ignored, because an ignored constraint gives wrong answers. Null means the default, as with OpenAI.
"""

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, cached_property, partial
from itertools import takewhile
from math import isinf
from typing import Annotated, Any, ClassVar, NamedTuple, TypeVar, get_args

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    create_model,
)
from pydantic.json_schema import JsonSchemaValue

from trunkline.sampling_params import TABLE, Http
from trunkline.status import RequestRefused, invalid
from trunkline.v1.generation_pb2 import LANE_BATCH, LANE_INTERACTIVE, LANE_UNSPECIFIED, Lane, SamplingParams
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.v1.worker_pb2 import Grammar
from trunkline_router.prompts.conversation import MAX_PARTS

MOST_UINT32 = (1 << 32) - 1
MOST_UINT64 = (1 << 64) - 1

# Bounds on what is checked one by one, because each wrong element of a list costs an error of its own.
MAX_ITEMS = 4096  # of a list or object; as many as a conversation has messages
PART_LISTS = ("content", "tool_calls", "output")  # what a message, or an item of a conversation, may have many of
MAX_FIELDS = 1024  # of a body
MAX_UNKNOWN = 256  # of an object
MAX_TEMPLATE_KWARGS_BYTES = 1 << 20  # of chat_template_kwargs as JSON

# Messages that are checked or converted at a time, in some two milliseconds. All MAX_PARTS may be in one of them, which
# takes 40 ms.
STEP_ITEMS = 256

NOT_YET = "is not supported"


def _in_range(field: str, ids: list[int]) -> list[int]:
    """Returns token ids. Raises RequestRefused (INVALID_REQUEST) if one does not fit into an int32."""
    if ids and not (min(ids) >= 0 and max(ids) < 1 << 31):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < 1 << 31)
        raise invalid(field, f"token id {wrong} is out of range")
    return ids


def _by_token_id(field: str, values: dict[str, float]) -> dict[int, float]:
    """Returns values by token id. Raises RequestRefused (INVALID_REQUEST) for another key."""
    for key in values:
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and int(key) < 1 << 31):
            raise invalid(field, f"{key[:32]!r} is not a token id")
    return {int(key): value for key, value in values.items()}


ANY: TypeAdapter[Any] = TypeAdapter(Any)
Strings = Annotated[list[str], Field(fail_fast=True)]
Count = Annotated[int, Field(ge=0, le=MOST_UINT32)]
MaxTokens = Annotated[int, Field(ge=1, lt=1 << 31)]
ModelName = Annotated[str, Field(min_length=1)]
# -1 keeps all tokens, as 0 does.
TopK = Annotated[int, Field(ge=-1, le=MOST_UINT32), AfterValidator(lambda given: max(0, given))]
# A negative seed is taken modulo 2^64.
Seed = Annotated[int, Field(ge=-(1 << 63), le=MOST_UINT64), AfterValidator(lambda given: given & MOST_UINT64)]
StopTokenIds = Annotated[list[int], Field(fail_fast=True), AfterValidator(partial(_in_range, "stop_token_ids"))]
LogitBias = Annotated[dict[str, float], AfterValidator(partial(_by_token_id, "logit_bias"))]


class Fields(BaseModel):
    """A JSON object. Values are not converted: a number in quotes is refused. Unknown fields are kept for check()."""

    # Of JSON, only a number beyond the largest float is infinite.
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)

    # Fields that other servers know and this one does not serve, each with the reason. A null or default is accepted.
    unserved: ClassVar[Mapping[str, str]] = {}
    # Fields that change nothing of the output, and are ignored.
    ignored: ClassVar[frozenset[str]] = frozenset()
    # Defaults of fields that are not served: they ask for nothing.
    defaults: ClassVar[Mapping[str, Any]] = {}
    # Lists that may have more than MAX_ITEMS elements.
    long_lists: ClassVar[frozenset[str]] = frozenset()
    # The list of a conversation, which may have thousands of elements and is checked some at a time.
    stepwise: ClassVar[str] = ""
    # Whether a body of these fields may not be empty.
    needs_body: ClassVar[bool] = True

    def check(self) -> None:
        """Raises RequestRefused (INVALID_REQUEST) for fields that contradict each other or are not served."""

    def left_out(self) -> list[str]:
        """Returns the names of fields that are known, not served, and left out: tools that run at no client."""
        return []

    def forget_conversation(self) -> None:
        """Frees the conversation, which may have thousands of objects, while the request may run for minutes: Python's
        garbage collector would visit them all the time."""
        if self.stepwise and isinstance(items := getattr(self, self.stepwise), list):
            items.clear()

    def unknown(self, prefix: str = "") -> list[str]:
        """Returns the names of unknown fields here and in nested objects. Raises RequestRefused (INVALID_REQUEST) for
        one that is known and not served."""
        found = self._unknown_here(prefix)
        for name, item in self._items(prefix):
            found += item.unknown(name)
        return found

    def unknown_in_steps(self) -> "Steps[list[str]]":
        """As unknown()."""
        found = self._unknown_here("")
        for number, (name, item) in enumerate(self._items(""), 1):
            found += item.unknown(name)
            if number % STEP_ITEMS == 0:
                yield
        return found

    def _unknown_here(self, prefix: str) -> list[str]:
        found: list[str] = []
        extra = self.__pydantic_extra__
        if not extra:
            return found
        if len(extra) > MAX_UNKNOWN:
            raise invalid(prefix + next(iter(extra)), f"and {len(extra) - 1} other fields are not known")
        for name, value in extra.items():
            if name in self.ignored or value is None:
                continue
            if name in self.unserved:
                is_default = name in self.defaults and value == self.defaults[name] and value is not True
                if value is not False and value != [] and not is_default:  # 0 equals False
                    raise invalid(prefix + name, self.unserved[name])
                continue
            found.append(prefix + name)
        return found

    def _items(self, prefix: str) -> "Iterator[tuple[str, Fields]]":
        """The nested objects, with what is before the names of their fields."""
        values = self.__dict__  # the fields: a third of the time of getattr() for each
        for name in _nested(type(self)):
            value = values[name]
            if isinstance(value, Fields):
                yield f"{prefix}{name}.", value
            elif isinstance(value, list) and value and isinstance(value[0], Fields):
                for index, item in enumerate(value):
                    if isinstance(item, Fields):
                        yield f"{prefix}{name}[{index}].", item

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema also says what unknown() refuses and ignores."""
        made = handler(core_schema)
        schema = handler.resolve_ref_schema(made)
        known = schema.setdefault("properties", {})
        for name in sorted(cls.ignored - known.keys()):
            known[name] = {"description": "Accepted and ignored."}
        for name, reason in cls.unserved.items():
            known.setdefault(name, {"description": f"Refused: {reason}.", "enum": [None, False, []]})
        schema["additionalProperties"] = False
        return made


@cache
def _nested(kind: type[Fields]) -> tuple[str, ...]:
    """The names of the fields that may have nested objects."""
    return tuple(name for name, field in kind.model_fields.items() if _has_fields(field.annotation))


def _has_fields(annotation: Any) -> bool:
    """Whether a type is one of Fields, or made of one."""
    is_fields = isinstance(annotation, type) and issubclass(annotation, Fields)
    return is_fields or any(map(_has_fields, get_args(annotation)))


Body = TypeVar("Body", bound=Fields)
Result = TypeVar("Result")
# Work on a long body, which yields between steps of a few milliseconds, so that other tasks run. It returns its result.
Steps = Generator[None, None, Result]


# What a parameter is in JSON, by its name or else by its type.
_FORMS: Mapping[Any, Any] = {
    **{float: float, int: Count, bool: bool},
    **{"top_k": TopK, "seed": Seed, "stop_token_ids": StopTokenIds, "logit_bias": LogitBias},
}


def with_parameters(http: Http) -> Callable[[type[Body]], type[Body]]:
    """Decorates a class of Fields: adds the parameters that the table has for these bodies. Their values are checked
    after those of the class's own fields."""

    def add(kind: type[Body]) -> type[Body]:
        fields: dict[str, Any] = {
            name: ((_FORMS.get(name) or _FORMS[row.kind]) | None, Field(default=None, description=row.help))
            for name, row in TABLE.items()
            if row.http is http
        }
        return create_model(kind.__name__, __base__=kind, __doc__=kind.__doc__, __module__=kind.__module__, **fields)

    return add


@with_parameters(Http.ALL)
class ParameterFields(Fields):
    """The model and how to sample.

    A field with the name of a sampling parameter, here or in a subclass, becomes that parameter.
    """

    model: str | None = None

    def sampling(self, **renamed: Any) -> SamplingParams:
        """Returns the parameters. Those that are null are left to the model's defaults.

        renamed: parameters whose fields have other names, or the same name and another meaning
        """
        fields = self.__dict__
        same = {name: value for name in PARAMETERS if (value := fields.get(name)) is not None}
        return SamplingParams(**{**same, **renamed})


class Constraint(NamedTuple):
    """What constrains the text of an answer.  field: that asks for it"""

    grammar: Grammar
    field: str


class SamplingFields(ParameterFields):
    """How to sample, and how the request is scheduled: what all protocols have."""

    # As vLLM names them.
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None

    @cached_property
    def constraint(self) -> Constraint | None:
        """What constrains the text of the answer. Raises RequestRefused (INVALID_REQUEST)."""
        return None

    def generate(self, request_id: str, sampling: SamplingParams, **prompt: Any) -> GenerateRequest:
        """Returns the request for the path that all protocols share. Raises RequestRefused (INVALID_REQUEST)."""
        return GenerateRequest(
            model=self.model or "",
            sampling=sampling,
            request_id=request_id,
            lane=self.lane,
            cache_salt=self.cache_salt or "",
            grammar=self.constraint.grammar if self.constraint else None,
            **prompt,
        )

    def named(self, names: "FieldNames") -> "FieldNames":
        """Returns these names, and that of the field that constrains the text."""
        if self.constraint is None:
            return names
        own = self.constraint.field
        return lambda field: own if field == "grammar" else names(field)

    @property
    def lane(self) -> "Lane.ValueType":
        return lane_of(self.priority)


def lane_of(priority: int | None) -> "Lane.ValueType":
    """The lane that a priority names: as in vLLM, lower numbers go first, and 0 is the default."""
    if not priority:
        return LANE_UNSPECIFIED
    return LANE_INTERACTIVE if priority < 0 else LANE_BATCH


PARAMETERS = frozenset(SamplingParams.DESCRIPTOR.fields_by_name)


def template_variables(values: dict[str, Any] | None) -> str:
    """Returns chat_template_kwargs as JSON. Raises RequestRefused (INVALID_REQUEST) if they are too long, and as
    json_text()."""
    if not values:
        return ""
    text = json_text(values, "chat_template_kwargs")
    if len(text.encode()) > MAX_TEMPLATE_KWARGS_BYTES:
        raise invalid("chat_template_kwargs", f"has more than {MAX_TEMPLATE_KWARGS_BYTES} bytes")
    return text


def json_text(value: object, field: str) -> str:
    """Returns a field's value as JSON. Raises RequestRefused (INVALID_REQUEST) if it has a number that is infinite."""
    try:
        text = orjson.dumps(value)
    except TypeError:  # an integer of more than 64 bits
        text = ANY.dump_json(value)
    if b"null" in text and _has_infinity(value):  # null is written for infinity, too
        raise invalid(field, "a number is out of range")
    return text.decode()


def _has_infinity(value: object) -> bool:
    """Whether a JSON value has an infinite number. The standard library takes several times as long."""
    values = [value]
    for each in values:  # and those that are added
        if isinstance(each, dict):
            values += each.values()
        elif isinstance(each, list):
            values += each
        elif isinstance(each, float) and isinf(each):
            return True
    return False


def checked(kind: type[Body], body: dict[str, Any]) -> Steps[tuple[Body, list[str]]]:
    """Returns the body as a `kind` of Fields, and the names of its unknown fields. Raises RequestRefused
    (INVALID_REQUEST) that names the first wrong field, or one that is known and not served."""
    if len(body) > MAX_FIELDS:
        raise invalid("body", f"has more than {MAX_FIELDS} fields")
    for name, value in body.items():
        if not isinstance(value, list | dict) or name in kind.long_lists:
            continue
        if len(value) > MAX_ITEMS:
            raise invalid(name, f"has {len(value)} entries, more than {MAX_ITEMS}")
        if (num_parts := _num_parts(value)) > MAX_PARTS:
            raise invalid(name, f"has {num_parts} parts of contents, more than {MAX_PARTS}")
    made = yield from _validated(kind, body)
    return made, (yield from made.unknown_in_steps())


def _validated(kind: type[Body], body: dict[str, Any]) -> Steps[Body]:
    """Validates a conversation a step at a time."""
    name = kind.stepwise
    items = body.get(name) if name else None
    if not isinstance(items, list) or len(items) <= STEP_ITEMS:
        return _validated_at_once(kind, body)
    made = _validated_at_once(kind, {**body, name: items[:STEP_ITEMS]})
    whole = list(getattr(made, name))
    for start in range(STEP_ITEMS, len(items), STEP_ITEMS):
        yield
        following = {name: items[start : start + STEP_ITEMS]}
        whole += getattr(_validated_at_once(_list_alone(kind), following, start), name)
    return made.model_copy(update={name: whole})


def _validated_at_once(kind: type[Body], body: dict[str, Any], start: int = 0) -> Body:
    """start: index of the first element of the list"""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise wrong_field(error, start) from None


@cache
def _list_alone(kind: type[Fields]) -> type[Fields]:
    """Fields of which the list that is checked in steps is the only one."""
    field = kind.model_fields[kind.stepwise]
    return create_model(kind.__name__, __base__=Fields, **{kind.stepwise: (field.annotation, field)})  # type: ignore[call-overload, no-any-return]


def _num_parts(value: list[Any] | dict[str, Any]) -> int:
    """The number of parts and calls of all messages, with parts in parts, if the value is a conversation: to check and
    convert each takes five microseconds."""
    num_parts = 0
    for item in value:
        if isinstance(item, dict):
            for name in PART_LISTS:
                if isinstance(parts := item.get(name), list):
                    num_parts += len(parts) + _num_parts(parts)
    return num_parts


def wrong_field(error: ValidationError, start: int = 0) -> RequestRefused:
    """The refusal for a body that does not have the expected fields.  start: index of the first element of its list"""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    parts: list[str] = []
    for part in first["loc"]:
        if isinstance(part, int):
            parts.append(f"[{part + start}]")
            start = 0
        elif part.isidentifier() and part != "str":  # names of alternatives in a union, such as str, are not fields
            parts.append(f".{part}" if parts else part)
    return invalid("".join(parts) or "body", first["msg"].lower())


def known_part(field: str) -> str:
    """Returns a refused field up to the first name that the API does not have: such names are a client's own words, and
    so are the keys of its objects."""

    def is_known(part: str) -> bool:
        found = _NAME_AND_INDEX.fullmatch(part)
        return found is not None and found[1] in _known_names()

    return ".".join(takewhile(is_known, field.split(".")))


_NAME_AND_INDEX = re.compile(r"([\w-]+)(?:\[\d+\])?")


@cache
def _known_names() -> frozenset[str]:
    names, kinds = {"body", "content-type", "x-request-id"}, [Fields]
    for kind in kinds:
        kinds += kind.__subclasses__()
        names |= {*kind.unserved, *kind.ignored}
        names |= {field.alias or name for name, field in kind.model_fields.items()}
    return frozenset(names)


SAMPLING = "sampling."  # its fields are fields of the body over HTTP

FieldNames = Callable[[str], str]  # from the shared path's name of a field, without SAMPLING, to an endpoint's


def prompt_named(name: str, **more: str) -> FieldNames:
    """Returns the names of an endpoint whose field `name` has the prompt. Of a conversation's message, no part is
    named: endpoints have other parts."""
    prompts = dict.fromkeys(("prompt", "text", "token_ids", "chat", "chat.messages"), name)
    chat = {"chat.tools": "tools", "chat.documents": "documents", "template_variables": "chat_template_kwargs"}
    chat |= dict.fromkeys(("chat.called_tool", "chat.requires_call"), "tool_choice")
    chat |= {"chat.max_reasoning_tokens": "thinking_token_budget", "chat.reasoning_effort": "reasoning_effort"}
    chat["grammar"] = "tools"  # of a request without another constraint
    return partial(_named, {**prompts, **chat, **more})


def _named(names: Mapping[str, str], field: str) -> str:
    name, bracket, index = field.partition(".parts[")[0].partition("[")
    return names.get(name, name) + bracket + index


@contextmanager
def refusals_named(names: FieldNames) -> Iterator[None]:
    """Renames the fields of refusals that are raised within it."""
    try:
        yield
    except RequestRefused as refused:
        raise renamed(refused, names) from None


def renamed(refused: RequestRefused, names: FieldNames) -> RequestRefused:
    """Returns the refusal with its field as the clients of an endpoint name it, in its message too."""
    field = refused.field
    name = names(field.removeprefix(SAMPLING))
    if field and refused.message.startswith(f"{field}: "):
        refused.message = f"{name}: {refused.message.removeprefix(f'{field}: ')}"
    refused.field = name
    return refused
