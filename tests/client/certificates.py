"""Certificates for one test: an authority, and a server on this machine."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


@dataclass(frozen=True)
class Certificates:
    """Files in PEM of an authority and of a server whose certificate the authority signed."""

    ca_file: Path
    cert_file: Path
    key_file: Path

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key_file.read_bytes(), self.cert_file.read_bytes())])


def make_certificates(folder: Path, *, names: tuple[str, ...] = ("localhost",)) -> Certificates:
    """names: of the server, beside the address 127.0.0.1"""
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _name("an authority of tests")
    constraints = x509.BasicConstraints(ca=True, path_length=0)
    root = _builder(authority, authority, authority_key).add_extension(constraints, critical=True)
    alternatives = [*(x509.DNSName(name) for name in names), x509.IPAddress(ip_address("127.0.0.1"))]
    leaf = _builder(_name("a router"), authority, server_key).add_extension(
        x509.SubjectAlternativeName(alternatives), critical=False
    )
    made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    made.ca_file.write_bytes(root.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    made.cert_file.write_bytes(leaf.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    made.key_file.write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return made


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
    )
