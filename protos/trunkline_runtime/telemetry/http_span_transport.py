"""Sends spans that are written already over HTTP, by the library's exporter: it reads the standard variables, and has
time limits, retries, compression and TLS. It takes span objects alone, so its client is used.
"""

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from trunkline_runtime.telemetry.bounded_session import BoundedSession
from trunkline_runtime.telemetry.otlp_exporter import ExporterError


class HttpSpanTransport(OTLPSpanExporter):
    """A SpanTransport.  Raises ExporterError if the library's version is one that this is not made for."""

    def __init__(self) -> None:
        super().__init__(session=BoundedSession())
        if not callable(getattr(getattr(self, "_client", None), "export", None)):
            raise ExporterError("opentelemetry-exporter-otlp-proto-http is not a supported version: no _client.export")

    def send(self, request: bytes, _: int) -> bool:
        """See SpanTransport."""
        if self._shutdown:
            return False
        result = self._client.export(request)
        # For the library a redirect, which is not followed, is a success, too.
        return bool(result.success) and result.status_code is not None and 200 <= result.status_code < 300
