"""What is left of quotas is told as Anthropic tells it."""

import time
from datetime import UTC, datetime

from tests.router.anthropic.messages_client import HI, client
from tests.router.fake_worker import FakeWorker
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.edge.http.headers import rate_limit_headers
from trunkline_router.edge.http.server import EXPOSED_HEADERS
from trunkline_router.quotas.quota import Quotas, RateLimit

NOW_S = datetime(2026, 2, 28, 23, 59, 30, tzinfo=UTC).timestamp() + 0.25
LIMITS = [RateLimit("requests", 60, 59, 60_000), RateLimit("tokens", 1000, 990, 30_000)]


def test_limits_have_the_names_and_the_times_of_each_api() -> None:
    assert [(name.decode(), value.decode()) for name, value in rate_limit_headers(LIMITS, "/v1/messages", NOW_S)] == [
        ("anthropic-ratelimit-requests-limit", "60"),
        ("anthropic-ratelimit-requests-remaining", "59"),
        ("anthropic-ratelimit-requests-reset", "2026-03-01T00:00:31Z"),
        ("anthropic-ratelimit-tokens-limit", "1000"),
        ("anthropic-ratelimit-tokens-remaining", "990"),
        ("anthropic-ratelimit-tokens-reset", "2026-03-01T00:00:01Z"),
    ]
    for path in ("/v1/chat/completions", "/v1/messages2", "/tokenize"):
        named = dict(rate_limit_headers(LIMITS, path, NOW_S))
        assert len(named) == 6
        assert named[b"x-ratelimit-remaining-tokens"] == b"990"
        assert named[b"x-ratelimit-reset-requests"] == b"60s"


def test_pages_of_other_origins_may_read_them() -> None:
    for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/completions"):
        assert {name.decode() for name, _ in rate_limit_headers(LIMITS, path, NOW_S)} <= set(EXPOSED_HEADERS)


async def test_messages_counts_and_refusals_tell_what_is_left() -> None:
    tenants = Tenants(otherwise=Tenant(quotas=Quotas(requests_per_minute=2, tokens_per_minute=5000)))
    async with client(FakeWorker("w"), tenants=tenants) as messages:
        answers = [
            await messages.post(),
            await messages.http.post("/v1/messages/count_tokens", json={"messages": [HI]}),
            await messages.post(),
        ]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    for answer, left in zip(answers, (1, 0, 0), strict=True):
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "2"
        assert answer.headers["anthropic-ratelimit-requests-remaining"] == str(left)
        assert answer.headers["anthropic-ratelimit-tokens-limit"] == "5000"
        for of in ("requests", "tokens"):
            reset = datetime.fromisoformat(answer.headers[f"anthropic-ratelimit-{of}-reset"])
            assert reset.tzinfo == UTC
            assert -5 < reset.timestamp() - time.time() < 62
