"""What tests of the router share."""

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack

import pytest

from tests.router.asked_work import Ask, asking
from trunkline_bench.servers.redis_server import RedisServer, redis_executables
from trunkline_router.prompts.helper_pool import Helpers

REDIS_VERSIONS = tuple(redis_executables())


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    return asking(monkeypatch)


@pytest.fixture
async def helpers() -> AsyncIterator[Helpers]:
    """Starts no process unless a conversation is rendered."""
    pool = Helpers()
    yield pool
    await pool.close()


@pytest.fixture(params=REDIS_VERSIONS)
def redis(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """One of each version that there is, for one test alone: it may be killed."""
    with RedisServer(version=request.param) as server:
        yield server


@pytest.fixture(scope="session")
def redis_servers() -> Iterator[dict[str, RedisServer]]:
    """By version, for all tests: each takes a prefix of its own."""
    with ExitStack() as stack:
        yield {version: stack.enter_context(RedisServer(version=version)) for version in REDIS_VERSIONS}


@pytest.fixture(params=REDIS_VERSIONS)
def redis_of_all(request: pytest.FixtureRequest, redis_servers: dict[str, RedisServer]) -> RedisServer:
    """One of them."""
    return redis_servers[request.param]
