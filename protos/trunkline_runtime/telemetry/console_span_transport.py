"""Prints spans as OTLP's JSON: https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding"""

import base64
import json
import sys
from typing import Any, TextIO

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

IDS = ("traceId", "spanId", "parentSpanId")


class ConsoleSpanTransport:
    """A SpanTransport that prints each request as a line."""

    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def send(self, request: bytes, _: int) -> bool:
        """See SpanTransport."""
        message = MessageToDict(ExportTraceServiceRequest.FromString(request), use_integers_for_enums=True)
        for resource in message["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope.get("spans", ()):
                    for named in (span, *span.get("links", ())):
                        _in_hex(named)
        print(json.dumps(message), file=self._out, flush=True)
        return True

    def shutdown(self) -> None:
        """See SpanTransport."""


def _in_hex(named: dict[str, Any]) -> None:
    """Ids are in hexadecimal, other than bytes in protobuf's own JSON."""
    for name in IDS:
        if name in named:
            named[name] = base64.b64decode(named[name]).hex()
