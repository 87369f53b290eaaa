"""A flood of forged tokens is refused cheaply, and disturbs neither other hosts nor known callers of the same host."""

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import httpx2

from tests.router.access.callers import Keys, Router, bearer, router_of
from tests.router.cluster import PATIENCE_S
from tests.router.fake_worker import FakeWorker
from tests.router.identity import issuer
from trunkline_router.access.identity.bearer_token import HOST_BURST_S

COST_S = 0.001  # of each verification, by the clock that the router has
OTHER_HOST = "127.0.0.2"
PROMPT = {"prompt": "hi", "max_tokens": 1}


def forged(number: int) -> str:
    """A token of the issuer's key id, signed with another key."""
    return issuer.token(issuer.claims(sub=f"mallory-{number}"), kind="ed25519-other", kid="ed25519")


class Clocks:
    """Wall time stands still; a verification takes COST_S."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._reads = itertools.count()

    def steady_s(self) -> float:
        return self.now_s

    def cpu_s(self) -> float:
        return next(self._reads) * COST_S


async def test_a_flood_of_forged_tokens_is_bounded_and_disturbs_no_other_caller(tmp_path: Path) -> None:
    keys, clocks = Keys(tmp_path / "keys.json"), Clocks()
    key = keys.add()
    async with router_of(keys, FakeWorker("w"), steady_s=clocks.steady_s, cpu_s=clocks.cpu_s) as router:
        known = bearer(issuer.token(issuer.claims(sub="known")))
        assert (await router.complete(known, **PROMPT)).status_code == 200
        statuses = Counter[Any]()
        for number in range(2 * round(HOST_BURST_S / COST_S)):
            if number % 2:
                statuses[(await router.refused(bearer(forged(number)), text="hi")).reason] += 1
            else:
                statuses[(await router.complete(bearer(forged(number)), **PROMPT)).status_code] += 1
        verified = statuses["UNAUTHENTICATED"] + statuses[401]
        assert abs(verified - HOST_BURST_S / COST_S) <= 1
        assert statuses["OVERLOADED"] > 10
        assert statuses[429] > 10

        refused = await router.refused(bearer(forged(-1)), text="hi")
        assert refused.retry_s is not None
        assert 0 < refused.retry_s <= 1
        over_http = await router.complete(bearer(forged(-2)), **PROMPT)
        assert int(over_http.headers["retry-after"]) >= 1
        ready = await router.http.get("/ready", headers=bearer(forged(-3)))
        assert (ready.status_code, ready.headers["retry-after"]) == (429, over_http.headers["retry-after"])

        await assert_served(router, known)
        await assert_served(router, bearer(key))
        fresh = bearer(issuer.token(issuer.claims(sub="fresh")))
        assert (await router.complete(fresh, **PROMPT)).status_code == 429, "of the host of the flood"
        async with of_other_host(router) as other:
            body = {"model": "tiny", **PROMPT}
            assert (await other.post("/v1/completions", json=body, headers=fresh)).status_code == 200
        clocks.now_s += refused.retry_s
        later = bearer(issuer.token(issuer.claims(sub="later")))
        assert (await router.complete(later, **PROMPT)).status_code == 200


async def test_valid_tokens_cost_nothing_of_the_budget(tmp_path: Path) -> None:
    clocks = Clocks()
    async with router_of(
        Keys(tmp_path / "keys.json"), FakeWorker("w"), steady_s=clocks.steady_s, cpu_s=clocks.cpu_s
    ) as router:
        tokens = [issuer.token(issuer.claims(sub=f"user-{number}")) for number in range(150)]
        answers = await asyncio.gather(*(router.http.get("/v1/models", headers=bearer(token)) for token in tokens))
        assert {answer.status_code for answer in answers} == {200}


async def assert_served(router: Router, headers: dict[str, str]) -> None:
    assert (await router.complete(headers, **PROMPT)).status_code == 200
    assert await router.generate(headers, text="hi")


def of_other_host(router: Router) -> httpx2.AsyncClient:
    transport = httpx2.AsyncHTTPTransport(local_address=OTHER_HOST)
    url = f"http://127.0.0.1:{router.inner.http_port}"
    return httpx2.AsyncClient(base_url=url, transport=transport, timeout=PATIENCE_S, trust_env=False)
