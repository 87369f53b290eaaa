"""An hour of made-up metrics of a fleet with one router, and an hour of the same fleet with two routers."""

import re
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

from tests.deploy.observability import dashboard_queries, promtool, rules
from tests.metrics_page import Row, rows

HOUR_S = 3600
EVERY_S = 120
ONE_FROM_UNIX_S = 1_767_225_600  # 2026; full hours, each in a block of Prometheus's own
TWO_FROM_UNIX_S = ONE_FROM_UNIX_S + 2 * HOUR_S
ONE_UNIX_S, TWO_UNIX_S = ONE_FROM_UNIX_S + HOUR_S, TWO_FROM_UNIX_S + HOUR_S  # the ends of both

BOUNDS = ("0.5", "1.0", "+Inf")
VALUES = {
    "model_name": {"small", "large"},
    "gen_ai_request_model": {"small", "large"},
    "lane": {"interactive", "standard"},
    "worker": {"w1", "w2"},
}
OF_TENANTS = {"router": {"acme", "refused"}, "worker": {"acme", "direct"}}
# Each router tells these of each worker, whatever the others tell. The rest of what is a sum over processes is one over
# routers, too: a second one takes half of the requests.
OF_EACH_ROUTER = {
    "trunkline_router_worker_state",
    "trunkline_router_processes",
    *(f"trunkline_router_worker_{name}_total" for name in ("connections", "losses", "hangs", "breaker_openings")),
}

Series = tuple[str, float, bool]  # name with labels; value, or growth per second; whether it grows


def write_blocks(folder: Path) -> Path:
    """Makes a folder of data for Prometheus. Fails if promtool refuses it."""
    lines = [*_hour(ONE_FROM_UNIX_S, ["a"]), *_hour(TWO_FROM_UNIX_S, ["a", "b"]), "# EOF\n"]
    (folder / "metrics.txt").write_text("".join(lines))
    promtool("tsdb", "create-blocks-from", "openmetrics", "metrics.txt", "data", folder=folder)
    return folder / "data"


def _hour(from_unix_s: int, routers: list[str]) -> Iterator[str]:
    for name, value, grows in _fleet(routers):
        for passed_s in range(0, HOUR_S + 1, EVERY_S):
            yield f"{name} {value * passed_s if grows else value} {from_unix_s + passed_s}\n"


def _fleet(routers: list[str]) -> Iterator[Series]:
    values = _values()
    for row in rows("router"):
        told_by_each = row.rule != "sum" or row.name in OF_EACH_ROUTER
        share = 1.0 if told_by_each else 1 / len(routers)
        for router in routers:
            yield from _series(row, "router", values, {"job": "trunkline-router", "instance": router}, share)
    for row in rows("worker"):
        for worker in sorted(VALUES["worker"]):
            target = {"job": "trunkline-worker", "instance": f"{worker}:9101", "worker": worker}
            yield from _series(row, "worker", values, target, 1.0)
    for router in routers:
        yield f'up{{job="trunkline-router",instance="{router}"}}', 1.0, False


def _series(row: Row, part: str, values: dict[str, set[str]], target: dict[str, str], share: float) -> Iterator[Series]:
    """The series of a metric at a target. Each has a value of its own, so that none can stand for another."""
    values = values | {"tenant": OF_TENANTS[part]}
    for number, chosen in enumerate(product(*(sorted(values.get(label, {"x"})) for label in row.labels)), 1):
        labels = target | dict(zip(row.labels, chosen, strict=True))
        if row.kind == "histogram":
            for bucket, bound in enumerate(BOUNDS, 1):
                yield _named(f"{row.name}_bucket", labels | {"le": bound}), share * number * bucket, True
            yield _named(f"{row.name}_sum", labels), share * number, True
            yield _named(f"{row.name}_count", labels), share * number * len(BOUNDS), True
        else:
            yield _named(row.name, labels), share * number, row.kind == "counter"


def _named(name: str, labels: dict[str, str]) -> str:
    told = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{told}}}"


def _values() -> dict[str, set[str]]:
    """Values by label: also those that queries ask for."""
    found = {label: set(values) for label, values in VALUES.items()}
    for expr in _queries():
        for label, given in re.findall(r'(\w+)(?:=~|!=|=)"([^"$]+)"', expr):
            if label not in ("job", "le"):
                found.setdefault(label, {"x"}).update(given.split("|"))
    return found


def _queries() -> Iterable[str]:
    yield from (asked.expr for asked in dashboard_queries())
    yield from (rule["expr"] for rule in rules())
