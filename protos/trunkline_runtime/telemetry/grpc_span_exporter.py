"""The library's exporter of spans over gRPC, the default protocol, with an encoder that takes less than half the time.

If another version of the library asks for the message under another name, its own encoder is used: a test tells.
"""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan

from trunkline_runtime.telemetry.otlp_spans import encode_spans


class GrpcSpanExporter(OTLPSpanExporter):
    """As the library's in all but the encoding."""

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        return encode_spans(data)
