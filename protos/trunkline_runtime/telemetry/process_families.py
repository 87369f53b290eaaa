"""Metrics that every server process has. Without what they tell of, they have no samples."""

from collections.abc import Iterable
from dataclasses import asdict

from prometheus_client.core import Metric

from trunkline_runtime.log import num_dropped_lines
from trunkline_runtime.telemetry.certificate_expiry import CertificateExpiry
from trunkline_runtime.telemetry.exposition import counter, gauge
from trunkline_runtime.telemetry.span_queue import ExportCounts


def spans_family(name: str, counts: ExportCounts | None) -> Metric:
    """What became of spans.  counts: None: they are not exported"""
    told = {} if counts is None else asdict(counts)
    return counter(
        name,
        "Spans by outcome: exported, failed because the collector did not take them, dropped because too many waited, "
        "withheld because a router exports only so many requests a second.",
        ("outcome",),
        [((outcome,), float(count)) for outcome, count in told.items()],
    )


def log_family(name: str) -> Metric:
    """What became of the log."""
    lines = [((), float(num_dropped_lines()))]
    return counter(name, "Lines of the log that could not be written: a full disk, or a reader that stalls.", (), lines)


def certificate_families(certificates: CertificateExpiry) -> Iterable[Metric]:
    """How long certificates last."""
    validities = certificates.validities()
    yield gauge(
        "trunkline_certificate_expires_in_seconds",
        "Time until a certificate expires; negative if it has.",
        ("file",),
        [((name,), certificates.left_s(validity)) for name, validity in validities.items()],
    )
    yield gauge(
        "trunkline_certificate_lifetime_seconds",
        "Whole life of the same certificate, from the beginning of its validity to the end.",
        ("file",),
        [((name,), validity.life_s) for name, validity in validities.items()],
    )
