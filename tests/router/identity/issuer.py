"""An issuer of tokens: keys of each type, their JWKS, and tokens that they sign."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from trunkline_router.identity_settings import IdentitySettings

NOW_UNIX_S = 1_800_000_000.0
ISSUER, AUDIENCE = "https://issuer.example", "trunkline"
RULES = IdentitySettings(jwt_issuer=ISSUER, jwt_audience=(AUDIENCE,))
KINDS = {
    "RS256": "rsa", "RS384": "rsa", "RS512": "rsa", "PS256": "rsa", "PS384": "rsa", "PS512": "rsa",
    "ES256": "p256", "ES384": "p384", "EdDSA": "ed25519",
}  # fmt: skip


@cache
def private_key(kind: str) -> Any:
    """A private key; one of each name."""
    if kind.startswith("rsa"):
        return rsa.generate_private_key(65537, 1024 if kind == "rsa-short" else 2048)
    if kind.startswith("ed25519"):
        return ed25519.Ed25519PrivateKey.generate()
    return ec.generate_private_key(ec.SECP384R1() if kind == "p384" else ec.SECP256R1())


def jwk(kind: str, **more: Any) -> dict[str, Any]:
    """The public key of a kind as a member of a JWKS, with its kind as its id."""
    algorithm: Any = RSAAlgorithm if kind.startswith("rsa") else ECAlgorithm if kind.startswith("p") else OKPAlgorithm
    made = {**algorithm.to_jwk(private_key(kind).public_key(), as_dict=True), "kid": kind, **more}
    made.pop("key_ops", None)
    return made


def jwks(*kinds: str) -> bytes:
    return json.dumps({"keys": [jwk(kind) for kind in kinds]}).encode()


def claims(**changes: Any) -> dict[str, Any]:
    """Valid claims with changes; None leaves a claim out."""
    made = {
        "iss": ISSUER, "aud": AUDIENCE, "sub": "ada", "exp": NOW_UNIX_S + 600, "nbf": NOW_UNIX_S - 10, "tenant": "acme",
        **changes,
    }  # fmt: skip
    return {name: value for name, value in made.items() if value is not None}


def token(content: Mapping[str, Any] | None = None, *, algorithm: str = "EdDSA", kind: str = "", **header: Any) -> str:
    """A signed token; without `content`, with valid claims."""
    kind = kind or KINDS[algorithm]
    headers = {"kid": kind, **header}
    return jwt.encode(
        dict(claims() if content is None else content), private_key(kind), algorithm=algorithm,
        headers={name: value for name, value in headers.items() if value is not None},
    )  # fmt: skip
