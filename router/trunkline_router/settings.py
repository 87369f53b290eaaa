"""Settings of a router."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trunkline.grant import GrantKeys
from trunkline_router.access.gate.places import MAX_CALLS
from trunkline_router.address import DNS_PREFIX, is_address
from trunkline_router.http_settings import HttpSettings
from trunkline_router.identity_settings import IdentitySettings
from trunkline_router.prompts.reasoning_effort import DEFAULT_LIMITS, effort_limits
from trunkline_router.quotas.redis_url import RedisTls, redis_url_problem
from trunkline_router.routing.route_request import PolicyName
from trunkline_router.tls_settings import WorkerTlsSettings
from trunkline_runtime.settings import instance_name, setting
from trunkline_runtime.tls_settings import ServerTlsSettings

ALLOWED_ALIASES = "allowed: NAME=MODEL, where only the last character of NAME may be *"
MOST_PROCESSES = 256
METRICS_OPTION = "--process-metrics-port"
EXIT_CANNOT_START = 2  # the status of a process that cannot start with its settings or files


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """See `trunkline-router --help`."""

    workers: tuple[str, ...] = setting(
        metavar="HOST:PORT,...",
        help="workers as host:port, separated by commas; dns:name:port stands for every address of the name, "
        "looked up repeatedly",
    )
    host: str = setting("127.0.0.1", metavar="HOST", help="address to listen on")
    port: int = setting(50051, help="gRPC port; 0 picks a free one", minimum=0, maximum=65535)
    router_id: str = setting(
        "",
        metavar="NAME",
        help="this router's name in logs, traces, metrics and at workers; default: host:port, with the machine's name "
        "as host if it listens on all addresses",
    )
    processes: int = setting(
        1,
        help="processes that serve the port together; each is a router of its own to workers",
        minimum=1,
        maximum=MOST_PROCESSES,
    )
    process_metrics_port: int = setting(
        -1,
        help="first of the ports at which the processes serve their metrics, at /metrics: process i, counted from 0, "
        "serves its own at this port + i. With several processes, the HTTP port has no metrics. 0: each process picks "
        "a free port, -1: none",
        minimum=-1,
        maximum=65535 - MOST_PROCESSES,
    )
    model_aliases: tuple[str, ...] = setting(
        (),
        metavar="ALIAS=MODEL,...",
        help="further names of models, separated by commas: gpt-4o=my-model, or claude-*=my-model for all names "
        "with this beginning. A model that workers serve under the name itself comes first",
    )
    enforce_calls: bool = setting(
        False,
        help="constrain every answer to a request with tools, so that its calls name a tool and conform to the tool's "
        "schema as far as that can be enforced; by default only answers that must call a tool or may call a strict one",
    )
    reasoning_efforts: tuple[str, ...] = setting(
        DEFAULT_LIMITS,
        metavar="EFFORT=TOKENS,...",
        help="most tokens of reasoning by effort (minimal, low, medium, high, xhigh, max), separated by commas, for "
        "models that reason and whose chat template knows no efforts; others have no limit",
    )
    max_choices: int = setting(16, help="largest n of a request", minimum=1, maximum=1024)
    max_calls: int = setting(
        MAX_CALLS,
        help="requests that a process may have open, at most seven eighths of them from one host, and half of "
        "one named tenant. Beyond that the "
        "client with the most requests whose messages have not arrived loses one, or the new request is refused",
        minimum=64,
        maximum=1 << 20,
    )
    policy: str = setting(
        PolicyName.PREDICTED_TTFT.value,
        help="how workers are chosen; all but the first are for comparison",
        choices=tuple(name.value for name in PolicyName),
    )
    tenants: str = setting(
        "",
        metavar="FILE",
        help='JSON file with the terms of tenants: {"acme": {"weight": 3, "lane": "interactive"}, "*": {"weight": 1}}; '
        "lane is the highest one that the tenant may use, standard by default; * stands for all other tenants. "
        "requests_per_minute, tokens_per_minute and tokens_in_flight limit the tenant's use of the fleet. Without "
        "identities the router believes the metadata x-trunkline-tenant: then keep it on a trusted network",
    )
    redis_url: str = setting(
        "",
        metavar="URL",
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
        metavar="PREFIX",
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
        metavar="SECRET",
        help="secret shared with the workers, 32 bytes or more: clients with direct=True get signed grants and stream "
        "directly from the workers; without it the router gives no grants. Pass it as TRUNKLINE_GRANT_KEY: other "
        "users of the host can see arguments",
    )
    grant_key_previous: str = setting(
        "",
        metavar="SECRET",
        help="another key of the workers, used with those that do not have the grant key yet, while it is being "
        "changed; pass it as TRUNKLINE_GRANT_KEY_PREVIOUS",
    )
    tls: ServerTlsSettings = field(default_factory=ServerTlsSettings)
    worker_tls: WorkerTlsSettings = field(default_factory=WorkerTlsSettings)
    redis_tls: RedisTls = field(default_factory=RedisTls)
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
    trace_slow_ms: float = setting(
        500.0,
        help="if spans are exported, a request that waits for longer than this for its first token, or between two "
        "tokens, is exported even if it was not sampled; 0: slow requests are sampled like others",
        minimum=0.0,
    )
    stop_timeout_s: float = setting(3.0, help="time for running requests to finish at SIGTERM", minimum=0.0)
    http: HttpSettings = field(default_factory=HttpSettings)
    identity: IdentitySettings = field(default_factory=IdentitySettings)

    @property
    def grant_keys(self) -> GrantKeys:
        return GrantKeys.of(self.grant_key, self.grant_key_previous)

    @property
    def name(self) -> str:
        return self.router_id or instance_name(self.host, self.port)


def sharing_problem(redis_url: str, key_prefix: str) -> str | None:
    """Returns what is wrong with --redis-url or --key-prefix, in one line without secrets; None if both are valid."""
    if not key_prefix.isascii() or not key_prefix.isprintable() or not key_prefix or set("{} ") & set(key_prefix):
        return f"--key-prefix={key_prefix!r} is not a prefix; allowed: printable ASCII without braces and spaces"
    return redis_url_problem(redis_url) if redis_url else None


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


def efforts_problem(entries: Sequence[str]) -> str | None:
    """Returns what is wrong with --reasoning-efforts, in one line; None if it is valid."""
    try:
        effort_limits(entries)
    except ValueError as error:
        return str(error)
    return None


def aliases_problem(entries: Sequence[str]) -> str | None:
    """Returns what is wrong with --model-aliases, in one line; None if it is valid."""
    pairs = [(name, model) for name, _, model in (entry.partition("=") for entry in entries)]
    names = [name for name, _ in pairs]
    for entry, (name, model) in zip(entries, pairs, strict=True):
        if not name or not model or "*" in name[:-1] + model or name.strip() != name or model.strip() != model:
            return f"--model-aliases: {entry!r} is no alias; {ALLOWED_ALIASES}"
        if names.count(name) > 1:
            return f"--model-aliases: {name!r} is there twice; each NAME may be there once"
        if model in names:
            return f"--model-aliases: {entry!r}: {model!r} is an alias itself; MODEL must be a served name"
    return None
