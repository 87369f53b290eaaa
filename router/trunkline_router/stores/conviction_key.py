"""What keys the fingerprints of convictions, so that who reads the store learns nothing of the requests."""

import hmac

from redis.asyncio.connection import parse_url

_KEY_DOMAIN = b"trunkline convictions of "


def conviction_key(redis_url: str, key_prefix: str, grant_key: bytes = b"") -> bytes:
    """What the fingerprints of convictions are keyed with, equal in all routers of a fleet; empty where this router is
    alone. It is as secret as the grant key or, without one, the password of their Redis; with neither, no secret at
    all. Of the URL only the password counts: routers may reach one Redis by several names."""
    if not redis_url:
        return b""
    secret = grant_key or str(parse_url(redis_url).get("password", "")).encode()
    return hmac.digest(secret, _KEY_DOMAIN + key_prefix.rstrip(":").encode(), "sha256")
