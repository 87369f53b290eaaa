"""Records of requests, made by hand, and what is counted of them."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from prometheus_client.core import Metric

from tests.router.fleet_of_states import Fleet, prompt_of
from trunkline.v1.worker_pb2 import Timeline
from trunkline_router.access.access import Tenant, Tenants
from trunkline_router.observe.metrics.request_metrics import RequestCounts
from trunkline_router.record.request_record import (
    COMPLETE,
    HTTP,
    AttemptRecord,
    Interval,
    PlacementRecord,
    RequestRecord,
)
from trunkline_router.routing.policy import RoutePlan

NOW_UNIX_S = 1_800_000_000.0
CHAT = "/v1/chat/completions"


@cache
def plan() -> RoutePlan:
    """A decision for w0, which predicts its time."""
    return Fleet(1).route(prompt_of(400)).plan


def timeline(**fields: Any) -> Timeline:
    """Of a choice that waited 0.02 s, had its first token after 0.1 s and ended after 0.5 s."""
    return Timeline(**{"admitted_s": 0.02, "first_token_s": 0.1, "ended_s": 0.5, "device_s": 0.2, **fields})


def attempt(started_s: float = 1.01, **fields: Any) -> AttemptRecord:
    """One that was answered by w0, 0.11 s after its begin, within 0.6 s."""
    values: dict[str, Any] = {
        "first_output_s": started_s + 0.11,
        "last_output_s": started_s + 0.6,
        "ended_s": started_s + 0.6,
        "ended": COMPLETE,
        "price_per_hour": 3.6,
        "timelines": [timeline()],
    }
    values |= fields
    device_s = sum(timeline.device_s for timeline in values["timelines"])
    return AttemptRecord("w0", started_s, device_s=device_s, **values)


def answered(**fields: Any) -> RequestRecord:
    """A request of 400 prompt tokens, 100 of them cached, with an answer of 11 tokens."""
    values: dict[str, Any] = {
        "request_id": "r",
        "started_s": 1.0,
        "started_unix_ns": int(NOW_UNIX_S * 1e9),
        "protocol": HTTP,
        "endpoint": CHAT,
        "trace_id": 0xABC,
        "is_sampled": True,
        "is_exported": True,
        "tenant": "acme",
        "lane": "standard",
        "model": "tiny",
        "prompt_tokens": 400,
        "cached_tokens": 100,
        "choices": 1,
        "max_tokens": 32,
        "completion_tokens": 11,
        "longest_choice_tokens": 11,
        "admitted": Interval(1.001, 1.002),
        "tokenized": Interval(1.002, 1.005),
        "placements": [PlacementRecord(Interval(1.005, 1.009), plan(), 0.08)],
        "attempts": [attempt()],
        "first_token_s": 1.12,
        "ended_s": 1.62,
        "outcome": "stop",
    }
    return RequestRecord(**{**values, **fields})


def refused(reason: str, **fields: Any) -> RequestRecord:
    """A request that no worker saw."""
    nothing: dict[str, Any] = {"completion_tokens": 0, "longest_choice_tokens": 0, "first_token_s": None}
    return answered(**{"outcome": reason, "attempts": [], "placements": [], **nothing, **fields})


def counts(*listed: str) -> RequestCounts:
    """With these tenants in the tenants file."""
    return RequestCounts(Tenants({name: Tenant() for name in listed}), lambda: NOW_UNIX_S)


def values(families: Callable[[], Iterable[Metric]], sample_name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """The samples of this name, by the values of these labels; all other labels are summed over."""
    found: dict[tuple[str, ...], float] = {}
    for family in families():
        for sample in family.samples:
            if sample.name == sample_name:
                key = tuple(sample.labels[label] for label in labels)
                found[key] = found.get(key, 0.0) + sample.value
    return found


def value(families: Callable[[], Iterable[Metric]], sample_name: str) -> float:
    """The sum of the samples of this name."""
    found = values(families, sample_name)
    assert found, f"there is no {sample_name}"
    return found[()]
