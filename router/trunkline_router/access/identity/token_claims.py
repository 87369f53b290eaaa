"""From the claims of a verified token to an identity. Pure.

A claim that is missing or has a wrong type is refused with a message that names it, and without its value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trunkline.status import RequestRefused
from trunkline_router.access.identity.identity import Identity, Role, unauthenticated
from trunkline_router.access.identity.identity_fields import LONGEST_NAME, TERMS, FieldError, identity_from

CLOCK_SKEW_S = 60.0  # the clocks of an issuer may be off by so much
MOST_UNIX_S = 1e11  # the year 5138; larger numbers are milliseconds


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """Which claims are expected and where they are."""

    issuer: str
    audiences: frozenset[str]
    tenant_claim: str = "tenant"
    roles_claim: str = "roles"
    prefix: str = ""  # of the claims for all other terms

    def claim_of(self, term: str) -> str:
        """The name of the claim for one of TERMS."""
        return {"tenant": self.tenant_claim, "roles": self.roles_claim}.get(term, self.prefix + term)


def identity_of(claims: Any, rules: ClaimRules, now_unix_s: float) -> Identity:
    """The identity that the claims describe. Raises RequestRefused (UNAUTHENTICATED)."""
    if not isinstance(claims, dict):
        raise unauthenticated("the token's claims are not an object")
    try:
        expires_unix_s = _check_times(claims, CLOCK_SKEW_S, now_unix_s)
        _check_parties(claims, rules)
        subject = claims.get("sub")
        if not isinstance(subject, str) or not 0 < len(subject) <= LONGEST_NAME or not subject.isprintable():
            raise FieldError("sub", f"must be a text of 1 to {LONGEST_NAME} characters")
    except FieldError as error:
        raise _refusal(error.field, error) from None
    terms = {term: _found(claims, rules.claim_of(term)) for term in TERMS}
    try:
        terms["roles"] = _known_roles(terms["roles"])
        return identity_from(f"jwt:{subject}", terms, expires_unix_s)
    except FieldError as error:
        raise _refusal(rules.claim_of(error.field), error) from None


def _check_times(claims: Mapping[str, Any], skew_s: float, now_unix_s: float) -> float:
    """Returns when the token ends, with the skew. Raises RequestRefused if it does not count now, and FieldError."""
    expires, not_before, issued = (_time(claims, name) for name in ("exp", "nbf", "iat"))
    if expires is None:
        raise FieldError("exp", "is missing")
    if now_unix_s >= expires + skew_s:
        raise unauthenticated("the token has expired")
    if not_before is not None and now_unix_s < not_before - skew_s:
        raise unauthenticated("the token is not valid yet: its claim nbf is in the future")
    if issued is not None and now_unix_s < issued - skew_s:
        raise unauthenticated("the token is not valid yet: its claim iat is in the future")
    return expires + skew_s


def _check_parties(claims: Mapping[str, Any], rules: ClaimRules) -> None:
    if claims.get("iss") != rules.issuer:
        raise FieldError("iss", "is not the issuer that this server trusts")
    given = claims.get("aud")
    audiences = [given] if isinstance(given, str) else given
    if not isinstance(audiences, list) or not all(isinstance(audience, str) for audience in audiences):
        raise FieldError("aud", "must be a text or a list of texts")
    if rules.audiences.isdisjoint(audiences):
        raise FieldError("aud", "does not name this server")


def _time(claims: Mapping[str, Any], name: str) -> float | None:
    value = claims.get(name)
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MOST_UNIX_S:  # false for NaN
        raise FieldError(name, "must be a number of seconds since 1970")
    return float(value)


def _found(claims: Mapping[str, Any], name: str) -> Any:
    """The claim of this name or, if there is none, the value at a path of names with dots; None if there is none."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _known_roles(given: Any) -> list[str] | None:
    """The roles of this program among those of a claim, which may list the roles of others; None if it is absent.

    The claim is a list, or a text of names with spaces between them, as OAuth's scope.
    """
    if given is None:
        return None
    names = given.split() if isinstance(given, str) else given
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise FieldError("roles", "must be a list of texts, or a text")
    return [name for name in names if name in set(Role)]


def _refusal(claim: str, error: FieldError) -> RequestRefused:
    return unauthenticated(f"the token's claim {claim} {error.problem}")
