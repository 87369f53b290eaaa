"""Certificates of authorities that tests make."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from trunkline.tls_files import KeyPair

LIFETIME_S = 3600.0


@dataclass(frozen=True, slots=True)
class TlsDirectory:
    """Files of one certificate, its key and the authorities that it trusts."""

    path: Path

    @property
    def cert(self) -> str:
        return str(self.path / "tls.crt")

    @property
    def key(self) -> str:
        return str(self.path / "tls.key")

    @property
    def ca(self) -> str:
        return str(self.path / "ca.crt")

    def write(self, pair: KeyPair, authorities: bytes) -> "TlsDirectory":
        """Replaces the files one after the other, as tools do that know no better."""
        self.path.mkdir(exist_ok=True)
        for name, data in ((self.cert, pair.chain), (self.key, pair.key), (self.ca, authorities)):
            self.put(name, data)
        return self

    def put(self, name: str, data: bytes) -> None:
        """Replaces one file."""
        Path(name).write_bytes(data)


class Authority:
    """Issues certificates."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _named(name)
        self._certificate = self._signed(self._name, self._key, is_authority=True, names=())

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(Encoding.PEM)

    def issue(
        self, *names: str, common_name: str = "test", from_s: float = -60.0, until_s: float = LIFETIME_S
    ) -> KeyPair:
        """A certificate for DNS names and IP addresses.  from_s, until_s: when it is valid, counted from now"""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._signed(_named(common_name), key, names=names, from_s=from_s, until_s=until_s)
        return KeyPair(
            made.public_bytes(Encoding.PEM),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )

    def _signed(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *,
        names: tuple[str, ...],
        is_authority: bool = False,
        from_s: float = -60.0,
        until_s: float = LIFETIME_S,
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + timedelta(seconds=from_s))
            .not_valid_after(now + timedelta(seconds=until_s))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([*map(_general, names)]), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)
