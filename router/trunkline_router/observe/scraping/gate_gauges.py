"""Metrics of what requests take of the router now, and of the calls that it did not let in."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import Metric

from trunkline_router.access.gate.request_gate import RequestGate
from trunkline_router.observe.metrics.request_labels import reason_label
from trunkline_router.record.error_statuses import PROTOCOL
from trunkline_router.request.dispatch import Dispatcher
from trunkline_router.request.inference import Running
from trunkline_runtime.telemetry.exposition import counter, gauge

HTTP_REASONS = frozenset(row.code for row in PROTOCOL.values())  # of errors of HTTP itself


class GateGauges:
    """Reads the gate, the running requests and the dispatcher at a scrape."""

    def __init__(self, gate: RequestGate, running: Running, dispatcher: Dispatcher) -> None:
        self._gate = gate
        self._running = running
        self._dispatcher = dispatcher

    def families(self) -> Iterable[Metric]:
        """All families."""
        gate, dispatcher, now_s = self._gate, self._dispatcher, self._dispatcher.clock_s()
        for name, documentation, value in (
            ("open_requests", "Requests that have passed the gate and have not ended.", gate.requests.num_held),
            ("running_requests", "Requests that are being served.", self._running.num_running),
            ("waiting_requests", "Requests that wait until a worker can take them.", dispatcher.pools.num_waiting),
            ("large_request_bytes", "Large requests in memory whose answers have not begun.", gate.held.num_held),
            ("unread_bytes", "Output that waits for clients to read it.", dispatcher.backlog.waiting_bytes),
            ("retry_budget", "Retries that may be made at once.", dispatcher.budget.left(now_s)),
            ("quarantined", "Requests that are refused because they killed workers.",
             dispatcher.quarantine.num_in_force(now_s)),
        ):  # fmt: skip
            yield gauge(f"trunkline_router_{name}", documentation, (), [((), float(value))])
        yield gauge(
            "trunkline_router_ready",
            "1 if a worker accepts requests.",
            (),
            [((), float(bool(dispatcher.pools.models())))],
        )
        yield counter(
            "trunkline_router_calls_refused",
            "Calls that were refused before, or without, a request: credentials, sizes, paths, too many open calls.",
            ("protocol", "reason"),
            [(labels, float(count)) for labels, count in _by_label(gate.refused.counts).items()],
        )
        quarantine = dispatcher.quarantine
        yield counter(
            "trunkline_router_quarantines",
            "Requests convicted of killing workers: in the whole fleet, or in this router alone.",
            ("scope",),
            [(("fleet",), float(quarantine.convicted)), (("router",), float(quarantine.convicted_briefly))],
        )


def _by_label(refused: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """Several reasons have the same label."""
    counts: Counter[tuple[str, str]] = Counter()
    for (protocol, reason), count in refused.items():
        counts[protocol, reason if reason in HTTP_REASONS else reason_label(reason)] += count
    return counts
