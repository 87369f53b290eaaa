"""Which paths and methods the HTTP API answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any, cast

import pytest

from tests.router.http.http_rig import Client, connected, error_of, get, post, serving
from trunkline_router.edge.http_call import Edge
from trunkline_router.gate.request_gate import RequestGate
from trunkline_router.http_app import HANDLERS_BY_PATH, http_app
from trunkline_router.request.access import Access
from trunkline_router.workers.pool import Pools

POSTS = [name.removeprefix("POST ") for name in HANDLERS_BY_PATH if name.startswith("POST ") and "{" not in name]


@asynccontextmanager
async def client_of_app() -> AsyncIterator[Client]:
    """A connection to the API of a router whose requests are refused before they need its workers."""
    access = Access()
    edge = Edge(cast(Any, None), access, RequestGate(Pools(Random(1)), access))
    async with serving(http_app(edge, is_ready=lambda: False)) as server, connected(server) as client:
        yield client


@pytest.mark.parametrize("path", POSTS)
async def test_a_path_answers_its_method_and_refuses_others_and_longer_paths(path: str) -> None:
    async with client_of_app() as client:
        client.send(post(b"[]", "Content-Type: application/json", path=f"{path}?a=b"))
        status, headers, body = await client.response()
        assert (status, error_of(body)["message"]) == (400, "body: is not a JSON object")
        assert headers["x-request-id"]
        client.send(get(path))
        status, headers, body = await client.response()
        assert (status, headers["allow"]) == (405, "POST")
        assert error_of(body)["message"] == f"{path} does not take GET"
        client.send(post(b"{}", path=f"{path}x"))
        status, _, body = await client.response()
        assert (status, error_of(body)["message"]) == (404, f"there is no {path}x")


async def test_liveness_and_readiness_differ_without_workers() -> None:
    async with client_of_app() as client:
        client.send(get("/health") + get("/ready"))
        assert [(await client.response())[0] for _ in range(2)] == [200, 503]
