"""Which paths and methods the HTTP API answers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.router.cluster import cluster
from tests.router.http.http_rig import Client, connected_to, error_of, get, post
from trunkline_router.edge.http_call import Edge
from trunkline_router.http.errors import is_anthropic
from trunkline_router.http_app import HANDLERS_BY_PATH

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
        client.send(get("/health") + get("/ready"))
        assert [(await client.response())[0] for _ in range(2)] == [200, 503]
