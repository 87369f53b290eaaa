"""The key for fingerprints of convictions, which keeps readers of the store from learning about the requests."""

import hmac

from redis.asyncio.connection import parse_url

_KEY_DOMAIN = b"trunkline convictions of "


def conviction_key(redis_url: str, key_prefix: str, grant_key: bytes = b"") -> bytes:
    """The key for fingerprints of convictions: equal in all routers of a fleet, and empty without a Redis.

    It is derived from the grant key or, without one, from the password of Redis; with neither it is not secret. The
    rest of the URL does not matter, because routers may reach the same Redis by several names.
    """
    if not redis_url:
        return b""
    secret = grant_key or str(parse_url(redis_url).get("password", "")).encode()
    return hmac.digest(secret, _KEY_DOMAIN + key_prefix.rstrip(":").encode(), "sha256")
