"""Where Redis is, and TLS to it. Settings are checked with these, so redis is imported only if there is a URL."""

import hmac
import ssl
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from trunkline.tls_files import read_authorities, read_pair
from trunkline_runtime.settings import setting
from trunkline_runtime.tls_settings import is_loopback, pair_problem

_KEY_DOMAIN = b"trunkline convictions of "
SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class RedisTls:
    """Settings of TLS to Redis. Each connection reads the files again."""

    redis_tls_ca: str = setting(
        "",
        metavar="FILE",
        help="file with the authorities of Redis's certificate, in PEM, for rediss://; default: the system's",
    )
    redis_tls_cert: str = setting(
        "",
        metavar="FILE",
        help="file with the certificate that the router presents to Redis, in PEM; read for each connection",
    )
    redis_tls_key: str = setting(
        "", metavar="FILE", help="file with the key of --redis-tls-cert, in PEM, not encrypted"
    )

    def problem(self, redis_url: str, *, allow_plaintext: bool) -> str | None:
        """What is wrong with these settings, in one line without secrets; None if they can be used."""
        problem = pair_problem("--redis-tls-cert", self.redis_tls_cert, "--redis-tls-key", self.redis_tls_key)
        url = urlsplit(redis_url)
        if problem or url.scheme == "rediss":
            return problem
        for flag, value in (("--redis-tls-ca", self.redis_tls_ca), ("--redis-tls-cert", self.redis_tls_cert)):
            if value:
                return f"{flag} needs a --redis-url that begins with rediss://"
        if not redis_url or url.scheme == "unix" or allow_plaintext or is_loopback(url.hostname or ""):
            return None
        return "--redis-url is not on the loopback interface: use rediss://, or permit plaintext with --allow-plaintext"

    def check(self) -> None:
        """Raises TlsFileError if a file cannot be used now."""
        if self.redis_tls_ca:
            read_authorities(self.redis_tls_ca)
        if self.redis_tls_cert:
            read_pair(self.redis_tls_cert, self.redis_tls_key)

    def options(self) -> dict[str, Any]:
        """Of a connection. Those in the URL, such as ssl_cert_reqs, take precedence."""
        return {
            "ssl_ca_certs": self.redis_tls_ca or None,
            "ssl_certfile": self.redis_tls_cert or None,
            "ssl_keyfile": self.redis_tls_key or None,
            "ssl_check_hostname": True,
            "ssl_min_version": ssl.TLSVersion.TLSv1_2,
        }


PUBLIC_AUTHORITIES = RedisTls()  # the system's, without a certificate of the router's own


def redis_url_problem(url: str) -> str | None:
    """What is wrong with --redis-url, or None. The message does not repeat the URL, which may contain a password."""
    allowed = "allowed: redis://[user:password@]host:port/db, rediss:// for TLS, unix:///path"
    try:
        parts = urlsplit(url)
        has_target = bool(parts.path if parts.scheme == "unix" else parts.hostname)
        fits = parts.scheme in SCHEMES and has_target and parts.port != 0
    except ValueError:
        fits = False
    if not fits:
        return f"--redis-url is not the URL of a Redis; {allowed}"
    from redis.asyncio import ConnectionPool  # most routers start without Redis, and its import takes 0.3 s
    from redis.exceptions import RedisError

    try:
        ConnectionPool.from_url(url)
    except (ValueError, TypeError, RedisError):
        return f"--redis-url has an invalid option; {allowed}"
    return None


def place_of(url: str) -> str:
    """The host and port, or the socket path, of the URL, for logs."""
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"


def conviction_key(redis_url: str, key_prefix: str, grant_key: bytes = b"") -> bytes:
    """The key for fingerprints of convictions: equal in all routers of a fleet, and empty without a Redis.

    It is derived from the grant key or, without one, from the password of Redis; with neither it is not secret. The
    rest of the URL does not matter, because routers may reach the same Redis by several names.
    """
    if not redis_url:
        return b""
    from redis.asyncio.connection import parse_url  # see redis_url_problem

    secret = grant_key or str(parse_url(redis_url).get("password", "")).encode()
    return hmac.digest(secret, _KEY_DOMAIN + key_prefix.rstrip(":").encode(), "sha256")
