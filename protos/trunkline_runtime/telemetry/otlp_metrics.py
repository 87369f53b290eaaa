"""Exports metrics at intervals, if the standard OTEL_* variables ask for it: an alternative to being scraped.

An export runs on a thread of its own. A collector that is down or slow delays nothing, and is told in one line.
"""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from opentelemetry.sdk.resources import Resource

from trunkline_runtime.log import get_logger
from trunkline_runtime.own_thread import in_own_thread
from trunkline_runtime.telemetry.exposition import Collect
from trunkline_runtime.telemetry.otel_variables import number_of, valid_variables
from trunkline_runtime.telemetry.otlp_data import Span, metric_of, metrics_data
from trunkline_runtime.telemetry.otlp_exporter import METRICS, exporter_of

INTERVAL, INTERVAL_MS, MOST_INTERVAL_MS = "OTEL_METRIC_EXPORT_INTERVAL", 60_000, 86_400_000
LAST_EXPORT_S = 2.0  # for the last one, when the process stops


class MetricsExport:
    """One process's exports.  collect: returns the metrics of now;  unix_ns: the time"""

    def __init__(
        self,
        exporter: MetricExporter,
        interval_s: float,
        resource: Resource,
        collect: Collect,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._exporter = exporter
        self._interval_s = interval_s
        self._resource = resource
        self._collect = collect
        self._unix_ns = unix_ns
        self._started_unix_ns = unix_ns()
        self._has_failed = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Executes run() in the background inside the block, and close() after it."""
        exporting = asyncio.create_task(self.run())
        exporting.add_done_callback(lambda task: task.cancelled() or task.result())
        try:
            yield
        finally:
            exporting.cancel()
            await self.close()

    async def run(self) -> None:
        """Exports until it is cancelled. An error is logged; it must not end the process."""
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.export()
            except Exception as error:
                get_logger().error("unexpected error in an export of metrics", exc_info=error)

    async def export(self) -> None:
        """Exports the metrics of now. A failure is logged."""
        span = Span(self._started_unix_ns, self._unix_ns())
        metrics = []
        for family in await self._collect():
            metrics.append(metric_of(family, span))
            await asyncio.sleep(0)
        has_failed = not await self._sent(metrics_data(metrics, self._resource))
        if has_failed != self._has_failed:
            self._has_failed = has_failed
            if has_failed:
                get_logger().warning("metrics are not exported: the collector does not take them")
            else:
                get_logger().info("metrics are exported again")

    async def close(self) -> None:
        """Exports a last time, if that is quick."""
        last = asyncio.create_task(self.export())
        await asyncio.wait({last}, timeout=LAST_EXPORT_S)
        last.cancel()
        await asyncio.gather(last, return_exceptions=True)
        threading.Thread(target=self._exporter.shutdown, daemon=True).start()

    async def _sent(self, data: MetricsData) -> bool:
        """On a daemon thread, so that a process can end while a collector keeps it waiting."""
        try:
            result = await in_own_thread(lambda: self._exporter.export(data), "metrics export")
        except Exception as error:  # the library may raise any error, for example after shutdown()
            get_logger().debug("metrics are not exported", exc_info=error)
            return False
        return result is MetricExportResult.SUCCESS


def metrics_export(service_name: str, instance: str, collect: Collect) -> MetricsExport | None:
    """None if neither OTEL_METRICS_EXPORTER nor the endpoint for metrics asks for an export.

    instance: the process's name among those of the service

    Exits with status 2 and one line on standard error if a variable is invalid, as for any other setting.
    """
    with valid_variables(service_name):
        exporter, interval_ms = exporter_of(METRICS), number_of(INTERVAL, INTERVAL_MS, MOST_INTERVAL_MS)
    if exporter is None:
        return None
    name = os.environ.get("OTEL_SERVICE_NAME") or service_name
    resource = Resource.create({"service.name": name, "service.instance.id": instance})
    return MetricsExport(exporter, interval_ms / 1e3, resource, collect)
