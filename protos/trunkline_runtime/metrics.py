"""OpenTelemetry metrics of a server process: the lag of its event loop."""

import os
import sys
from collections.abc import Iterable
from importlib import import_module

from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    ConsoleMetricExporter,
    MetricExporter,
    MetricReader,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.resources import Resource

from trunkline_runtime.loop_lag import LoopLag

EXPORTERS = ("otlp", "console", "none")
EXPORTER, ENDPOINT = "OTEL_METRICS_EXPORTER", "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"
LAG = "trunkline.event_loop.lag"


def metric_reader(service_name: str) -> MetricReader | None:
    """A reader that exports every OTEL_METRIC_EXPORT_INTERVAL; None if neither OTEL_METRICS_EXPORTER nor the endpoint
    for metrics asks for an export.

    Exits with status 2 and one line on standard error if a variable is invalid, as for any other setting.
    """
    wanted = os.environ.get(EXPORTER) or ("otlp" if os.environ.get(ENDPOINT) else "none")
    problem = ""
    if wanted not in EXPORTERS:
        problem = f"{EXPORTER}={wanted} is not supported; allowed: {', '.join(EXPORTERS)}"
    if wanted == "none":
        return None
    try:
        if not problem:
            return PeriodicExportingMetricReader(ConsoleMetricExporter() if wanted == "console" else _otlp_exporter())
    except Exception as error:  # the library reads a dozen more variables, and may raise any error
        problem = f"metrics cannot be exported as the OTEL_* variables say: {error}"
    print(f"{service_name}: {problem}", file=sys.stderr)
    sys.exit(2)


def export_lag(lag: LoopLag, service_name: str, reader: MetricReader) -> MeterProvider:
    """Exports the longest lag since the last export, in seconds. The caller must shut down the returned provider."""

    def observe(_: CallbackOptions) -> Iterable[Observation]:
        yield Observation(lag.take())

    name = os.environ.get("OTEL_SERVICE_NAME", service_name)
    provider = MeterProvider([reader], resource=Resource.create({"service.name": name}))
    provider.get_meter("trunkline").create_observable_gauge(
        LAG, [observe], unit="s", description="longest time that a due callback waited for the event loop"
    )
    return provider


def _otlp_exporter() -> MetricExporter:
    module = import_module("opentelemetry.exporter.otlp.proto.grpc.metric_exporter")
    exporter: MetricExporter = module.OTLPMetricExporter()
    return exporter
