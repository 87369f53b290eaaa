"""The same metrics as for a scraper, as OpenTelemetry's data."""

from collections.abc import Mapping
from typing import NamedTuple

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric as Family
from prometheus_client.samples import Exemplar as KeptExemplar
from prometheus_client.samples import Sample

SCOPE = InstrumentationScope("trunkline")
UNITS = {"_seconds": "s", "_bytes": "By", "_celsius": "Cel", "_watts": "W"}  # by how a name ends
GEN_AI, ERROR_TYPE = "gen_ai_", "error.type"  # of the conventions
CUMULATIVE = AggregationTemporality.CUMULATIVE
NO_SPAN = 0  # the encoder leaves an example's trace out, too, if it has no span; receivers take zero for none


class Span(NamedTuple):
    """The time that values are of, in nanoseconds of Unix time."""

    start_unix_ns: int
    end_unix_ns: int


def metric_of(family: Family, span: Span) -> Metric:
    """One family."""
    data: Sum | Gauge | Histogram
    if family.type == "counter":
        data = Sum([_number(sample, span) for sample in family.samples], CUMULATIVE, is_monotonic=True)
    elif family.type == "histogram":
        data = Histogram(_histograms(family, span), CUMULATIVE)
    else:
        data = Gauge([_number(sample, span) for sample in family.samples])
    name, unit = family.name, next((unit for end, unit in UNITS.items() if family.name.endswith(end)), "")
    if name.startswith(GEN_AI):  # the conventions have dots in names, and the unit is not part of them
        name = _dotted(name.removesuffix("_seconds"))
    return Metric(name, family.documentation, unit, data)


def metrics_data(metrics: list[Metric], resource: Resource) -> MetricsData:
    """What an exporter takes."""
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(SCOPE, metrics, "")], "")])


def _number(sample: Sample, span: Span) -> NumberDataPoint:
    return NumberDataPoint(_attributes(sample.labels), span.start_unix_ns, span.end_unix_ns, sample.value)


def _histograms(family: Family, span: Span) -> list[HistogramDataPoint]:
    """From samples in the order in which prometheus_client has them: the buckets of one histogram, its count, and its
    sum."""
    points, bounds, counts, examples, count = [], [], [], [], 0.0
    for sample in family.samples:
        if sample.name.endswith("_bucket"):
            bounds.append(float(sample.labels["le"]))
            counts.append(int(sample.value))
            if sample.exemplar is not None:
                examples.append(_example(sample.exemplar, span))
        elif sample.name.endswith("_count"):
            count = sample.value
        elif sample.name.endswith("_sum"):
            single = [upper - lower for upper, lower in zip(counts, [0, *counts], strict=False)]
            points.append(
                HistogramDataPoint(
                    attributes=_attributes(sample.labels),
                    start_time_unix_nano=span.start_unix_ns,
                    time_unix_nano=span.end_unix_ns,
                    count=int(count),
                    sum=sample.value,
                    bucket_counts=single,
                    explicit_bounds=bounds[:-1],  # the last one is infinity
                    min=None,  # type: ignore[arg-type]  # not known: the field is then left out
                    max=None,  # type: ignore[arg-type]
                    exemplars=examples,
                )
            )
            bounds, counts, examples = [], [], []
    return points


def _example(kept: KeptExemplar, span: Span) -> Exemplar:
    """The example of a bucket, which names a trace."""
    at_ns = span.end_unix_ns if kept.timestamp is None else int(float(kept.timestamp) * 1e9)
    return Exemplar({}, float(kept.value), at_ns, NO_SPAN, int(kept.labels["trace_id"], 16))


def _attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return {_dotted(name): value for name, value in labels.items() if value}


def _dotted(name: str) -> str:
    """gen_ai_server_time_to_first_token → gen_ai.server.time_to_first_token. Names that are not of the conventions stay
    as they are."""
    if not name.startswith(GEN_AI):
        return ERROR_TYPE if name == ERROR_TYPE.replace(".", "_") else name
    area, _, rest = name.removeprefix(GEN_AI).partition("_")
    first, _, last = rest.partition("_")
    is_object = area == "server" and first == "request"  # gen_ai.server.request.duration
    return f"gen_ai.{area}.{first}.{last}" if is_object else f"gen_ai.{area}.{rest}"
