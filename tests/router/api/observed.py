"""What a router tells of the requests that it served."""

from opentelemetry.sdk.resources import Resource

from tests.runtime.otlp_receiver import ReceivedSpan, read
from trunkline_router.observe.tracing.request_traces import RequestTraces
from trunkline_router.record.request_observer import RequestObserver
from trunkline_runtime.telemetry.span_queue import Spans


class Traces:
    """The spans of all requests that an observer sees."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.observer = RequestObserver(listeners=[RequestTraces(self, slow_s=None).request_ended])

    def put(self, spans: Spans) -> bool:
        self.spans += read(spans(Resource.create()))
        return True

    def withhold(self) -> None:
        raise AssertionError("no test makes so many requests")

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReceivedSpan:
        (span,) = self.named(name)
        return span


def ended(lines: list[dict[str, object]]) -> dict[str, object]:
    (line,) = (line for line in lines if line["event"] == "request ended")
    return line
