"""What the fingerprints of convictions are keyed with."""

import pytest

from trunkline_router.quotas.redis_url import conviction_key

URL = "redis://:secret@demo-redis:6379/0"
GRANT_KEY = b"a key for tests, of thirty-two bytes"


@pytest.mark.parametrize(
    "url",
    [
        "redis://default:secret@demo-redis:6379/0",
        "redis://:secret@demo-redis.llm.svc.cluster.local/0",
        "rediss://:secret@10.0.0.7:6380/2",
        "redis://:%73ecret@demo-redis:6379/0?health_check_interval=10",
        "unix:///run/redis.sock?password=secret",
    ],
)
def test_routers_that_reach_their_redis_by_several_names_have_one_key(url: str) -> None:
    assert conviction_key(url, "llm/demo:") == conviction_key(URL, "llm/demo:")


def test_the_key_hangs_on_the_password_on_the_fleet_and_on_the_grant_key_where_there_is_one() -> None:
    keys = [
        conviction_key(URL, "llm/demo:"),
        conviction_key("redis://:other@demo-redis:6379/0", "llm/demo:"),
        conviction_key("redis://demo-redis:6379/0", "llm/demo:"),
        conviction_key(URL, "llm/other:"),
        conviction_key(URL, "llm/demo:", GRANT_KEY),
        conviction_key(URL, "llm/demo:", GRANT_KEY + b"2"),
    ]
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 32 for key in keys)


def test_with_a_grant_key_who_has_the_password_does_not_have_the_key() -> None:
    assert conviction_key(URL, "llm/demo:", GRANT_KEY) == conviction_key("redis://x", "llm/demo:", GRANT_KEY)


def test_a_router_that_shares_with_nobody_draws_a_key_of_its_own() -> None:
    assert conviction_key("", "llm/demo:", GRANT_KEY) == b""
