"""The OpenAPI page says what the endpoints take and answer."""

import re
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from jsonschema_rs import Draft202012Validator, meta

from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import CHAT, OpenAiClient, client
from tests.router.responses.responses_client import new_store
from trunkline.status import INVALID_REQUEST
from trunkline.v1.worker_pb2 import Capability
from trunkline_router.access.identity.needed_roles import PATHS
from trunkline_router.edge.openapi.operations import OPERATIONS
from trunkline_router.edge.openapi.page import openapi_page
from trunkline_router.http_app import UNSERVED
from trunkline_router.record.error_statuses import TABLE, is_anthropic

PAGE: dict[str, Any] = orjson.loads(openapi_page())
HI = {"model": "tiny", "messages": CHAT}
ASK = {"model": "tiny", "max_tokens": 2}
CAPABILITIES = [
    Capability.CAPABILITY_GRAMMARS,
    Capability.CAPABILITY_VECTORS,
    Capability.CAPABILITY_SCORES,
]


def operations() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in PAGE["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def schema_for(path: str, method: str, status: int) -> dict[str, Any]:
    """The schema of a response, with the components to which it refers."""
    responses = PAGE["paths"][path][method.lower()]["responses"]
    schema: dict[str, Any] = responses[str(status)]["content"]["application/json"]["schema"]
    return {**schema, "components": PAGE["components"]}


def test_each_endpoint_that_has_a_role_is_on_the_page() -> None:
    assert OPERATIONS.keys() == PATHS.keys()
    assert {name for name, _ in operations()} == {name.replace(":path}", "}") for name in PATHS}
    assert not set(UNSERVED) & PAGE["paths"].keys()
    without_metrics = orjson.loads(openapi_page(has_metrics=False))["paths"]
    assert PAGE["paths"].keys() - without_metrics.keys() == {"/metrics"}


def test_schemas_are_valid_and_all_references_lead_somewhere() -> None:
    for name, schema in PAGE["components"]["schemas"].items():
        meta.validate(schema)
        assert re.fullmatch(r"[A-Za-z]+", name), "a name that generators of clients can use"
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', orjson.dumps(PAGE).decode()))
    assert referred <= PAGE["components"]["schemas"].keys()
    ids = [operation["operationId"] for _, operation in operations()]
    assert len(set(ids)) == len(ids)


def test_endpoints_say_who_may_call_them_and_how_they_refuse() -> None:
    for name, operation in operations():
        needed = next(needed for known, needed in PATHS.items() if known.replace(":path}", "}") == name)
        if needed.is_open:
            assert "security" not in operation
            continue
        assert operation["security"][:2] == [{"bearer": []}, {"api_key": []}]
        assert ({} in operation["security"]) == (needed.open is not None)
        statuses = operation["responses"].keys()
        assert {"200", "400", "401", "403", "408", "413", "414", "429", "431", "500"} <= statuses, name
        assert ("504" in statuses) == (name.startswith("POST") and "/fleet/" not in name), name
        shape = "MessagesError" if is_anthropic(name.partition(" ")[2]) else "Error"
        refused = operation["responses"]["400"]["content"]["application/json"]["schema"]
        assert refused == {"$ref": f"#/components/schemas/{shape}"}
        assert TABLE[INVALID_REQUEST].code in operation["responses"]["400"]["description"]


def test_fields_that_are_refused_or_ignored_are_on_the_page() -> None:
    fields = PAGE["components"]["schemas"]["ChatRequest"]
    assert fields["additionalProperties"] is False
    assert fields["properties"]["guided_json"]["enum"] == [None, False, []]
    assert fields["properties"]["user"] == {"description": "Accepted and ignored."}
    assert set(fields["required"]) == {"model", "messages"}
    lenient = orjson.loads(openapi_page(allows_unknown_fields=True))["components"]["schemas"]["ChatRequest"]
    assert "additionalProperties" not in lenient


SCHEMA = {"type": "object", "required": ["a"]}
ANSWERED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "completion": ("POST", "/v1/completions", {**ASK, "prompt": ["a", "b"], "n": 2}),
    "scored completion": (
        "POST",
        "/v1/completions",
        {**ASK, "prompt": "hi", "logprobs": 1, "echo": True, "return_token_ids": True, "prompt_logprobs": 1},
    ),
    "chat": ("POST", "/v1/chat/completions", {**HI, "max_tokens": 2, "n": 2}),
    "scored chat": (
        "POST",
        "/v1/chat/completions",
        {**HI, "logprobs": True, "top_logprobs": 1, "return_token_ids": True, "prompt_logprobs": 1, "max_tokens": 2},
    ),
    "response": ("POST", "/v1/responses", {"model": "tiny", "input": "hi", "max_output_tokens": 2}),
    "scored response": (
        "POST",
        "/v1/responses",
        {"model": "tiny", "input": "hi", "include": ["message.output_text.logprobs"], "max_output_tokens": 2},
    ),
    "message": ("POST", "/v1/messages", {**HI, "max_tokens": 2}),
    "count": ("POST", "/v1/messages/count_tokens", HI),
    "tokens": ("POST", "/tokenize", {"prompt": "hi", "return_token_strs": True}),
    "text": ("POST", "/detokenize", {"tokens": [1, 2]}),
    "schema in chat": (
        "POST",
        "/v1/chat/completions",
        {**HI, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    ),
    "regex in completion": (
        "POST",
        "/v1/completions",
        {**ASK, "prompt": "a", "structured_outputs": {"regex": "a+", "disable_any_whitespace": True}},
    ),
    "schema in response": (
        "POST",
        "/v1/responses",
        {"model": "tiny", "input": "hi", "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
    ),
    "schema in message": (
        "POST",
        "/v1/messages",
        {**HI, "max_tokens": 2, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    ),
    "embeddings": ("POST", "/v1/embeddings", {"model": "tiny", "input": ["a", "b"], "truncate_prompt_tokens": 2}),
    "embeddings in base64": ("POST", "/v1/embeddings", {"model": "tiny", "input": "a", "encoding_format": "base64"}),
    "pooling": ("POST", "/pooling", {"model": "tiny", "input": [[1, 2], [3]]}),
    "reranking": ("POST", "/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b", {"text": "c"}]}),
    "short reranking": ("POST", "/rerank", {"query": "a", "documents": ["b"], "return_documents": False}),
    "Cohere's reranking": ("POST", "/v2/rerank", {"model": "tiny", "query": "a", "documents": ["b"], "top_n": 1}),
    "scores": ("POST", "/v1/score", {"model": "tiny", "text_1": "a", "text_2": ["b", "c"]}),
    "short scores": ("POST", "/score", {"model": "tiny", "queries": ["a"], "documents": ["b", "c"]}),
    "classes": ("POST", "/classify", {"model": "tiny", "input": "a"}),
    "models": ("GET", "/v1/models", {}),
    "health": ("GET", "/health", {}),
    "ready": ("GET", "/ready", {}),
    "version": ("GET", "/version", {}),
    "page": ("GET", "/openapi.json", {}),
}


DRAIN, UNDRAIN = "/fleet/workers/{worker}/drain", "/fleet/workers/{worker}/undrain"
ASKED = {**ANSWERED, "drain": ("POST", DRAIN, {"timeout_s": 5.5}), "undrain": ("POST", UNDRAIN, {})}


async def answer(asks: OpenAiClient, method: str, url: str, path: str, body: Any, status: int) -> Any:
    """The body of a response, which fits the page."""
    response = await asks.http.request(method, url, json=body if method == "POST" else None)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    Draft202012Validator(schema_for(path, method, status)).validate(response.json())
    return response.json()


async def test_answers_are_as_the_page_says() -> None:
    worker = FakeWorker("w", answer=2, drains=True, capabilities=CAPABILITIES)
    async with client(worker, store=new_store()) as asks:
        for method, path, body in ANSWERED.values():
            await answer(asks, method, path, path, body, 200)
        stored = await answer(asks, *ANSWERED["response"][:2], *ANSWERED["response"][1:], 200)
        named, path = f"/v1/responses/{stored['id']}", "/v1/responses/{response}"
        await answer(asks, "GET", named, path, None, 200)
        await answer(asks, "DELETE", named, path, None, 200)
        await answer(asks, "GET", named, path, None, 404)
        await answer(asks, "GET", "/v1/models/tiny", "/v1/models/{model}", None, 200)
        await answer(asks, "GET", "/v1/models/none", "/v1/models/{model}", None, 404)
        page = await answer(asks, "GET", "/openapi.json", "/openapi.json", None, 200)
        assert page == PAGE
        listed = (await answer(asks, "GET", "/fleet/requests?limit=5", "/fleet/requests", None, 200))["requests"]
        path = "/fleet/requests/{request}"
        story = await answer(asks, "GET", f"/fleet/requests/{listed[0]['request_id']}", path, None, 200)
        assert story.items() >= listed[0].items()
        await answer(asks, "GET", "/fleet/requests/unknown", path, None, 404)
        await answer(asks, "POST", "/fleet/workers/unknown/drain", DRAIN, {}, 404)
        await answer(asks, "POST", "/fleet/workers/w/drain", DRAIN, ASKED["drain"][2], 200)
        await answer(asks, "POST", "/fleet/workers/unknown/undrain", UNDRAIN, {}, 404)
        await answer(asks, "POST", "/fleet/workers/w/undrain", UNDRAIN, {}, 200)


async def test_the_state_of_the_fleet_is_as_the_page_says() -> None:
    async with client(FakeWorker("w"), store=new_store()) as asks:
        async with asks.http.stream("GET", "/fleet/events") as response:
            lines = aiter(response.aiter_lines())
            assert [await anext(lines) for _ in range(1)] == ["event: snapshot"]
            shown = orjson.loads((await anext(lines)).removeprefix("data: "))
        schema = PAGE["paths"]["/fleet/events"]["get"]["responses"]["200"]["content"]["text/event-stream"]["schema"]
        data = schema["properties"]["data"]["contentSchema"]
        Draft202012Validator({**data, "components": PAGE["components"]}).validate(shown)


async def test_refusals_are_as_the_page_says() -> None:
    async with client(FakeWorker("w")) as asks:
        for path, methods in PAGE["paths"].items():
            if "post" in methods:
                await answer(asks, "POST", path, path, {"mood": "good"}, 400)
                if path in (DRAIN, UNDRAIN):
                    continue
                known = next(body for _, other, body in ANSWERED.values() if other == path)
                await answer(asks, "POST", path, path, {**known, "model": "none"}, 404)


@pytest.mark.parametrize("kind", [kind for kind in ASKED if ASKED[kind][0] == "POST"])
def test_the_requests_above_are_what_the_page_asks_for(kind: str) -> None:
    _, path, body = ASKED[kind]
    schema = PAGE["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = Draft202012Validator({**schema, "components": PAGE["components"]})
    validator.validate(body)
    assert not validator.is_valid({**body, "mood": "good"})
    assert not validator.is_valid({**body, "model": 7})
