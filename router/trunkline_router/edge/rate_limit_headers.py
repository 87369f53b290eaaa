"""What is left of a tenant's quotas, in the headers that clients of each API read."""

import math
from collections.abc import Iterable
from datetime import UTC, datetime

from trunkline_router.quotas.quota import RateLimit
from trunkline_router.record.error_statuses import ANTHROPIC_PATH, Header


def rate_limit_headers(limits: Iterable[RateLimit], path: str, now_unix_s: float) -> list[Header]:
    """Returns the headers for a response of the API that the path belongs to."""
    if path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/"):
        return [header for limit in limits for header in _anthropic(limit, now_unix_s)]
    return [header for limit in limits for header in _openai(limit)]


def _openai(limit: RateLimit) -> list[Header]:
    return [
        _header(f"x-ratelimit-limit-{limit.of}", str(limit.limit)),
        _header(f"x-ratelimit-remaining-{limit.of}", str(limit.remaining)),
        _header(f"x-ratelimit-reset-{limit.of}", f"{limit.reset_ms / 1e3:g}s"),
    ]


def _anthropic(limit: RateLimit, now_unix_s: float) -> list[Header]:
    """The reset is a time of RFC 3339 in whole seconds, rounded up."""
    reset = datetime.fromtimestamp(math.ceil(now_unix_s + limit.reset_ms / 1e3), UTC)
    return [
        _header(f"anthropic-ratelimit-{limit.of}-limit", str(limit.limit)),
        _header(f"anthropic-ratelimit-{limit.of}-remaining", str(limit.remaining)),
        _header(f"anthropic-ratelimit-{limit.of}-reset", reset.strftime("%Y-%m-%dT%H:%M:%SZ")),
    ]


def _header(name: str, value: str) -> Header:
    return name.encode(), value.encode()
