"""Settings of a router."""

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline_router.discovery.address import DNS_PREFIX, is_address
from trunkline_router.gate.open_calls import MAX_CALLS, MAX_TENANT_CALLS
from trunkline_router.routing.routing_policy import PolicyName
from trunkline_router.stores.redis_connection import redis_url_problem
from trunkline_runtime.settings import setting


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """See `trunkline-router --help`."""

    workers: tuple[str, ...] = setting(
        help="workers as host:port, separated by commas; dns:name:port stands for every address that the name has, "
        "looked up again and again"
    )
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(50051, help="gRPC port; 0 picks a free one", minimum=0, maximum=65535)
    router_id: str = setting("", help="this router's name in logs and at workers; default: host:port")
    processes: int = setting(
        1, help="processes that serve the port together; each is a router of its own to workers", minimum=1, maximum=256
    )
    max_connection_age_s: float = setting(
        600.0,
        help="a client's connection that is about this old takes no further requests, and the client opens another "
        "one: so connections spread over processes and routers that came later; 0: never",
        minimum=0.0,
        maximum=1e6,
    )
    max_choices: int = setting(16, help="largest n of a request", minimum=1, maximum=1024)
    max_calls: int = setting(
        MAX_CALLS,
        help="requests that a process has open, seven eighths of them from one host. Beyond that the client with most "
        "requests whose messages have not come loses one, or the newcomer is refused",
        minimum=64,
        maximum=1 << 20,
    )
    max_tenant_calls: int = setting(
        MAX_TENANT_CALLS, help="of these, a named tenant's; further ones are refused", minimum=1, maximum=1 << 20
    )
    policy: str = setting(
        PolicyName.PREDICTED_TTFT.value,
        help="how workers are chosen; all but the first are there for contrast",
        choices=tuple(name.value for name in PolicyName),
    )
    tenants: str = setting(
        "",
        help='JSON file with the terms of tenants: {"acme": {"weight": 3, "lane": "interactive"}, "*": {"weight": 1}}; '
        "lane is the highest one that the tenant may use: standard, unless it is granted interactive. * is everybody "
        "else. requests_per_minute, tokens_per_minute "
        "and tokens_in_flight limit what it may use of the fleet. The metadata x-trunkline-tenant is taken at its "
        "word: keep the router on a trusted network",
    )
    redis_url: str = setting(
        "",
        help="what several routers share lies there, in a single primary that does not evict: "
        "redis://[user:password@]host:port/db, rediss:// for TLS, unix:///path; without one this router shares with "
        "nobody. Where it holds a password, better as TRUNKLINE_REDIS_URL: arguments can be seen by others",
    )
    redis_patience_ms: float = setting(
        5.0,
        help="how long a request may wait for Redis before its router counts it alone; where Redis is far away, two "
        "round trips or more: what is exchanged with it in the background may take four times as long, connecting ten",
        minimum=0.1,
        maximum=1000.0,
    )
    key_prefix: str = setting(
        "trunkline:",
        help="what this fleet's keys in Redis begin with, in braces; two fleets on one Redis need two: with one they "
        "take each other's workers and quotas for their own",
    )
    follow_leases: bool = setting(
        True,
        help="connect also to workers that only other routers' entries in Redis name; whoever may write to Redis can "
        "name one, and is sent prompts. Not needed where each router's --workers lead to all workers",
    )
    quota_when_down: str = setting(
        "open",
        help="quotas while Redis cannot be asked; open: each router counts what it admits itself; closed: requests of "
        "tenants with quotas are refused",
        choices=("open", "closed"),
    )
    grant_key: str = setting(
        "",
        help="secret that workers know too, 32 bytes or more: clients with direct=True are given signed grants, and "
        "stream from the workers themselves; without one nobody is. Better as TRUNKLINE_GRANT_KEY: arguments can be "
        "seen by others",
    )
    max_resumptions: int = setting(
        8, help="how often a request may go on at another worker when its own is lost; 0: never", minimum=0, maximum=64
    )
    inter_token_timeout_s: float = setting(
        10.0,
        help="a worker that has work and says nothing for so long is taken for hung: its requests go on elsewhere",
        minimum=0.1,
        maximum=3600.0,
    )
    slow_start_s: float = setting(
        10.0, help="time in which a worker that has just come gets up to its full share of requests", minimum=0.0
    )
    max_unread_mib: int = setting(
        512,
        help="output that clients have not read yet, of all requests of a process; past it the one that is furthest "
        "behind loses its request",
        minimum=16,
        maximum=1 << 20,
    )
    stop_timeout_s: float = setting(3.0, help="time for running requests to finish at SIGTERM", minimum=0.0)

    @property
    def name(self) -> str:
        return self.router_id or f"{self.host}:{self.port}"


def sharing_problem(redis_url: str, key_prefix: str) -> str | None:
    """What is wrong with --redis-url or --key-prefix, in one line without what may be secret; None where nothing is."""
    if not key_prefix.isascii() or not key_prefix.isprintable() or not key_prefix or set("{} ") & set(key_prefix):
        return f"--key-prefix={key_prefix!r} is not a prefix; allowed: printable ASCII without braces and spaces"
    return redis_url_problem(redis_url) if redis_url else None


def address_problem(workers: Sequence[str]) -> str | None:
    """What is wrong with --workers, in one line; None where nothing is."""
    if not workers:
        return "--workers names nobody; allowed: host:port or dns:name:port, separated by commas"
    for entry in workers:
        if not is_address(entry.removeprefix(DNS_PREFIX)):
            return (
                f"--workers={entry} is not host:port or dns:name:port; "
                "allowed: host:port or dns:name:port with a port of 1 to 65535"
            )
    return None
