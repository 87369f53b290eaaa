"""Which paths and methods the HTTP API answers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.router.cluster import cluster
from tests.router.fake_worker import FakeWorker
from tests.router.http.http_rig import Client, connected_to, error_of, get, post
from trunkline_router.access.gate.places import Places, request_bounds
from trunkline_router.edge.http_call import Edge
from trunkline_router.http_app import HANDLERS_BY_PATH
from trunkline_router.record.error_statuses import is_anthropic

POSTS = [name.removeprefix("POST ") for name in HANDLERS_BY_PATH if name.startswith("POST ") and "{" not in name]


@asynccontextmanager
async def client_of_app() -> AsyncIterator[Client]:
    """A connection to the API of a router that has no workers."""
    async with cluster(edge=Edge) as router, connected_to(router.http_port) as client:
        yield client


def message_of(path: str, body: bytes) -> str:
    """The message of an error in the shape of the path's API."""
    if not is_anthropic(path):
        return str(error_of(body)["message"])
    error = json.loads(body)
    assert error["type"] == "error"
    return str(error["error"]["message"])


@pytest.mark.parametrize("path", POSTS)
async def test_a_path_answers_its_method_and_refuses_others_and_longer_paths(path: str) -> None:
    async with client_of_app() as client:
        client.send(post(b"[]", "Content-Type: application/json", path=f"{path}?a=b"))
        status, headers, body = await client.response()
        assert (status, message_of(path, body)) == (400, "body: is not a JSON object")
        assert headers["x-request-id"]
        client.send(get(path))
        status, headers, body = await client.response()
        assert (status, headers["allow"]) == (405, "POST")
        assert message_of(path, body) == f"{path} does not take GET"
        client.send(post(b"{}", path=f"{path}x"))
        status, _, body = await client.response()
        assert (status, message_of(f"{path}x", body)) == (404, f"there is no {path}x")


async def test_liveness_and_readiness_differ_without_workers() -> None:
    async with client_of_app() as client:
        for path, status in (("/health", 200), ("/ready", 503)):
            client.send(get(path))
            assert (await client.response())[0] == status


NAMED = "X-Request-Id: req-7"
# Each kind of answer to a request whose head the server has read: what is sent, and its status.
ANSWERS = {
    "health": (get("/health", NAMED), 200),
    "health with unusable headers": (get("/health", NAMED, "Authorization: Basic a", "x-trunkline-tenant: a\xff"), 200),
    "ready": (get("/ready", NAMED), 503),
    "version": (get("/version", NAMED), 200),
    "page": (get("/openapi.json", NAMED), 200),
    "models": (get("/v1/models", NAMED), 200),
    "unknown path": (get("/nothing", NAMED), 404),
    "unknown path of Anthropic's": (get("/v1/messages/batches", NAMED), 404),
    "unserved path": (post(b"{}", NAMED, path="/v1/responses/compact"), 404),
    "wrong method": (get("/v1/completions", NAMED), 405),
    "wrong method of a status path": (post(b"{}", NAMED, path="/health"), 405),
    "refused header": (post(b"{}", NAMED, "Authorization: Basic a", path="/v1/completions"), 401),
    "refused body": (post(b"{", NAMED, "Content-Type: application/json", path="/v1/completions"), 400),
    "too large a body": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\nX-Request-Id: req-7\r\n\r\n", 413),
    "too large a body of Anthropic's": (
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999\r\nX-Request-Id: req-7\r\n\r\n",
        413,
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
async def test_every_answer_names_its_request(kind: str) -> None:
    sent, expected = ANSWERS[kind]
    unnamed = sent.replace(b"X-Request-Id: req-7", b"A: b")
    async with cluster(edge=Edge) as router:
        for request in (sent, unnamed, sent.replace(b"req-7", b"no id")):
            async with connected_to(router.http_port) as client:
                client.send(request)
                status, headers, body = await client.response()
                if request is sent:
                    assert (status, headers["x-request-id"]) == (expected, "req-7")
                assert len(headers["x-request-id"]) == (5 if request is sent else 32)
                assert headers["request-id"] == headers["x-request-id"]
                if expected >= 400 and b'"request_id"' in body:
                    assert json.loads(body)["request_id"] == headers["x-request-id"]


async def test_probes_are_answered_while_no_further_request_is_admitted() -> None:
    worker = FakeWorker("a", answer=None)
    async with cluster(worker, edge=Edge) as router:
        router.gate.requests = Places(request_bounds(1, 1), "open requests")
        async with connected_to(router.http_port) as running, connected_to(router.http_port) as client:
            body = b'{"model": "tiny", "prompt": "x"}'
            request = post(body, "Content-Type: application/json", path="/v1/completions")
            running.send(request)
            await worker.arrived.get()
            client.send(request)
            assert (await client.response())[0] == 429
            for path in ("/health", "/ready", "/version", "/openapi.json"):
                client.send(get(path))
                assert (await client.response())[0] == 200, path
