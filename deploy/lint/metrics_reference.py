"""Writes the tables of docs/metrics.md from the metrics that a router and a worker make; --check only compares."""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric

from deploy.lint.generated_part import update
from trunkline.v1.worker_pb2 import GetModelResponse
from trunkline_router.access.access import Access
from trunkline_router.assembly import build
from trunkline_router.http_settings import HttpSettings
from trunkline_router.settings import RouterSettings
from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.tracing import open_tracing
from trunkline_worker.front.metrics_port import MetricsSources
from trunkline_worker.front.session import Backlog
from trunkline_worker.front.telemetry.worker_metrics import WorkerMetrics

# How values of several processes and routers become one, if not by summing them up: these are of the same thing.
HIGHEST = frozenset(
    {
        *("trunkline_router_build_info", "trunkline_router_event_loop_lag_seconds", "trunkline_router_neighbours"),
        *("trunkline_router_fleet_price_per_hour", "trunkline_router_pool_workers", "trunkline_router_ready"),
        *("trunkline_router_quarantined", "trunkline_router_quota_limit", "trunkline_router_quota_used"),
        *("trunkline_router_worker_clock_skew_seconds", "trunkline_router_worker_index_age_seconds"),
        *("trunkline_router_worker_index_blocks", "trunkline_router_worker_routed_by_load"),
    }
)
LOWEST = frozenset(
    {
        *("trunkline_certificate_expires_in_seconds", "trunkline_certificate_lifetime_seconds"),
        *("trunkline_router_redis_reachable", "trunkline_router_worker_index_accuracy", "process_start_time_seconds"),
    }
)
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


async def router_families() -> list[Metric]:
    """Those of a router without workers."""
    router = build(RouterSettings(("127.0.0.1:1",), http=HttpSettings(http_port=-1)), Access(), open_tracing("docs"))
    families = list(await router.collect())
    await router.server.stop(0)
    await router.shared.close()
    await router.helpers.close()
    return families


async def worker_families() -> list[Metric]:
    """Those of a worker that has done nothing."""
    sources = MetricsSources(WorkerMetrics(GetModelResponse()), LoopLag(), Backlog())
    return list(await sources.collect())


def table(families: Iterable[Metric], *, with_rule: bool) -> str:
    """A Markdown table with one row for each family."""
    rows = [_row(family, with_rule=with_rule) for family in families]
    heads = ["metric", "type", *(["over processes"] if with_rule else []), "labels", "meaning"]
    return "\n".join([f"| {' | '.join(heads)} |", "|---" * len(heads) + "|", *rows]) + "\n"


def _row(family: Any, *, with_rule: bool) -> str:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    rule = "highest" if family.name in HIGHEST else "lowest" if family.name in LOWEST else "sum"
    labels = ", ".join(f"`{label}`" for label in family._labelnames)
    cells = [f"`{name}`", family.type, *([rule] if with_rule else []), labels, family.documentation]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    of_router, of_worker = asyncio.run(router_families()), asyncio.run(worker_families())
    update(PAGE, "router", f"\n{table(of_router, with_rule=True)}\n", "make metrics-reference")
    update(PAGE, "worker", f"\n{table(of_worker, with_rule=False)}\n", "make metrics-reference")


if __name__ == "__main__":
    main()
