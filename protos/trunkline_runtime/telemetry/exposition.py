"""Metrics as text, in pieces, so that a long answer delays no stream."""

import asyncio
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from trunkline_runtime.telemetry.bucket_counts import BucketCounts

Families = Iterable[Metric]
Samples = Iterable[tuple[Sequence[str], float]]  # label values, and a value
OPENMETRICS_END = b"# EOF\n"


def gauge(name: str, documentation: str, labels: Sequence[str], samples: Samples) -> Metric:
    """A family of values that go up and down."""
    family = GaugeMetricFamily(name, documentation, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def counter(name: str, documentation: str, labels: Sequence[str], samples: Samples) -> Metric:
    """A family of values that only grow. Its samples are called name_total."""
    family = CounterMetricFamily(name, documentation, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def histogram(
    name: str, documentation: str, labels: Sequence[str], samples: Iterable[tuple[Sequence[str], BucketCounts]]
) -> Metric:
    """A family of histograms."""
    family = HistogramMetricFamily(name, documentation, labels=labels)
    for values, counts in samples:
        family.add_metric(values, counts.cumulative(), counts.sum)
    return family


async def exposition(families: Families, accept: str) -> tuple[bytes, str]:
    """(body, content type) in the format that an Accept header asks for. Other tasks run after each family."""
    encode, content_type = choose_encoder(accept)
    pieces = []
    for family in families:
        pieces.append(encode(_Alone(family)).removesuffix(OPENMETRICS_END))
        await asyncio.sleep(0)
    if content_type.startswith("application/openmetrics-text"):
        pieces.append(OPENMETRICS_END)
    return b"".join(pieces), content_type


class _Alone:
    """A registry of one family."""

    def __init__(self, family: Metric) -> None:
        self.collect: Callable[[], list[Metric]] = lambda: [family]
