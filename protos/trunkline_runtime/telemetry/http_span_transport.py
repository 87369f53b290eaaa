"""Sends spans that are written already over HTTP, by the library's exporter: it reads the standard variables, and has
time limits, retries, compression and TLS. It takes span objects alone, so its client is used.
"""

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from trunkline_runtime.telemetry.bounded_session import BoundedSession


class HttpSpanTransport(OTLPSpanExporter):
    """A SpanTransport.  Raises ImportError if the library's version is one that this is not made for."""

    def __init__(self) -> None:
        super().__init__(session=BoundedSession())
        if not callable(getattr(getattr(self, "_client", None), "export", None)):
            raise ImportError("this version of it has no _client.export")

    def send(self, request: bytes, _: int) -> bool:
        """See SpanTransport."""
        return not self._shutdown and self._client.export(request).success
