"""The time until certificates expire follows their files."""

from pathlib import Path

import pytest

from tests.certificates import LIFETIME_S, Authority, TlsDirectory
from trunkline_runtime.telemetry.process_families import CertificateExpiry
from trunkline_runtime.tls import ServerTls, TlsFiles


def test_every_certificate_is_told_and_a_new_file_counts_at_once(tmp_path: Path) -> None:
    authority = Authority()
    own = TlsDirectory(tmp_path / "own").write(authority.issue("router.test", until_s=500.0), authority.pem)
    workers = TlsDirectory(tmp_path / "workers").write(authority.issue("x.test", until_s=-10.0), authority.pem)
    files = {"worker_tls_certificate": workers.cert, "worker_tls_ca": workers.ca, "redis_tls_certificate": ""}
    expiry = CertificateExpiry(ServerTls(TlsFiles(own.cert, own.key)), files)
    expected = {"certificate": 500.0, "worker_tls_certificate": -10.0, "worker_tls_ca": LIFETIME_S}
    assert told(expiry, "trunkline_certificate_expires_in_seconds") == pytest.approx(expected, abs=60.0)
    workers.put(workers.cert, authority.issue("x.test", until_s=9000.0).chain)
    left = told(expiry, "trunkline_certificate_expires_in_seconds")
    assert left["worker_tls_certificate"] == pytest.approx(9000.0, abs=60.0)


def test_the_whole_life_is_that_of_the_certificate_that_expires_first(tmp_path: Path) -> None:
    old, new = Authority(), Authority()
    long, short = (old.issue("x.test", from_s=-900.0, until_s=until_s) for until_s in (9000.0, 100.0))
    path = tmp_path / "ca.crt"
    path.write_bytes(long.chain + short.chain + new.pem)
    expiry = CertificateExpiry(files={"redis_tls_ca": str(path)})
    assert told(expiry, "trunkline_certificate_lifetime_seconds") == {"redis_tls_ca": 1000.0}


def told(expiry: CertificateExpiry, metric: str) -> dict[str, float]:
    """The values of a metric by the name of the file."""
    (family,) = [one for one in expiry.families() if one.name == metric]
    return {sample.labels["file"]: sample.value for sample in family.samples}


@pytest.mark.parametrize("content", [None, b"", b"not a certificate"])
def test_a_file_that_cannot_be_read_is_left_out(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_bytes(content)
    assert CertificateExpiry(files={"redis_tls_ca": str(path)}).validities() == {}
