"""The worker's port for metrics: what it answers, and which parts of the process it asks."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import chain

from prometheus_client.core import Metric

from trunkline_runtime.log import get_logger
from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.telemetry.exposition import Families
from trunkline_runtime.telemetry.gpu_meter import NO_GPU, GpuMeter, gpu_families
from trunkline_runtime.telemetry.metrics_server import MetricsServer
from trunkline_runtime.telemetry.otlp_metrics import metrics_export
from trunkline_runtime.telemetry.process_families import CertificateExpiry, ProcessMetrics
from trunkline_runtime.telemetry.scrape_tokens import ScrapeTokens
from trunkline_runtime.telemetry.series import gauge
from trunkline_runtime.telemetry.span_queue import ExportCounts
from trunkline_runtime.tls import ServerTls
from trunkline_worker.front.session import Backlog
from trunkline_worker.front.telemetry.worker_metrics import WorkerMetrics


@asynccontextmanager
async def metrics_served(
    worker_id: str,
    host: str,
    port: int,
    metrics: WorkerMetrics,
    backlog: Backlog,
    tokens: ScrapeTokens,
    tls: ServerTls | None,
    spans: ExportCounts | None = None,
    gpu: GpuMeter | None = None,
) -> AsyncIterator[MetricsServer | None]:
    """Serves the metrics of a worker inside the block, and exports them if the OTEL_* variables say so. Raises
    PortInUse.

    port: -1: they are not served
    tls: of the worker's other port; None for plaintext
    spans: what became of spans; None: they are not exported
    gpu: of the engine; None: it computes on none, or NVML is not there
    """
    async with AsyncExitStack() as stack:
        lag = await stack.enter_async_context(LoopLag().watching())
        sources = MetricsSources(metrics, lag, backlog, tls=tls, gpu=gpu, spans=spans)
        export = metrics_export("trunkline-worker", worker_id, sources.collect)
        if export is not None:
            await stack.enter_async_context(export.running())
        server = None
        if port >= 0:
            server = MetricsServer(sources.collect, tokens, None if tls is None else tls.ssl_context())
            await server.start(host, port)
            stack.push_async_callback(server.stop)
            get_logger().info("metrics served", port=server.port)
        yield server


class MetricsSources:
    """The parts of the process that know metrics.

    tls: the worker's own certificate; None for plaintext
    spans: what became of spans; None: they are not exported
    """

    def __init__(
        self,
        metrics: WorkerMetrics,
        lag: LoopLag,
        backlog: Backlog,
        *,
        tls: ServerTls | None = None,
        gpu: GpuMeter | None = None,
        spans: ExportCounts | None = None,
    ) -> None:
        self._metrics = metrics
        self._backlog = backlog
        self._gpu = gpu
        # Of the front: the engine is a process of its own.
        self._process = ProcessMetrics("worker", lag, CertificateExpiry(tls), spans)

    async def collect(self) -> Families:
        """All metrics of now, made one by one."""
        of_gpu = NO_GPU if self._gpu is None else await asyncio.to_thread(self._gpu.sample)
        return chain(self._metrics.families(time.perf_counter()), self._of_process(), gpu_families(of_gpu))

    def _of_process(self) -> Iterable[Metric]:
        yield gauge(
            "trunkline_worker_outbox_bytes",
            "Output that waits to be sent to routers and direct clients.",
            (),
            [((), float(self._backlog.all_bytes))],
        )
        yield from self._process.families()
