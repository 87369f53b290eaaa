"""A server that asks for no credentials does not answer web pages whose names lead to it."""

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.openai.openai_rig import client
from trunkline_router.access.access import Access
from trunkline_router.edge.http.headers import is_local


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


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models"])
async def test_a_page_whose_name_leads_here_is_refused(path: str) -> None:
    for access, status in ((Access(), 403), (Access(allows_anonymous=True), 200)):
        async with client(FakeWorker("w"), access=access) as asks:
            for host, wanted in (("evil.example:8000", status), ("127.0.0.1:8000", 200)):
                answer = await asks.http.get(path, headers={"host": host, "x-request-id": "req-7"})
                assert (answer.status_code, answer.headers["x-request-id"]) == (wanted, "req-7")
