"""Settings of a router."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from trunkline.grant_keys import GrantKeys
from trunkline_router.address import DNS_PREFIX, is_address
from trunkline_router.gate.open_calls import MAX_CALLS, MAX_TENANT_CALLS
from trunkline_router.identity.endpoints import Open
from trunkline_router.routing.routing_policy import PolicyName
from trunkline_router.stores.redis_connection import redis_url_problem
from trunkline_router.tls_settings import RedisTlsSettings, WorkerTlsSettings
from trunkline_runtime.settings import setting
from trunkline_runtime.tls_settings import ServerTlsSettings, is_loopback

ORIGIN = re.compile(r"https?://[^/\s?#@*]+")  # as browsers send it: without a path


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """See `trunkline-router --help`."""

    workers: tuple[str, ...] = setting(
        help="workers as host:port, separated by commas; dns:name:port stands for every address of the name, "
        "looked up repeatedly"
    )
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(50051, help="gRPC port; 0 picks a free one", minimum=0, maximum=65535)
    router_id: str = setting("", help="this router's name in logs and at workers; default: host:port")
    processes: int = setting(
        1, help="processes that serve the port together; each is a router of its own to workers", minimum=1, maximum=256
    )
    max_connection_age_s: float = setting(
        600.0,
        help="age at which a client's connection takes no further requests, and the client opens another one: so "
        "connections spread to processes and routers that started later; 0: never",
        minimum=0.0,
        maximum=1e6,
    )
    max_choices: int = setting(16, help="largest n of a request", minimum=1, maximum=1024)
    max_calls: int = setting(
        MAX_CALLS,
        help="requests that a process may have open, at most seven eighths of them from one host. Beyond that the "
        "client with the most requests whose messages have not arrived loses one, or the new request is refused",
        minimum=64,
        maximum=1 << 20,
    )
    max_tenant_calls: int = setting(
        MAX_TENANT_CALLS, help="open requests of a named tenant; further ones are refused", minimum=1, maximum=1 << 20
    )
    policy: str = setting(
        PolicyName.PREDICTED_TTFT.value,
        help="how workers are chosen; all but the first are for comparison",
        choices=tuple(name.value for name in PolicyName),
    )
    tenants: str = setting(
        "",
        help='JSON file with the terms of tenants: {"acme": {"weight": 3, "lane": "interactive"}, "*": {"weight": 1}}; '
        "lane is the highest one that the tenant may use, standard by default; * stands for all other tenants. "
        "requests_per_minute, tokens_per_minute and tokens_in_flight limit the tenant's use of the fleet. Without "
        "identities the router believes the metadata x-trunkline-tenant: then keep it on a trusted network",
    )
    redis_url: str = setting(
        "",
        help="Redis for the state that several routers share, a single primary that does not evict: "
        "redis://[user:password@]host:port/db, rediss:// for TLS, unix:///path; without it this router shares no "
        "state. Pass a URL with a password as TRUNKLINE_REDIS_URL: other users of the host can see arguments",
    )
    redis_patience_ms: float = setting(
        5.0,
        help="how long a request may wait for Redis before its router decides alone; at least two round trips to "
        "Redis. Background exchanges with Redis may take four times as long, connecting ten times",
        minimum=0.1,
        maximum=1000.0,
    )
    key_prefix: str = setting(
        "trunkline:",
        help="prefix of this fleet's keys in Redis, written in braces; fleets that share a Redis need different ones, "
        "or they take each other's workers and quotas for their own",
    )
    follow_leases: bool = setting(
        True,
        help="also connect to workers that only other routers' entries in Redis name; any process that can write to "
        "Redis can then name a worker and be sent prompts. Not needed if each router's --workers names all workers",
    )
    quota_when_down: str = setting(
        "open",
        help="quotas while Redis is unreachable; open: each router counts what it admits itself; closed: requests of "
        "tenants with quotas are refused",
        choices=("open", "closed"),
    )
    grant_key: str = setting(
        "",
        help="secret shared with the workers, 32 bytes or more: clients with direct=True get signed grants and stream "
        "directly from the workers; without it the router gives no grants. Pass it as TRUNKLINE_GRANT_KEY: other "
        "users of the host can see arguments",
    )
    grant_key_previous: str = setting(
        "",
        help="another key of the workers, used with those that do not have the grant key yet, while it is being "
        "changed; pass it as TRUNKLINE_GRANT_KEY_PREVIOUS",
    )
    tls: ServerTlsSettings = field(default_factory=ServerTlsSettings)
    worker_tls: WorkerTlsSettings = field(default_factory=WorkerTlsSettings)
    redis_tls: RedisTlsSettings = field(default_factory=RedisTlsSettings)
    max_resumptions: int = setting(
        8,
        help="how often a request may continue on another worker when its own is lost; 0: never",
        minimum=0,
        maximum=64,
    )
    inter_token_timeout_s: float = setting(
        10.0,
        help="a worker that has work and sends nothing for so long counts as hung: its requests continue elsewhere",
        minimum=0.1,
        maximum=3600.0,
    )
    slow_start_s: float = setting(
        10.0, help="time in which a new worker reaches its full share of requests", minimum=0.0
    )
    max_unread_mib: int = setting(
        512,
        help="limit on the output of a process that clients have not read yet; beyond it the client that is furthest "
        "behind loses its request",
        minimum=16,
        maximum=1 << 20,
    )
    stop_timeout_s: float = setting(3.0, help="time for running requests to finish at SIGTERM", minimum=0.0)
    http_port: int = setting(8000, help="HTTP port; 0 picks a free one, -1: no HTTP", minimum=-1, maximum=65535)
    http_keep_alive_s: float = setting(
        75.0, help="time after which an HTTP connection without requests is closed", minimum=1.0, maximum=3600.0
    )
    http_head_timeout_s: float = setting(
        10.0, help="time in which the headers of an HTTP request must arrive", minimum=0.1, maximum=600.0
    )
    http_body_timeout_s: float = setting(
        30.0, help="time in which the body of an HTTP request must arrive after its headers", minimum=0.1, maximum=600.0
    )
    sse_keep_alive_s: float = setting(
        15.0,
        help="a streamed HTTP response without output gets a comment after this time, because proxies cut silent "
        "connections; 0: never",
        minimum=0.0,
        maximum=3600.0,
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        help="origins whose web pages may use the HTTP port from a browser, such as https://chat.example.com, "
        "separated by commas; * stands for all; by default none",
    )

    allow_unknown_fields: bool = setting(
        False, help="ignore unknown fields of HTTP requests, and name them in the response header x-trunkline-warning"
    )
    max_stored_responses: int = setting(
        0,
        help="responses of a tenant that /v1/responses keeps, so that clients can retrieve and continue them; 0: none. "
        "Beyond it the oldest goes. They are in this process's memory alone: --processes must be 1, and behind a load "
        "balancer a client must stay on one router",
        minimum=0,
        maximum=1 << 20,
    )
    max_stored_mib: int = setting(
        64,
        help="memory for stored responses, of which a tenant can use a quarter; beyond it the oldest go",
        minimum=1,
        maximum=1 << 20,
    )
    response_ttl_s: float = setting(
        3600.0, help="how long a stored response is kept", minimum=1.0, maximum=30 * 86400.0
    )

    # Identity
    api_keys: str = setting(
        "",
        help="JSON file with API keys, written by trunkline keys create --file; a change counts within a second",
    )
    api_keys_in_redis: bool = setting(
        False,
        help="use the API keys that trunkline keys create --redis-url has written; needs --redis-url and the fleet's "
        "secret. While Redis is unreachable, the keys that a router knows stay valid",
    )
    fleet_secret: str = setting(
        "",
        help="secret of all routers of the fleet, 32 bytes or more: seals API keys in Redis and keeps tenants from "
        "computing each other's cache salts. Pass it as TRUNKLINE_FLEET_SECRET or as a file: other users of the host "
        "can see arguments",
    )
    fleet_secret_file: str = setting(
        "",
        help="file with the fleet's secret, in place of --fleet-secret. Each further line has an earlier secret, which "
        "still opens what it has sealed",
    )
    jwt_jwks: str = setting(
        "",
        help="public keys (JWKS) of the issuer of tokens (JWT): a file, which is watched, or an https URL, which is "
        "asked every five minutes; http is allowed for loopback addresses",
    )
    jwt_issuer: str = setting("", help="the claim iss that tokens must have; required with --jwt-jwks")
    jwt_audience: tuple[str, ...] = setting(
        (), help="names of this service, separated by commas: the claim aud must have one; required with --jwt-jwks"
    )
    jwt_clock_skew_s: float = setting(
        60.0, help="how far the issuer's clock may be off: tokens count for so long before and after", minimum=0.0,
        maximum=600.0,
    )  # fmt: skip
    jwt_jwks_max_age_s: float = setting(
        86400.0,
        help="how long the keys of a URL stay valid if it cannot be fetched again; then tokens are refused",
        minimum=60.0,
        maximum=1e7,
    )
    jwt_tenant_claim: str = setting("tenant", help="claim with the tenant; a name with dots may be a path")
    jwt_roles_claim: str = setting(
        "roles",
        help="claim with the roles user, operator and scraper, others are ignored: a list, or a text with spaces "
        "between them; a name with dots may be a path. A token without the claim has the role user",
    )
    jwt_claim_prefix: str = setting(
        "",
        help="what the names of the claims acts_for, lane, models, quotas, may_salt and sees_cache begin with, such as "
        "https://acme.example/",
    )

    allow_anonymous: bool = setting(
        False,
        help="serve callers without credentials. With API keys or tokens, such callers have the role user and no "
        "tenant; without, every caller may do everything, which is otherwise allowed on a loopback address only",
    )
    open: tuple[str, ...] = setting(
        (),
        help="what callers without credentials may call in any case, separated by commas: "
        + ", ".join(name.value for name in Open)
        + "; liveness is always open",
    )

    @property
    def grant_keys(self) -> GrantKeys:
        return GrantKeys.of(self.grant_key, self.grant_key_previous)

    @property
    def name(self) -> str:
        return self.router_id or f"{self.host}:{self.port}"


def sharing_problem(redis_url: str, key_prefix: str) -> str | None:
    """Returns what is wrong with --redis-url or --key-prefix, in one line without secrets; None if both are valid."""
    if not key_prefix.isascii() or not key_prefix.isprintable() or not key_prefix or set("{} ") & set(key_prefix):
        return f"--key-prefix={key_prefix!r} is not a prefix; allowed: printable ASCII without braces and spaces"
    return redis_url_problem(redis_url) if redis_url else None


def storing_problem(settings: RouterSettings) -> str | None:
    """Returns why responses cannot be stored with these settings, in one line; None if they can, or are not."""
    if not settings.max_stored_responses or settings.processes == 1:
        return None
    return (
        f"--max-stored-responses={settings.max_stored_responses} needs --processes=1, not {settings.processes}: a "
        "process keeps its responses in its own memory, where requests that reach another process do not find them"
    )


def cors_problem(origins: Sequence[str]) -> str | None:
    """Returns what is wrong with --cors-origins, in one line; None if it is valid."""
    for origin in origins:
        if origin != "*" and ORIGIN.fullmatch(origin) is None:
            return f"--cors-origins={origin} is not an origin; allowed: *, or http:// or https:// with a host and port"
    return None


def address_problem(workers: Sequence[str]) -> str | None:
    """Returns what is wrong with --workers, in one line; None if it is valid."""
    if not workers:
        return "--workers names no worker; allowed: host:port or dns:name:port, separated by commas"
    for entry in workers:
        if not is_address(entry.removeprefix(DNS_PREFIX)):
            return (
                f"--workers={entry} is not host:port or dns:name:port; "
                "allowed: host:port or dns:name:port with a port of 1 to 65535"
            )
    return None


def identity_problem(settings: RouterSettings) -> str | None:
    """Returns what is wrong with the settings of identities, in one line without secrets; None if they are valid."""
    if settings.api_keys_in_redis and not settings.redis_url:
        return "--api-keys-in-redis needs --redis-url"
    if settings.api_keys_in_redis and not (settings.fleet_secret or settings.fleet_secret_file):
        return "--api-keys-in-redis needs the fleet's secret: set TRUNKLINE_FLEET_SECRET or --fleet-secret-file"
    if not settings.jwt_jwks:
        return None
    for name, value in (("issuer", settings.jwt_issuer), ("audience", settings.jwt_audience)):
        if not value:
            return f"--jwt-jwks needs --jwt-{name}: without it, tokens for other services would count here"
    if is_url(settings.jwt_jwks):
        return _jwks_url_problem(settings.jwt_jwks)
    return None


def exposure_problem(settings: RouterSettings) -> str | None:
    """Returns why the router would be open to strangers, or what is wrong with --open; None if nothing is."""
    allowed = [name.value for name in Open]
    for name in settings.open:
        if name not in allowed:
            return f"--open={name} is not known; allowed: {', '.join(allowed)}"
    has_identities = settings.api_keys or settings.api_keys_in_redis or settings.jwt_jwks
    if has_identities or settings.allow_anonymous or is_loopback(settings.host):
        return None
    return (
        f"--host={settings.host} can be reached from other machines, and callers need no credentials: set --api-keys, "
        "--api-keys-in-redis or --jwt-jwks, or --allow-anonymous to serve every caller"
    )


def is_url(place: str) -> bool:
    """Whether --jwt-jwks is a URL; otherwise it is a file."""
    return "://" in place


def _jwks_url_problem(url: str) -> str | None:
    allowed = "allowed: a file, https://host/path, or http://127.0.0.1:port/path"
    try:
        parts = urlsplit(url)
        fits = bool(parts.hostname) and parts.port != 0
    except ValueError:
        return f"--jwt-jwks is not a URL; {allowed}"
    if not fits or parts.scheme not in ("https", "http"):
        return f"--jwt-jwks is not a URL; {allowed}"
    if parts.username or parts.password:
        return f"--jwt-jwks has a user or password; {allowed}"
    if parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        return f"--jwt-jwks is an http URL: its keys could be replaced on the way; {allowed}"
    return None
