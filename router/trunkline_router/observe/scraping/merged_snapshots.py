"""Makes one answer of the metrics of several processes. Pure.

A snapshot is plain data: the families with their samples. Counters and histograms of processes add up. A gauge adds up
too, unless all processes tell the same of the world outside: then the highest or the lowest value counts.
"""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.samples import Exemplar, Sample

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
GAUGE = "gauge"

Snapshot = list[Any]  # families, each [name, type, documentation, samples]; a sample is [name, labels, value, exemplar]


def family_snapshot(family: Metric) -> list[Any]:
    """A family as plain data, which JSON can write: it has no infinite values."""
    samples = [
        [sample.name, sample.labels, sample.value, None if sample.exemplar is None else list(sample.exemplar)]
        for sample in family.samples
        if isfinite(sample.value)
    ]
    return [family.name, family.type, family.documentation, samples]


def without_gauges(snapshot: Snapshot) -> Snapshot:
    """What is left of a process that has ended."""
    return [family for family in snapshot if family[1] != GAUGE]


def merged(snapshots: Iterable[Snapshot]) -> Iterator[Metric]:
    """The families of all snapshots, merged one by one, in the order of their first appearance."""
    parts: dict[str, list[list[Any]]] = {}
    for snapshot in snapshots:
        for family in snapshot:
            parts.setdefault(family[0], []).append(family)
    for families in parts.values():
        yield merged_family(families)


def merged_family(families: list[list[Any]]) -> Metric:
    """One family of the same family of several processes, at least one."""
    name, kind, documentation, _ = families[0]
    merge = _highest if name in HIGHEST else _lowest if name in LOWEST else _sum
    samples: dict[tuple[str, ...], list[Any]] = {}
    for _, _, _, told in families:
        for sample_name, labels, value, exemplar in told:
            key = (sample_name, *labels.values())  # the labels of a family are in one order
            kept = samples.get(key)
            if kept is None:
                samples[key] = [sample_name, labels, value, exemplar]
            else:
                kept[2] = merge(kept[2], value)
                kept[3] = _latest(kept[3], exemplar)
    family = Metric(name, documentation, kind)
    family.samples = [
        Sample(sample_name, labels, value, None, None if exemplar is None else Exemplar(*exemplar))
        for sample_name, labels, value, exemplar in samples.values()
    ]
    return family


def _sum(a: float, b: float) -> float:
    return a + b


def _highest(a: float, b: float) -> float:
    return max(a, b)


def _lowest(a: float, b: float) -> float:
    return min(a, b)


def _latest(a: list[Any] | None, b: list[Any] | None) -> list[Any] | None:
    """The later of two exemplars: labels, value, Unix time."""
    if a is None or b is None:
        return a or b
    return max(a, b, key=lambda exemplar: exemplar[2])
