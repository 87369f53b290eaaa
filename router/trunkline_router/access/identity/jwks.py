"""Public keys that verify tokens, from a JSON Web Key Set (RFC 7517)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jwt import PyJWK
from jwt.exceptions import PyJWTError

from trunkline_router.access.identity.identity import IdentityError
from trunkline_router.access.identity.identity_fields import JSON_ERRORS, loaded

MOST_KEYS = 100
LEAST_RSA_BITS = 2048
LONGEST_KEY_ID = 256

_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
# (kty, crv) → algorithms that a token may name with such a key. None is symmetric: the public key would be the secret.
ALGORITHMS: Mapping[tuple[str, str | None], Sequence[str]] = {
    ("RSA", None): _RSA,
    ("EC", "P-256"): ("ES256",),
    ("EC", "P-384"): ("ES384",),
    ("OKP", "Ed25519"): ("EdDSA",),
}
_PUBLIC_PARTS = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}


@dataclass(frozen=True, slots=True)
class VerificationKey:
    """A public key, for each algorithm that may be used with it."""

    by_algorithm: Mapping[str, PyJWK]


@dataclass(frozen=True, slots=True)
class VerificationKeys:
    """Keys by their ids; a key without one has the id ""."""

    by_id: Mapping[str, Sequence[VerificationKey]] = field(default_factory=dict)

    def find(self, key_id: str | None, algorithm: str) -> PyJWK | None:
        """The key for a token's header; None if there is none. A token without a key id is for an only key."""
        if key_id is None:
            keys = [key for same_id in self.by_id.values() for key in same_id]
            candidates: Sequence[VerificationKey] = keys if len(keys) == 1 else ()
        else:
            candidates = self.by_id.get(key_id, ())
        found = (key.by_algorithm.get(algorithm) for key in candidates)
        return next((key for key in found if key is not None), None)


def read_jwks(content: bytes) -> VerificationKeys:
    """The keys of a set that can be used; others are left out, as RFC 7517 says. Raises IdentityError if none can."""
    try:
        found = loaded(content)
    except JSON_ERRORS:
        raise IdentityError("is not JSON") from None
    members = found.get("keys") if isinstance(found, dict) else None
    if not isinstance(members, list):
        raise IdentityError('must be a JSON Web Key Set: {"keys": […]}')
    if len(members) > MOST_KEYS:
        raise IdentityError(f"has more than {MOST_KEYS} keys")
    by_id: dict[str, list[VerificationKey]] = {}
    for member in members:
        key = _key(member) if isinstance(member, dict) else None
        if key is not None:
            by_id.setdefault(member.get("kid", ""), []).append(key)
    if not by_id:
        raise IdentityError("has no public key for signatures of a supported type: RSA, EC P-256 or P-384, Ed25519")
    return VerificationKeys(by_id)


def _key(member: Mapping[str, Any]) -> VerificationKey | None:
    kind, curve, key_id = member.get("kty"), member.get("crv"), member.get("kid", "")
    if not isinstance(kind, str) or not (curve is None or isinstance(curve, str)) or not _is_for_signatures(member):
        return None
    if not isinstance(key_id, str) or len(key_id) > LONGEST_KEY_ID:
        return None
    algorithms = ALGORITHMS.get((kind, curve), ())
    if "alg" in member:
        algorithms = [algorithm for algorithm in algorithms if algorithm == member["alg"]]
    public = {"kty": kind, **{part: member.get(part) for part in _PUBLIC_PARTS.get(kind, ())}}
    try:
        keys = {algorithm: PyJWK(public, algorithm) for algorithm in algorithms}
    except (PyJWTError, ValueError, TypeError):
        return None
    if not keys or (kind == "RSA" and next(iter(keys.values())).key.key_size < LEAST_RSA_BITS):
        return None
    return VerificationKey(keys)


def _is_for_signatures(member: Mapping[str, Any]) -> bool:
    operations = member.get("key_ops", ["verify"])
    return member.get("use", "sig") == "sig" and isinstance(operations, list) and "verify" in operations
