"""Sends spans that are written already over gRPC, by the library's exporter: it reads the standard variables, and has
time limits, retries, compression and TLS. It takes span objects alone, so some of its inside is used.
"""

from typing import NamedTuple

import grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from trunkline_runtime.telemetry.otlp_exporter import ExporterError

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
HOOKS = ("_export", "_translate_data", "_count_data", "_initialize_channel_and_stub")


class _Written(NamedTuple):
    request: bytes
    num_spans: int


class _Client:
    """The library's client with the request as bytes."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.Export: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)


class GrpcSpanTransport(OTLPSpanExporter):
    """A SpanTransport.  Raises ExporterError if the library's version is one that this is not made for."""

    def __init__(self) -> None:
        if missing := [name for name in HOOKS if not hasattr(OTLPSpanExporter, name)]:
            raise ExporterError(
                f"opentelemetry-exporter-otlp-proto-grpc is not a supported version: no {', '.join(missing)}"
            )
        super().__init__()

    def send(self, request: bytes, num_spans: int) -> bool:
        """See SpanTransport."""
        return self._export(_Written(request, num_spans)) is SpanExportResult.SUCCESS  # type: ignore[arg-type]

    def _initialize_channel_and_stub(self) -> None:
        super()._initialize_channel_and_stub()  # type: ignore[no-untyped-call]
        self._client = _Client(self._channel)  # type: ignore[assignment,arg-type]

    def _translate_data(self, data: _Written) -> bytes:  # type: ignore[override]
        return data.request

    def _count_data(self, data: _Written) -> int:  # type: ignore[override]
        return data.num_spans
