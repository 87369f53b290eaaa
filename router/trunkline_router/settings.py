"""Settings of a router."""

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline_router.policies import PolicyName
from trunkline_runtime.settings import setting


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """See `trunkline-router --help`."""

    workers: tuple[str, ...] = setting(help="workers as host:port, separated by commas")
    host: str = setting("127.0.0.1", help="address to listen on")
    port: int = setting(50051, help="gRPC port; 0 picks a free one", minimum=0, maximum=65535)
    router_id: str = setting("", help="this router's name in logs and at workers; default: host:port")
    max_choices: int = setting(16, help="largest n of a request", minimum=1, maximum=1024)
    policy: str = setting(
        PolicyName.PREDICTED_TTFT.value,
        help="how workers are chosen; all but the first are there for contrast",
        choices=tuple(name.value for name in PolicyName),
    )
    tenants: str = setting(
        "",
        help='JSON file with the terms of tenants: {"acme": {"weight": 3, "lane": "standard"}, "*": {"weight": 1}}; '
        "lane is the highest one that the tenant may use, * is everybody else. The metadata x-trunkline-tenant is "
        "taken at its word: keep the router on a trusted network",
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
    stop_timeout_s: float = setting(3.0, help="time for running requests to finish at SIGTERM", minimum=0.0)


def address_problem(workers: Sequence[str]) -> str | None:
    """What is wrong with --workers, in one line; None where nothing is."""
    if not workers:
        return "--workers names nobody; allowed: host:port, separated by commas"
    for address in workers:
        host, _, port = address.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
            return f"--workers={address} is not host:port; allowed: host:port with a port of 1 to 65535"
    return None
