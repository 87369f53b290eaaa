"""A server that asks for no credentials does not answer web pages whose names lead to it."""

import pytest

from tests.router.http.http_rig import connected, echo, get, serving
from trunkline_router.edge.http.headers import is_local
from trunkline_router.http_app import App
from trunkline_router.record.refused_calls import RefusedCalls


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        *[(host, True) for host in (b"", b"localhost", b"LOCALHOST:8000", b"app.localhost:1", b"127.0.0.1:8000")],
        *[(host, True) for host in (b"[::1]:8000", b"[::1]", b"10.1.2.3")],
        *[(host, False) for host in (b"evil.example", b"evil.example:8000", b"localhost.evil.example", b"127.0.0.1.x")],
        *[(host, False) for host in (b"[evil]:1", b"evil.example:127.0.0.1", b"xlocalhost", b"\xff")],
    ],
)
def test_hosts_that_can_be_a_page_are_told_from_those_that_cannot(host: bytes, wanted: bool) -> None:
    assert is_local(host) == wanted


async def test_a_page_whose_name_leads_here_is_refused() -> None:
    async with (
        serving(App({"GET /": echo}, RefusedCalls(), only_local_hosts=True)) as server,
        connected(server) as client,
    ):
        for host, status in ((b"evil.example:8000", 403), (b"127.0.0.1:8000", 200)):
            client.send(get("/", "X-Request-Id: req-7").replace(b"Host: x", b"Host: " + host))
            got, headers, _ = await client.response()
            assert (got, headers["x-request-id"]) == (status, "req-7")
