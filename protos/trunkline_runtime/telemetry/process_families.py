"""Metrics that every server process has. Without what they tell of, they have no samples."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from prometheus_client import ProcessCollector
from prometheus_client.core import Metric

from trunkline.tls_files import TlsFileError
from trunkline_runtime.log import num_dropped_lines
from trunkline_runtime.loop_lag import LoopLag
from trunkline_runtime.telemetry.series import counter, gauge
from trunkline_runtime.telemetry.span_queue import ExportCounts
from trunkline_runtime.tls import ServerTls, Validity, first_to_expire, stamp_of


class CertificateExpiry:
    """How long the certificates of a process last: of its own ports, and of files that it presents or trusts elsewhere.

    tls: of the process's ports; None for plaintext;  files: others, in PEM, by name. Empty paths do not count
    """

    def __init__(
        self,
        tls: ServerTls | None = None,
        files: Mapping[str, str] | None = None,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._tls = tls
        self._files = {name: path for name, path in (files or {}).items() if path}
        self._now_unix_s = now_unix_s
        self._read: dict[str, tuple[object, Validity | None]] = {}  # by path: what stat() said, and the validity

    def validities(self) -> dict[str, Validity]:
        """By name, the validity of the certificate of each file that expires first. Files that cannot be read are left
        out."""
        found = {} if self._tls is None else self._tls.validities()
        for name, path in self._files.items():
            validity = self._validity(path)
            if validity is not None:
                found[name] = validity
        return found

    def families(self) -> Iterable[Metric]:
        """How long certificates last."""
        validities, now_unix_s = self.validities(), self._now_unix_s()
        yield gauge(
            "trunkline_certificate_expires_in_seconds",
            "Time until a certificate expires; negative if it has.",
            ("file",),
            [((name,), validity.until_unix_s - now_unix_s) for name, validity in validities.items()],
        )
        yield gauge(
            "trunkline_certificate_lifetime_seconds",
            "Whole life of the same certificate, from the beginning of its validity to the end.",
            ("file",),
            [((name,), validity.life_s) for name, validity in validities.items()],
        )

    def _validity(self, path: str) -> Validity | None:
        stamp = stamp_of(path)
        if path not in self._read or self._read[path][0] != stamp:
            try:
                validity = first_to_expire(Path(path).read_bytes(), path)
            except (OSError, TlsFileError):
                validity = None
            self._read[path] = (stamp, validity)
        return self._read[path][1]


class ProcessMetrics:
    """of: the kind of server, which names of metrics have;  spans: what became of spans; None: they are not exported"""

    def __init__(
        self, of: str, lag: LoopLag, certificates: CertificateExpiry, spans: ExportCounts | None = None
    ) -> None:
        self._prefix = f"trunkline_{of}_"
        self._lag = lag
        self._certificates = certificates
        self._spans = spans
        self._process = ProcessCollector(registry=None)  # registered nowhere

    def families(self) -> Iterable[Metric]:
        """All families."""
        yield gauge(
            self._prefix + "event_loop_lag_seconds",
            "Longest time that a due callback waited in the last minute.",
            (),
            [((), self._lag.recent_s())],
        )
        yield counter(
            self._prefix + "spans",
            "Spans by outcome: exported, failed because the collector did not take them, dropped because too many "
            "waited, withheld because a router exports only so many requests a second.",
            ("outcome",),
            [] if self._spans is None else [((outcome,), count) for outcome, count in asdict(self._spans).items()],
        )
        yield counter(
            self._prefix + "dropped_log_lines",
            "Lines of the log that could not be written: a full disk, or a reader that stalls.",
            (),
            [((), num_dropped_lines())],
        )
        yield from self._certificates.families()
        yield from self._process.collect()
