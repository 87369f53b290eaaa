"""How long the certificates of a process last: of its own ports, and of files that it presents or trusts elsewhere."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from trunkline.tls_files import TlsFileError
from trunkline_runtime.tls import ServerTls, first_expiry, stamp_of


class CertificateExpiry:
    """tls: of the process's ports; None for plaintext;  files: others, in PEM, by name. Empty paths do not count"""

    def __init__(
        self,
        tls: ServerTls | None = None,
        files: Mapping[str, str] | None = None,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._tls = tls
        self._files = {name: path for name, path in (files or {}).items() if path}
        self._now_unix_s = now_unix_s
        self._read: dict[str, tuple[object, float | None]] = {}  # by path: what stat() said, and the expiry

    def left_s(self) -> dict[str, float]:
        """By name, the time until the first certificate of each expires; negative if it has. Files that cannot be read
        are left out."""
        left = {} if self._tls is None else self._tls.seconds_until_expiry()
        for name, path in self._files.items():
            expires_unix_s = self._expiry(path)
            if expires_unix_s is not None:
                left[name] = expires_unix_s - self._now_unix_s()
        return left

    def _expiry(self, path: str) -> float | None:
        stamp = stamp_of(path)
        if path not in self._read or self._read[path][0] != stamp:
            try:
                expires_unix_s = first_expiry(Path(path).read_bytes(), path)
            except (OSError, TlsFileError):
                expires_unix_s = None
            self._read[path] = (stamp, expires_unix_s)
        return self._read[path][1]
