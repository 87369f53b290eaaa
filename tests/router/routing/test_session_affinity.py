"""Through real gRPC, with the Python client: under --policy session-affinity a session stays where it is."""

import pytest

from tests.router.cluster import Cluster, cluster
from tests.router.fake_worker import FakeWorker
from trunkline import Client
from trunkline_router.main import router_settings
from trunkline_router.routing.route_request import PolicyName

KEY = b"a key of thirty-two bytes, or so"
POLICY = PolicyName(router_settings(["--workers=127.0.0.1:1", "--policy=session-affinity"]).policy)
SESSIONS = [f"chat-{number}" for number in range(12)]


async def holders(client: Client, turn: int) -> dict[str, str]:
    """Session → the worker of its next request, whose prompt has nothing in common with any other."""
    found = {}
    for number, session in enumerate(SESSIONS):
        done = await client.complete([10 + turn * len(SESSIONS) + number] * 20, session=session)
        found[session] = done.prompt.worker_id
    return found


def of(router: Cluster, *, direct: bool = False, tenant: str = "") -> Client:
    return Client(f"127.0.0.1:{router.port}", direct=direct, tenant=tenant)


@pytest.mark.parametrize("direct", [False, True])
async def test_requests_of_one_session_go_to_one_worker_and_sessions_spread(
    direct: bool, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [FakeWorker(name, grant_key=KEY) for name in "abc"]
    async with cluster(*workers, policy=POLICY, grant_key=KEY) as router, of(router, direct=direct) as client:
        first = await holders(client, 0)
        assert set(first.values()) == {"a", "b", "c"}
        for turn in range(1, 4):
            assert await holders(client, turn) == first
    assert "not direct" not in caplog.text


async def test_a_client_that_turns_direct_finds_its_sessions_where_they_were() -> None:
    workers = [FakeWorker(name, grant_key=KEY) for name in "abc"]
    async with cluster(*workers, policy=POLICY, grant_key=KEY) as router:
        async with of(router) as routed:
            first = await holders(routed, 0)
        async with of(router, direct=True) as direct:
            assert await holders(direct, 1) == first


async def test_sessions_of_two_tenants_have_nothing_to_do_with_one_another() -> None:
    workers = [FakeWorker(name) for name in "abc"]
    async with cluster(*workers, policy=POLICY) as router, of(router, tenant="acme") as acme:
        first = await holders(acme, 0)
        async with of(router, tenant="other") as other:
            assert await holders(other, 1) != first
        assert await holders(acme, 2) == first
