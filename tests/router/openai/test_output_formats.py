"""Structured output: each endpoint's own fields become a grammar, and nothing that constrains the text is ignored."""

import asyncio
from typing import Any

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import CHAT, client, result_of
from trunkline.status import RequestRefused, invalid
from trunkline.v1.inference_pb2 import GenerateRequest
from trunkline.v1.worker_pb2 import Capability, GrammarKind
from trunkline_router.edge.anthropic.anthropic_requests import MessageRequest
from trunkline_router.edge.openai.chat import ChatRequest
from trunkline_router.edge.openai.completion_request import CompletionRequest
from trunkline_router.edge.request_fields import FieldNames, checked, known_part, renamed
from trunkline_router.edge.responses.response_request import ResponseRequest

Json = dict[str, Any]
Asked = tuple[GenerateRequest, FieldNames]

# Not sorted: an answer has its properties in this order. The schema has an integer of more than 64 bits.
SCHEMA: Json = {"type": "object", "properties": {"b": {"const": 10**20}, "a": {"type": "string"}}, "required": ["b"]}
TEXT = '{"type":"object","properties":{"b":{"const":100000000000000000000},"a":{"type":"string"}},"required":["b"]}'
NAMED: Json = {"name": "thing", "description": "A thing.", "strict": True, "schema": SCHEMA}
TAG: Json = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<"]}
TAG_TEXT = '{"structures":[{"begin":"<a>","schema":{},"end":"</a>"}],"triggers":["<"]}'
LARK, GBNF = 'start: "a" | root\nroot: "b"', '# the answer\n root ::= "a" | "b"\n'


def chat(**body: Any) -> Asked:
    request = accepted(ChatRequest, messages=CHAT, **body)
    return result_of(request.generate_request("id")), request.field_names


def completion(**body: Any) -> Asked:
    request = accepted(CompletionRequest, prompt="hi", **body)
    return request.generate_request("hi", "id", request.sampling_params()), request.field_names


def response(**body: Any) -> Asked:
    request = accepted(ResponseRequest, input="hi", **body)
    return request.generate_request("id", ()), request.field_names(0, ())


def message(**body: Any) -> Asked:
    request = accepted(MessageRequest, messages=CHAT, max_tokens=8, **body)
    return result_of(request.generate_request("id")), request.field_names


def accepted(kind: Any, **body: Any) -> Any:
    request, unknown = result_of(checked(kind, {"model": "tiny", **body}))
    assert unknown == []
    request.check()
    return request


def response_format(kind: str, **fields: Any) -> Json:
    return {"response_format": {"type": kind, **fields}}


def structured(**fields: Any) -> Json:
    return {"structured_outputs": fields}


def text_format(**fields: Any) -> Json:
    return {"text": {"format": fields}}


JSON_SCHEMA = GrammarKind.GRAMMAR_KIND_JSON_SCHEMA
# What is asked for, and the grammar's kind, text and field.
ASKED: list[tuple[Any, Json, "GrammarKind.ValueType", str, str]] = [
    *(
        (ask, body, kind, text, field)
        for ask in (chat, completion)
        for body, kind, text, field in (
            (response_format("json_schema", json_schema=NAMED), JSON_SCHEMA, TEXT,
             "response_format.json_schema.schema"),
            (response_format("json_schema", json_schema={"schema": {}}), JSON_SCHEMA, "{}",
             "response_format.json_schema.schema"),
            (response_format("json_object"), JSON_SCHEMA, '{"type":"object"}', "response_format"),
            (response_format("structural_tag", format={"type": "any_text", "excludes": ["é"]}),
             GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG, '{"format":{"type":"any_text","excludes":["é"]}}',
             "response_format"),
            (response_format("structural_tag", **TAG), GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG, TAG_TEXT,
             "response_format"),
        )
    ),
    *(
        (ask, structured(**{name: value}), kind, text, f"structured_outputs.{name}")
        for ask in (chat, completion, response)
        for name, value, kind, text in (
            ("json", SCHEMA, JSON_SCHEMA, TEXT),
            ("json", '{"type": "array"}', JSON_SCHEMA, '{"type": "array"}'),
            ("json_object", True, JSON_SCHEMA, '{"type":"object"}'),
            ("regex", r"\d+", GrammarKind.GRAMMAR_KIND_REGEX, r"\d+"),
            ("choice", ['"', "b\\", "é"], GrammarKind.GRAMMAR_KIND_CHOICE, r'["\"","b\\","é"]'),
            ("grammar", LARK, GrammarKind.GRAMMAR_KIND_LARK, LARK),
            ("grammar", GBNF, GrammarKind.GRAMMAR_KIND_EBNF, GBNF),
            ("structural_tag", TAG_TEXT, GrammarKind.GRAMMAR_KIND_STRUCTURAL_TAG, TAG_TEXT),
        )
    ),
    (chat, structured(regex="a", disable_any_whitespace=True, disable_fallback=True, json_object=False,
                      disable_additional_properties=False), GrammarKind.GRAMMAR_KIND_REGEX, "a",
     "structured_outputs.regex"),
    (chat, {**response_format("text"), **structured(regex="a")}, GrammarKind.GRAMMAR_KIND_REGEX, "a",
     "structured_outputs.regex"),
    (response, text_format(type="json_schema", **NAMED), JSON_SCHEMA, TEXT, "text.format.schema"),
    (response, text_format(type="json_object"), JSON_SCHEMA, '{"type":"object"}', "text.format"),
    (message, {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, JSON_SCHEMA, TEXT,
     "output_config.format.schema"),
    (message, {"output_format": {"type": "json_schema", "schema": SCHEMA}}, JSON_SCHEMA, TEXT, "output_format.schema"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "body", "kind", "text", "field"), ASKED)
def test_what_is_asked_for_becomes_a_grammar(
    ask: Any, body: Json, kind: "GrammarKind.ValueType", text: str, field: str
) -> None:
    request, names = ask(**body)
    assert (request.grammar.kind, request.grammar.text, request.grammar.digest) == (kind, text, b"")
    refused = renamed(invalid("grammar", "is bad"), names)
    assert (refused.field, refused.message) == (field, f"{field}: is bad")
    assert known_part(field) == field, "logs name it"
    assert names("max_tokens") == ask()[1]("max_tokens"), "other fields keep their names"


@pytest.mark.parametrize("ask", [chat, completion, response, message])
def test_without_a_constraint_there_is_no_grammar(ask: Any) -> None:
    bodies: list[Json] = [{}]
    if ask is not message:
        bodies.append({"structured_outputs": None})
    if ask in (chat, completion):
        bodies += [response_format("text"), {"response_format": None}]
    if ask is response:
        bodies += [text_format(type="text"), {"text": {"format": None}}]
    for body in bodies:
        request, names = ask(**body)
        assert not request.HasField("grammar")
        assert names("grammar") == "tools"  # whose calls a grammar may enforce


ONE = "must have one of json, regex, choice, grammar, json_object, structural_tag, and only one"
REFUSED: list[tuple[Any, Json, str, str]] = [
    (chat, response_format("grammar"), "response_format.type", "input should be 'text', 'json_object'"),
    (chat, {"response_format": {}}, "response_format.type", "field required"),
    (chat, {"response_format": "json_object"}, "response_format", "input should be a valid dictionary"),
    (chat, response_format("json_schema"), "response_format.json_schema", "is required with type 'json_schema'"),
    (chat, response_format("text", json_schema=NAMED), "response_format.json_schema",
     "is only allowed with type 'json_schema'"),
    (chat, response_format("json_schema", json_schema={"name": "a"}), "response_format.json_schema.schema",
     "field required"),
    (chat, response_format("json_schema", json_schema={"schema": "{}"}), "response_format.json_schema.schema",
     "input should be a valid dictionary"),
    (chat, response_format("json_schema", json_schema={"schema": {"a": float("inf")}}),
     "response_format.json_schema.schema", "a number is out of range"),
    (chat, response_format("json_schema", json_schema=NAMED, triggers=[]), "response_format.triggers",
     "is only allowed with type 'structural_tag'"),
    (chat, response_format("structural_tag", triggers=["<"]), "response_format.structures",
     "is required with type 'structural_tag'"),
    (chat, response_format("structural_tag", format={"type": "any_text"}, triggers=["<"]), "response_format.triggers",
     "contradicts format"),
    (chat, response_format("text", format={}), "response_format.format",
     "is only allowed with type 'structural_tag'"),
    (chat, structured(), "structured_outputs", ONE),
    (chat, structured(json_object=False), "structured_outputs", ONE),
    (chat, structured(regex="a", json={}), "structured_outputs", ONE),
    (chat, structured(json=[]), "structured_outputs.json", "input should be a valid"),
    (chat, structured(choice=["a", 1]), "structured_outputs.choice[1]", "input should be a valid string"),
    (chat, structured(json={}, whitespace_pattern=" ?"), "structured_outputs.whitespace_pattern",
     "is not supported: whitespace within JSON is always the same"),
    (chat, structured(json={}, disable_additional_properties=True), "structured_outputs.disable_additional_properties",
     "is not supported: use additionalProperties"),
    (chat, {**response_format("json_object"), **structured(regex="a")}, "structured_outputs",
     "contradicts response_format"),
    (chat, {"guided_json": SCHEMA}, "guided_json", "was removed from vLLM: use structured_outputs"),
    (response, response_format("json_object"), "response_format", "is not a field of responses: use text.format"),
    (response, {**text_format(type="json_object"), **structured(regex="a")}, "structured_outputs",
     "contradicts text.format"),
    (response, text_format(type="json_schema", name="a"), "text.format.schema", "field required"),
    (response, text_format(type="text", schema={}), "text.format.schema", "is only allowed with type 'json_schema'"),
    (message, {"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type",
     "input should be 'json_schema'"),
    (message, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "field required"),
    (message, {"output_config": {"format": {"type": "json_schema", "schema": {}}},
               "output_format": {"type": "json_schema", "schema": {}}}, "output_format",
     "contradicts output_config.format"),
]  # fmt: skip


@pytest.mark.parametrize(("ask", "body", "field", "message"), REFUSED)
def test_what_cannot_be_enforced_is_refused_by_name(ask: Any, body: Json, field: str, message: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        ask(**body)
    assert refused.value.field == field
    assert refused.value.message.startswith(f"{field}: {message}")
    assert known_part(field) == field


@pytest.mark.parametrize("body", [response_format("text", mood=1), structured(regex="a", mood=1)])
def test_unknown_fields_are_found(body: Json) -> None:
    _, unknown = result_of(checked(ChatRequest, {"model": "tiny", "messages": CHAT, **body}))
    assert unknown == [f"{next(iter(body))}.mood"]


SCHEMAS: dict[str, tuple[Json, str]] = {
    "/v1/chat/completions": (
        {"messages": CHAT, **response_format("json_schema", json_schema=NAMED)},
        "response_format.json_schema.schema",
    ),
    "/v1/completions": ({"prompt": ["a", "b"], **structured(json=SCHEMA)}, "structured_outputs.json"),
    "/v1/responses": ({"input": "hi", **text_format(type="json_schema", **NAMED)}, "text.format.schema"),
    "/v1/messages": (
        {"messages": CHAT, "max_tokens": 8, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        "output_config.format.schema",
    ),
}


@pytest.mark.parametrize("path", SCHEMAS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_schema_that_its_worker_refuses_is_named_as_the_client_named_it(path: str, stream: bool) -> None:
    worker = FakeWorker("w", answer=None, capabilities=[Capability.CAPABILITY_GRAMMARS])
    body, field = SCHEMAS[path]
    async with client(worker) as asks:
        asked = asyncio.create_task(asks.post(path, {"model": "tiny", "stream": stream, **body}))
        choice = await worker.arrived.get()
        assert worker.grammars[choice.submit.work.grammar.digest].text == TEXT
        choice.fail(invalid("grammar", "/properties/b: const is not supported"))
        answer = await asked
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == f"{field}: /properties/b: const is not supported"
    assert answer.json()["error"].get("param", field) == field, "Anthropic's errors have no such field"


@pytest.mark.parametrize("path", SCHEMAS)
async def test_without_a_worker_that_can_enforce_it_a_schema_is_refused(path: str) -> None:
    body, field = SCHEMAS[path]
    async with client(FakeWorker("w")) as asks:
        answer = await asks.post(path, {"model": "tiny", **body})
    assert answer.status_code == 400
    needs = f"{field}: needs the capability grammars, which no worker of model tiny has"
    assert answer.json()["error"]["message"] == needs
